package enginesim

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/vmihailenco/msgpack/v5"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var qwen = sync.OnceValues(func() (*Tokenizer, error) { return LoadTokenizer(os.DirFS("../../tokens/models/qwen3")) })

func qwenTokenizer(t testing.TB) *Tokenizer {
	t.Helper()
	tok, err := qwen()
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// shared returns the folder of reference data, which is not part of the project.
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

// start runs an engine for a test; connections are closed with it.
func start(t testing.TB, o Options) *Engine {
	t.Helper()
	o.Tokenizer = qwenTokenizer(t)
	e, err := Start(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		e.Close()
		http.DefaultClient.CloseIdleConnections()
	})
	return e
}

type answer struct {
	status int
	raw    []byte
	header http.Header
	body   struct {
		ID      string `json:"id"`
		Choices []struct {
			Text    string `json:"text"`
			Message struct {
				Content string `json:"content"`
			} `json:"message"`
			Finish string `json:"finish_reason"`
		} `json:"choices"`
		Usage struct {
			Prompt     int `json:"prompt_tokens"`
			Completion int `json:"completion_tokens"`
			Details    struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
		KV map[string]any `json:"kv_transfer_params"`
	}
}

func (a *answer) cached() int { return a.body.Usage.Details.Cached }

func post(t testing.TB, url string, body any, headers ...string) *answer {
	t.Helper()
	a, err := tryPost(url, body, headers...)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func tryPost(url string, body any, headers ...string) (*answer, error) {
	var raw []byte
	switch b := body.(type) {
	case string:
		raw = []byte(b)
	default:
		var err error
		if raw, err = json.Marshal(b); err != nil {
			return nil, err
		}
	}
	req, err := http.NewRequest(http.MethodPost, url, bytes.NewReader(raw))
	if err != nil {
		return nil, err
	}
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	a := &answer{status: res.StatusCode, header: res.Header}
	if a.raw, err = io.ReadAll(res.Body); err != nil {
		return a, err
	}
	_ = json.Unmarshal(a.raw, &a.body)
	return a, nil
}

type m = map[string]any

// words is a text of n tokens that begins with a name of its own.
func words(name string, n int) string {
	return name + strings.Repeat(" river", n-1)
}

func turn(role, content string) m { return m{"role": role, "content": content} }

func TestSecondTurnSharesTheAnswer(t *testing.T) {
	for _, engine := range []EngineKind{VLLM, SGLang, TRTLLM} {
		t.Run(string(engine), func(t *testing.T) {
			e := start(t, Options{Engine: engine, BlockSize: 4})
			first := []m{turn("system", words("You", 50)), turn("user", "Hello there")}
			a := post(t, e.URL()+"/v1/chat/completions", m{"messages": first, "max_tokens": 21})
			if a.status != 200 || a.cached() != 0 || a.body.Usage.Completion != 21 {
				t.Fatalf("first: %d %s", a.status, a.raw)
			}
			text := a.body.Choices[0].Message.Content
			b := post(t, e.URL()+"/v1/chat/completions", m{"messages": append(first, turn("assistant", text), turn("user", "More")), "max_tokens": 3})
			// All tokens of the first turn but the last generated one are in the cache, in whole blocks.
			if want := (a.body.Usage.Prompt + 20) / 4 * 4; b.cached() != want {
				t.Errorf("second turn: %d cached, want %d: %s", b.cached(), want, b.raw)
			}
			c := post(t, e.URL()+"/v1/chat/completions", m{"messages": first, "max_tokens": 21})
			if c.body.Choices[0].Message.Content != text {
				t.Error("the same request got another answer")
			}
		})
	}
}

// subscribe listens to a rank with a third-party ZMQ client.
func subscribe(t *testing.T, e *Engine, rank int) zmq4.Socket {
	t.Helper()
	had := e.Subscribers(rank)
	s := zmq4.NewSub(context.Background(), zmq4.WithAutomaticReconnect(false))
	if err := s.Dial(e.EventsEndpoint(rank)); err != nil {
		t.Fatal(err)
	}
	if err := s.SetOption(zmq4.OptionSubscribe, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	for e.Subscribers(rank) == had {
		time.Sleep(time.Millisecond)
	}
	return s
}

func receive(t *testing.T, s zmq4.Socket) (seq byte, batch []any) {
	t.Helper()
	msg, err := s.Recv()
	if err != nil {
		t.Fatal(err)
	}
	if len(msg.Frames) != 3 || len(msg.Frames[1]) != 8 {
		t.Fatalf("%d frames", len(msg.Frames))
	}
	d := msgpack.NewDecoder(bytes.NewReader(msg.Frames[2]))
	d.UseLooseInterfaceDecoding(true)
	v, err := d.DecodeInterface()
	if err != nil {
		t.Fatal(err)
	}
	return msg.Frames[1][7], v.([]any)
}

// index is a naive interpretation of a rank's events: how often is each prefix held?
type index struct {
	prefix map[string]string // engine hash -> tokens up to the block's end, with marks
	held   map[string]int
}

func newIndex() *index { return &index{map[string]string{}, map[string]int{}} }

func hashText(v any) string { return fmt.Sprintf("%v", v) }

func (x *index) apply(t *testing.T, ev any) {
	t.Helper()
	f := map[string]any{}
	switch ev := ev.(type) {
	case map[string]any:
		f = ev
	case []any:
		names := []string{"type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"}
		for i, v := range ev {
			if i < len(names) {
				f[names[i]] = v
			}
		}
	}
	switch f["type"] {
	case "AllBlocksCleared":
		x.held = map[string]int{}
	case "BlockRemoved":
		for _, h := range f["block_hashes"].([]any) {
			p := x.prefix[hashText(h)]
			if x.held[p] == 0 {
				t.Errorf("removed %v, which is not held", h)
			}
			x.held[p]--
		}
	case "BlockStored":
		p := ""
		if parent := f["parent_block_hash"]; parent != nil {
			var known bool
			if p, known = x.prefix[hashText(parent)]; !known {
				t.Errorf("unknown parent %v", parent)
			}
		}
		size := int(f["block_size"].(int64))
		ids := f["token_ids"].([]any)
		hashes := f["block_hashes"].([]any)
		if len(ids) != size*len(hashes) {
			t.Errorf("%d tokens for %d blocks of %d", len(ids), len(hashes), size)
		}
		extra, _ := f["extra_keys"].([]any)
		for i, h := range hashes {
			if extra != nil && extra[i] != nil {
				p += fmt.Sprint(extra[i])
			}
			if i == 0 && f["cache_salt"] != nil && f["parent_block_hash"] == nil {
				p += fmt.Sprint([]any{f["cache_salt"]})
			}
			p += fmt.Sprint(ids[i*size : (i+1)*size])
			x.prefix[hashText(h)] = p
			x.held[p]++
		}
	}
}

func (x *index) match(ids []uint32, size int, salt string) int {
	p, n := "", 0
	if salt != "" {
		p = fmt.Sprint([]any{salt})
	}
	for n+size < len(ids) {
		p += fmt.Sprint(ids[n : n+size])
		if x.held[p] == 0 {
			break
		}
		n += size
	}
	return n
}

// The events of a rank, read naively, predict the cached tokens of every request, under eviction and in every encoding.
func TestEventsPredictCachedTokens(t *testing.T) {
	for _, row := range []struct {
		name string
		o    Options
	}{
		{"vllm maps", Options{}},
		{"vllm arrays", Options{ArrayEvents: true}},
		{"vllm raw hashes", Options{RawHashes: true}},
		{"sglang maps", Options{Engine: SGLang}},
		{"sglang arrays", Options{Engine: SGLang, ArrayEvents: true}},
	} {
		t.Run(row.name, func(t *testing.T) {
			o := row.o
			o.BlockSize, o.Blocks, o.MaxModelLen = 4, 40, 120
			o.EventsEndpoint = "tcp://127.0.0.1:0"
			e := start(t, o)
			s := subscribe(t, e, 0)
			x := newIndex()
			next := uint64(e.Stats().Ranks[0].Sequence)
			hits := 0
			for i := range 60 {
				prompt := words([]string{"Alpha", "Beta", "Gamma", "Delta"}[i*7%4], 20+i*13%50)
				salt := []string{"", "", "tenant-a"}[i%3]
				body := m{"prompt": prompt, "max_tokens": 1 + i%9}
				if salt != "" {
					body["cache_salt"] = salt
				}
				for int(next) < e.Stats().Ranks[0].Sequence {
					seq, batch := receive(t, s)
					if uint64(seq) != next%256 {
						t.Fatalf("sequence %d, want %d", seq, next)
					}
					next++
					for _, ev := range batch[1].([]any) {
						x.apply(t, ev)
					}
				}
				want := x.match(e.opts.Tokenizer.Encode(prompt, false), 4, salt)
				if o.ArrayEvents && o.Engine == SGLang && salt != "" {
					continue // the naive reader does not support the eighth element
				}
				a := post(t, e.URL()+"/v1/completions", body)
				if a.status != 200 || a.cached() != want {
					t.Fatalf("request %d: %d cached tokens, events say %d: %s", i, a.cached(), want, a.raw)
				}
				if want > 0 {
					hits++
				}
			}
			st := e.Stats().Ranks[0]
			if st.Evictions == 0 || hits < 10 {
				t.Errorf("%d evictions and %d hits: the test has no force", st.Evictions, hits)
			}
			if st.BlocksUsed != 0 || st.Running+st.Waiting != 0 {
				t.Errorf("something is left: %+v", st)
			}
		})
	}
}

func replay(t *testing.T, e *Engine, frames ...[]byte) [][][]byte {
	t.Helper()
	d := zmq4.NewDealer(context.Background(), zmq4.WithAutomaticReconnect(false))
	defer d.Close()
	if err := d.Dial(e.ReplayEndpoint(0)); err != nil {
		t.Fatal(err)
	}
	if err := d.SendMulti(zmq4.NewMsgFrom(frames...)); err != nil {
		t.Fatal(err)
	}
	var out [][][]byte
	for {
		msg, err := d.Recv()
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, msg.Frames)
		if seq := msg.Frames[len(msg.Frames)-2]; bytes.Equal(seq, bytes.Repeat([]byte{0xFF}, 8)) {
			return out
		}
	}
}

func TestReplay(t *testing.T) {
	for _, old := range []bool{false, true} {
		e := start(t, Options{EventsEndpoint: "tcp://127.0.0.1:0", ReplayEndpoint: "tcp://127.0.0.1:0", EventsTopic: "kv", ReplaySteps: 3, OldReplay: old, BlockSize: 4})
		for i := range 5 {
			post(t, e.URL()+"/v1/completions", m{"prompt": words(fmt.Sprint("N", i), 9), "max_tokens": 1})
		}
		got := replay(t, e, nil, []byte{0})
		if len(got) != 4 {
			t.Fatalf("old %v: %d replies, want the last 3 batches and the end", old, len(got))
		}
		width := 4
		if old {
			width = 3
		}
		for i, frames := range got {
			if len(frames) != width || len(frames[0]) != 0 {
				t.Errorf("old %v: reply %d has frames %q", old, i, frames)
			}
		}
		if seq := got[0][width-2]; seq[7] != 2 {
			t.Errorf("oldest kept is %v, want 2", seq)
		}
		if last := got[3]; !old && len(last[1]) != 0 {
			t.Errorf("terminator with topic %q", last[1])
		}
		if got := replay(t, e, nil, []byte{0, 0, 0, 0, 0, 0, 0, 4}); len(got) != 2 {
			t.Errorf("from 4: %d replies", len(got))
		}
		if got := replay(t, e, nil, bytes.Repeat([]byte{0xFF}, 8)); len(got) != 1 {
			t.Errorf("from -1: %d replies", len(got))
		}
	}
}

const callable = `"tools": [{"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}},
	{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"},
	"unit": {"type": "string"}}, "required": ["city", "days"]}}}]`

// A call of a tool is answered where tool_choice asks for one, and only there.
func TestForcedToolCalls(t *testing.T) {
	url := start(t, Options{}).URL()
	chat := `"messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 4, ` + callable
	const call = `{"function":{"arguments":"{\"city\":\"text\",\"days\":1}","name":"weather"}`
	for _, c := range []struct{ name, path, body, want, not string }{
		{"named", "chat/completions", `{` + chat + `, "tool_choice": {"type": "function", "function": {"name": "weather"}}}`, call, `"content":"`},
		{"required", "chat/completions", `{` + chat + `, "tool_choice": "required"}`, `"finish_reason":"tool_calls"`, `"finish_reason":"length"`},
		{"streamed", "chat/completions", `{` + chat + `, "stream": true, "tool_choice": {"type": "function", "function": {"name": "weather"}}}`, call, `"finish_reason":"length"`},
		{"auto", "chat/completions", `{` + chat + `, "tool_choice": "auto"}`, `"tool_calls":[]`, "weather"},
		{"none", "chat/completions", `{` + chat + `}`, `"tool_calls":[]`, "weather"},
		{"of no tool", "chat/completions", `{` + chat + `, "tool_choice": {"type": "function", "function": {"name": "wether"}}}`, `"code":400`, `"choices"`},
		{"Anthropic's", "messages", `{"messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 4, "tool_choice": {"type": "any"},
			"tools": [{"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}]}`,
			`"input":{"city":"text"},"name":"weather","type":"tool_use"`, `"type":"text"`},
		{"Anthropic's, streamed", "messages", `{"messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 4, "stream": true, "tool_choice": {"type": "any"},
			"tools": [{"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}]}`,
			`"partial_json":"{\"city\":\"text\"}","type":"input_json_delta"`, `text_delta`},
	} {
		got := string(post(t, url+"/v1/"+c.path, c.body).raw)
		if !strings.Contains(got, c.want) || strings.Contains(got, c.not) {
			t.Errorf("%s: got %s, want %s and not %s", c.name, got, c.want, c.not)
		}
	}
}

// Different images are different prompts, the same image is found in the cache, and tools keep their bytes.
func TestImagesAreCached(t *testing.T) {
	url := start(t, Options{}).URL()
	ask := func(image string) *answer {
		return post(t, url+"/v1/chat/completions", `{"max_tokens": 2, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:`+image+
			`"}}, {"type": "text", "text": "`+strings.Repeat("What is on the picture? ", 20)+`"}]}], `+callable+`}`)
	}
	first, same, other := ask("a"), ask("a"), ask("b")
	if first.status != http.StatusOK || same.cached() == 0 || other.cached() >= same.cached() {
		t.Errorf("got %s, cached %d, %d, want an answer, the same image cached, and less of another one", first.raw, same.cached(), other.cached())
	}
}

func TestEmbeddingsAndCounts(t *testing.T) {
	url := start(t, Options{}).URL()
	var got struct {
		Data []struct{ Embedding any }
		Use  struct {
			Prompt int `json:"prompt_tokens"`
		} `json:"usage"`
	}
	for _, c := range []struct {
		body  string
		count int
		first string
	}{
		{`{"input": "one text"}`, 1, ""},
		{`{"input": ["one text", "another"]}`, 2, ""},
		{`{"input": [[1, 2], [3]], "encoding_format": "base64"}`, 2, "string"},
	} {
		a := post(t, url+"/v1/embeddings", c.body)
		if err := json.Unmarshal(a.raw, &got); err != nil || a.status != http.StatusOK || len(got.Data) != c.count || got.Use.Prompt == 0 {
			t.Errorf("%s: got %d, %s, %v, want %d vectors", c.body, a.status, a.raw, err, c.count)
			continue
		}
		if _, text := got.Data[0].Embedding.(string); text != (c.first == "string") {
			t.Errorf("%s: got %v, want the format that was asked for", c.body, got.Data[0].Embedding)
		}
	}
	if a := post(t, url+"/v1/embeddings", `{"input": {}}`); a.status != http.StatusBadRequest {
		t.Errorf("got %d of an input that is none, want 400", a.status)
	}
	message := `{"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 1}`
	count := post(t, url+"/v1/messages/count_tokens", message)
	answered := post(t, url+"/v1/messages", message)
	var counted, used struct {
		Input int `json:"input_tokens"`
		Usage struct {
			Input   int `json:"input_tokens"`
			Created int `json:"cache_creation_input_tokens"`
		}
	}
	if err := errors.Join(json.Unmarshal(count.raw, &counted), json.Unmarshal(answered.raw, &used)); err != nil || counted.Input == 0 ||
		counted.Input != used.Usage.Input+used.Usage.Created {
		t.Errorf("got %s, want as many tokens as of the answer, %s", count.raw, answered.raw)
	}
}
