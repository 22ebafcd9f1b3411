package shape

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/bpe"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// The three functions here implement the commands `kvlane tokenize` and `kvlane render`. They read one JSON object per line and
// write one per line, in the same order. A line that cannot be served, including an empty one, yields {"error": "..."} and
// processing continues; only read and write errors stop it. At the end, a *LinesError counts the failed lines.

// TokenizeLines answers {"text": "..."} with {"ids": [...]}.
func TokenizeLines(r io.Reader, w io.Writer, tok *bpe.Tokenizer, addSpecial bool) error {
	var ids []uint32
	var text []byte
	return eachLine(r, w, func(dst, line []byte) ([]byte, error) {
		if err := body.Valid(line); err != nil {
			return dst, err
		}
		var err error
		if text, err = body.AppendText(text[:0], body.Member(line, "text")); err != nil {
			return dst, fmt.Errorf("text: %w", err)
		}
		if ids, err = tok.Encode(ids[:0], string(text), addSpecial); err != nil {
			return dst, err
		}
		return append(body.AppendIDList(append(dst, `{"ids":`...), ids), '}'), nil
	})
}

// RenderOptions configures RenderLines.
type RenderOptions struct {
	Engine Engine
	// Path is the request's path; "" is /v1/chat/completions.
	Path string
	// IDs includes the token ids in the output.
	IDs bool
}

// RenderLines answers a request body with {"prompt": "...", "ids": [...]}, or {"error": "..."} if
// the engine would refuse it. It adds "partial" if only the front of the prompt is known.
func RenderLines(r io.Reader, w io.Writer, m *Model, opts RenderOptions) error {
	path := cmp.Or(opts.Path, "/v1/chat/completions")
	api, _ := body.Detect("POST", path)
	if api == body.Unknown {
		return fmt.Errorf("path %q: no API with a prompt", path)
	}
	var req body.Request
	return eachLine(r, w, func(dst, line []byte) ([]byte, error) {
		if err := req.Parse(api, line); err != nil {
			return dst, err
		}
		res, err := m.RenderPrompt(&req, opts.Engine)
		if err != nil {
			return dst, err
		}
		dst = appendString(append(dst, `{"prompt":`...), res.Text)
		if opts.IDs {
			dst = body.AppendIDList(append(dst, `,"ids":`...), res.IDs)
		}
		if res.Partial != "" {
			dst = appendString(append(dst, `,"partial":`...), res.Partial)
		}
		return append(dst, '}'), nil
	})
}

// RenderContextLines answers an object of template variables with {"prompt": "..."}, or {"error":
// "..."} if the template raises or does not compile. now is the time that strftime_now reports.
func RenderContextLines(r io.Reader, w io.Writer, source string, now time.Time) error {
	template, broken := jinja.Compile(source)
	return eachLine(r, w, func(dst, line []byte) ([]byte, error) {
		if broken != nil {
			return dst, broken
		}
		v, err := jinja.ParseJSON(line)
		if err != nil {
			return dst, err
		}
		vars, ok := v.AsDict()
		if !ok {
			return dst, errors.New("not a JSON object")
		}
		text, err := template.Render(nil, vars, jinja.Env{Now: now})
		if err != nil {
			return dst, err
		}
		return append(appendString(append(dst, `{"prompt":`...), asText(text)), '}'), nil
	})
}

// LinesError is returned after the end of the input if some lines failed.
type LinesError struct{ Failed, Lines int }

func (e *LinesError) Error() string {
	return fmt.Sprintf("%d of %d lines were answered with an error", e.Failed, e.Lines)
}

func eachLine(r io.Reader, w io.Writer, answer func(dst, line []byte) ([]byte, error)) error {
	in := bufio.NewReaderSize(r, 1<<16)
	out := bufio.NewWriterSize(w, 1<<16)
	var dst []byte
	var count LinesError
	for {
		line, err := in.ReadBytes('\n')
		if len(line) > 0 {
			count.Lines++
			failed := errors.New("the line is empty")
			if len(bytes.TrimSpace(line)) > 0 {
				dst, failed = answer(dst[:0], line)
			}
			if failed != nil {
				count.Failed++
				dst = append(appendString(append(dst[:0], `{"error":`...), failed.Error()), '}')
			}
			if _, err := out.Write(append(dst, '\n')); err != nil {
				return err
			}
			if in.Buffered() == 0 { // flush, so that interactive callers get each answer immediately
				if err := out.Flush(); err != nil {
					return err
				}
			}
		}
		if errors.Is(err, io.EOF) {
			if err := out.Flush(); err != nil || count.Failed == 0 {
				return err
			}
			return &count
		}
		if err != nil {
			return err
		}
	}
}

func appendString(dst []byte, text string) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(text); err != nil { // encoding a string cannot fail
		return append(dst, `""`...)
	}
	return append(dst, bytes.TrimSuffix(b.Bytes(), []byte{'\n'})...)
}
