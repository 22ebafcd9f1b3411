package config

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A file that is not YAML, or not even text, is one problem with its position, in the same
// form as all others.
func TestFilesThatAreNoYAML(t *testing.T) {
	for text, want := range map[string]string{
		"a: [1, 2\nb: 3\n":                    "k.yaml:2:1: is not YAML: ',' or ']' must be specified: close the bracket that is open before this place",
		"listen:\n\taddress: x\n":             "k.yaml:2:1: is not YAML: found character '\t' that cannot start any token: indent with spaces, not tabs",
		"listen:\n  address: \"127.0.0.1:1\n": "k.yaml:2:12: is not YAML: could not find end character of double-quoted text",
		"a: {b: c\n":                          "k.yaml:1:4: is not YAML: could not find flow mapping end token '}'",
		"drain: b: c\n":                       "k.yaml:1:8: is not YAML: mapping value is not allowed in this context: put text with a colon in quotes, and indent the keys of a section alike, here and in the next line",
		"{\n  \"drain\": \"1s\",\n  \"é\" 5}": "k.yaml:3:7: is not JSON: invalid character '5' after object key",
		"{\"listen\": {\"address\": \"h:1\"":  "k.yaml:1:28: is not JSON: unexpected end of JSON input",
		"{\"listen\": {address: [1}":          "k.yaml:1:13: is not JSON: invalid character 'a' looking for beginning of object key string",
		"{listen: {address: [1}":              "k.yaml:1:22: is not YAML: ',' or ']' must be specified: close the bracket that is open before this place",
		"{\"drain\": \"1s\",}":                "",
		"routing: {policy: kv-aware}":         "k.yaml:1:19: routing.policy: needs a section with keys, not a value: a policy is named by routing.preset",
		"workers:\n- address: h:1\n":          "k.yaml:1:1: workers: needs a section with keys, not a list: a list of workers is workers.static",
		"models: {name: a}":                   "k.yaml:1:1: models: needs a list, not a section: write - before each element",
		"admin: {address: ${A}}":              "k.yaml:1:19: is not YAML: ',' or '}' must be specified: ${NAME} within {…} or […] needs quotes",
		"workers: {static: [{address: \"1.1.1.1:1\", events: \"tcp://h:1\"}]}": "k.yaml:1:51: workers.static[0].events: needs a section with keys, not a value: an address is events.endpoint",
		"flow: fifo":                             "k.yaml:1:7: flow: needs a section with keys, not a value",
		"\x1f\x8b\x08\x00rest":                   "k.yaml:1:1: is compressed with gzip: unpack it",
		"\xff\xfea\x00":                          "k.yaml:1:1: is UTF-16: save it as UTF-8",
		"\xfe\xff\x00a":                          "k.yaml:1:1: is UTF-16: save it as UTF-8",
		"drain: 1s\n# é\xffx\n":                  "k.yaml:2:4: is not text (byte 0xff): a configuration is YAML or JSON in UTF-8",
		"\x7fELF\x02\x01":                        "k.yaml:1:1: is not text (byte 0x7f): a configuration is YAML or JSON in UTF-8",
		"HOME=/root\x00PATH=/bin":                "k.yaml:1:11: is not text (byte 0x00): a configuration is YAML or JSON in UTF-8",
		strings.Repeat("\x00", 1<<20):            "k.yaml:1:1: is not text (byte 0x00): a configuration is YAML or JSON in UTF-8",
		"just words":                             "k.yaml:1:1: needs a section with keys, not a value",
		"drain: 1s\n---\ndrain: 2s\n":            "k.yaml:3:1: a second YAML document: keep one in a file",
		"%YAML 1.2\n---\ndrain: 1s\n---\n":       "",
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

// A problem that another package finds is placed like the file's own.
func TestProblemsOfOthers(t *testing.T) {
	file := filepath.Join(t.TempDir(), "k.yaml")
	if err := os.WriteFile(file, []byte("models:\n- name: a\n- name: b\n  tokenizer: x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		"models[1].tokenizer":     ":4:14: models[1].tokenizer: is odd",
		"models[0].chat_template": ":2:3: models[0].chat_template: is odd",
		"index.block_size":        ": index.block_size: is odd",
	} {
		if got := Place(file, ProblemsError{{Path: path, Message: "is odd"}}).Error(); got != file+want {
			t.Errorf("got %q, want %q", got, file+want)
		}
		if got, want := Place("/none", ProblemsError{{Path: path, Message: "is odd"}}).Error(), path+": is odd"; got != want {
			t.Errorf("without the file: got %q, want %q", got, want)
		}
	}
	if got := Place(file, os.ErrExist); !errors.Is(got, os.ErrExist) {
		t.Errorf("another error: got %v, want it as it is", got)
	}
}
