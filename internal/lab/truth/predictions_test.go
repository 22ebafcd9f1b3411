package truth

import (
	"encoding/binary"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"
)

type m = map[string]any

// frames are the frames of a batch's message.
func frames(t *testing.T, seq uint64, rank int, events ...any) [][]byte {
	t.Helper()
	payload, err := msgpack.Marshal([]any{float64(seq), events, rank})
	if err != nil {
		t.Fatal(err)
	}
	return [][]byte{[]byte("kv"), binary.BigEndian.AppendUint64(nil, seq), payload}
}

func ids(from, n int) []int {
	s := make([]int, n)
	for i := range s {
		s[i] = from + i
	}
	return s
}

func stored(hashes []uint64, parent any, tokens []int, more m) m {
	e := m{"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, "block_size": 4, "medium": "GPU"}
	maps.Copy(e, more)
	return e
}

// ask is a completion that ran alone on rank 0.
func ask(n int, at float64, prompt []int, cached int, body m) m {
	if body == nil {
		body = m{}
	}
	if body["model"] == nil {
		body["model"] = "base"
	}
	text, err := json.Marshal(body)
	if err != nil {
		panic(err)
	}
	return m{
		"kind": "http", "n": n, "label": "ask", "path": "/v1/completions", "headers": m{"x-data-parallel-rank": "0"}, "body": string(text), "status": 200, "t_sent": at, "t": at + 0.5,
		"resp": m{"choices": []any{m{"prompt_token_ids": prompt}}, "usage": m{"prompt_tokens": len(prompt), "prompt_tokens_details": m{"cached_tokens": cached}}},
	}
}

func event(at float64, f [][]byte) m {
	return m{"kind": "event", "t": at, "source": "rank0", "frames": f}
}

// write makes a folder with one recording and other files.
func write(t *testing.T, records ...m) string {
	t.Helper()
	dir := t.TempDir()
	var b strings.Builder
	enc := json.NewEncoder(&b)
	for _, r := range records {
		if err := enc.Encode(r); err != nil {
			t.Fatal(err)
		}
	}
	for name, content := range map[string][]byte{"one.jsonl.gz": packed(t, b.String()), "chat.jsonl": []byte(`{"case":1,"body":{}}`), "README.md": []byte("x")} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// checked checks the only recording of a folder.
func checked(dir string) (*cachedTotals, string, error) {
	c := &comparison{}
	var ids idTotals
	res := &cachedTotals{skipped: map[string]int{}}
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".gz") {
			err = c.compare(e.Name(), filepath.Join(dir, e.Name()), &ids, res)
		}
	}
	return res, c.cached.String(), err
}

// Everything that affects hits: branches, salt, adapter, eviction, a reset that is
// announced late, the last token.
func TestPredictions(t *testing.T) {
	meta := m{"kind": "meta", "engine": "vllm", "t": 0}
	dir := write(t, meta,
		event(0.5, frames(t, 7, 0, stored([]uint64{1, 2}, nil, ids(1, 8), nil))),
		event(0.6, frames(t, 8, 0, stored([]uint64{3}, nil, ids(1, 4), m{"extra_keys": []any{[]any{"tenant"}}}), stored([]uint64{4}, nil, ids(1, 4), m{"lora_name": "ad", "extra_keys": []any{[]any{"ad"}}}))),
		ask(1, 1, ids(1, 9), 8, nil), ask(2, 2, ids(1, 8), 4, nil), ask(3, 3, append(ids(1, 4), ids(50, 9)...), 4, nil), ask(4, 4, ids(90, 9), 0, nil),
		ask(5, 5, ids(1, 9), 4, m{"cache_salt": "tenant"}), ask(6, 6, ids(1, 9), 0, m{"cache_salt": "other"}), ask(7, 7, ids(1, 9), 4, m{"model": "ad"}),
		event(7.8, frames(t, 9, 0, m{"type": "BlockRemoved", "block_hashes": []int{2}, "medium": "GPU"})),
		ask(8, 8, ids(1, 9), 4, nil),
		m{"kind": "http", "n": 9, "path": "/reset_prefix_cache", "t_sent": 9, "t": 9.1, "resp": m{"success": true}},
		ask(10, 10, ids(1, 9), 0, nil),
		// Not judged: two answers, no ids; two concurrent requests have bounds.
		ask(11, 11, ids(1, 9), 0, m{"n": 2}), m{"kind": "http", "n": 12, "path": "/v1/completions", "body": "{}", "t_sent": 12, "t": 12.5, "resp": m{"usage": m{"prompt_tokens": 5, "prompt_tokens_details": m{"cached_tokens": 0}}}},
		ask(13, 13, ids(1, 9), 0, nil), ask(14, 13.2, ids(1, 9), 0, nil))
	res, out, err := checked(dir)
	if err != nil {
		t.Fatal(err)
	}
	want := `one.jsonl.gz: right 9, wrong 0, predicted 28 and reported 28 cached tokens; 2 beside others within bounds; not judged: 1 of unknown ids, 1 with several answers
`
	if res.wrong != 0 || out != want {
		t.Errorf("%d wrong, got\n%s\nwant\n%s", res.wrong, out, want)
	}
}

// A request that names no rank went where events came from; without events it is judged if
// all ranks hold the same. Endpoints count in different fields. Blocks that another engine
// sends are not predicted.
func TestRanksAndWords(t *testing.T) {
	open := func(n int, at float64, path string, prompt []int, usage m, body m) m {
		r := ask(n, at, prompt, 0, body)
		r["headers"], r["path"] = m{}, path
		r["resp"] = m{"choices": []any{m{"prompt_token_ids": prompt}}, "usage": usage}
		return r
	}
	other := func(at float64, f [][]byte) m {
		e := event(at, f)
		e["source"] = "rank1"
		return e
	}
	completions := func(tokens, cached int) m {
		return m{"prompt_tokens": tokens, "prompt_tokens_details": m{"cached_tokens": cached}}
	}
	dir := write(t, m{"kind": "meta", "engine": "vllm", "t": 0},
		event(0.5, frames(t, 0, 0, stored([]uint64{1}, nil, ids(1, 4), nil))),
		other(0.6, frames(t, 0, 1, stored([]uint64{1, 2}, nil, ids(1, 8), nil))),
		other(1.2, frames(t, 1, 1, stored([]uint64{3}, 2, ids(9, 4), nil))),
		open(1, 1, "/v1/completions", ids(1, 13), completions(13, 8), nil),
		open(2, 2, "/v1/completions", ids(60, 13), completions(13, 0), nil),
		open(3, 3, "/v1/completions", ids(1, 13), completions(13, 12), nil), // either rank
		other(4.2, frames(t, 2, 1, stored([]uint64{4}, 3, ids(13, 4), nil))),
		open(4, 4, "/v1/responses", ids(1, 17), m{"input_tokens": 17, "input_tokens_details": m{"cached_tokens": 12}}, nil),
		other(5.2, frames(t, 3, 1, stored([]uint64{5}, 4, ids(17, 4), nil))),
		open(5, 5, "/v1/messages", ids(1, 21), m{"input_tokens": 1, "cache_creation_input_tokens": 4, "cache_read_input_tokens": 16}, nil),
		open(6, 6, "/v1/completions", ids(1, 9), completions(9, 8), m{"kv_transfer_params": m{"do_remote_prefill": true}}))
	res, out, err := checked(dir)
	if err != nil {
		t.Fatal(err)
	}
	if want := "one.jsonl.gz: right 4, wrong 0, predicted 36 and reported 36 cached tokens; not judged: 1 with blocks from another engine, 1 without a rank\n"; res.wrong != 0 || !strings.HasPrefix(out, want) {
		t.Errorf("got\n%s\nwant\n%s", out, want)
	}
}

// Blocks that SGLang announces after a request used them are an earlier request's, which is
// correct; blocks that it never announces are a difference.
func TestLateEvents(t *testing.T) {
	dir := write(t, m{"kind": "meta", "engine": "sglang", "t": 0},
		event(0.5, frames(t, 0, 0, stored([]uint64{1}, nil, ids(1, 4), nil))),
		ask(1, 1, ids(1, 13), 8, nil),
		event(1.6, frames(t, 1, 0, stored([]uint64{2}, 1, ids(5, 4), nil))),
		ask(2, 10, ids(1, 13), 12, nil))
	res, out, err := checked(dir)
	if err != nil || res.wrong != 1 || res.skipped["announced only after they were used"] != 1 {
		t.Errorf("%v, %v\n%s", &res, err, out)
	}
}

// Requests that run concurrently with others on their rank have only bounds.
func TestConcurrentRequestsHaveBounds(t *testing.T) {
	dir := write(t, m{"kind": "meta", "engine": "vllm", "t": 0},
		event(0.5, frames(t, 0, 0, stored([]uint64{1}, nil, ids(1, 4), nil))),
		ask(1, 1, ids(1, 13), 4, nil), ask(2, 1.2, ids(1, 13), 12, nil), ask(3, 1.4, append(ids(1, 8), ids(50, 5)...), 12, nil))
	res, out, err := checked(dir)
	if err != nil || res.bounded != 2 || res.wrong != 1 || !strings.Contains(out, "#3 \"ask\": predicted 4 to 8 beside others, engine reported 12") {
		t.Errorf("%v, %v\n%s", &res, err, out)
	}
}

// A difference is shown and counted.
func TestDifferencesAreCounted(t *testing.T) {
	dir := write(t, m{"kind": "meta", "engine": "vllm", "t": 0}, event(0.5, frames(t, 0, 0, stored([]uint64{1}, nil, ids(1, 4), nil))), ask(1, 1, ids(1, 9), 8, nil))
	res, out, err := checked(dir)
	if err != nil || res.wrong != 1 || !strings.Contains(out, `one.jsonl.gz #1 "ask": predicted 4, engine reported 8`) {
		t.Errorf("%d wrong, %v:\n%s", res.wrong, err, out)
	}
}

// Events of SGLang do not show an extra_key: a prompt that begins like one with a key cannot be judged. Ids come from the
// request where the answer has none.
func TestSGLangExtraKeys(t *testing.T) {
	given := func(n int, at float64, prompt any, tokens, cached int, more m) m {
		body := m{"model": "base", "prompt": prompt}
		maps.Copy(body, more)
		r := ask(n, at, nil, cached, body)
		r["resp"] = m{"choices": []any{m{}}, "usage": m{"prompt_tokens": tokens, "prompt_tokens_details": m{"cached_tokens": cached}}}
		return r
	}
	dir := write(t, m{"kind": "meta", "engine": "sglang", "t": 0},
		event(1.2, frames(t, 0, 0, m{"type": "AllBlocksCleared"}, stored([]uint64{1, 2}, nil, ids(1, 8), nil))),
		given(1, 1, ids(1, 9), 9, 0, nil), given(2, 2, ids(1, 9), 9, 8, nil),
		event(3.2, frames(t, 1, 0, stored([]uint64{3}, 2, ids(9, 4), nil))),
		given(3, 3, ids(1, 13), 13, 8, nil),
		given(4, 4, "text, so its ids are unknown", 9, 0, nil),
		event(5.2, frames(t, 2, 0, stored([]uint64{7}, nil, ids(70, 4), nil))),
		given(5, 5, ids(70, 5), 5, 0, m{"extra_key": "k"}),
		event(6.2, frames(t, 3, 0, stored([]uint64{7}, nil, ids(70, 4), nil))),
		given(6, 6, ids(70, 5), 5, 0, nil))
	res, out, err := checked(dir)
	if err != nil {
		t.Fatal(err)
	}
	if want := "one.jsonl.gz: right 3, wrong 0, predicted 16 and reported 16 cached tokens; not judged: 1 equal to one with extra_key, 1 of unknown ids, 1 with extra_key\n"; res.wrong != 0 || !strings.HasPrefix(out, want) {
		t.Errorf("%d wrong:\n%s", res.wrong, out)
	}
}

// A malformed line is reported, even if everything else is right.
func TestMalformedRecordings(t *testing.T) {
	meta := m{"kind": "meta", "engine": "vllm", "t": 0}
	good := event(0.5, frames(t, 0, 0, stored([]uint64{1}, nil, ids(1, 4), nil)))
	without := func(r m, key string) m {
		r = maps.Clone(r)
		delete(r, key)
		return r
	}
	with := func(r m, key string, v any) m {
		r = maps.Clone(r)
		r[key] = v
		return r
	}
	payload := frames(t, 0, 0, stored([]uint64{1}, nil, ids(1, 4), nil))
	cut := [][]byte{payload[0], payload[1], payload[2][:len(payload[2])-9]}
	for name, c := range map[string]struct {
		records []m
		want    string
	}{
		"no meta":           {[]m{good}, `one.jsonl.gz:1: the first record is of kind "event", want meta`},
		"two metas":         {[]m{meta, meta}, "one.jsonl.gz:2: a second meta record"},
		"engine":            {[]m{with(meta, "engine", "vlm"), good}, `one.jsonl.gz:1: meta names the engine "vlm"`},
		"kind":              {[]m{meta, with(good, "kind", "evnt")}, `one.jsonl.gz:2: record of kind "evnt", want meta, http, event, replay or note`},
		"no source":         {[]m{meta, without(good, "source")}, "one.jsonl.gz:2: event without source"},
		"two frames short":  {[]m{meta, with(good, "frames", payload[2:])}, "one.jsonl.gz:2: event of rank0: 1 frames"},
		"frames no base64":  {[]m{meta, with(good, "frames", []string{"!"})}, "one.jsonl.gz:2: illegal base64"},
		"payload cut":       {[]m{meta, good, with(good, "frames", cut)}, "one.jsonl.gz:3: event of rank0, batch 0: feed: payload is not an event batch"},
		"event malformed":   {[]m{meta, event(0.5, frames(t, 3, 0, m{"type": "BlockStored", "block_hashes": 7}))}, "one.jsonl.gz:2: event of rank0, batch 3: malformed"},
		"not sent":          {[]m{meta, good, without(ask(1, 1, ids(1, 9), 4, nil), "t_sent")}, "one.jsonl.gz:3: http record without t_sent"},
		"not ended":         {[]m{meta, good, without(ask(1, 1, ids(1, 9), 4, nil), "t")}, "one.jsonl.gz:3: http record without t"},
		"ended before sent": {[]m{meta, good, with(ask(1, 1, ids(1, 9), 4, nil), "t", 0.25)}, "one.jsonl.gz:3: http record that ended at 0.25, before it was sent at 1"},
	} {
		if res, out, err := checked(write(t, c.records...)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, %v\n%s", name, err, &res, out)
		}
	}
}

// Missing, repeated and reordered batches are noted, and a restarted engine holds nothing.
func TestIrregularSequences(t *testing.T) {
	one := event(0.5, frames(t, 4, 0, stored([]uint64{1}, nil, ids(1, 4), nil)))
	again := frames(t, 0, 0, stored([]uint64{5}, nil, ids(1, 4), nil))
	dir := write(t, m{"kind": "meta", "engine": "vllm", "t": 0}, one, one, ask(1, 1, ids(1, 9), 4, nil),
		event(1.9, frames(t, 7, 0, stored([]uint64{9}, nil, ids(50, 4), nil))), ask(2, 2, ids(1, 9), 0, nil), ask(3, 3, ids(50, 9), 4, nil),
		event(3.9, again), ask(4, 4, ids(50, 9), 0, nil), ask(5, 5, ids(1, 9), 4, nil))
	res, out, err := checked(dir)
	if want := "one.jsonl.gz, events of rank0: 2 batches missing (the rank was cleared there), 1 batches twice, 1 restarts\n"; err != nil || res.wrong != 0 || res.right != 5 || !strings.HasPrefix(out, want) {
		t.Errorf("%v, %v\n%s", &res, err, out)
	}
}

// Without a single event, tokens that an engine reports as cached are unexplained.
func TestReportedWithoutEvents(t *testing.T) {
	dir := write(t, m{"kind": "meta", "engine": "vllm", "t": 0}, ask(1, 1, ids(1, 9), 8, nil), ask(2, 2, ids(1, 9), 0, nil))
	res, _, err := checked(dir)
	if err != nil || res.wrong != 1 || res.right != 1 {
		t.Errorf("%v, %v", &res, err)
	}
}
