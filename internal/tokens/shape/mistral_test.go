package shape_test

import (
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/encoders"
	"github.com/kvlane/kvlane/internal/tokens/shape"
)

// tekkenPattern is the split pattern of tekken.json.
const tekkenPattern = `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`

// mistralFiles returns a folder in Mistral's format: that of the recordings, or one that is made of
// a tokenizer.json with the same tokens.
func mistralFiles(t *testing.T, name string) fs.FS {
	t.Helper()
	if live := os.Getenv("KVLANE_ENCODER_CASES"); live != "" {
		return os.DirFS(filepath.Join(live, name))
	}
	version := name[strings.LastIndexByte(name, '_')+1:]
	files := fstest.MapFS{"tokenizer.model." + version: {Data: spmOf(t, version)}}
	if strings.Contains(name, "tekken") {
		files = fstest.MapFS{"tekken.json": {Data: tekkenOf(t, version, tekkenVocabulary(t))}}
	}
	files["config.json"] = &fstest.MapFile{Data: []byte(`{"model_type": "mistral", "architectures": ["MistralForCausalLM"]}`)}
	return files
}

// TestMistralMedia: a prompt is known up to the message with the first medium. If a folder holds two
// tokenizers, vLLM tokenizes completions with Mistral's, and SGLang with the other one.
func TestMistralMedia(t *testing.T) {
	t.Parallel()
	m, err := shape.Load(fstest.MapFS{
		"tekken.json": {Data: tekkenOf(t, "v13", bytesVocabulary())}, "consolidated.safetensors": {}, "tokenizer.json": {Data: byteTokenizer("<s>")},
		"config.json": {Data: []byte(`{"vision_config": {}}`)},
	}, shape.Options{})
	if err != nil {
		t.Fatal(err)
	}
	prompt := func(api body.API, engine shape.Engine, raw string) (shape.Result, error) {
		t.Helper()
		req, err := body.Parse(api, []byte(raw))
		if err != nil {
			t.Fatal(err)
		}
		return m.RenderPrompt(req, engine)
	}
	const front = `{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": `
	image := `{"type": "image_url", "image_url": {"url": "http://x/y"}}`
	res, err := prompt(body.Chat, shape.VLLM, front+`[{"type": "text", "text": "c"}, `+image+`]}]}`)
	if want := "<s>[SYSTEM_PROMPT]s[/SYSTEM_PROMPT][INST]a[/INST]b</s>[INST]"; err != nil || res.Partial == "" || res.Text != want || len(res.IDs) != 9 {
		t.Errorf("got %q, %d ids, partial %q, error %v, want %q and 9 ids", res.Text, len(res.IDs), res.Partial, err, want)
	}
	if _, err = prompt(body.Chat, shape.VLLM, `{"messages": [{"role": "system", "content": [`+image+`]}, {"role": "user", "content": "a"}]}`); err == nil {
		t.Error("an image in a system message: got no error, want a refusal")
	}
	for engine, want := range map[shape.Engine][]uint32{shape.VLLM: {1, 1000 + '<', 1000 + 's', 1000 + '>'}, shape.SGLang: {256}} {
		if res, err := prompt(body.Completions, engine, `{"prompt": "<s>"}`); err != nil || !slices.Equal(res.IDs, want) {
			t.Errorf("%v: got %v, error %v, want %v", engine, res.IDs, err, want)
		}
	}
	_, err = prompt(body.Tokenize, shape.VLLM, `{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": []}, {"role": "user", "content": "a"}]}`)
	if err != nil {
		t.Errorf("/tokenize without calls: got %v, want no error", err)
	}
	_, err = prompt(body.Tokenize, shape.VLLM, `{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [{"id": "123456789",
		"type": "function", "function": {"name": "f", "arguments": "{}"}}]}, {"role": "tool", "tool_call_id": "123456789", "content": "r"}]}`)
	if !errors.Is(err, encoders.ErrMissing) {
		t.Errorf("/tokenize with calls: got %v, want ErrMissing", err)
	}
}

// TestMistralSettings: the reasoning effort is checked in chats without a user, too. A prompt that names the answer's schema
// is not known.
func TestMistralSettings(t *testing.T) {
	t.Parallel()
	file := tekkenOf(t, "v15", bytesVocabulary())
	files := fstest.MapFS{"tekken.json": {Data: file}, "config.json": {Data: []byte(`{}`)}}
	m, err := shape.Load(files, shape.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for effort, want := range map[string]bool{"": true, `, "reasoning_effort": "high"`: true, `, "reasoning_effort": "medium"`: false} {
		for _, role := range []string{"user", "system", "developer"} {
			req, err := body.Parse(body.Chat, []byte(`{"messages": [{"role": "`+role+`", "content": "a"}]`+effort+`}`))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := m.RenderPrompt(req, shape.VLLM); (err == nil) != want {
				t.Errorf("%s%s: got error %v, want none: %v", role, effort, err, want)
			}
		}
	}
	files["tekken.json"] = &fstest.MapFile{Data: []byte(strings.Replace(string(file), `"model_settings_builder":{`, `"model_settings_builder":{"json_schema":{},`, 1))}
	m, err = shape.Load(files, shape.Options{})
	if err != nil {
		t.Fatal(err)
	}
	req, err := body.Parse(body.Chat, []byte(`{"messages": [{"role": "user", "content": "a"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.RenderPrompt(req, shape.VLLM); !errors.Is(err, encoders.ErrMissing) {
		t.Errorf("with a schema in the settings: got %v, want ErrMissing", err)
	}
}

// vocabularyOf returns the tokens of a tokenizer.json by id.
func vocabularyOf(t testing.TB, name string) []string {
	t.Helper()
	f, err := os.Open(filepath.Join("../models", name, "tokenizer.json.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	packed, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Model struct {
			Vocab map[string]int `json:"vocab"`
		} `json:"model"`
	}
	if err := json.NewDecoder(packed).Decode(&file); err != nil {
		t.Fatal(err)
	}
	tokens := make([]string, len(file.Model.Vocab))
	for token, id := range file.Model.Vocab {
		tokens[id] = token
	}
	return tokens
}

// tekkenVocabulary returns the bytes of the tokens that are not special.
func tekkenVocabulary(t testing.TB) (out [][]byte) {
	bytes, next := map[rune]byte{}, rune(256)
	for b := range rune(256) {
		if b < '!' || b > '~' && b < 0xa1 || b == 0xad {
			bytes[next] = byte(b)
			next++
			continue
		}
		bytes[b] = byte(b)
	}
	const special = 1000
	for _, token := range vocabularyOf(t, "mistral_nemo")[special:] {
		var raw []byte
		for _, r := range token {
			raw = append(raw, bytes[r])
		}
		out = append(out, raw)
	}
	return out
}

func bytesVocabulary() (out [][]byte) {
	for b := range 256 {
		out = append(out, []byte{byte(b)})
	}
	return out
}

// tekkenOf returns a tekken.json.
func tekkenOf(t testing.TB, version string, tokens [][]byte) []byte {
	t.Helper()
	names := strings.Fields("<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] " +
		"[IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT] [ARGS] [CALL_ID] [THINK] [/THINK] [MODEL_SETTINGS] [/MODEL_SETTINGS]")
	special, vocab := []map[string]any{}, make([]map[string]any, len(tokens))
	for i, name := range names {
		special = append(special, map[string]any{"rank": i, "token_str": name})
	}
	for i, raw := range tokens {
		vocab[i] = map[string]any{"rank": i, "token_bytes": raw}
	}
	file := map[string]any{"special_tokens": special, "vocab": vocab, "config": map[string]any{"version": version, "pattern": tekkenPattern,
		"default_vocab_size": 1000 + len(tokens), "default_num_special_tokens": 1000}}
	if version == "v15" {
		file["model_settings_builder"] = map[string]any{"reasoning_effort": map[string]any{"type": "enum", "values": []string{"none", "high"}, "default": "none"}}
	}
	raw, err := json.Marshal(file)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// spmOf returns the SentencePiece model of a version.
func spmOf(t testing.TB, version string) (out []byte) {
	t.Helper()
	const unknown, control, fallback = 2, 3, 6
	tokens := vocabularyOf(t, "mistral_7b")
	piece := func(text string, score float64, kind uint64) {
		p := protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), []byte(text))
		p = protowire.AppendFixed32(protowire.AppendTag(p, 2, protowire.Fixed32Type), math.Float32bits(float32(score)))
		p = protowire.AppendVarint(protowire.AppendTag(p, 3, protowire.VarintType), kind)
		out = protowire.AppendBytes(protowire.AppendTag(out, 1, protowire.BytesType), p)
	}
	piece(tokens[0], 0, unknown)
	piece(tokens[1], 0, control)
	piece(tokens[2], 0, control)
	if version != "v1" {
		names := strings.Fields("[INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [IMG] [PREFIX] [MIDDLE] [SUFFIX] " +
			"[IMG_BREAK] [IMG_END] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]")
		for i := range 768 {
			name := fmt.Sprintf("[control_%d]", i)
			if i < len(names) {
				name = names[i]
			}
			piece(name, 0, control)
		}
	}
	const first = 259 // of those that are not bytes
	for i := 3; i < len(tokens); i++ {
		switch {
		case i < first:
			piece(tokens[i], 0, fallback)
		case strings.Trim(tokens[i], "▁") == "" && tokens[i] != "▁":
			piece(tokens[i], -1e9, 1)
		default:
			piece(tokens[i], float64(first-i), 1)
		}
	}
	trainer := protowire.AppendVarint(protowire.AppendTag(nil, 3, protowire.VarintType), 2)
	trainer = protowire.AppendVarint(protowire.AppendTag(trainer, 35, protowire.VarintType), 1)
	normalizer := protowire.AppendVarint(protowire.AppendTag(nil, 4, protowire.VarintType), 0)
	out = protowire.AppendBytes(protowire.AppendTag(out, 2, protowire.BytesType), trainer)
	return protowire.AppendBytes(protowire.AppendTag(out, 3, protowire.BytesType), normalizer)
}

// TestResultsWithoutID: vLLM 0.32 measures the id of a result for Mistral's encoder, and refuses one that is null. Version 2
// has no use for ids.
func TestResultsWithoutID(t *testing.T) {
	t.Parallel()
	m := loadEncoderModel(t, fstest.MapFS{"tokenizer.model.v2": {Data: spmOf(t, "v2")}})
	for id, refused := range map[string]bool{`,"tool_call_id":null`: true, `,"tool_call_id":"c"`: false} {
		req, err := body.Parse(body.Chat, []byte(`{"messages":[{"role":"tool","content":"b"`+id+`},{"role":"user","content":"a"}]}`))
		if err != nil {
			t.Fatal(err)
		}
		got, err := m.RenderPrompt(req, shape.VLLM)
		if _, ok := errors.AsType[*shape.Refusal](err); ok != refused || !ok && err != nil {
			t.Errorf("%s: got %d ids, error %v, want a refusal: %v", id, len(got.IDs), err, refused)
		}
	}
}

// TestLoneSurrogates: for tekken a surrogate without a partner is U+FFFD, and two in a row are not known.
func TestLoneSurrogates(t *testing.T) {
	t.Parallel()
	tekken := loadEncoderModel(t, fstest.MapFS{"tekken.json": {Data: tekkenOf(t, "v3", bytesVocabulary())}})
	spm := loadEncoderModel(t, fstest.MapFS{"tokenizer.model.v2": {Data: spmOf(t, "v2")}})
	ids := func(m *shape.Model, text string) ([]uint32, error) {
		req, err := body.Parse(body.Chat, []byte(`{"messages":[{"role":"user","content":"`+text+`"}]}`))
		if err != nil {
			t.Fatal(err)
		}
		got, err := m.RenderPrompt(req, shape.VLLM)
		return got.IDs, err
	}
	want, err := ids(tekken, `a\ufffdb \ufffd`)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := ids(tekken, `a\ud800b \udc00`); err != nil || !slices.Equal(got, want) {
		t.Errorf("tekken: got %v, %v, want %v", got, err, want)
	}
	refused := func(err error) bool { _, ok := errors.AsType[*shape.Refusal](err); return ok }
	if got, err := ids(tekken, `a\udc00\ud800`); err == nil || refused(err) {
		t.Errorf("two in a row: got %v, %v, want an error that is not the engine's", got, err)
	}
	if got, err := ids(spm, `a\ud800b`); !refused(err) {
		t.Errorf("SentencePiece: got %v, %v, want a refusal", got, err)
	}
}

// TestEmptyCalls: vLLM 0.32 takes an empty object or text for no tool calls, and refuses other values of another type.
func TestEmptyCalls(t *testing.T) {
	t.Parallel()
	m := tinyChat(t, "{}", "{}", "{{ messages[1].content }}{{ messages[1].tool_calls is defined }}")
	for calls, taken := range map[string]bool{`{}`: true, `""`: true, `[]`: true, `null`: true, `{"a":1}`: false, `"x"`: false, `0`: false, `false`: false} {
		req, err := body.Parse(body.Chat, []byte(`{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b","tool_calls":`+calls+`}]}`))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := m.RenderPrompt(req, shape.VLLM); (err == nil) != taken || taken && got.Text != "bFalse" {
			t.Errorf("%s: got %q, error %v, want it taken: %v", calls, got.Text, err, taken)
		}
	}
}
