package bpe

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// TestRegexRefuses: patterns of uncertain meaning are rejected.
func TestRegexRefuses(t *testing.T) {
	for _, re := range []string{
		``, `a*`, `a|`, `(`, `)`, `[`, `[]`, `[a`, `a{2`, `a{2}?`, `a**`, `a{3,2}`, `(?:a*)*b`, `*a`, `\1`, `(a)\1`, `(?<n>a)`, `(?m:a)`, `(?#c)a`,
		`\h`, `\R`, `\X`, `\K`, `\G`, `[[:alpha:]]`, `[a-\d]`, `[\d-a]`, `[a-c-]`[:5], `[&&a]`, `[a&&]`, `\p{Foo}`, `\pL`, `\x{110000}`, `\xff`, `\u00`, `(?i:é)`, `(?i:ss)`,
		`(?i:\p{L})`, `(?i:[^a])`, `(?<=a)b`, `(?<!a)b`, `^a`, `a+?`, `a??`, `a{1,2}?`, `a{1,3}+`, `(?i)a`, `\Aa`, `a\z`, `a\Ba`, `\x41`, `\u{41}`, `\x{ffffff}`, `\x{`, `\p{^L}`, `\p{Letter}`, `\p{Word}`, `[a&&&b]`, `(?=a)`, `(?!a)+b`, `(?~a)`, `(*FAIL)`, strings.Repeat("(", 100) + "a" + strings.Repeat(")", 100),
		`(?:` + strings.Repeat(`(?:ab){900}`, 9) + `)`, `a\`,
	} {
		if _, err := compileRegex(re); !errors.Is(err, ErrUnsupported) {
			t.Errorf("%.50q: %v, want a refusal", re, err)
		}
	}
}

// TestRegexIsBounded: a pattern with exponential backtracking gives up on the text and works
// again for the next one.
func TestRegexIsBounded(t *testing.T) {
	file := tinyByteLevel(`{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}`,
		`{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":"(?:a|aa)+b|c"},"behavior":"Isolated","invert":false},`+
			`{"type":"ByteLevel","add_prefix_space":false,"use_regex":false}]}`)
	tok, err := loadText(file, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tok.Encode(nil, strings.Repeat("a", 5000), false); !errors.Is(err, ErrLimit) {
		t.Errorf("got %v, want an error", err)
	}
	if _, _, err := tok.EncodeAfter(nil, nil, nil, strings.Repeat("a", 5000), Cut{}, false); !errors.Is(err, ErrLimit) {
		t.Errorf("with cuts: got %v, want an error", err)
	}
	if ids, err := tok.Encode(nil, "aaab", false); err != nil || !slices.Equal(ids, []uint32{'a', 'a', 'a', 'b'}) {
		t.Errorf("got %v (%v), want the ids of a, a, a, b", ids, err)
	}
}

// FuzzRegex: any pattern is rejected or yields matches within the text, in order.
func FuzzRegex(f *testing.F) {
	for _, re := range splitPatterns {
		f.Add(re, samples[0])
	}
	f.Fuzz(func(t *testing.T, pattern, text string) {
		re, err := compileRegex(pattern)
		if err != nil || !utf8.ValidString(text) {
			return
		}
		m := &regexSearch{}
		m.allow(100)
		for at := 0; at < len(text); {
			from, to, ok := m.find(re, text, at, len(text))
			if !ok {
				break
			}
			if from < at || to <= from || to > len(text) || !utf8.ValidString(text[from:to]) {
				t.Fatalf("%q: match %d to %d behind %d of %q", pattern, from, to, at, text)
			}
			at = to
		}
	})
}
