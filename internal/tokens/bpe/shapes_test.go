package bpe

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// jsonOf is a JSON object for the files that these tests generate.
type jsonOf = map[string]any

// shapeFile returns a small tokenizer.json around parts. Its model reveals where words end: their
// last symbol has a token of its own.
func shapeFile(parts jsonOf) string {
	file := jsonOf{"version": "1.0", "truncation": nil, "padding": nil, "normalizer": nil, "pre_tokenizer": nil, "post_processor": nil, "decoder": nil}
	vocab := jsonOf{}
	add := func(token string) {
		if _, ok := vocab[token]; !ok {
			vocab[token] = len(vocab)
		}
	}
	for b := range 256 {
		add(fmt.Sprintf("<0x%02X>", b))
	}
	var merges [][2]string
	for _, c := range "abcdehlorstw \nĠĊ▁" {
		add(string(c))
	}
	for _, m := range []string{"t h", "th e", "▁ t", "▁t he", "l l", "ll o", "h e", "he llo", "_ \n", "a a", "aa aa", "Ġ a", "e l"} {
		left, right, _ := strings.Cut(m, " ")
		left = strings.ReplaceAll(left, "_", " ")
		add(left)
		add(right)
		add(left + right)
		merges = append(merges, [2]string{left, right})
	}
	file["model"] = jsonOf{"type": "BPE", "dropout": nil, "unk_token": nil, "continuing_subword_prefix": nil, "end_of_word_suffix": nil,
		"fuse_unk": false, "byte_fallback": true, "ignore_merges": false, "vocab": vocab, "merges": merges}
	token := func(id int, content string, flags ...string) jsonOf {
		t := jsonOf{"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}
		for _, f := range flags {
			t[f] = true
		}
		return t
	}
	file["added_tokens"] = []jsonOf{token(len(vocab), "<x>"), token(len(vocab)+1, "Été", "normalized"), token(len(vocab)+2, "<y>", "lstrip", "rstrip")}
	for name, part := range parts {
		if model, ok := part.(jsonOf); ok && name == "model" {
			maps.Copy(file["model"].(jsonOf), model) //nolint:forcetypeassert // set above
			continue
		}
		file[name] = part
	}
	b, err := json.Marshal(file)
	if err != nil {
		panic(err)
	}
	return string(b)
}

// splitPatterns are patterns of models that have no splitter of their own, and some that cover
// the rest of the syntax.
var splitPatterns = []string{
	`\s?\p{L}+`, `\s?\p{P}+`, `[\r\n]`, `[一-龥ࠀ-一가-퟿]+`, `\p{N}+`, `\s+$`, `\p{N}`,
	` ?[^(\s|[.,!?…。，、।۔،])]+`, `[^\n]+|[\n]+`,
	`'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s`,
	`(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`,
	`(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+`,
	`(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+`,
	`[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?:'[sS]|'[tT]|'[rR][eE])?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`,
	`\s{4}(?!\S)|\s{2}(?!\S)|\s{1}`,
	`\d{1,3}(?=(?:\d{3})*\b)`, `[0-9][0-9][0-9]`, `\d{1,3}(?=(\d{3})+(?!\d))|\d+`, `\p{Nd}{1,510}(?=(?>\p{Nd}{510})*(?:\P{Nd}|$))`,
	`[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_` + "`" + `{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`,
	`(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z`, `([\t\n]|    |  )`, `[\p{P}!-/:-@\[-` + "`" + `{-~]`, `<\|im_end\|>`,
	`[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+`,
	`(?i:the|hello|[sdmt]|kel)|\w+|[^\w\s]`, `\p{Lu}\p{Ll}*|\p{Lo}+`, `(?>\p{L}+|\p{N}+)\.`, `\b\w|\W`, `[[^x]&&[^y]]|\x{1F600}?a`, `[^\w\s]+|\W`, `[\W]+`,
	`[\p{L}&&[^a-m]]+`, `\P{L}+`, `[^\S\n]+`, `(?:a|ab)(?:c|bcd)*`, `(?:\p{L}\p{M}*)+|(?:\s|\p{P})+\p{N}`, `\p{Hiragana}+|\p{Katakana}+|\p{Hangul}+|\p{Cyrillic}+|\p{Arabic}+`,
	`[a-z]+(?=[A-Z])|[A-Z]+(?![a-z])`, `\u0041|\u00e9|\t+`, `[\w-]+|[-,]`, `\r\n|\n|\r`, `(?:ab|a)*+b|\s{2,}`, `\d+(?:\.\d+)?`, `(?!\s)\W+|.`,
}

// shapes returns, by name, tokenizers of all the kinds that only pipelines support.
func shapes() map[string]string {
	out := map[string]string{}
	splitBy := func(pattern any, behavior string, invert bool) jsonOf {
		return jsonOf{"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}
	}
	add := func(name string, parts jsonOf) { out[name] = shapeFile(parts) }
	how := []string{"Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"}
	for i, re := range splitPatterns {
		add("pattern "+re, jsonOf{"pre_tokenizer": splitBy(jsonOf{"Regex": re}, "Isolated", false)})
		add("pattern, other behavior "+re, jsonOf{"pre_tokenizer": splitBy(jsonOf{"Regex": re}, how[i%len(how)], i%2 == 0)})
	}
	for _, b := range how {
		for _, invert := range []bool{false, true} {
			add(fmt.Sprint("split ", b, invert), jsonOf{"pre_tokenizer": splitBy(jsonOf{"Regex": `\p{L}+`}, b, invert)})
			add(fmt.Sprint("string ", b, invert), jsonOf{"pre_tokenizer": splitBy(jsonOf{"String": "l"}, b, invert)})
		}
		add("punctuation "+b, jsonOf{"pre_tokenizer": jsonOf{"type": "Punctuation", "behavior": b}})
	}
	level := func(prefix, regex bool) jsonOf {
		return jsonOf{"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": regex}
	}
	sequence := func(list ...any) jsonOf { return jsonOf{"type": "Sequence", "pretokenizers": list} }
	metaspace := func(scheme string, split bool) jsonOf {
		return jsonOf{"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}
	}
	for name, pre := range map[string]any{
		"none": nil, "digits": jsonOf{"type": "Digits", "individual_digits": true}, "numbers": jsonOf{"type": "Digits", "individual_digits": false},
		"bytes": level(false, true), "bytes, space": level(true, true), "bytes, whole": level(true, false),
		"marks": metaspace("always", true), "marks first": metaspace("first", true), "marks never, whole": metaspace("never", false),
		"falcon":         sequence(jsonOf{"type": "Punctuation", "behavior": "Contiguous"}, level(false, true), jsonOf{"type": "Digits", "individual_digits": false}, splitBy(jsonOf{"Regex": "[0-9][0-9][0-9]"}, "Isolated", false)),
		"deepseek llm":   sequence(splitBy(jsonOf{"Regex": "[\r\n]"}, "Isolated", false), splitBy(jsonOf{"Regex": `\s?\p{L}+`}, "Isolated", false), splitBy(jsonOf{"Regex": `\s?\p{P}+`}, "Isolated", false), splitBy(jsonOf{"Regex": "[一-龥ࠀ-一가-퟿]+"}, "Isolated", false), jsonOf{"type": "Digits", "individual_digits": true}, level(false, false)),
		"cut, first":     sequence(splitBy(jsonOf{"String": "l"}, "Removed", false), metaspace("first", true)),
		"numbers, marks": sequence(metaspace("first", false), jsonOf{"type": "Digits", "individual_digits": true}),
	} {
		add("pre "+name, jsonOf{"pre_tokenizer": pre})
	}
	replace := func(pattern jsonOf, content string) jsonOf {
		return jsonOf{"type": "Replace", "pattern": pattern, "content": content}
	}
	for name, n := range map[string]any{
		"nfc": jsonOf{"type": "NFC"}, "nfkc": jsonOf{"type": "NFKC"}, "prepend": jsonOf{"type": "Prepend", "prepend": "a"},
		"replace": replace(jsonOf{"String": "l"}, "<x>"), "replace pattern": replace(jsonOf{"Regex": `\s+`}, " "), "drop": replace(jsonOf{"Regex": "[aeiou]"}, ""),
		"two":     jsonOf{"type": "Sequence", "normalizers": []any{jsonOf{"type": "NFC"}, replace(jsonOf{"Regex": `\s+`}, " ")}},
		"chatglm": jsonOf{"type": "Sequence", "normalizers": []any{replace(jsonOf{"String": "<!dummy-prefix!>"}, "▁"), replace(jsonOf{"String": " "}, "▁")}},
	} {
		add("normalizer "+name, jsonOf{"normalizer": n, "pre_tokenizer": splitBy(jsonOf{"Regex": `\s+`}, "Removed", false)})
		add("normalizer, marks "+name, jsonOf{"normalizer": n, "pre_tokenizer": metaspace("always", true)})
	}
	for _, re := range splitPatterns {
		out["bytes, pattern "+re] = rebuiltFile(jsonOf{"normalizer": jsonOf{"type": "NFC"}, "pre_tokenizer": sequence(splitBy(jsonOf{"Regex": re}, "Isolated", false), level(false, false))})
	}
	out["bytes, nfkc"] = rebuiltFile(jsonOf{"normalizer": jsonOf{"type": "NFKC"}, "pre_tokenizer": level(false, true)})
	out["bytes, prepended, space"] = rebuiltFile(jsonOf{"normalizer": jsonOf{"type": "Prepend", "prepend": "a"}, "pre_tokenizer": level(true, true)})
	out["bytes, numbers, space"] = rebuiltFile(jsonOf{"pre_tokenizer": sequence(jsonOf{"type": "Digits", "individual_digits": true}, level(true, true))})
	split := splitBy(jsonOf{"Regex": `\w+|[^\w\s]+`}, "Removed", true)
	for name, model := range map[string]jsonOf{
		"unknown":        {"byte_fallback": false, "unk_token": "a"},
		"fused":          {"byte_fallback": false, "unk_token": "a", "fuse_unk": true},
		"dropped":        {"byte_fallback": false},
		"some bytes":     {"unk_token": "a", "fuse_unk": true, "vocab": jsonOf{"a": 0, "b": 1, "<0xC3>": 2, "<0xA9>": 3, "<0x20>": 4, "ab": 5}, "merges": [][2]string{{"a", "b"}}},
		"whole words":    {"ignore_merges": true},
		"merges as text": {"end_of_word_suffix": "", "merges": []string{"t h", "th e", "l l"}},
	} {
		add("model "+name, jsonOf{"model": model, "pre_tokenizer": split})
		add("model, whole text "+name, jsonOf{"model": model})
	}
	return out
}

// shapeTexts are the texts that the shapes are tried on.
func shapeTexts(r *rand.Rand, n int) []string {
	texts := append([]string(nil), samples...)
	for range n {
		s := randomText(r, r.IntN(10))
		for range r.IntN(5) {
			s += []string{"<x>", " <x> ", "hello", " the ", "Été", "E\u0301te\u0301", "été", "<y>", "\n<y>\t", "aaaa", "123456", "l", "ss", "1.5", "\r\n", "Kel", "ſ", "abcd", "  "}[r.IntN(19)]
		}
		texts = append(texts, s)
	}
	return texts
}

// shapeGolden holds a hash of the ids of each text.
type shapeGolden struct {
	Name string   `json:"name"`
	IDs  []string `json:"ids"`
}

func idsHash(ids []uint32) string {
	h := fnv.New32a()
	for _, id := range ids {
		fmt.Fprintf(h, "%d,", id)
	}
	return strconv.FormatUint(uint64(h.Sum32()), 36)
}

// TestShapesGolden: tokenizers of unusual shapes have the ids of the reference, whatever their
// normalizer, pre-tokenizer and model.
func TestShapesGolden(t *testing.T) {
	texts := shapeTexts(rand.New(rand.NewPCG(3, 9)), 120)
	path := filepath.Join("testdata", "shapes.jsonl.gz")
	all := shapes()
	if *update {
		var goldens []shapeGolden
		var tasks []any
		for name, file := range all {
			path := filepath.Join(t.TempDir(), "tokenizer.json")
			if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
				t.Fatal(err)
			}
			goldens = append(goldens, shapeGolden{Name: name})
			tasks = append(tasks, map[string]string{"tokenizer": path})
		}
		for i, a := range references[goldenIDs](t, tasks, texts) {
			g := &goldens[i/len(texts)]
			g.IDs = append(g.IDs, idsHash(a.IDs))
		}
		writeLines(t, path, goldens)
	}
	seen := 0
	for _, g := range jsonLines[shapeGolden](t, path) {
		file, ok := all[g.Name]
		if !ok {
			t.Errorf("no shape %s", g.Name)
			continue
		}
		seen++
		t.Run(fmt.Sprintf("%.60s", g.Name), func(t *testing.T) {
			tok, err := loadText(file, nil)
			if err != nil {
				t.Fatal(err)
			}
			for i, s := range texts {
				ids, err := tok.Encode(nil, s, false)
				if err != nil || idsHash(ids) != g.IDs[i] {
					t.Errorf("%q: wrong ids %v (%v)", s, ids, err)
				}
			}
		})
	}
	if seen != len(all) {
		t.Errorf("%d goldens for %d shapes", seen, len(all))
	}
}

// referenceIDs returns the reference's ids of texts with a tokenizer.json.
func referenceIDs(t *testing.T, file string, texts []string) []goldenIDs {
	t.Helper()
	path := filepath.Join(t.TempDir(), "tokenizer.json")
	if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
		t.Fatal(err)
	}
	return reference[goldenIDs](t, map[string]string{"tokenizer": path}, texts)
}

// rebuiltFile is a byte-level tokenizer.json whose words differ between the
// pre-tokenizers that classes have.
func rebuiltFile(parts jsonOf) string {
	vocab := jsonOf{}
	for b := range 256 {
		vocab[string(byteToRune[b])] = b
	}
	var merges [][2]string
	for _, m := range []string{"1 2", "12 3", "4 5", "123 45", "l l", "e l", "Ġ t", "h e", "Ã ©", "e Ì", "Ġ 1", ". .", "' s", "' S", "Ġ Ġ", "Ċ Ċ", "å Ľ", "Ì ģ", "à ¤"} {
		left, right, _ := strings.Cut(m, " ")
		vocab[left+right] = len(vocab)
		merges = append(merges, [2]string{left, right})
	}
	file := jsonOf{
		"version": "1.0", "truncation": nil, "padding": nil, "normalizer": nil, "decoder": nil,
		"added_tokens":   []jsonOf{{"id": len(vocab), "content": "<x>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}},
		"pre_tokenizer":  jsonOf{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
		"post_processor": jsonOf{"type": "TemplateProcessing", "single": []any{jsonOf{"SpecialToken": jsonOf{"id": "<x>", "type_id": 0}}, jsonOf{"Sequence": jsonOf{"id": "A", "type_id": 0}}}, "pair": []any{jsonOf{"Sequence": jsonOf{"id": "A", "type_id": 0}}, jsonOf{"Sequence": jsonOf{"id": "B", "type_id": 1}}}, "special_tokens": jsonOf{"<x>": jsonOf{"id": "<x>", "ids": []int{len(vocab)}, "tokens": []string{"<x>"}}}},
		"model":          jsonOf{"type": "BPE", "dropout": nil, "unk_token": nil, "continuing_subword_prefix": nil, "end_of_word_suffix": nil, "fuse_unk": false, "byte_fallback": false, "ignore_merges": true, "vocab": vocab, "merges": merges},
	}
	maps.Copy(file, parts)
	b, err := json.Marshal(file)
	if err != nil {
		panic(err)
	}
	return string(b)
}

// TestRebuiltGolden: a directory with a config.json behaves as in transformers, whose classes may
// build another tokenizer than tokenizer.json describes.
func TestRebuiltGolden(t *testing.T) {
	texts := shapeTexts(rand.New(rand.NewPCG(5, 1)), 60)
	path := filepath.Join("testdata", "rebuilt.jsonl.gz")
	level, space := rebuiltFile(nil), tiny(`"unk_token":null`, `"fuse_unk":true,"unk_token":"a"`)
	cases := map[string][3]string{}
	for _, c := range []string{
		"gpt2 GPT2Tokenizer", "gpt2 -", "llama GPT2Tokenizer", "llama GPT2TokenizerFast", "llama PreTrainedTokenizerFast", "llama -", "starcoder2 GPT2Tokenizer", "phi3 GPT2Tokenizer", "phi CodeGenTokenizer",
		"granite GPT2Tokenizer", "qwen2 LlamaTokenizerFast", "qwen2 Qwen2Tokenizer", "qwen3 Qwen2TokenizerFast", "qwen3 PreTrainedTokenizerFast", "qwen3_moe -", "llama Qwen2Tokenizer", "qwen3_5 Qwen2Tokenizer", "qwen3_5 -",
		"gpt_neox GPTNeoXTokenizer", "olmo GPTNeoXTokenizerFast", "olmo2 GPT2Tokenizer", "mpt -", "cohere CohereTokenizer", "cohere2 CohereTokenizerFast", "cohere2 -", "llama CohereTokenizer",
		"deepseek_v3 LlamaTokenizerFast", "glm4 GPT2Tokenizer", "mistral PreTrainedTokenizerFast", "unheard_of GPT2Tokenizer", "unheard_of OddTokenizer", "unheard_of -",
	} {
		model, class, _ := strings.Cut(c, " ")
		config := `{"tokenizer_class":"` + class + `"}`
		if class == "-" {
			config = `{}`
		}
		cases["bytes "+c] = [3]string{level, `{"model_type":"` + model + `"}`, config}
	}
	cases["bytes, space"] = [3]string{level, `{"model_type":"gpt2"}`, `{"tokenizer_class":"GPT2Tokenizer","add_prefix_space":true}`}
	cases["bytes, no space"] = [3]string{level, `{"model_type":"qwen2"}`, `{"tokenizer_class":"Qwen2Tokenizer","add_prefix_space":null}`}
	for _, c := range []string{"llama LlamaTokenizer", "llama LlamaTokenizerFast", "mistral LlamaTokenizer", "phi3 LlamaTokenizer", "gemma2 GemmaTokenizer", "gemma3_text GemmaTokenizerFast", "unheard_of LlamaTokenizer", "llama GemmaTokenizer", "internlm2 LlamaTokenizer"} {
		model, class, _ := strings.Cut(c, " ")
		cases["spaces "+c] = [3]string{space, `{"model_type":"` + model + `"}`, `{"tokenizer_class":"` + class + `","unk_token":"a","bos_token":"a","eos_token":"a","pad_token":"a","mask_token":"a"}`}
	}
	if *update {
		var goldens []shapeGolden
		var tasks []any
		for name, c := range cases {
			dir := t.TempDir()
			for file, text := range map[string]string{"tokenizer.json": c[0], "config.json": c[1], "tokenizer_config.json": c[2]} {
				if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			goldens = append(goldens, shapeGolden{Name: name})
			tasks = append(tasks, map[string]string{"folder": dir})
		}
		for i, a := range references[goldenIDs](t, tasks, texts) {
			g := &goldens[i/len(texts)]
			g.IDs = append(g.IDs, idsHash(a.IDs)+" "+idsHash(a.Special))
		}
		writeLines(t, path, goldens)
	}
	seen := 0
	for _, g := range jsonLines[shapeGolden](t, path) {
		c, ok := cases[g.Name]
		if !ok {
			t.Errorf("no case %s", g.Name)
			continue
		}
		seen++
		t.Run(g.Name, func(t *testing.T) {
			tok, err := loadText(c[0], map[string]string{"config.json": c[1], "tokenizer_config.json": c[2]})
			if err != nil {
				t.Fatal(err)
			}
			for i, s := range texts {
				plain, err := tok.Encode(nil, s, false)
				special, err2 := tok.Encode(nil, s, true)
				if err != nil || err2 != nil || idsHash(plain)+" "+idsHash(special) != g.IDs[i] {
					t.Errorf("%q: wrong ids %v, %v (%v, %v)", s, plain, special, err, err2)
				}
			}
		})
	}
	if seen != len(cases) {
		t.Errorf("%d goldens for %d cases", seen, len(cases))
	}
}

// TestShapesLive compares the same tokenizers on texts that differ in each run.
func TestShapesLive(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	given := shapeTexts(rand.New(rand.NewPCG(seed, 0)), 300)
	docs := make([]document, len(given))
	for i, s := range given {
		docs[i] = document{Name: strconv.Itoa(i), Text: s}
	}
	for name, file := range shapes() {
		t.Run(fmt.Sprintf("%.60s", name), func(t *testing.T) {
			tok, err := loadText(file, nil)
			if err != nil {
				t.Fatal(err)
			}
			checkDocuments(t, tok, docs, referenceIDs(t, file, given))
		})
	}
}
