package bpe

import (
	"os"
	"path/filepath"
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
