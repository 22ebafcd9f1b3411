package bpe

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
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

// TestLoadMistral: tekken.json wins, else the last version of a SentencePiece model, whatever
// else the folder has; TokenID knows the control tokens.
func TestLoadMistral(t *testing.T) {
	read := func(path ...string) []byte {
		b, err := os.ReadFile(filepath.Join(append([]string{"testdata", "foreign"}, path...)...))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	tekken, spm := read("tekken", "tekken.json.gz"), read("spm_blanks", "tokenizer.model.gz")
	for _, c := range []struct {
		files   map[string][]byte
		version string
		inst    bool
		ids     int
	}{
		{map[string][]byte{"tekken.json.gz": tekken, "tokenizer.model.v3.gz": spm, "tokenizer.json": []byte("{}")}, "v3", true, 3030},
		{map[string][]byte{"tokenizer.model.v1.gz": read("spm_bpe_rules", "tokenizer.model.gz"), "tokenizer.model.v7m1.gz": spm, "config.json": []byte(`{"model_type":"llama"}`)}, "v7m1", false, 1500},
		{map[string][]byte{"tokenizer.json": []byte("{}")}, "", false, 0},
	} {
		fsys := fstest.MapFS{}
		for name, data := range c.files {
			fsys[name] = &fstest.MapFile{Data: data}
		}
		tok, err := LoadMistral(fsys)
		if c.ids == 0 {
			if !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("got %v, want an error that wraps fs.ErrNotExist", err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		_, inst := tok.TokenID("[INST]")
		if got := tok.Config().Version; got != c.version || inst != c.inst || tok.VocabSize() != c.ids {
			t.Errorf("got version %q, [INST] %t, %d ids, want %q, %t, %d", got, inst, tok.VocabSize(), c.version, c.inst, c.ids)
		}
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
