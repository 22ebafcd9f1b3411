package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// Load reads and validates a file. Warnings are about renamed keys and valid settings that are probably a mistake. The error is
// a ProblemsError if the file could be read.
func Load(file string) (c *Config, warnings []Problem, err error) {
	text, err := ReadFile(file)
	if err != nil {
		return nil, nil, fmt.Errorf("read configuration: %w", err)
	}
	c, d, err := parse(file, text)
	if err != nil {
		return nil, nil, err
	}
	c.warn(nil, d)
	return c, d.warnings, nil
}

// Parse decodes and validates text; file is its name in problems.
func Parse(file string, text []byte) (*Config, error) {
	c, _, err := parse(file, text)
	return c, err
}

func parse(file string, text []byte) (*Config, *decoder, error) {
	c := Default()
	d, err := decodeFile(file, text, &c)
	if err != nil {
		return nil, nil, err
	}
	c.validate(d.incomplete())
	if len(d.problems) > 0 {
		return nil, nil, d.problems
	}
	return &c, d, nil
}

// Inspect is Load of a text that also reads the files that the configuration names, except those of models. If running
// is not nil, Kvlane is about to run on this machine: missing files and addresses in use are then errors, and the
// configuration is returned with them. running returns the effective configuration of the Kvlane at an admin port, nil
// if none answers.
func Inspect(file string, text []byte, running func(Admin) (text []byte, closed bool)) (c *Config, warnings []Problem, err error) {
	c, d, err := parse(file, text)
	if err != nil {
		return nil, nil, err
	}
	var listed []Worker
	if c.Workers.File != "" {
		text, err := ReadFile(c.Workers.File)
		if err != nil {
			d.bad("workers.file", "%v", err)
		} else if listed, err = ParseWorkers(c.Workers.File, text); err != nil {
			return c, d.warnings, err
		}
	}
	missing := d.note
	if running != nil {
		missing = d.bad
		c.validateFree(running, d.bad, d.note)
	}
	c.validateFiles(running != nil, d.bad, missing, d.note)
	c.warn(listed, d)
	if len(d.problems) > 0 {
		return c, d.warnings, d.problems
	}
	return c, d.warnings, nil
}

// hidden replaces secrets.
const hidden = "(hidden)"

// credentials are the user and password of a URL, and query its query, which may hold a key; a password may have an @.
var credentials, query = regexp.MustCompile(`://[^/\s"]+@`), regexp.MustCompile(`(://[^\s"?]+\?)[^\s"]+`)

// Effective returns the configuration as YAML with every key. It can be read again, except that secrets are hidden.
func (c *Config) Effective() ([]byte, error) {
	shown := *c
	if shown.Index.Key != "" {
		shown.Index.Key = hidden
	}
	text, err := yaml.Marshal(&shown)
	text = query.ReplaceAll(credentials.ReplaceAll(text, []byte("://"+hidden+"@")), []byte("${1}"+hidden))
	return bytes.ReplaceAll(bytes.ReplaceAll(text, []byte("$$"), []byte("$$$$")), []byte("${"), []byte("$${")), err
}

// ParseWorkers decodes a workers file: a YAML list of workers. An empty list must be
// written as []: a file without a list counts as incompletely written.
func ParseWorkers(file string, text []byte) ([]Worker, error) {
	var list []Worker
	d, err := decodeFile(file, text, &list)
	if err != nil {
		return nil, err
	}
	if list == nil && len(d.problems) == 0 {
		d.bad("", "has no list of workers; an empty one is written []")
	}
	for i := range list {
		list[i].validate(d.incomplete().under(item("", i)))
	}
	uniqueWorkers("", list, d.bad)
	if len(d.problems) > 0 {
		return nil, d.problems
	}
	return list, nil
}

// decodeFile decodes text into the value that into points to. Problems with keys and values
// are in the decoder; the error is about text that cannot be parsed.
func decodeFile(file string, text []byte, into any) (*decoder, error) {
	d := &decoder{places: places{file, map[string]place{}}, anchors: map[string]ast.Node{}, meant: map[string]bool{}}
	d.bad, d.note = d.reporter(&d.problems), d.reporter(&d.warnings)
	text = bytes.TrimPrefix(text, []byte(byteOrderMark))
	if p := unreadable(text); p.Message != "" {
		p.File = file
		return nil, ProblemsError{p}
	}
	if json.Valid(text) {
		text = bytes.ReplaceAll(text, []byte{'\t'}, []byte{' '}) // YAML allows no tabs there
	}
	tokens := lexer.Tokenize(string(text))
	if line := deepAt(tokens); line > 0 {
		return nil, ProblemsError{{File: file, Line: line, Message: fmt.Sprintf("is nested deeper than %d levels", maxLevels)}}
	}
	if line := crowdedAt(tokens); line > 0 {
		return nil, ProblemsError{{File: file, Line: line, Message: fmt.Sprintf("a section has more than %d keys", maxKeys)}}
	}
	f, err := parser.Parse(tokens, 0)
	if err != nil {
		return nil, ProblemsError{syntaxProblem(file, text, err)}
	}
	docs := slices.DeleteFunc(f.Docs, func(one *ast.DocumentNode) bool { return one.Body == nil || one.Body.Type() == ast.DirectiveType })
	if len(docs) > 1 {
		return nil, ProblemsError{{File: file, Line: docs[1].Body.GetToken().Position.Line, Column: 1, Message: "a second YAML document: keep one in a file"}}
	}
	if len(docs) == 1 {
		d.document(docs[0].Body, reflect.ValueOf(into).Elem())
	}
	return d, nil
}

// byteOrderMark is written by some editors at the start of UTF-8 files.
const byteOrderMark = "\xef\xbb\xbf"

// maxLevels bounds the nesting of brackets, or of lists on one line: the parser takes minutes for 200,000 levels.
const maxLevels = 1000

var brackets = map[token.Type]int{token.SequenceStartType: 1, token.MappingStartType: 1, token.SequenceEndType: -1, token.MappingEndType: -1}

// deepAt returns the line in which there are more levels, 0 for none.
func deepAt(tokens token.Tokens) int {
	flow, lists, line := 0, 0, 0
	for _, t := range tokens {
		if t.Position.Line != line {
			lists, line = 0, t.Position.Line
		}
		if flow = max(flow+brackets[t.Type], 0); t.Type == token.SequenceEntryType || t.Type == token.MappingKeyType {
			lists++
		}
		if max(flow, lists) > maxLevels {
			return line
		}
	}
	return 0
}

// maxKeys bounds the keys of one section, because the parser takes quadratic time: minutes for 200,000 keys.
const maxKeys = 5000

// crowdedAt returns the line in which a section written over several lines has more keys, 0 for none.
func crowdedAt(tokens token.Tokens) int {
	type section struct{ column, keys int }
	var open []section // the innermost last; the keys of each begin in one column
	line := 0
	for _, t := range tokens {
		key := t
		if t.Type == token.MappingValueType && t.Prev != nil {
			key = t.Prev
		} else if t.Type == token.CommentType || t.Position.Line == line {
			continue
		}
		line = t.Position.Line
		column, last := key.Position.Column, len(open)-1
		for ; last >= 0 && open[last].column > column; last-- {
			open = open[:last]
		}
		if key == t {
			continue
		}
		if last < 0 || open[last].column < column {
			open, last = append(open, section{column: column}), last+1
		}
		if open[last].keys++; open[last].keys > maxKeys {
			return line
		}
	}
	return 0
}

// unreadable describes a file that is too long or not text: printing its lines would garble the terminal.
func unreadable(text []byte) Problem {
	switch {
	case len(text) > maxFile: // such as the standard input
		return Problem{Message: fmt.Sprintf("has more than %d bytes", maxFile)}
	case bytes.HasPrefix(text, []byte{0x1f, 0x8b}):
		return Problem{Line: 1, Column: 1, Message: "is compressed with gzip: unpack it"}
	case bytes.HasPrefix(text, []byte{0xff, 0xfe}), bytes.HasPrefix(text, []byte{0xfe, 0xff}):
		return Problem{Line: 1, Column: 1, Message: "is UTF-16: save it as UTF-8"}
	}
	for at := 0; at < len(text); {
		r, n := utf8.DecodeRune(text[at:])
		if r == utf8.RuneError && n == 1 || r < ' ' && r != '\t' && r != '\n' && r != '\r' || r == 0x7f {
			start := bytes.LastIndexByte(text[:at], '\n') + 1
			return Problem{Line: 1 + bytes.Count(text[:at], []byte{'\n'}), Column: 1 + utf8.RuneCount(text[start:at]),
				Message: fmt.Sprintf("is not text (byte %#02x): a configuration is YAML or JSON in UTF-8", text[at])}
		}
		at += n
	}
	return Problem{}
}

// syntaxAdvice maps the YAML parser's errors to advice.
var syntaxAdvice = map[string]string{
	"character '\t'":               "indent with spaces, not tabs",
	"mapping value is not allowed": "put text with a colon in quotes, and indent the keys of a section alike, here and in the next line",
	"must be specified":            "close the bracket that is open before this place",
}

// syntaxProblem keeps the position of the YAML parser's err, or of JSON's error if the text looks
// like JSON, and drops excerpts of the source.
func syntaxProblem(file string, text []byte, err error) Problem {
	p := Problem{File: file, Message: "is not YAML: " + err.Error()}
	var any json.RawMessage
	if syntax, ok := errors.AsType[*json.SyntaxError](json.Unmarshal(text, &any)); ok && regexp.MustCompile(`^\s*\{\s*"`).Match(text) {
		before := text[:min(max(int(syntax.Offset)-1, 0), len(text))]
		p.Message = "is not JSON: " + syntax.Error()
		p.Line, p.Column = 1+bytes.Count(before, []byte{'\n'}), 1+utf8.RuneCount(before[bytes.LastIndexByte(before, '\n')+1:])
	} else if placed, ok := errors.AsType[yaml.Error](err); ok {
		p.Message = "is not YAML: " + placed.GetMessage()
		if t := placed.GetToken(); t != nil && t.Position != nil {
			p.Line, p.Column = t.Position.Line, t.Position.Column
			if lines := bytes.Split(text, []byte{'\n'}); p.Line <= len(lines) && bytes.Contains(lines[p.Line-1], []byte(": ${")) {
				p.Message += ": ${NAME} within {…} or […] needs quotes"
				return p
			}
			for text, advice := range syntaxAdvice {
				if strings.Contains(p.Message, text) {
					p.Message += ": " + advice
				}
			}
		}
	}
	return p
}
