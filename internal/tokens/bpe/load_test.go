package bpe

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"unicode/utf8"
)

// tiny returns a SentencePiece-style tokenizer.json with its byte tokens; the replacements are
// pairs of old and new text.
func tiny(replacements ...string) string {
	var vocab strings.Builder
	for b := range 256 {
		vocab.WriteString(`"<0x` + strings.ToUpper(string("0123456789abcdef"[b>>4])+string("0123456789abcdef"[b&15])) + `>":` + itoa(b) + `,`)
	}
	s := `{"added_tokens":[{"id":260,"content":"<x>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],
	"normalizer":null,"pre_tokenizer":{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true},
	"post_processor":null,"model":{"type":"BPE","dropout":null,"unk_token":null,"byte_fallback":true,
	"vocab":{` + vocab.String() + `"a":256,"b":257,"▁":258,"▁a":259},"merges":[["▁","a"]]}}`
	return strings.NewReplacer(replacements...).Replace(s)
}

func itoa(n int) string {
	if n >= 10 {
		return itoa(n/10) + itoa(n%10)
	}
	return string(rune('0' + n))
}

// tinyByteLevel returns a byte-level tokenizer.json without merges.
func tinyByteLevel(replacements ...string) string {
	var vocab []string
	for b := range 256 {
		name := string(byteToRune[b])
		if name == `"` || name == `\` {
			name = `\` + name
		}
		vocab = append(vocab, `"`+name+`":`+itoa(b))
	}
	s := `{"added_tokens":[],"normalizer":null,"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},
	"post_processor":null,"model":{"type":"BPE","vocab":{` + strings.Join(vocab, ",") + `},"merges":[]}}`
	return strings.NewReplacer(replacements...).Replace(s)
}

func loadText(s string, more map[string]string) (*Tokenizer, error) {
	files := fstest.MapFS{"tokenizer.json": {Data: []byte(s)}}
	for name, text := range more {
		files[name] = &fstest.MapFile{Data: []byte(text)}
	}
	return Load(files)
}

// TestLoadRefuses: the error names the part that cannot be reproduced exactly.
func TestLoadRefuses(t *testing.T) {
	llama := map[string]string{
		"config.json":           `{"model_type":"llama"}`,
		"tokenizer_config.json": `{"tokenizer_class":"LlamaTokenizerFast"}`,
	}
	for _, c := range []struct {
		name, file string
		more       map[string]string
		reason     string
	}{
		{"word pieces", tiny(`"type":"BPE"`, `"type":"WordPiece"`), nil, "model WordPiece"},
		{"word piece", tiny(`"type":"BPE"`, `"type":"WordPiece","max_input_chars_per_word":100`), nil, "model WordPiece"},
		{"word level", tiny(`"type":"BPE"`, `"type":"WordLevel"`), nil, "model WordLevel"},
		{"suffix", tiny(`"byte_fallback":true`, `"byte_fallback":true,"end_of_word_suffix":"</w>"`), nil, "end_of_word_suffix"},
		{"dropout", tiny(`"dropout":null`, `"dropout":0.1`), nil, "dropout"},
		{"missing byte", tiny(`"<0x0A>":10,`, ``), nil, "<0x0A>"},
		{"normalizer", tiny(`"normalizer":null`, `"normalizer":{"type":"Nmt"}`), nil, "Nmt"},
		{"normalizer of encoders", tiny(`"normalizer":null`, `"normalizer":{"type":"Sequence","normalizers":[{"type":"NFC"},{"type":"BertNormalizer"}]}`), nil, "BertNormalizer"},
		{"lower case", tiny(`"normalizer":null`, `"normalizer":{"type":"Lowercase"}`), nil, "Lowercase"},
		{"white space", tiny(`"type":"Metaspace"`, `"type":"Whitespace"`), nil, "Whitespace"},
		{"class of encoders", tiny(), map[string]string{"config.json": `{"model_type":"bert"}`, "tokenizer_config.json": `{"tokenizer_class":"BertTokenizerFast"}`}, "BertTokenizer"},
		{"pre-tokenizer", tiny(`"type":"Metaspace"`, `"type":"UnicodeScripts"`), nil, "UnicodeScripts"},
		{"behavior", tiny(`{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true}`, `{"type":"Split","pattern":{"String":"a"},"behavior":"Odd"}`), nil, "Odd"},
		{"unknown token", tiny(`"byte_fallback":true`, `"byte_fallback":false`, `"unk_token":null`, `"unk_token":"<unk>"`), nil, "<unk>"},
		{"pattern", tinyByteLevel(`{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}`,
			`{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":"(x)\\1"},"behavior":"Isolated","invert":false},{"type":"ByteLevel","add_prefix_space":false,"use_regex":false}]}`), nil, "in the pattern"},
		{"missing byte-level token", tinyByteLevel(`"A":65,`, ``), nil, "byte 0x41"},
		{"post-processor", tiny(`"post_processor":null`, `"post_processor":{"type":"RobertaProcessing"}`), nil, "RobertaProcessing"},
		{"two that add tokens", tiny(`"post_processor":null`, `"post_processor":{"type":"Sequence","processors":[{"type":"BertProcessing","cls":["a",256],"sep":["b",257]},`+
			`{"type":"BertProcessing","cls":["a",256],"sep":["b",257]}]}`), nil, "several post-processors"},
		{"the old flag of Metaspace", tiny(`"prepend_scheme":"always"`, `"add_prefix_space":false`), nil, "add_prefix_space"},
		{"rebuilt by the engine", tinyByteLevel(), llama, "model_type llama"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := loadText(c.file, c.more)
			if !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), c.reason) {
				t.Errorf("got %v, want a refusal that names %q", err, c.reason)
			}
		})
	}
}

// TestLoadErrors: broken or missing files are errors.
func TestLoadErrors(t *testing.T) {
	for name, s := range map[string]string{
		"empty":             "",
		"cut off":           tiny()[:2000],
		"merge of nothing":  tiny(`["▁","a"]`, `["▁","q"]`),
		"merge to nothing":  tiny(`["▁","a"]`, `["a","b"]`),
		"three parts":       tiny(`["▁","a"]`, `["▁","a","b"]`),
		"same id twice":     tiny(`"b":257`, `"b":256`),
		"same token twice":  tiny(`"b":257`, `"a":257`),
		"huge id":           tiny(`"b":257`, `"b":4294967296`),
		"lone surrogate":    tiny(`"b":257`, `"\ud800":257`),
		"no model":          `{"added_tokens":[]}`,
		"nested too deeply": `{"x":` + strings.Repeat("[", 1000),
	} {
		if _, err := loadText(s, nil); err == nil {
			t.Errorf("%s: got no error, want one", name)
		}
	}
	if _, err := Load(fstest.MapFS{}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no files: %v", err)
	}
}

// TestFloatsThatAreNotFinite: Python writes them into config.json. In strings nothing changes, and what Python refuses is refused.
func TestFloatsThatAreNotFinite(t *testing.T) {
	for text, ok := range map[string]bool{
		`{"architectures": ["NemotronHForCausalLM"], "time_step_limit": [0.0, Infinity], "low": -Infinity, "x": {"y": NaN}, "model_type": "a\"NaN, Infinity"}`: true,
		`{"architectures": ["NemotronHForCausalLM"], "x": Infinite}`:                                                                                           false,
		`{"architectures": ["NemotronHForCausalLM"], "x": "Infinity}`:                                                                                          false,
	} {
		m, err := loadText(tiny(), map[string]string{"config.json": text})
		if !ok {
			if err == nil {
				t.Errorf("%s: got no error, want one", text)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if c := m.Config(); c.Architecture != "NemotronHForCausalLM" || c.ModelType != `a"NaN, Infinity` {
			t.Errorf("got %q and %q, want those of %s", c.Architecture, c.ModelType, text)
		}
	}
}

// TestSpaces covers each way to put a space before a text. TestVariantsLive compares the same
// with the reference.
func TestSpaces(t *testing.T) {
	for _, c := range []struct {
		scheme string
		config map[string]string
		text   string
		want   []uint32
	}{
		{"always", nil, "a a", []uint32{259, 259}},
		{"always", nil, " a", []uint32{259}},
		{"always", nil, "▁a<x>a", []uint32{259, 260, 259}},
		{"first", nil, "a<x>a", []uint32{259, 260, 256}},
		{"first", nil, "<x>a", []uint32{260, 256}},
		{"never", nil, "a a<x>a", []uint32{256, 259, 260, 256}},
		{"always", nil, "é", []uint32{258, 0xc3, 0xa9}},
	} {
		tok, err := loadText(tiny(`"always"`, `"`+c.scheme+`"`), c.config)
		if err != nil {
			t.Fatal(err)
		}
		got, err := tok.Encode(nil, c.text, true)
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%s %q: %v, want %v (%v)", c.scheme, c.text, got, c.want, err)
		}
	}
}

// TestAddedTokenFlags: the flags have the same effect as in the reference.
func TestAddedTokenFlags(t *testing.T) {
	for _, c := range []struct {
		flag, text string
		want       []uint32
	}{
		{"lstrip", "a  <x> a", []uint32{259, 260, 259}},
		{"rstrip", "a<x>  b", []uint32{259, 260, 258, 257}},
		{"single_word", "a<x> <x>", []uint32{259, '<', 'x', '>', 258, 260}},
	} {
		tok, err := loadText(tiny(`"`+c.flag+`":false`, `"`+c.flag+`":true`), nil)
		if err != nil {
			t.Fatal(err)
		}
		got, err := tok.Encode(nil, c.text, false)
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%s %q: %v, want %v (%v)", c.flag, c.text, got, c.want, err)
		}
	}
}

// TestWhiteSpaceIsWalkedOnce: a run of added tokens that are white space, and take the white space next to them, costs in proportion
// to its length. Walked by each of them this would take an hour.
func TestWhiteSpaceIsWalkedOnce(t *testing.T) {
	const n = 1 << 20
	for _, c := range []struct {
		flags string
		want  int
	}{{`"lstrip":true,"rstrip":false`, n}, {`"lstrip":false,"rstrip":true`, n}, {`"lstrip":true,"rstrip":true`, 1}} {
		token := `{"id":261,"content":"\n","single_word":false,` + c.flags + `,"normalized":false,"special":false}`
		tok, err := loadText(tiny(`"special":true}]`, `"special":true},`+token+`]`), nil)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := tok.Encode(nil, strings.Repeat("\n", n), false); err != nil || len(got) != c.want {
			t.Errorf("%s: %d tokens, want %d (%v)", c.flags, len(got), c.want, err)
		}
	}
}

// Further added tokens for tiny.
const (
	lineEnd = `{"id":261,"content":"\n","single_word":false,"lstrip":true,"rstrip":false,"normalized":false,"special":false}`
	blanks  = `{"id":261,"content":"  ","single_word":false,"lstrip":false,"rstrip":false,"normalized":true,"special":false}`
)

// TestAddedTokensMeet: tokens that compete for the same white space, or for spaces that are marks
// already, match as in the reference. TestVariantsLive compares the same kinds with it.
func TestAddedTokensMeet(t *testing.T) {
	mark := `{"type":"Sequence","normalizers":[{"type":"Prepend","prepend":"▁"},{"type":"Replace","pattern":{"String":" "},"content":"▁"}]}`
	metaspace := `{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true}`
	for _, c := range []struct {
		name, file, text string
		want             []uint32
	}{
		{"the line end is taken already", tiny(`"rstrip":false`, `"rstrip":true`, `"special":true}]`, `"special":true},`+lineEnd+`]`), "a<x>\n", []uint32{259, 260}},
		{"a mark is not white space", tiny(`"normalizer":null`, `"normalizer":`+mark, metaspace, "null", `"normalized":false`, `"normalized":true`,
			`"rstrip":false`, `"rstrip":true`), "<x> ", []uint32{260, 258}},
		{"without a normalizer a mark is not a blank", tiny(`"normalized":false`, `"normalized":true`, `"special":true}]`, `"special":true},`+blanks+`]`),
			"▁▁", []uint32{258, 258}},
		{"without a normalizer blanks are", tiny(`"normalized":false`, `"normalized":true`, `"special":true}]`, `"special":true},`+blanks+`]`),
			"  ", []uint32{261}},
	} {
		tok, err := loadText(c.file, nil)
		if err != nil {
			t.Fatal(err)
		}
		got, err := tok.Encode(nil, c.text, false)
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%s: %q: %v, want %v (%v)", c.name, c.text, got, c.want, err)
		}
	}
}

// TestConfig: the configuration is exposed as in transformers.
func TestConfig(t *testing.T) {
	tok, err := loadText(tiny(), map[string]string{
		"tokenizer_config.json":                   `{"bos_token":"<x>","eos_token":{"content":"</y>"},"pad_token":null,"chat_template":[{"name":"default","template":"D"},{"name":"tool_use","template":"T"}],"tokenizer_class":"X","image_token":"<img>"}`,
		"config.json":                             `{"model_type":"m","eos_token_id":2}`,
		"generation_config.json":                  `{"eos_token_id":[3,4]}`,
		"additional_chat_templates/ignored.other": "x",
	})
	if err != nil {
		t.Fatal(err)
	}
	c := tok.Config()
	want := map[string]string{"bos_token": "<x>", "eos_token": "</y>", "image_token": "<img>"}
	if !reflect.DeepEqual(c.Special, want) {
		t.Errorf("special tokens %v, want %v", c.Special, want)
	}
	if c.TokenizerClass != "X" || c.ModelType != "m" || !slices.Equal(c.EOSTokenIDs, []uint32{3, 4}) {
		t.Errorf("got %+v, want class X, type m, EOS ids 3 and 4", c)
	}
	if s, ok := c.Template("tool_use"); !ok || s != "T" {
		t.Errorf("template %q", s)
	}
	if s, ok := c.Template(""); !ok || s != "D" {
		t.Errorf("template %q", s)
	}
	// a special token that is not an added token gets the next id
	if id, ok := tok.TokenID("</y>"); !ok || id != 261 {
		t.Errorf("</y>: got id %d, want 261", id)
	}
	tok, err = loadText(tiny(), map[string]string{
		"tokenizer_config.json": `{"chat_template":"old"}`, "chat_template.jinja": "new",
		"additional_chat_templates/rag.jinja": "R",
	})
	if err != nil {
		t.Fatal(err)
	}
	if s, _ := tok.Config().Template("default"); s != "new" {
		t.Errorf("template %q", s)
	}
	if s, _ := tok.Config().Template("rag"); s != "R" {
		t.Errorf("template %q", s)
	}
}

// Compiled, a template takes 330 times its source at most, so the templates of a folder are bounded together.
func TestTemplatesAreBoundedTogether(t *testing.T) {
	part := strings.Repeat("x", maxTemplates/3+1)
	for what, files := range map[string]map[string]string{
		"one":      {"chat_template.jinja": part + part + part},
		"files":    {"chat_template.jinja": part, "additional_chat_templates/a.jinja": part, "additional_chat_templates/b.jinja": part},
		"in JSON":  {"chat_template.json": `{"chat_template":"` + part + part + part + `"}`},
		"a list":   {"tokenizer_config.json": `{"chat_template":[{"name":"a","template":"` + part + part + `"},{"name":"b","template":"` + part + `"}]}`},
		"fit well": {"chat_template.jinja": part, "additional_chat_templates/a.jinja": part},
	} {
		if _, err := loadText(tiny(), files); (err == nil) != (what == "fit well") || err != nil && !strings.Contains(err.Error(), "chat templates") {
			t.Errorf("%s: got %v, want an error only of more than %d bytes", what, err, maxTemplates)
		}
	}
}

// TestTokens: ids and strings are each other's inverse.
func TestTokens(t *testing.T) {
	for _, name := range families {
		tok := family(t, name)
		n := 0
		for id := range uint32(tok.VocabSize()) {
			s, ok := tok.Token(id)
			if !ok {
				continue
			}
			n++
			if back, ok := tok.TokenID(s); !ok || back != id {
				t.Fatalf("%s: %d is %q is %d", name, id, s, back)
			}
		}
		if n < tok.VocabSize() {
			t.Errorf("%s: %d of %d tokens", name, n, tok.VocabSize())
		}
	}
}

// TestHostileText: long words and invalid text are harmless.
func TestHostileText(t *testing.T) {
	for _, name := range families {
		tok := family(t, name)
		for _, s := range []string{"a", "ab", "中", " ", "\n", "1", "\u0301", "<", "<|", "'", "A", "é\u0323\u0301"} {
			if _, err := tok.Encode(nil, strings.Repeat(s, 200_000/len(s)), true); err != nil {
				t.Errorf("%s, %q repeated: %v", name, s, err)
			}
		}
		for _, s := range []string{"\xff", "a\xed\xa0\x80", "\xc0\x80", "\xf4\x90\x80\x80", "中\xe4\xb8"} {
			if _, err := tok.Encode(nil, s, false); !errors.Is(err, ErrText) {
				t.Errorf("%s, %q: got %v, want ErrText", name, s, err)
			}
		}
	}
}

// TestEncodeAllocates: encoding a text again does not allocate.
func TestEncodeAllocates(t *testing.T) {
	for _, name := range families {
		tok := family(t, name)
		text := strings.Repeat(samples[0]+samples[1]+samples[5], 5)
		dst, err := tok.Encode(nil, text, true)
		if err != nil {
			t.Fatal(err)
		}
		if n := testing.AllocsPerRun(50, func() { dst, err = tok.Encode(dst[:0], text, true) }); n != 0 || err != nil {
			t.Errorf("%s: %v allocations (%v)", name, n, err)
		}
	}
}

// TestEncodeConcurrently shares a tokenizer between goroutines.
func TestEncodeConcurrently(t *testing.T) {
	tok := family(t, "qwen3")
	texts := make([]string, 40)
	want := make([][]uint32, len(texts))
	for i := range texts {
		texts[i] = strings.Repeat(samples[i%len(samples)]+itoa(i), 5)
		var err error
		if want[i], err = tok.Encode(nil, texts[i], false); err != nil {
			t.Fatal(err)
		}
	}
	var wg sync.WaitGroup
	for g := range 12 {
		wg.Go(func() {
			for k := range 200 {
				i := (g*7 + k) % len(texts)
				if got, err := tok.Encode(nil, texts[i], false); err != nil || !slices.Equal(got, want[i]) {
					t.Errorf("text %d: wrong ids (%v)", i, err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// FuzzLoad loads broken files; every tokenizer that loads must also encode.
func FuzzLoad(f *testing.F) {
	f.Add(tiny(), `{"bos_token":"<x>"}`)
	f.Add(tinyByteLevel(), `{"added_tokens_decoder":{"3":{"content":"<q>","lstrip":true}}}`)
	f.Add(`{"model":{"vocab":{},"merges":[]}}`, `{`)
	if b, err := os.ReadFile(filepath.Join("..", "models", "qwen3", "tokenizer_config.json")); err == nil {
		f.Add(tiny(), string(b))
	}
	f.Fuzz(func(t *testing.T, file, config string) {
		tok, err := loadText(file, map[string]string{"tokenizer_config.json": config})
		if err != nil {
			return
		}
		for _, s := range []string{"a <x> é\n\nb", config} {
			ids, err := tok.Encode(nil, s, true)
			if (err == nil) != utf8.ValidString(s) {
				t.Fatalf("%q: got %v, want an error exactly for invalid UTF-8", s, err)
			}
			for _, id := range ids {
				tok.Token(id)
			}
		}
	})
}

// FuzzConfig loads the other files of a model, whatever they hold: what is read is what the files can say.
func FuzzConfig(f *testing.F) {
	f.Add(`{"bos_token":"<x>","eos_token":{"content":"</y>"},"chat_template":[{"name":"default","template":"D"}]}`, `{"model_type":"m","eos_token_id":2}`, `{"eos_token_id":[3,4]}`, `{}`, "{{ x }}")
	f.Add(`{"chat_template":"x","extra_special_tokens":["a",{"b":1}],"added_tokens_decoder":{"-1":{}}}`, `{"vocab_size":-1,"vision_config":null}`, `{"eos_token_id":-1}`, `{"unk_token":1}`, "")
	f.Add(`[]`, `null`, `{"eos_token_id":4294967296}`, `"x"`, "\xff")
	f.Fuzz(func(t *testing.T, config, model, generation, special, template string) {
		tok, err := loadText(tiny(), map[string]string{
			"tokenizer_config.json": config, "config.json": model, "generation_config.json": generation, "special_tokens_map.json": special, "chat_template.jinja": template,
		})
		if err != nil {
			return
		}
		c := tok.Config()
		if c.VocabSize < 0 {
			t.Fatalf("got %d ids, want none below 0", c.VocabSize)
		}
		if got, ok := c.Template(""); !ok || got != template {
			t.Fatalf("got template %q, want %q of the file", got, template)
		}
		ids, err := tok.Encode(nil, "ab "+special, true)
		if (err == nil) != utf8.ValidString(special) {
			t.Fatalf("got %v of %q, want an error exactly for invalid UTF-8", err, special)
		}
		for _, id := range ids {
			if _, ok := tok.Token(id); !ok {
				t.Fatalf("got id %d, which is no token", id)
			}
		}
	})
}
