package enginesim

import (
	"bufio"
	"compress/gzip"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

var qwen = sync.OnceValues(func() (*Tokenizer, error) { return LoadTokenizer(os.DirFS("../../models/qwen3")) })

func qwenTokenizer(t testing.TB) *Tokenizer {
	t.Helper()
	tok, err := qwen()
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// shared gives the reference folder, which is not part of the project.
func shared(t testing.TB) string {
	t.Helper()
	dir := os.Getenv("KVLANE_SHARED")
	if dir == "" {
		t.Skip("KVLANE_SHARED is not set: no golden files")
	}
	return dir
}

func jsonLines(t testing.TB, path string, each func(line []byte)) {
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
	scan := bufio.NewScanner(z)
	scan.Buffer(nil, 64<<20)
	for scan.Scan() {
		each(scan.Bytes())
	}
	if err := scan.Err(); err != nil {
		t.Fatal(err)
	}
}

// The ids are those that Hugging Face tokenizers 0.23 and vLLM 0.32 give.
func TestTokenizerSamples(t *testing.T) {
	tok := qwenTokenizer(t)
	for _, row := range []struct {
		text string
		ids  []int32
	}{
		{"engine language signal doctor island", []int32{8512, 4128, 8286, 10668, 12922}},
		{"<|im_start|>user\nHello, world<|im_end|>\n<|im_start|>assistant\n", []int32{151644, 872, 198, 9707, 11, 1879, 151645, 198, 151644, 77091, 198}},
		{"Tell me about Köln 🙂 and 東京.", []int32{40451, 752, 911, 141377, 27484, 323, 60596, 109, 46553, 13}},
		{"", nil},
	} {
		if got := tok.Encode(row.text, false); !slices.Equal(got, row.ids) {
			t.Errorf("%q: got %v, want %v", row.text, got, row.ids)
		}
	}
}

func TestTokenizerGoldens(t *testing.T) {
	dir := filepath.Join(shared(t), "data", "tokenizers")
	var texts []string
	jsonLines(t, filepath.Join(dir, "corpus.jsonl.gz"), func(line []byte) {
		var row struct {
			Text string `json:"text"`
		}
		if err := json.Unmarshal(line, &row); err != nil {
			t.Fatal(err)
		}
		texts = append(texts, row.Text)
	})
	// Known: x/text breaks runs of over 30 combining marks (stream-safe text) and knows newer letters than regexp2.
	known := map[string]bool{"combining_runs": true, "cp_00000": true, "cp_1c000": true, "cp_10000": true, "cpsp_00000": true, "cpsp_08000": true, "cpsp_10000": true}
	for _, family := range []string{"qwen3", "deepseek_v3", "gptoss", "mistral_nemo", "mistral_7b"} {
		t.Run(family, func(t *testing.T) {
			tok, err := LoadTokenizer(os.DirFS("../../models/" + family))
			if err != nil {
				t.Fatal(err)
			}
			i, wrong := 0, 0
			jsonLines(t, filepath.Join(dir, "ids."+family+".jsonl.gz"), func(line []byte) {
				var row struct {
					Name string  `json:"name"`
					IDs  []int32 `json:"ids"`
				}
				if err := json.Unmarshal(line, &row); err != nil {
					t.Fatal(err)
				}
				if got := tok.Encode(texts[i], false); !slices.Equal(got, row.IDs) && !known[row.Name] {
					if wrong++; wrong <= 3 {
						at := 0
						for at < len(got) && at < len(row.IDs) && got[at] == row.IDs[at] {
							at++
						}
						t.Errorf("%s: differs at token %d: got %d ids, want %d; text %.80q; before %q", row.Name, at, len(got), len(row.IDs), texts[i], tok.Decode(got[max(0, at-3):min(len(got), at+2)]))
					}
				}
				i++
			})
			t.Logf("%d texts, %d differ", i, wrong)
		})
	}
}

// A text of generated tokens must be encoded to the same tokens, after a chat turn's head and after any other word.
func TestGeneratedWordsAreStable(t *testing.T) {
	tok := qwenTokenizer(t)
	if len(tok.words) < 500 || len(tok.starters) < 100 {
		t.Fatalf("only %d words, %d starters", len(tok.words), len(tok.starters))
	}
	ids := []int32{tok.starters[7]}
	for i := range 300 {
		ids = append(ids, tok.words[i*37%len(tok.words)])
	}
	text := tok.Decode(ids)
	head := tok.Encode("<|im_start|>assistant\n", false)
	got := tok.Encode("<|im_start|>assistant\n"+text+"<|im_end|>\n", false)
	if want := append(slices.Clone(head), ids...); !slices.Equal(got[:len(want)], want) {
		t.Fatalf("answer is encoded to other ids: %v, want %v", got[:len(want)], want)
	}
}

func TestTokenizerLongWord(t *testing.T) {
	tok := qwenTokenizer(t)
	text := strings.Repeat("a", 200_000)
	if got := tok.Decode(tok.Encode(text, false)); got != text {
		t.Fatal("a long word does not come back")
	}
}
