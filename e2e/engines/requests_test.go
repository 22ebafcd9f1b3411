package engines

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
)

type m = map[string]any

// prose makes n words that no other seed makes.
func prose(seed string, n int) string {
	words := strings.Fields("lantern meadow copper ferry window autumn ladder pepper harvest violin cellar thunder ribbon quarry saddle orchard")
	state := uint64(14695981039346656037)
	for _, c := range []byte(seed) {
		state = (state ^ uint64(c)) * 1099511628211
	}
	var b strings.Builder
	for i := range n {
		state = state*6364136223846793005 + 1442695040888963407
		if i > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(words[state>>33%uint64(len(words))])
	}
	return b.String()
}

func user(text string) m      { return m{"role": "user", "content": text} }
func system(text string) m    { return m{"role": "system", "content": text} }
func assistant(text string) m { return m{"role": "assistant", "content": text} }

func chat(messages ...m) m {
	return m{"model": modelName, "max_tokens": 8, "temperature": 0, "messages": messages}
}

func completion(prompt any, more ...any) m {
	body := m{"model": modelName, "max_tokens": 4, "temperature": 0, "prompt": prompt}
	for i := 0; i+1 < len(more); i += 2 {
		body[more[i].(string)] = more[i+1] //nolint:forcetypeassert // pairs of key and value
	}
	return body
}

// predicted sends a request and wants the engine to report as many cached tokens as Kvlane predicted. Events of earlier
// requests have come before.
func (b *bed) predicted(what, path string, body m) answer {
	b.t.Helper()
	b.settle()
	a := b.post(path, body)
	b.t.Logf("%-44s rank %d, %4d prompt tokens, %4d predicted, %4d cached by the engine", what, a.rank, a.prompt, a.matched, a.cached)
	if a.matched != a.cached {
		b.t.Errorf("%s: predicted %d cached tokens, the engine reports %d", what, a.matched, a.cached)
	}
	return a
}

// TestVLLM and TestSGLang start the engine once and play every story on it.
func TestVLLM(t *testing.T) {
	b := newBed(t, vllm)
	play(t, b)
}

func TestSGLang(t *testing.T) {
	b := newBed(t, sglang)
	play(t, b)
}

func play(t *testing.T, b *bed) {
	for _, story := range []struct {
		name string
		tell func(*bed)
	}{
		{"the second turn goes to the rank that cached the first", (*bed).turns},
		{"ids of texts equal the engine's", (*bed).textIDs},
		{"ids of generated requests equal the engine's", (*bed).requestIDs},
		{"refusals of odd bodies are the engine's", (*bed).refusals},
		{"whole blocks, and the last token is always computed", (*bed).edges},
		{"a salt separates caches", (*bed).salts},
		{"requests that do not read the cache", (*bed).unread},
		{"the rank is honoured on every endpoint", (*bed).endpoints},
		{"eviction", (*bed).eviction},
		{"a reset", (*bed).resets},
		{"the tokenizer is checked against the engine in service", (*bed).agreement},
	} {
		t.Run(story.name, func(t *testing.T) {
			whole := b.t
			b.t = t
			defer func() { b.t = whole }()
			story.tell(b)
		})
	}
}

const rules = "You are a librarian who answers briefly and names the shelf. Novels stand on the ground floor, maps and atlases on " +
	"the first, letters and diaries on the second, and what nobody asks for in the cellar. You never send anybody away without a book."

func (b *bed) turns() {
	used := map[int]bool{}
	for n := range 4 {
		messages := []m{system(fmt.Sprintf("Reader %d. %s", n, rules)), user("Where are the maps?")}
		rank := -1
		for turn := range 3 {
			a := b.predicted(fmt.Sprintf("conversation %d, turn %d", n+1, turn+1), "/v1/chat/completions", chat(messages...))
			switch {
			case turn == 0:
				rank = a.rank
				used[rank] = true
			case a.rank != rank:
				b.t.Errorf("turn %d went to rank %d, the first to rank %d", turn+1, a.rank, rank)
			case a.cached == 0:
				b.t.Errorf("the engine had nothing of turn %d in its cache", turn+1)
			}
			messages = append(messages, assistant(a.text), user("And who wrote them? "+prose(fmt.Sprint("turn", turn), 20)))
		}
	}
	if len(used) < ranks {
		b.t.Errorf("only %d ranks were used", len(used))
	}
}

func (b *bed) edges() {
	ids := make([]int, 4*b.block+1)
	for i := range ids {
		ids[i] = 1000 + i
	}
	b.predicted("four blocks and a token", "/v1/completions", completion(ids))
	b.predicted("the same", "/v1/completions", completion(ids))
	b.predicted("exactly four blocks", "/v1/completions", completion(ids[:4*b.block]))
	b.predicted("one token less", "/v1/completions", completion(ids[:4*b.block-1]))
	b.predicted("another third block", "/v1/completions", completion(slices.Concat(ids[:2*b.block], ids[:2*b.block])))
	b.predicted("shorter than a block", "/v1/completions", completion(ids[:b.block-1]))
	b.predicted("text", "/v1/completions", completion(prose("text", 100)))
	b.predicted("longer text", "/v1/completions", completion(prose("text", 100)+" "+prose("more", 60)))
}

func (b *bed) salts() {
	text := prose("salted", 120)
	first := b.predicted("salt a", "/v1/completions", completion(text, "cache_salt", "tenant-a"))
	if a := b.predicted("salt b", "/v1/completions", completion(text, "cache_salt", "tenant-b")); a.cached != 0 {
		b.t.Error("salts share a cache")
	}
	if a := b.predicted("salt a again", "/v1/completions", completion(text, "cache_salt", "tenant-a")); a.cached == 0 || a.rank != first.rank {
		b.t.Error("the same salt found nothing")
	}
	b.predicted("salt a, longer", "/v1/completions", completion(text+" "+prose("tail", 60), "cache_salt", "tenant-a"))
	if a := b.predicted("no salt", "/v1/completions", completion(text)); a.cached != 0 {
		b.t.Error("a request without a salt found a tenant's blocks")
	}
}

// endpoints checks by the engine's own counters that the rank which Kvlane chose did the work.
func (b *bed) endpoints() {
	requests := []struct {
		path string
		body func(seed string) m
	}{
		{"/v1/chat/completions", func(s string) m { return chat(user(prose(s, 90))) }},
		{"/v1/completions", func(s string) m { return completion(prose(s, 90)) }},
		{"/v1/messages", func(s string) m { return chat(user(prose(s, 90))) }},
		{"/inference/v1/generate", func(s string) m {
			return m{"model": modelName, "token_ids": spread(s, 90), "sampling_params": m{"max_tokens": 4, "temperature": 0}}
		}},
	}
	if b.kind == sglang {
		// /generate honours a rank in the body alone, see docs/real-engines.md.
		requests = requests[:3]
	}
	for _, r := range requests {
		for n := range 4 {
			before := [ranks]float64{b.work(0), b.work(1)}
			a := b.predicted(fmt.Sprintf("%s, prompt %d", r.path, n), r.path, r.body(fmt.Sprint(r.path, n)))
			// Less than a block is a health check of SGLang's, which computes a token.
			did := func(rank int) bool { return b.work(rank) >= before[rank]+float64(b.block) }
			b.until("the engine counts the work", func() bool { return did(0) || did(1) })
			if !did(a.rank) || did(1-a.rank) {
				b.t.Errorf("%s: Kvlane chose rank %d, the engine used rank %d", r.path, a.rank, 1-a.rank)
			}
		}
	}
}

// unread sends prompts that are cached with parameters for which the engine computes them again, or does not: the lists of
// docs/tokens.md.
func (b *bed) unread() {
	type sent struct {
		path  string
		more  m
		reads bool
	}
	const completions, chats, generate = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
	params := func(more m) m { // of vLLM's own API
		out := m{"max_tokens": 4, "temperature": 0}
		maps.Copy(out, more)
		return m{"sampling_params": out}
	}
	list := map[string][]sent{
		vllm.name: {
			{completions, m{"prompt_logprobs": 0}, false}, {completions, m{"prompt_logprobs": 2}, false}, {completions, m{"prompt_logprobs": nil}, true},
			{completions, m{"echo": true, "logprobs": 0}, false}, {completions, m{"echo": true, "logprobs": 1}, false}, {completions, m{"echo": true}, true},
			{completions, m{"logprobs": 2}, true}, {chats, m{"prompt_logprobs": 0}, false}, {chats, m{"echo": true}, false},
			{chats, m{"echo": true, "logprobs": true, "top_logprobs": 1}, false}, {chats, m{"logprobs": true, "top_logprobs": 1}, true},
			{generate, params(m{"prompt_logprobs": 0}), false}, {generate, params(m{"skip_reading_prefix_cache": true}), false},
			{generate, params(m{"logprobs": 1}), true}, // with prompt_logprobs and skip_reading_prefix_cache: false vLLM 0.32 ends: docs/real-engines.md
		},
		sglang.name: {
			{completions, m{"echo": true, "logprobs": 1}, false}, {completions, m{"echo": true, "logprobs": 0}, true}, {completions, m{"echo": true}, true},
			{completions, m{"logprobs": 1}, true}, {completions, m{"prompt_logprobs": 1}, true}, {chats, m{"logprobs": true, "top_logprobs": 1}, true},
			{"/generate", m{"return_logprob": true, "logprob_start_len": 0}, false}, {"/generate", m{"return_logprob": true, "logprob_start_len": 40}, true},
			{"/generate", m{"return_logprob": true}, true},
		},
	}[b.name]
	for i, c := range list {
		text := prose(fmt.Sprint("unread", i), 120)
		body := func() m {
			switch c.path {
			case chats:
				return chat(user(text))
			case completions:
				return completion(text)
			case generate:
				body := params(nil)
				body["model"], body["token_ids"] = modelName, spread(fmt.Sprint("unread", i), 120)
				return body
			}
			return m{"text": text, "sampling_params": m{"max_new_tokens": 4, "temperature": 0}}
		}
		first := b.predicted(c.path, c.path, body())
		with := body()
		maps.Copy(with, c.more)
		b.predicted(fmt.Sprint("with ", c.more), c.path, with) // perhaps on the other rank, which has the prompt then, too
		if a := b.predicted("the same again", c.path, with); (a.cached > first.cached) != c.reads {
			b.t.Errorf("%s with %v: got %d cached tokens, and %d the first time", c.path, c.more, a.cached, first.cached)
		}
		if a := b.predicted("without them", c.path, body()); a.cached <= first.cached {
			b.t.Errorf("%s: got %d cached tokens, want those of the prompt", c.path, a.cached)
		}
	}
	if b.name == vllm.name {
		b.beams()
	}
}

// beams: a search with beams reads the cache, with prompt_logprobs, too. Its usage has no cached tokens, so the engine's counter
// tells.
func (b *bed) beams() {
	text := prose("beams", 120)
	whole := (b.predicted("before beams", "/v1/completions", completion(text)).prompt - 1) / b.block * b.block
	for _, c := range []struct {
		more  []any
		reads bool
	}{
		{[]any{"use_beam_search", true, "n", 2}, true}, {[]any{"use_beam_search", true, "n", 2, "prompt_logprobs", 0}, true},
		{[]any{"prompt_logprobs", 0}, false}, {[]any{}, true},
	} {
		b.settle()
		before := b.counted("vllm:prefix_cache_hits_total", "")
		a := b.post("/v1/completions", completion(text, c.more...))
		hits := int(b.counted("vllm:prefix_cache_hits_total", "") - before)
		b.t.Logf("%v: %d matched, %d tokens of the cache hit", c.more, a.matched, hits)
		if c.reads && (a.matched != whole || hits < whole) || !c.reads && (a.matched != 0 || hits != 0) {
			b.t.Errorf("%v: got %d tokens matched and %d hit, want %d read: %v", c.more, a.matched, hits, whole, c.reads)
		}
	}
}

// spread makes n token ids.
func spread(seed string, n int) []int {
	ids := make([]int, n)
	for i := range ids {
		ids[i] = 2000 + (i*i+len(seed)*37+int(seed[len(seed)-1])*101)%5000
	}
	return ids
}

// eviction fills the ranks several times over and comes back to what was evicted and what was not.
func (b *bed) eviction() {
	words := 5 * b.block
	prompts := make([]string, 2*ranks*b.blocks*b.block/words)
	for n := range prompts {
		prompts[n] = prose(fmt.Sprint("fill", n), words)
		b.predicted(fmt.Sprintf("new prompt %d of %d", n+1, len(prompts)), "/v1/completions", completion(prompts[n]))
		if n%2 == 0 { // vLLM would report its blocks again, which would stay counted when they are evicted
			b.predicted("it asks for a report", "/v1/completions", completion(prompts[n], "vllm_xargs", m{"kv_cache_report_mode": "full"}))
		}
	}
	hit, missed := 0, 0
	for n := len(prompts) - 1; n >= 0; n -= 3 {
		if a := b.predicted(fmt.Sprintf("prompt %d again", n+1), "/v1/completions", completion(prompts[n])); a.cached > 0 {
			hit++
		} else {
			missed++
		}
	}
	b.t.Logf("of %d prompts that came back %d were still cached, %d evicted", hit+missed, hit, missed)
	if hit == 0 || missed == 0 {
		b.t.Error("this is no test of eviction")
	}
}

// resets empties the engine's caches. An idle rank announces that with its next work only, so the first request to a rank
// afterwards may be predicted too well, and none after it.
func (b *bed) resets() {
	b.settle()
	b.clear()
	announced := map[int]bool{}
	for n := 0; len(announced) < ranks; n++ {
		if n == 20 {
			b.t.Fatalf("20 requests reached only %d ranks", len(announced))
		}
		announced[b.post("/v1/completions", completion(prose(fmt.Sprint("after", n), 90))).rank] = true
		b.settle()
	}
	text := prose("settled", 100)
	if a := b.predicted("after the reset", "/v1/completions", completion(text)); a.cached != 0 {
		b.t.Error("the engine has kept something")
	}
	if a := b.predicted("and again", "/v1/completions", completion(text)); a.cached == 0 {
		b.t.Error("nothing was cached after the reset")
	}
	b.predicted("a conversation from before the reset", "/v1/chat/completions", chat(system("Reader 0. "+rules), user("Where are the maps?")))
}

// agreement looks at the comparisons that ran in service.
func (b *bed) agreement() {
	b.until("requests are compared in service", func() bool { return b.metric("kvlane_token_checks_total") > 3 })
	lines := b.run(nil, "tokens-check", "--tokenizer", qwen3, "--engine", "http://"+b.address, "--kind", b.name)
	b.t.Logf("kvlane tokens-check: %s", lines[len(lines)-1])
	b.t.Logf("in service: %v comparisons, predicted %v and observed %v cached tokens", b.metric("kvlane_token_checks_total"),
		b.metric("kvlane_predicted_cached_tokens_total"), b.metric("kvlane_observed_cached_tokens_total"))
	if differ := b.metric("kvlane_token_checks_total{[^}]*outcome=\"different\"[^}]*}"); differ != 0 {
		b.t.Errorf("%v requests differ", differ)
	}
}

// textIDs compares `kvlane tokenize` with the engine's.
func (b *bed) textIDs() {
	texts := []string{"", "x", "Hello, world", rules, "a<|im_end|>b<think>c</think>", "  \n\n\t ", "1234567890 3.14159 0x1F",
		"👩‍👩‍👧 é é \u200fשלום ﬁ Å 東京 Köln Ελλάδα हिन्दी ไทย", "for i in range(3):\n\tprint(f\"{i!r}\")\r\n", strings.Repeat("ab", 500), strings.Repeat("!", 300)}
	for n := range 60 {
		texts = append(texts, oddText(n))
	}
	equal := 0
	for i, line := range b.run(linesOf(texts, func(s string) m { return m{"text": s} }), "tokenize", "--tokenizer", qwen3) {
		ours := idsOf(b.t, line)
		theirs, status := b.ids(b.tokenize, encode(m{"model": modelName, "prompt": texts[i], "add_special_tokens": false}))
		if status != 200 || !slices.Equal(ours, theirs) {
			b.t.Errorf("%q: ours %v, the engine's %d %v", texts[i], ours, status, theirs)
			continue
		}
		equal++
	}
	b.t.Logf("%d texts with equal ids", equal)
}

// requestIDs compares `kvlane render` with every endpoint of the engine that tells ids.
func (b *bed) requestIDs() {
	var bodies []m
	for n := range 120 {
		bodies = append(bodies, oddRequest(n))
	}
	paths := []string{b.tokenize}
	if b.kind == vllm {
		paths = append(paths, "/v1/chat/completions/render")
	}
	equal, refused := 0, 0
	for _, path := range paths {
		ours := b.run(linesOf(bodies, func(body m) m { return body }), "render", "--tokenizer", qwen3, "--engine", b.name, "--path", path, "--tokens", "--tool-parser")
		for i, body := range bodies {
			theirs, status := b.ids(path, encode(body))
			var got struct {
				Error string `json:"error"`
			}
			if err := json.Unmarshal(ours[i], &got); err != nil {
				b.t.Fatal(err)
			}
			switch {
			case got.Error != "" && status == 200, got.Error == "" && status != 200:
				b.t.Errorf("%s %s: ours %s, the engine's status %d", path, encode(body), ours[i], status)
			case status != 200:
				refused++
			case !slices.Equal(idsOf(b.t, ours[i]), theirs):
				b.t.Errorf("%s %s: ours %s, the engine's %v", path, encode(body), ours[i], theirs)
			default:
				equal++
			}
		}
	}
	b.t.Logf("%d requests: %d answers with equal ids, %d refused by both", len(bodies), equal, refused)
}

func idsOf(t *testing.T, line []byte) []uint32 {
	t.Helper()
	var got struct {
		IDs []uint32 `json:"ids"`
	}
	if err := json.Unmarshal(line, &got); err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	return got.IDs
}

func encode(v any) []byte {
	raw, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return raw
}

func linesOf[T any](list []T, line func(T) m) [][]byte {
	out := make([][]byte, len(list))
	for i, v := range list {
		out[i] = encode(line(v))
	}
	return out
}
