package enginesim

import (
	"bytes"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"
)

// Whatever a body holds, reading it ends in ids or an error with a client's status.
func FuzzRequestBody(f *testing.F) {
	for _, s := range []string{
		`{"messages":[{"role":"user","content":"Hi"}]}`, `{"messages":[{"role":"assistant","content":"<think>a</think>b","tool_calls":[{"function":{"name":"f","arguments":"{}"}}]}],"tools":[{"type":"function","function":{"name":"f"}}]}`,
		`{"prompt":[1,2,3]}`, `{"prompt":["a","b"]}`, `{"prompt":[[1],[2]]}`, `{"messages":[{"role":"tool","content":[{"type":"text","text":"x"}]}],"add_generation_prompt":false,"continue_final_message":true}`,
		`{"messages":[{"role":"user","content":"\ud83d"}]}`, `[`, `{"messages":{}}`,
		`{"messages":[{"role":"assistant","content":"x"}],"continue_final_message":true,"add_generation_prompt":false,"tools":[]}`,
	} {
		f.Add([]byte(s))
	}
	tok := qwenTokenizer(f)
	f.Fuzz(func(t *testing.T, raw []byte) {
		body, err := parseBody(raw)
		if err == nil && body.Messages != nil {
			_, err = tok.promptOf(VLLM, body)
			if _, other := tok.promptOf(SGLang, body); other != nil && asAPIError(other).status != 400 {
				t.Error(other)
			}
		} else if err == nil {
			_, err = tok.prompts(body.Prompt, true)
		}
		if err != nil && asAPIError(err).status != 400 {
			t.Errorf("status %d: %v", asAPIError(err).status, err)
		}
	})
}

type byteConn struct {
	net.Conn
	in *bytes.Reader
}

func (c byteConn) Read(b []byte) (int, error)     { return c.in.Read(b) }
func (byteConn) Write(b []byte) (int, error)      { return len(b), nil }
func (byteConn) SetDeadline(time.Time) error      { return nil }
func (byteConn) Close() error                     { return nil }
func (byteConn) SetWriteDeadline(time.Time) error { return nil }

// Whatever bytes a client sends, reading them ends.
func FuzzZMTP(f *testing.F) {
	greeting := append(append([]byte{0xFF, 0, 0, 0, 0, 0, 0, 0, 0, 0x7F, 3, 1}, "NULL"...), make([]byte, 48)...)
	ready := append([]byte{4, 6}, "\x05READY"...)
	f.Add(append(append([]byte{}, greeting...), append(ready, 0, 1, 1)...))
	f.Add(append(append([]byte{}, greeting...), append(ready, 1, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0)...))
	f.Add(append(append([]byte{}, greeting...), append(ready, 4, 7, 4, 'P', 'I', 'N', 'G', 0, 1)...))
	f.Fuzz(func(t *testing.T, raw []byte) {
		z, err := zmtpHandshake(byteConn{in: bytes.NewReader(raw)}, "PUB")
		if err != nil {
			return
		}
		for {
			if _, err := z.message(); err != nil {
				if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || strings.HasPrefix(err.Error(), "zmtp") {
					return
				}
				t.Fatal(err)
			}
		}
	})
}
