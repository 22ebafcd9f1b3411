package bpe

import (
	"strings"
	"testing"
)

// MinTokens never exceeds the real count, and is not far below it for texts of long tokens.
func TestMinTokensIsALowerBound(t *testing.T) {
	const n = 1 << 15
	for _, name := range []string{"qwen3", "gptoss", "deepseek_v3", "mistral_7b", "mistral_nemo"} {
		tok := family(t, name)
		if tok.longest == 0 {
			t.Errorf("%s: no bound", name)
			continue
		}
		texts := longTexts()
		longest := ""
		for id := range tok.vocab.has {
			if b := tok.vocab.bytes(uint32(id)); len(b) > len(longest) {
				longest = string(b)
			}
		}
		texts["longest token"] = strings.Repeat(longest, n/len(longest))
		texts["spaces"] = strings.Repeat(" ", n)
		texts["low lines"] = strings.Repeat(spaceMark, n/3)
		texts["jamo"] = strings.Repeat("\u1112\u1161\u11ab", n/9)
		texts["singletons"] = strings.Repeat("\u1fef", n/3)
		texts["three marks"] = strings.Repeat("\u03b1\u0313\u0300\u0345", n/8)
		texts["Greek"] = strings.Repeat("\u03b9\u0308\u0301", n/6)
		for _, a := range tok.added {
			texts["added token"] = strings.Repeat(a.Content, n/len(a.Content))
		}
		for what, text := range texts {
			ids, err := tok.Encode(nil, text, false)
			if err != nil {
				t.Fatal(err)
			}
			least := tok.MinTokens(text)
			if least > len(ids) || least < len(text)/tok.longest/nfcShrinks {
				t.Errorf("%s, %s: got at least %d ids, want at most %d", name, what, least, len(ids))
			}
		}
	}
}

// A token that consumes adjacent white space can stand for any number of bytes.
func TestNoMinTokensWithStrippingTokens(t *testing.T) {
	tok := *family(t, "qwen3")
	tok.added = append([]AddedToken{{ID: tok.added[0].ID, Content: "<mask>", Lstrip: true}}, tok.added...)
	if n := tok.longestToken(); n != 0 {
		t.Errorf("got a longest token of %d bytes, want none", n)
	}
}
