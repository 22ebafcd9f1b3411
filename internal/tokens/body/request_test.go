package body

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestPromptForms(t *testing.T) {
	for _, c := range []struct {
		api   API
		body  string
		form  Form
		count int
		first string
	}{
		{Chat, `{"messages":[{"role":"user"},{"role":"user"}]}`, FormMessages, 2, `[{"role":"user"},{"role":"user"}]`},
		{Chat, `{"messages":"x"}`, FormOther, 0, `"x"`},
		{Chat, `{}`, FormNone, 0, ``},
		{Chat, `{"messages":null}`, FormNone, 0, ``},
		{Completions, `{"prompt":"abc"}`, FormText, 0, `"abc"`},
		{Completions, `{"prompt":["abc","d"]}`, FormTexts, 2, `"abc"`},
		{Completions, `{"prompt":[1, 2,3]}`, FormIDs, 3, `[1, 2,3]`},
		{Completions, `{"prompt":[[1,2],[3]]}`, FormIDLists, 2, `[1,2]`},
		{Completions, `{"prompt":[{}]}`, FormOther, 1, `[{}]`},
		{Completions, `{"prompt":5}`, FormOther, 0, `5`},
		{Completions, `{"prompt_embeds":"x"}`, FormOther, 0, ``},
		{Embeddings, `{"input":["a"]}`, FormTexts, 1, `"a"`},
		{Embeddings, `{"messages":[{}]}`, FormMessages, 1, `[{}]`},
		{Responses, `{"input":"a"}`, FormText, 0, `"a"`},
		{Responses, `{"input":[{"type":"message"}]}`, FormItems, 1, `[{"type":"message"}]`},
		{Generate, `{"text":"a"}`, FormText, 0, `"a"`},
		{Generate, `{"text":["a","b"]}`, FormTexts, 2, `"a"`},
		{Generate, `{"input_ids":[1]}`, FormIDs, 1, `[1]`},
		{Generate, `{"text":"a","input_ids":[[1],[2]]}`, FormIDLists, 2, `[1]`},
		{VLLMGenerate, `{"token_ids":[7,8]}`, FormIDs, 2, `[7,8]`},
		{Messages, `{"messages":[{}],"system":"s"}`, FormMessages, 1, `[{}]`},
		{Tokenize, `{"prompt":"a"}`, FormText, 0, `"a"`},
		{Tokenize, `{"messages":[{}]}`, FormMessages, 1, `[{}]`},
		{Unknown, `{"messages":[{}]}`, FormNone, 0, ``},
	} {
		r, err := Parse(c.api, []byte(c.body))
		if err != nil {
			t.Errorf("%s: %v", c.body, err)
			continue
		}
		if r.Form != c.form || r.Count != c.count || string(r.FirstPrompt()) != c.first {
			t.Errorf("%v %s: form %d count %d first %s", c.api, c.body, r.Form, r.Count, r.FirstPrompt())
		}
	}
}

func TestFields(t *testing.T) {
	body := `{"mod\u0065l":"first","model":"m\u00fc","stream":true,"n":2,"best_of":3,"max_tokens":5,"max_completion_tokens":7,` +
		`"priority":-2,"cache_salt":"s","lora_path":["l",null],"kv_transfer_params":{"x":1},"prompt":["a","b"],` +
		`"session_id":"  ","vllm_xargs":{"session_id":" v "},"stream_options":null,"unknown":{"model":"no"}}`
	r, err := Parse(Completions, []byte(body))
	if err != nil {
		t.Fatal(err)
	}
	id, field := r.ConversationID(ConversationFields)
	maxTokens, ok := r.MaxTokens()
	got := []any{r.Model(), r.Stream(), r.Choices(true), maxTokens, ok, r.CacheSalt(), r.LoRA(), id, field,
		r.Has(FieldStreamOptions), string(r.Raw(FieldStreamOptions)), string(r.Raw(FieldUnknownForTest()))}
	want := []any{"mü", true, int64(6), int64(5), true, "s", "l", "v", "vllm_xargs.session_id", false, "null", ""}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
}

// FieldUnknownForTest returns a field that the body above does not have.
func FieldUnknownForTest() Field { return FieldTools }

func TestGenerateReadsSamplingParams(t *testing.T) {
	r, err := Parse(Generate, []byte(`{"text":"a","sampling_params":{"max_new_tokens":9,"n":4}}`))
	if err != nil {
		t.Fatal(err)
	}
	if n, ok := r.MaxTokens(); n != 9 || !ok || r.Choices(false) != 4 {
		t.Errorf("max %d %v choices %d", n, ok, r.Choices(false))
	}
}

// What an engine ignores takes no places.
func TestOnlySomeAPIsGenerateSeveralSequences(t *testing.T) {
	for api, want := range map[API][3]int64{
		Chat: {9, 1, 1}, Completions: {9, 1, 1}, Generate: {1, 9, 1}, VLLMGenerate: {1, 9, 1}, Responses: {1, 1, 1}, Messages: {1, 1, 1}, Embeddings: {1, 1, 1},
	} {
		for i, member := range []string{`"n":9`, `"sampling_params":{"n":9,"best_of":12}`, `"best_of":9`} {
			if r, err := Parse(api, []byte(`{`+member+`,"input":"a"}`)); err != nil || r.Choices(false) != want[i] {
				t.Errorf("%v, %s: got %d (%v), want %d", api, member, r.Choices(false), err, want[i])
			}
		}
	}
}

// The product of what a client chooses does not overflow.
func TestTheNumberOfSequencesIsBounded(t *testing.T) {
	for text, want := range map[string]int64{
		`{"prompt":["a","b"],"n":4611686018427387904}`:                 2 << 16,
		`{"prompt":["a","b"],"n":9223372036854775807}`:                 2 << 16,
		`{"prompt":["a","b"],"n":-9223372036854775807}`:                2,
		`{"prompt":"a","n":4294967296}`:                                1 << 16,
		`{"prompt":"a","best_of":3}`:                                   3,
		`{"prompt":"a","n":0,"best_of":4294967296}`:                    1 << 16,
		`{"prompt":["a","b"],"sampling_params":[{"n":65536},{"n":4}]}`: 2,
		`{"prompt":["a","b"],"n":"3"}`:                                 6, // pydantic 2.13 takes these, so engines compute them
		`{"prompt":"a","n":" 3 "}`:                                     3,
		`{"prompt":"a","n":"+3.0"}`:                                    3,
		`{"prompt":"a","n":3.0}`:                                       3,
		`{"prompt":"a","n":"1_0"}`:                                     10,
		`{"prompt":"a","n":"2","best_of":"3"}`:                         3,
		`{"prompt":"a","n":"nan","best_of":3}`:                         3,
		`{"prompt":"a","n":"inf"}`:                                     1 << 16,
		`{"prompt":"a","n":"x","best_of":null}`:                        1,
		`{"prompt":"a","n":["3"]}`:                                     1,
	} {
		if r, err := Parse(Completions, []byte(text)); err != nil || r.Choices(true) != want {
			t.Errorf("%s: got %d (%v), want %d", text, r.Choices(true), err, want)
		}
	}
	r, err := Parse(Generate, []byte(`{"text":["a","b"],"sampling_params":[{"n":3},{"n":3}]}`))
	if err != nil || r.Choices(false) != 6 {
		t.Errorf("got %d (%v), want 6", r.Choices(false), err)
	}
}

func TestConversationIDOrder(t *testing.T) {
	for _, c := range []struct{ body, id string }{
		{`{"disaggregated_params":{"conversation_id":"d"},"conversation_params":{"conversation_id":"c"},"session_id":"s"}`, "c"},
		{`{"disaggregated_params":{"conversation_id":"d"},"session_id":"s"}`, "d"},
		{`{"conversation":{"id":"o"},"nvext":{"agent_context":{"session_id":5,"trajectory_id":" "}}}`, "o"},
		{`{"conversation":"t","nvext":{"agent_context":{"session_id":"s","trajectory_id":"j"}}}`, "j"},
		{`{"conversation":"t","nvext":{"agent_context":"s"}}`, "t"},
		{`{"conversation":5,"prompt_cache_key":"k"}`, ""},
		{`{"user":"u","nvext":null}`, ""},
	} {
		r, err := Parse(Responses, []byte(c.body))
		if err != nil {
			t.Fatal(err)
		}
		if id, _ := r.ConversationID(ConversationFields); id != c.id {
			t.Errorf("%s: %q, want %q", c.body, id, c.id)
		}
	}
}

func TestAppendIDs(t *testing.T) {
	got, err := AppendIDs(nil, []byte("[1, 0 ,4294967295\n]"))
	if err != nil || !reflect.DeepEqual(got, []uint32{1, 0, 4294967295}) {
		t.Errorf("got %v, %v, want [1 0 4294967295]", got, err)
	}
	for _, bad := range []string{`[-1]`, `[1.0]`, `[1e2]`, `[4294967296]`, `["a"]`, `[null]`, `5`, `[[1]]`} {
		if _, err := AppendIDs(nil, []byte(bad)); err == nil {
			t.Errorf("%s: got no error, want one", bad)
		}
	}
}

func TestTextDecodesAsReference(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := rapid.String().Draw(t, "text")
		raw, err := json.Marshal(want)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := AppendText(nil, raw); err != nil || string(got) != want {
			t.Fatalf("%s: got %q, %v, want %q", raw, got, err, want)
		}
	})
	for _, lone := range []string{`"x\ud800"`, `"\udc00x"`, `"\ud800\u0041"`, `"\ud83d\ud83d"`} {
		if _, err := AppendText(nil, []byte(lone)); err != ErrLoneSurrogate { //nolint:errorlint // the API promises this exact value
			t.Errorf("%s: got %v, want ErrLoneSurrogate", lone, err)
		}
		if got, ok := TextOf([]byte(lone)); got != "" || ok {
			t.Errorf("%s: got %q, want no text", lone, got)
		}
	}
}

func TestReuseForgetsTheBodyBefore(t *testing.T) {
	var r Request
	if err := r.Parse(Chat, []byte(`{"model":"a","messages":[{},{}]}`)); err != nil {
		t.Fatal(err)
	}
	if err := r.Parse(Chat, []byte(`{"messages":[{}]}`)); err != nil {
		t.Fatal(err)
	}
	if r.Model() != "" || r.Count != 1 || len(r.Elements) != 1 {
		t.Errorf("model %q count %d elements %v", r.Model(), r.Count, r.Elements)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(uint8(Chat), []byte(`{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}`))
	f.Add(uint8(Completions), []byte(`{"prompt":[[1,2],[3]],"n":2}`))
	f.Add(uint8(Generate), []byte(`{"text":["a"],"sampling_params":{"max_new_tokens":3}}`))
	f.Fuzz(func(t *testing.T, api uint8, body []byte) {
		r, err := Parse(API(api%uint8(len(apiNames))), body)
		if err != nil {
			return
		}
		if !json.Valid(body) {
			t.Fatalf("%q: got no error, want one", body)
		}
		var fields map[string]json.RawMessage
		if err := json.Unmarshal(body, &fields); err != nil {
			t.Fatal(err)
		}
		for f := range numFields {
			want, has := fields[f.String()]
			if got := r.Raw(f); has != (got != nil) || strings.TrimSpace(string(want)) != string(got) {
				t.Fatalf("%v: %q, want %q", f, got, want)
			}
		}
		r.ConversationID(ConversationFields)
		r.MaxTokens()
		r.Choices(true)
		if r.Form == FormIDs {
			_, _ = AppendIDs(nil, r.FirstPrompt()) // must not panic
		}
	})
}
