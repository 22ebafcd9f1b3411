package config

import (
	"strings"
	"testing"
)

// What is no YAML, or no text at all, is one line with its place, in the form of all
// other problems.
func TestFilesThatAreNoYAML(t *testing.T) {
	for text, want := range map[string]string{
		"a: [1, 2\nb: 3\n":                       "k.yaml:2:1: is no YAML: ',' or ']' must be specified",
		"listen:\n\taddress: x\n":                "k.yaml:2:1: is no YAML: found character '\t' that cannot start any token",
		"listen:\n  address: \"127.0.0.1:1\n":    "k.yaml:2:12: is no YAML: could not find end character of double-quoted text",
		"a: {b: c\n":                             "k.yaml:1:4: is no YAML: could not find flow mapping end token '}'",
		"drain: b: c\n":                          "k.yaml:1:8: is no YAML: mapping value is not allowed in this context",
		"\x1f\x8b\x08\x00rest":                   "k.yaml:1:1: is compressed with gzip: unpack it",
		"\xff\xfea\x00":                          "k.yaml:1:1: is UTF-16: save it as UTF-8",
		"\xfe\xff\x00a":                          "k.yaml:1:1: is UTF-16: save it as UTF-8",
		"drain: 1s\n# é\xffx\n":                  "k.yaml:2:4: is no text (byte 0xff): a configuration is YAML in UTF-8",
		"\x7fELF\x02\x01":                        "k.yaml:1:1: is no text (byte 0x7f): a configuration is YAML in UTF-8",
		"HOME=/root\x00PATH=/bin":                "k.yaml:1:11: is no text (byte 0x00): a configuration is YAML in UTF-8",
		strings.Repeat("\x00", 1<<20):            "k.yaml:1:1: is no text (byte 0x00): a configuration is YAML in UTF-8",
		"just words":                             "k.yaml:1:1: needs a section with keys, not a value",
		"drain: 1s\n---\ndrain: 2s\n":            "k.yaml: more than one YAML document",
		byteOrderMark + "drain: 1s\r\nlog: {}\n": "",
	} {
		_, err := Parse("k.yaml", []byte(text))
		got := ""
		if err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%.40q:\n got %q\nwant %q", text, got, want)
		}
	}
}

// A problem that somebody else finds is placed like the file's own.
func TestProblemsOfOthers(t *testing.T) {
	c, err := Parse("k.yaml", []byte("models:\n- name: a\n- name: b\n  tokenizer: x\n"))
	if err != nil {
		t.Fatal(err)
	}
	def := Default()
	for got, want := range map[string]string{
		c.Problem("models[1].tokenizer", "is %s", "odd").String():  "k.yaml:4:14: models[1].tokenizer: is odd",
		c.Problem("models[0].chat_template", "is odd").String():    "k.yaml:2:3: models[0].chat_template: is odd",
		def.Problem("models[0].tokenizer", "is %d", 1).Message:     "is 1",
		c.Problem("index.block_size", "is not in the file").Path:   "index.block_size",
		c.Problem("index.block_size", "is not there").String()[:7]: "k.yaml:",
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
