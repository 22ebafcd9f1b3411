package bpe

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sort"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

// With -update the reference library rewrites the goldens; the environment variable KVLANE_PYTHON
// names a Python that has it installed.
var update = flag.Bool("update", false, "write testdata with the reference library")

// reference runs livecheck/reference.py and returns one answer per text.
func reference[T any](t *testing.T, task any, texts []string) []T {
	t.Helper()
	return references[T](t, []any{task}, texts)
}

// references is reference for several tasks in sequence.
func references[T any](t *testing.T, tasks []any, texts []string) []T {
	t.Helper()
	python := os.Getenv("KVLANE_PYTHON")
	if python == "" {
		t.Skip("KVLANE_PYTHON is not set: it names a Python with Hugging Face tokenizers")
	}
	var in bytes.Buffer
	enc := json.NewEncoder(&in)
	enc.SetEscapeHTML(false)
	for _, task := range tasks {
		if err := enc.Encode(task); err != nil {
			t.Fatal(err)
		}
		for _, s := range texts {
			if err := enc.Encode(map[string]string{"text": s}); err != nil {
				t.Fatal(err)
			}
		}
	}
	cmd := exec.CommandContext(t.Context(), python, filepath.Join("livecheck", "reference.py"))
	cmd.Stdin, cmd.Stderr = &in, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var answers []T
	lines := bufio.NewScanner(bytes.NewReader(out))
	lines.Buffer(nil, 64<<20)
	for lines.Scan() {
		var a T
		if err := json.Unmarshal(lines.Bytes(), &a); err != nil {
			t.Fatal(err)
		}
		answers = append(answers, a)
	}
	if len(answers) != len(tasks)*len(texts) {
		t.Fatalf("%d answers for %d texts", len(answers), len(tasks)*len(texts))
	}
	return answers
}

func writeLines[T any](t *testing.T, path string, values []T) {
	t.Helper()
	var b bytes.Buffer
	z, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	if err != nil {
		t.Fatal(err)
	}
	enc := json.NewEncoder(z)
	enc.SetEscapeHTML(false)
	for _, v := range values {
		if err := enc.Encode(v); err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
}

func tokenizerTask(name string) any {
	path := filepath.Join("..", "models", name, "tokenizer.json.gz")
	return map[string]string{"tokenizer": path}
}

// TestGolden: our own texts have the ids of the reference.
func TestGolden(t *testing.T) {
	docsPath := filepath.Join("testdata", "texts.jsonl.gz")
	if *update {
		var docs []document
		for i, s := range goldenTexts() {
			docs = append(docs, document{Name: strconv.Itoa(i), Text: s})
		}
		writeLines(t, docsPath, docs)
	}
	docs := jsonLines[document](t, docsPath)
	for _, name := range families {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join("testdata", "ids."+name+".jsonl.gz")
			if *update {
				writeLines(t, path, reference[goldenIDs](t, tokenizerTask(name), texts(docs)))
			}
			checkDocuments(t, family(t, name), docs, jsonLines[goldenIDs](t, path))
		})
	}
}

func texts(docs []document) []string {
	out := make([]string, len(docs))
	for i, d := range docs {
		out[i] = d.Text
	}
	return out
}

type splitGolden struct {
	Name string  `json:"name"`
	Ends [][]int `json:"ends"`
}

// preTokenizers are all pre-tokenizers of byte-level models that Load accepts,
// in the library's JSON.
func preTokenizers() map[string]any {
	split := func(re string) any {
		return map[string]any{"type": "Split", "pattern": map[string]string{"Regex": re}, "behavior": "Isolated", "invert": false}
	}
	gpt2 := map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true}
	sequence := func(list ...any) any { return map[string]any{"type": "Sequence", "pretokenizers": list} }
	all := map[string]any{
		"ByteLevel": gpt2,
		"Digits":    sequence(map[string]any{"type": "Digits", "individual_digits": true}, gpt2),
		"stages":    sequence(split(stages[0]), split(stages[1]), split(stages[2])),
	}
	for re := range patterns {
		all[re] = split(re)
	}
	return all
}

func splitterOf(name string) splitter {
	switch name {
	case "ByteLevel":
		return gpt2Split{}
	case "Digits":
		return gpt2Split{digits: true}
	case "stages":
		return stagedSplit{}
	}
	return patterns[name]
}

// TestSplitGolden: every splitter cuts our own texts where the reference's regular expressions
// do.
func TestSplitGolden(t *testing.T) {
	docs := jsonLines[document](t, filepath.Join("testdata", "texts.jsonl.gz"))
	path := filepath.Join("testdata", "splits.jsonl.gz")
	if *update {
		var all []splitGolden
		for name, pre := range preTokenizers() {
			g := splitGolden{Name: name}
			for _, a := range reference[struct{ Ends []int }](t, map[string]any{"pre_tokenizer": pre}, texts(docs)) {
				g.Ends = append(g.Ends, deltas(a.Ends))
			}
			all = append(all, g)
		}
		sort.Slice(all, func(i, j int) bool { return all[i].Name < all[j].Name })
		writeLines(t, path, all)
	}
	goldens := jsonLines[splitGolden](t, path)
	if len(goldens) != len(preTokenizers()) {
		t.Fatalf("%d goldens for %d pre-tokenizers", len(goldens), len(preTokenizers()))
	}
	for _, g := range goldens {
		t.Run(fmt.Sprintf("%.40s", g.Name), func(t *testing.T) {
			for i, d := range docs {
				checkSplit(t, splitterOf(g.Name), d.Text, g.Ends[i])
			}
		})
	}
}

// deltas converts ends to sizes, which compress better.
func deltas(ends []int) []int {
	out := make([]int, len(ends))
	last := 0
	for i, e := range ends {
		out[i], last = e-last, e
	}
	return out
}

// checkSplit compares word sizes in code points.
func checkSplit(t *testing.T, p splitter, s string, want []int) {
	t.Helper()
	var got []int
	last := 0
	for _, e := range wordEnds(p, s, 512) {
		got = append(got, utf8.RuneCountInString(s[last:e]))
		last = int(e)
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q: words of %v code points, want %v", s[:min(len(s), 100)], got, want)
	}
}

// wordEnds splits a whole text, window words per call.
func wordEnds(p splitter, s string, window int) []uint32 {
	var all []uint32
	ends := make([]uint32, window)
	for at := 0; at < len(s); {
		n, next := p.split(s, at, ends)
		all = append(all, ends[:n]...)
		at = next
	}
	return all
}

// TestLive compares with the reference library on texts that differ in each run, for any
// tokenizer that KVLANE_LIVE_TOKENIZER names.
func TestLive(t *testing.T) {
	if os.Getenv("KVLANE_PYTHON") == "" {
		t.Skip("KVLANE_PYTHON is not set: it names a Python with Hugging Face tokenizers")
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	var docs []document
	for n := range 1500 {
		docs = append(docs, document{Name: strconv.Itoa(n), Text: randomText(r, 1+n/10)})
	}
	if dir := os.Getenv("KVLANE_LIVE_TOKENIZER"); dir != "" {
		tok, err := Load(os.DirFS(dir))
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, "tokenizer.json")
		if _, err := os.Stat(path); err != nil {
			path += ".gz"
		}
		task := map[string]string{"tokenizer": path}
		if _, err := os.Stat(filepath.Join(dir, "config.json")); err == nil {
			task = map[string]string{"folder": dir} // the way engines load it
		}
		checkDocuments(t, tok, docs, reference[goldenIDs](t, task, texts(docs)))
		return
	}
	for _, name := range families {
		t.Run(name, func(t *testing.T) {
			checkDocuments(t, family(t, name), docs, reference[goldenIDs](t, tokenizerTask(name), texts(docs)))
		})
	}
	for name, pre := range preTokenizers() {
		t.Run(fmt.Sprintf("%.40s", name), func(t *testing.T) {
			for i, a := range reference[struct{ Ends []int }](t, map[string]any{"pre_tokenizer": pre}, texts(docs)) {
				checkSplit(t, splitterOf(name), docs[i].Text, deltas(a.Ends))
			}
		})
	}
}

// TestVariantsLive compares small tokenizers of the kinds that Load accepts but no committed
// model has.
func TestVariantsLive(t *testing.T) {
	r := rand.New(rand.NewPCG(8, 8))
	var docs []document
	for i := range 400 {
		s := randomText(r, r.IntN(8))
		for range r.IntN(4) {
			s += []string{"<x>", " <x> ", "a<x>", "<x>a", "▁", " ", "b a", "<x><x>", "_<x>", "\n<x>\n"}[r.IntN(10)]
		}
		docs = append(docs, document{Name: strconv.Itoa(i), Text: s})
	}
	metaspace := `{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true}`
	prepend := `{"type":"Sequence","normalizers":[{"type":"Prepend","prepend":"▁"},{"type":"Replace","pattern":{"String":" "},"content":"▁"}]}`
	replace := `{"type":"Replace","pattern":{"String":" "},"content":"▁"}`
	gemma := `{"type":"Split","pattern":{"String":" "},"behavior":"MergedWithPrevious","invert":false}`
	post := `{"type":"Sequence","processors":[{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":false,"use_regex":true},` +
		`{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<x>","type_id":0}},{"Sequence":{"id":"A","type_id":0}},` +
		`{"SpecialToken":{"id":"b","type_id":0}}],"pair":[{"Sequence":{"id":"A","type_id":0}},{"Sequence":{"id":"B","type_id":1}}],` +
		`"special_tokens":{"<x>":{"id":"<x>","ids":[260],"tokens":["<x>"]},"b":{"id":"b","ids":[257],"tokens":["b"]}}}]}`
	byteLevel := `{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}`
	roberta := `{"type":"RobertaProcessing","sep":["b",257],"cls":["<x>",260],"trim_offsets":true,"add_prefix_space":false}`
	for name, file := range map[string]string{
		"always":       tiny(),
		"first":        tiny(`"always"`, `"first"`),
		"never":        tiny(`"always"`, `"never"`),
		"no split":     tiny(`"split":true`, `"split":false`),
		"first, whole": tiny(`"split":true`, `"split":false`, `"always"`, `"first"`),
		"prepend":      tiny(`"normalizer":null`, `"normalizer":`+prepend, metaspace, "null"),
		"normalized":   tiny(`"normalizer":null`, `"normalizer":`+prepend, metaspace, "null", `"normalized":false`, `"normalized":true`),
		"gemma":        tiny(`"normalizer":null`, `"normalizer":`+replace, metaspace, gemma),
		"lstrip":       tiny(`"lstrip":false`, `"lstrip":true`),
		"rstrip":       tiny(`"rstrip":false`, `"rstrip":true`),
		"both":         tiny(`"rstrip":false`, `"rstrip":true`, `"lstrip":false`, `"lstrip":true`),
		"single word":  tiny(`"single_word":false`, `"single_word":true`),
		"marks":        tiny(`"normalizer":null`, `"normalizer":`+prepend, metaspace, "null", `"normalized":false`, `"normalized":true`, `"lstrip":false`, `"lstrip":true`, `"rstrip":false`, `"rstrip":true`),
		"raw marks":    tiny(`"normalized":false`, `"normalized":true`, `"special":true}]`, `"special":true},`+blanks+`]`),
		"roberta":      tiny(`"post_processor":null`, `"post_processor":`+roberta),
		"bert":         tiny(`"post_processor":null`, `"post_processor":`+strings.Replace(roberta, "Roberta", "Bert", 1)),
		"ignoring":     tiny(`"byte_fallback":true`, `"byte_fallback":true,"ignore_merges":true`),
		"space joins":  tiny(`"▁a":259`, `"▁a":259,"b▁":261`, `[["▁","a"]]`, `[["b","▁"],["▁","a"]]`, metaspace, "null", `"normalizer":null`, `"normalizer":`+prepend),
		"post":         tiny(`"post_processor":null`, `"post_processor":`+post),
		"gpt2":         tinyByteLevel(),
		"gpt2 space":   tinyByteLevel(`"add_prefix_space":false`, `"add_prefix_space":true`),
		"gpt2 nfc":     tinyByteLevel(`"normalizer":null`, `"normalizer":{"type":"NFC"}`),
		"star":         tinyByteLevel(byteLevel, `{"type":"Sequence","pretokenizers":[{"type":"Digits","individual_digits":true},`+byteLevel+`]}`),
	} {
		t.Run(name, func(t *testing.T) {
			tok, err := loadText(file, nil)
			if err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(t.TempDir(), "tokenizer.json")
			if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
				t.Fatal(err)
			}
			checkDocuments(t, tok, docs, reference[goldenIDs](t, map[string]string{"tokenizer": path}, texts(docs)))
		})
	}
}
