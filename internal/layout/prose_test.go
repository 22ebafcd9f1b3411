package layout

import (
	"flag"
	"fmt"
	"go/ast"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

var update = flag.Bool("update", false, "write the counts of prose.txt anew")

// habits are patterns of prose that slow an expert down, and what to write instead. A match is one unless its last group is a word
// of unless.
var habits = []struct {
	name, instead string
	pattern       *regexp.Regexp
	unless        string
}{
	{"says-whether", "reports whether, explains why", habit(`(says?|said|tells?|told) (whether|that|why|if)`), ""},
	{"is-no", "is not a", habit(`(is|are|was|were) no (\w+)`), "longer more less fewer greater larger later"},
	{"nobody", "a passive, or the caller, client, reader", habit(`(nobody|whoever|who (asks?|wants?|knows?|reads?|waits?|comes?|needs?|holds?|looks?))`), ""},
	{"at-once", "concurrently, immediately", habit(`at once`), ""},
	{"beside", "besides, next to, with", habit(`beside`), ""},
	{"road", "path", habit(`roads?`), ""},
	{"birth", "creation, start", habit(`births?`), ""},
	{"desk", "semaphore, decision slot", habit(`desks?`), ""},
	{"tally", "counter", habit(`tall(y|ies)`), ""},
	{"brought", "supplied, request-supplied", habit(`brought`), ""},
	{"apart", "disaggregated, separate", habit(`apart`), ""},
	{"so-many", "as many as, this long, that many", habit(`so (?:many|much|long|few)\b\W*(\w*)`), "that as"},
}

// long is a line of a document that is wider than lineLimit; tables and code blocks may be.
const (
	long      = "long-line"
	lineLimit = 120
)

// ordinary is what looks like a habit and is not.
var ordinary = regexp.MustCompile(`(?i)\bthere (is|are|was|were) no\b`)

func habit(words string) *regexp.Regexp { return regexp.MustCompile(`(?i)\b` + words + `\b`) }

const proseFile = "prose.txt"

// TestProse counts habits in comments and messages of Go files by room, and in documents, scripts and descriptions of the
// configuration. A count may only fall: prose.txt has the ones of now.
func TestProse(t *testing.T) {
	counts, places := map[string]int{}, map[string][]string{}
	count := func(room, place, text string) {
		for name, n := range matches(text) {
			key := name + " " + room
			counts[key] += n
			places[key] = append(places[key], place)
		}
	}
	for _, f := range goFiles(t) {
		if !f.generated && f.pkg != "internal/layout" {
			count(roomOf(f.pkg), f.name, comments(f.syntax))
			if !f.test {
				count(roomOf(f.pkg), f.name, messages(f.syntax))
			}
		}
	}
	hidden, err := filepath.Glob(root + "/.ci/*")
	if err != nil || len(hidden) == 0 {
		t.Fatalf("got %q, %v, want the scripts of .ci", hidden, err)
	}
	for _, path := range hidden {
		count("scripts", strings.TrimPrefix(path, root+"/"), remarks(read(t, path)))
	}
	repository(t, func(path string) {
		name := filepath.ToSlash(strings.TrimPrefix(path, root+string(filepath.Separator)))
		switch {
		case script.MatchString(name):
			count("scripts", name, remarks(read(t, path)))
		case filepath.Ext(path) == ".md":
			text, wide := document(read(t, path))
			count("docs", name, text)
			if wide > 0 {
				counts[long+" docs"] += wide
				places[long+" docs"] = append(places[long+" docs"], name)
			}
		case strings.HasPrefix(name, "internal/config/") && filepath.Ext(path) == ".json":
			for _, m := range regexp.MustCompile(`"description": "(.*)"`).FindAllStringSubmatch(read(t, path), -1) {
				count("schema", name, m[1])
			}
		}
	})

	var table strings.Builder
	for _, h := range append(names(), long) {
		for _, room := range roomNames() {
			key := h + " " + room
			if n := counts[key]; n > 0 {
				fmt.Fprintf(&table, "%s %d\n", key, n)
			}
		}
	}
	if *update {
		if err := os.WriteFile(proseFile, []byte(table.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	limits := map[string]int{}
	for line := range strings.Lines(read(t, proseFile)) {
		var name, room string
		var n int
		if _, err := fmt.Sscan(line, &name, &room, &n); err != nil {
			t.Fatalf("%s: %q: %v", proseFile, line, err)
		}
		limits[name+" "+room] = n
	}
	fell := false
	for key, n := range counts {
		fell = fell || n < limits[key]
		if n > limits[key] {
			t.Errorf("%s: got %d, want at most %d: write %s. It stands in %s", key, n, limits[key], instead(key), strings.Join(places[key], ", "))
		}
	}
	for key := range limits {
		fell = fell || counts[key] == 0
	}
	if fell {
		t.Log("counts of habits fell: lower them with go test ./internal/layout -run Prose -update")
	}
}

// comments returns the comments of a file, one a line.
func comments(f *ast.File) string {
	var b strings.Builder
	for _, c := range f.Comments {
		b.WriteString(strings.Join(strings.Fields(c.Text()), " ") + ".\n")
	}
	return b.String()
}

// messages returns the string literals of three words or more, one a line: log messages, errors, and helps of metrics and flags.
func messages(f *ast.File) string {
	var b strings.Builder
	ast.Inspect(f, func(n ast.Node) bool {
		if literal, ok := n.(*ast.BasicLit); ok && literal.Kind == token.STRING {
			text, _ := strconv.Unquote(literal.Value)
			if words := strings.Fields(text); len(words) >= 3 {
				b.WriteString(strings.Join(words, " ") + ".\n")
			}
		}
		return true
	})
	return b.String()
}

// script is the files whose comments begin with #.
var script = regexp.MustCompile(`(^|/)(Makefile|Dockerfile|NOTES\.txt)$|\.(sh|py|yaml|yml|tpl)$`)

// remarks returns the comments of a script, and what it prints.
func remarks(text string) string {
	var b strings.Builder
	for _, m := range regexp.MustCompile(`(?m)#+ (.*)$|\b(?:echo|print)\b(.*)$`).FindAllStringSubmatch(text, -1) {
		b.WriteString(m[1] + m[2] + ".\n")
	}
	return b.String()
}

// document returns the prose of a Markdown text with each paragraph on a line, without code blocks, and the number of its lines
// that are too long.
func document(text string) (prose string, wide int) {
	var b strings.Builder
	code := false
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "```"):
			code = !code
		case code:
		case line == "":
			b.WriteString("\n")
		default:
			b.WriteString(line + " ")
			if utf8.RuneCountInString(line) > lineLimit && line[0] != '|' {
				wide++
			}
		}
	}
	return b.String(), wide
}

// matches returns how often each habit stands in a text.
func matches(text string) map[string]int {
	found := map[string]int{}
	text = ordinary.ReplaceAllString(text, "")
	for _, h := range habits {
		for _, m := range h.pattern.FindAllStringSubmatch(text, -1) {
			if h.unless != "" && strings.Contains(" "+h.unless+" ", " "+strings.ToLower(m[len(m)-1])+" ") {
				continue
			}
			found[h.name]++
		}
	}
	return found
}

func names() (names []string) {
	for _, h := range habits {
		names = append(names, h.name)
	}
	return names
}

func roomNames() (names []string) {
	for _, r := range rooms {
		names = append(names, r.name)
	}
	return append(names, "docs", "schema", "scripts")
}

func instead(key string) string {
	for _, h := range habits {
		if strings.HasPrefix(key, h.name+" ") {
			return h.instead
		}
	}
	return fmt.Sprintf("lines of at most %d characters", lineLimit)
}

func read(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

func TestHabits(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"Free says whether a slot is free.", "says-whether"},
		{"Free reports whether a slot is free.", ""},
		{"A digest is no name.", "is-no"},
		{"A block that is no longer held.", ""},
		{"There is no such block.", ""},
		{"Nobody waits.", "nobody"},
		{"So many are kept.", "so-many"},
		{"It waits so long.", "so-many"},
		{"So many that none is left, and so long as it lives.", ""},
		{"Both run at once.", "at-once"},
		{"The crossroads, besides.", ""},
	} {
		got := ""
		for name := range matches(c.text) {
			got += name
		}
		if got != c.want {
			t.Errorf("%q: got %q, want %q", c.text, got, c.want)
		}
	}
	prose, wide := document("a\nb\n\n```\ncode\n```\n| " + strings.Repeat("x", 200) + " |\n" + strings.Repeat("y", 121) + "\n")
	if !strings.HasPrefix(prose, "a b \n") || strings.Contains(prose, "code") || wide != 1 {
		t.Errorf("got %q with %d long lines, want paragraphs without code and 1", prose, wide)
	}
}
