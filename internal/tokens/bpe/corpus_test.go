package bpe

import (
	"bufio"
	"compress/gzip"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
)

// families are the directories of internal/tokens/models.
var families = []string{"qwen3", "deepseek_v3", "gptoss", "mistral_nemo", "mistral_7b"}

var loaded sync.Map // family -> func() (*Tokenizer, error)

// family loads a committed tokenizer once per test run.
func family(t testing.TB, name string) *Tokenizer {
	t.Helper()
	load, _ := loaded.LoadOrStore(name, sync.OnceValues(func() (*Tokenizer, error) {
		return Load(os.DirFS(filepath.Join("..", "models", name)))
	}))
	tok, err := load.(func() (*Tokenizer, error))()
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// jsonLines reads a gzipped file with one JSON value per line.
func jsonLines[T any](t testing.TB, path string) []T {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var out []T
	lines := bufio.NewScanner(z)
	lines.Buffer(nil, 64<<20)
	for lines.Scan() {
		var v T
		if err := json.Unmarshal(lines.Bytes(), &v); err != nil {
			t.Fatal(err)
		}
		out = append(out, v)
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	return out
}

type document struct {
	Name string `json:"name"`
	Text string `json:"text"`
}

type goldenIDs struct {
	IDs     []uint32 `json:"ids"`
	Special []uint32 `json:"ids_special,omitempty"`
}

// sharedData returns the directory of the large corpus, which is not part of the repository.
func sharedData(t testing.TB) string {
	t.Helper()
	dir := os.Getenv("KVLANE_SHARED")
	if dir == "" {
		t.Skip("KVLANE_SHARED is not set: the large corpus is not part of the repository")
	}
	return filepath.Join(dir, "data", "tokenizers")
}

// TestSharedCorpus: every document of the large corpus has the ids of the reference.
func TestSharedCorpus(t *testing.T) {
	dir := sharedData(t)
	docs := jsonLines[document](t, filepath.Join(dir, "corpus.jsonl.gz"))
	for _, name := range families {
		t.Run(name, func(t *testing.T) {
			want := jsonLines[goldenIDs](t, filepath.Join(dir, "ids."+name+".jsonl.gz"))
			if len(want) != len(docs) {
				t.Fatalf("%d documents, %d goldens", len(docs), len(want))
			}
			checkDocuments(t, family(t, name), docs, want)
		})
	}
}

func checkDocuments(t *testing.T, tok *Tokenizer, docs []document, want []goldenIDs) {
	t.Helper()
	wrong := 0
	for i, d := range docs {
		for _, special := range []bool{false, true} {
			expect := want[i].IDs
			if special {
				expect = want[i].Special
			}
			if expect == nil {
				continue // the large corpus omits what adds nothing
			}
			got, err := tok.Encode(nil, d.Text, special)
			if err != nil {
				t.Fatalf("%s: %v", d.Name, err)
			}
			if slices.Equal(got, expect) {
				continue
			}
			if wrong++; wrong <= 5 {
				at := 0
				for at < min(len(got), len(expect)) && got[at] == expect[at] {
					at++
				}
				t.Errorf("%s (%d, special %t): differs at token %d: got %v want %v", d.Name, i, special, at,
					got[at:min(at+5, len(got))], expect[at:min(at+5, len(expect))])
			}
		}
	}
	if wrong > 0 {
		t.Errorf("%d of %d are wrong", wrong, 2*len(docs))
	}
}
