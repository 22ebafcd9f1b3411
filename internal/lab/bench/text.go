package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"unicode/utf8"

	"github.com/kvlane/kvlane/internal/tokens/bpe"
)

// text is the material of prompts.
type text struct {
	name  string
	whole string
	// starts are where a user's part may begin.
	starts []int
	// perToken is the average number of bytes per token.
	perToken float64
	// words, if any, are shuffled for each user's part.
	words []string
}

// library returns Go's own library as two texts. files consists of all files, including tables and tests, to be cut
// anywhere. lines has each line once, three parts of prose (comments) to two of code, to be cut between lines.
func library(ctx context.Context, tok *bpe.Tokenizer) (lines, files *text, err error) {
	root, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		return nil, nil, fmt.Errorf("go env GOROOT: %w", err)
	}
	var all, chosen strings.Builder
	seen := map[string]bool{}
	prose, code := 0, 0
	lines = &text{name: "prose and code"}
	for _, dir := range []string{"net/http", "net", "go/*", "runtime", "crypto/*", "encoding/*", "os", "reflect", "strings", "text/*", "html/*", "sync", "time", "testing", "io", "log/*", "database/*"} {
		names, err := filepath.Glob(filepath.Join(strings.TrimSpace(string(root)), "src", dir, "*.go"))
		if err != nil {
			return nil, nil, err
		}
		for _, name := range names {
			content, err := os.ReadFile(name)
			if err != nil {
				return nil, nil, err
			}
			whole := strings.ToValidUTF8(string(content), "")
			all.WriteString(whole)
			base := filepath.Base(name)
			if strings.HasSuffix(base, "_test.go") || strings.HasPrefix(base, "z") || strings.Contains(base, "tables") || strings.Contains(whole[:min(len(whole), 300)], "Code generated") {
				continue
			}
			for scan := bufio.NewScanner(strings.NewReader(whole)); scan.Scan(); {
				line := strings.TrimRight(scan.Text(), " \t\r")
				comment, isProse := strings.CutPrefix(strings.TrimLeft(line, " \t"), "// ")
				if isProse {
					line = comment
				}
				if len(line) < 12 || len(line) > 300 || seen[line] || !isASCII(line) || !isProse && code > prose*2/3 {
					continue
				}
				seen[line] = true
				if isProse {
					prose += len(line)
				} else {
					code += len(line)
				}
				lines.starts = append(lines.starts, chosen.Len())
				chosen.WriteString(line)
				chosen.WriteByte('\n')
			}
		}
	}
	if chosen.Len() < 2<<20 {
		return nil, nil, fmt.Errorf("only %d bytes of Go's library found", chosen.Len())
	}
	lines.whole = chosen.String()
	files = &text{name: "whole files", whole: all.String()[:min(all.Len(), 8<<20)]}
	for _, t := range []*text{lines, files} {
		ids, err := tok.Encode(nil, t.whole, false)
		if err != nil {
			return nil, nil, err
		}
		t.perToken = float64(len(t.whole)) / float64(len(ids))
	}
	return lines, files, nil
}

// fresh is a text of known words in sentences that are always new.
func fresh(from *text) *text {
	return &text{name: "new text", whole: from.whole, words: strings.Fields(from.whole), perToken: from.perToken}
}

func isASCII(s string) bool { return utf8.RuneCountInString(s) == len(s) }

// user is the n-th user's part, of about size bytes.
func (t *text) user(size, n int) string {
	if t.words != nil {
		var b strings.Builder
		pick := rand.New(rand.NewPCG(uint64(n), uint64(size)))
		for b.Len() < size {
			b.WriteString(t.words[pick.IntN(len(t.words))])
			b.WriteByte(' ')
		}
		return b.String()
	}
	start := n * 104729 % (len(t.whole) - size)
	if len(t.starts) > 0 {
		start = min(t.starts[n*7919%len(t.starts)], len(t.whole)-size)
	}
	return strings.ToValidUTF8(t.whole[start:start+size], "")
}

// chat is the n-th prompt: half a system prompt that all share, half the user's part.
func (t *text) chat(size, n int) ([]byte, error) {
	type message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	return json.Marshal(map[string]any{
		"model": modelName, "max_tokens": 1,
		"messages": []message{{"system", strings.ToValidUTF8(t.whole[:size/2], "")}, {"user", fmt.Sprint(n, "\n") + t.user(size/2, n)}},
	})
}
