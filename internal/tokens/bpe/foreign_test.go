package bpe

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestForeignGolden: tokenizers in other files than tokenizer.json have the ids of their own
// libraries. livecheck/fixtures.py writes them.
func TestForeignGolden(t *testing.T) {
	docs := jsonLines[document](t, filepath.Join("testdata", "texts.jsonl.gz"))
	folders, err := filepath.Glob(filepath.Join("testdata", "foreign", "*"))
	if err != nil || len(folders) == 0 {
		t.Fatalf("got %d folders, %v, want some", len(folders), err)
	}
	for _, folder := range folders {
		t.Run(filepath.Base(folder), func(t *testing.T) {
			tok, err := Load(os.DirFS(folder))
			if err != nil {
				t.Fatal(err)
			}
			want := jsonLines[goldenIDs](t, filepath.Join(folder, "ids.jsonl.gz"))
			if len(want) != len(docs) {
				t.Fatalf("got %d goldens, want %d", len(want), len(docs))
			}
			checkDocuments(t, tok, docs, want)
		})
	}
}

// TestTekkenHasControlTokens: TokenID knows those of tekken.json, which no text contains.
func TestTekkenHasControlTokens(t *testing.T) {
	tok, err := Load(os.DirFS(filepath.Join("testdata", "foreign", "tekken")))
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := tok.TokenID("[INST]"); !ok || tok.VocabSize() != 3030 {
		t.Errorf("got [INST] %t, %d ids, want true, 3030", ok, tok.VocabSize())
	}
}

// FuzzSPM: a damaged model file is refused, or its tokenizer encodes.
func FuzzSPM(f *testing.F) {
	for _, name := range []string{"spm_bpe", "spm_unigram"} {
		raw, err := readFile(os.DirFS(filepath.Join("testdata", "foreign", name)), "tokenizer.model")
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw[:2000])
		f.Add(raw[len(raw)-2000:])
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		for _, config := range []Config{{}, {HasModel: true}} {
			if tok, err := parseSPM(raw, "", config); err == nil {
				_, _ = tok.Encode(nil, "a  b\u2581é\t<s>", true)
			}
		}
	})
}

// TestLongRunsAreCut: Kimi's code cuts runs of 25,000 characters and texts of 400,000.
func TestLongRunsAreCut(t *testing.T) {
	var got []int
	text := strings.Repeat("é", kimiRun) + strings.Repeat(" ", kimiRun+1) + strings.Repeat("a ", kimiText/2)
	for from, to := range runs(text, kimiRun) {
		got = append(got, to-from)
	}
	if want := []int{3 * kimiRun, kimiText - 2*kimiRun, 2*kimiRun + 1}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
