package bpe

import (
	"encoding/base64"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// TestForeignGolden: tokenizers in other files than tokenizer.json have the ids of their own
// libraries. livecheck/fixtures.py writes them; KVLANE_FOREIGN is a folder of its newly made ones.
func TestForeignGolden(t *testing.T) { checkForeign(t, "testdata") }

func TestForeignLive(t *testing.T) {
	data := os.Getenv("KVLANE_FOREIGN")
	if data == "" {
		t.Skip("KVLANE_FOREIGN names no folder of livecheck/fixtures.py")
	}
	checkForeign(t, data)
}

func checkForeign(t *testing.T, data string) {
	t.Helper()
	docs := jsonLines[document](t, filepath.Join(data, "texts.jsonl.gz"))
	folders, err := filepath.Glob(filepath.Join(data, "foreign", "*"))
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

// FuzzTokenLists: a damaged tekken.json or tiktoken file is refused, or a word has the ids of a naive encoder.
func FuzzTokenLists(f *testing.F) {
	merged := []string{"in", "th", "the", "er", "oth", "other", " t", "the r"}
	var tiktoken, tekken strings.Builder
	pattern := caseWords(reUpper, reLower, ``) + `|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|` + reBlank
	fmt.Fprintf(&tekken, `{"config":{"pattern":%q,"default_vocab_size":270,"default_num_special_tokens":6},"vocab":[`, pattern)
	for i := range 256 + len(merged) {
		token := []byte{byte(i)}
		if i > 255 {
			token = []byte(merged[i-256])
		}
		text := base64.StdEncoding.EncodeToString(token)
		fmt.Fprintf(&tiktoken, "%s %d\n", text, i)
		fmt.Fprintf(&tekken, `%s{"rank":%d,"token_bytes":%q}`, map[bool]string{true: ","}[i > 0], i, text)
	}
	tekken.WriteString(`],"special_tokens":[{"rank":1,"token_str":"<s>"}]}`)
	for i, file := range foreignFiles[:3] {
		text := tiktoken.String()
		if file.name == tekkenFile {
			text = tekken.String()
		}
		if _, err := file.parse([]byte(text), file.name, Config{}); err != nil {
			f.Fatal(err) // a seed that loads nothing finds nothing
		}
		f.Add([]byte(text), "theotherin", uint8(i))
		f.Add([]byte(strings.Replace(text, " 3\n", " 4\n", 1)), "a", uint8(i))
		f.Add([]byte(text[:len(text)/2]), "", uint8(i))
	}
	f.Fuzz(func(t *testing.T, raw []byte, text string, which uint8) {
		file := foreignFiles[which%3]
		if len(raw) > 1<<16 || len(text) > 1<<10 {
			return
		}
		tok, err := file.parse(raw, file.name, Config{})
		if err != nil {
			return
		}
		if _, err := tok.Encode(nil, text, true); (err == nil) != utf8.ValidString(text) {
			t.Fatalf("%q: got %v, want an error exactly for invalid UTF-8", text, err)
		}
		word := strings.Map(func(r rune) rune { // one word of every pattern
			if r < 'a' || r > 'z' {
				return -1
			}
			return r
		}, text)
		ranks := map[string]uint32{}
		for id, has := range tok.vocab.has {
			if b := tok.vocab.bytes(uint32(id)); has && len(b) > 0 {
				ranks[string(b)] = uint32(id)
			}
		}
		for _, c := range []byte(word) {
			if _, ok := ranks[string(c)]; !ok {
				return // tiktoken has an id for each byte
			}
		}
		for _, a := range tok.added {
			if strings.Contains(word, a.Content) {
				return
			}
		}
		got, err := tok.Encode(nil, word, false)
		if want := byRank(ranks, word); err != nil || !slices.Equal(got, want) {
			t.Fatalf("%q: got %v, %v, want %v", word, got, err, want)
		}
	})
}

// byRank merges the leftmost neighbours whose text is the lowest token, as tiktoken does.
func byRank(ranks map[string]uint32, word string) (ids []uint32) {
	if id, ok := ranks[word]; ok {
		return []uint32{id}
	}
	parts := strings.Split(word, "")
	for {
		best, at := uint32(math.MaxUint32), -1
		for i := range len(parts) - 1 {
			if id, ok := ranks[parts[i]+parts[i+1]]; ok && id < best {
				best, at = id, i
			}
		}
		if at < 0 {
			break
		}
		parts = slices.Replace(parts, at, at+2, parts[at]+parts[at+1])
	}
	for _, p := range parts {
		if p != "" {
			ids = append(ids, ranks[p])
		}
	}
	return ids
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
