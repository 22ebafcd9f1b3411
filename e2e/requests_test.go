package e2e

import (
	"bytes"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

const system = "You are a librarian. Novels stand on the ground floor, maps on the first, letters on the second, and what nobody " +
	"asks for in the cellar. You answer briefly and you never send anybody away without a book."

// The core promise: the second turn is routed to the rank that cached the first, and the
// engine's own usage equals Kvlane's prediction.
func TestASecondTurnLandsOnTheRankThatCachedTheFirst(t *testing.T) {
	for name, s := range map[string]shape{
		"map events, header":    {},
		"array events, header":  {engine: func(_ int, o *enginesim.Options) { o.ArrayEvents = true }},
		"hashes as bytes":       {engine: func(_ int, o *enginesim.Options) { o.RawHashes = true }},
		"a port of its own":     {perPort: true},
		"sglang":                {engine: func(_ int, o *enginesim.Options) { o.Engine = enginesim.SGLang }, worker: ", engine: sglang", model: ", engine: sglang"},
		"larger engine blocks":  {engine: func(_ int, o *enginesim.Options) { o.BlockSize = 32 }},
		"response bodies seen":  {envoy: ", response_body: STREAMED"},
		"full duplex both ways": {envoy: ", request_body: FULL_DUPLEX_STREAMED, response_body: FULL_DUPLEX_STREAMED"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, s)
			used := map[string]bool{}
			for n := range 4 {
				messages := []message{{"system", fmt.Sprintf("Reader %d. %s", n, system)}, {"user", "Where are the maps?"}}
				first := b.chat(messages...)
				messages = append(messages, message{"assistant", first.text()}, message{"user", "And the letters?"})
				second := b.chat(messages...)
				if first.target == "" || second.target != first.target {
					t.Errorf("first turn on %q, second on %q", first.target, second.target)
				}
				if second.answer.Usage.Details.Cached == 0 || second.matched != second.answer.Usage.Details.Cached {
					t.Errorf("predicted %d cached tokens, the engine says %d", second.matched, second.answer.Usage.Details.Cached)
				}
				used[first.target] = true
			}
			if len(used) != 4 {
				t.Errorf("births were not spread over the targets: %v", used)
			}
		})
	}
}

// The rank must reach the engine, and clients cannot set headers that steer requests.
func TestARankReachesTheEngineAndAClientCannotSteer(t *testing.T) {
	b := newBed(t, shape{})
	for i := range 8 {
		r := b.post("/v1/chat/completions", chatBody(message{"user", prose(fmt.Sprint(i), 40)}),
			"x-gateway-destination-endpoint", b.engines[1].Addr(), "x-data-parallel-rank", "1", "x-kvlane-pin", "e1/1", "x-kvlane-endpoint", b.engines[1].Addr())
		worker, rec, ok := b.seen(r.header.Get("X-Request-Id"))
		if !ok || r.status != http.StatusOK {
			t.Fatalf("status %d: %s", r.status, r.body)
		}
		if want := fmt.Sprintf("%s/%d", worker, rec.Rank); r.target != want || !rec.Pinned {
			t.Errorf("decided for %s, served by %s, pinned %v", r.target, want, rec.Pinned)
		}
		if pick := rec.Headers["x-gateway-destination-endpoint"]; pick != b.engines[worker[1]-'0'].Addr() {
			t.Errorf("%s got the pick %s", worker, pick)
		}
		for name := range rec.Headers {
			if strings.HasPrefix(name, "x-kvlane-") {
				t.Errorf("header %s reached the engine", name)
			}
		}
	}
	if n := b.metric("kvlane_picks_total", `worker="e0"`); n == 0 {
		t.Error("the client steered everything to e1")
	}
}

// An unset rank is not 0: where the engine chooses, no header is sent.
func TestAnUnsetRankIsNotZero(t *testing.T) {
	b := newBed(t, shape{ranks: 1, rankFree: true, engine: func(_ int, o *enginesim.Options) { o.Ranks = 2 }})
	for i := range 4 {
		r := b.chat(message{"user", prose(fmt.Sprint(i), 30)})
		if _, rec, _ := b.seen(r.header.Get("X-Request-Id")); rec.Pinned || rec.Headers["x-data-parallel-rank"] != "" {
			t.Errorf("a rank was named: %+v", rec.Headers)
		}
	}
}

// Every API with a prompt is routed by its prompt.
func TestCompletionsOfEveryShape(t *testing.T) {
	b := newBed(t, shape{})
	ids := strings.TrimSuffix(strings.Repeat("1000,2000,3000,4000,", 20), ",")
	for name, prompt := range map[string]string{
		"text":                `"` + prose("a", 90) + `"`,
		"list of texts":       `["` + prose("b", 90) + `", "second"]`,
		"token ids":           `[` + ids + `]`,
		"lists of token ids":  `[[` + ids + `,7], [1, 2]]`,
		"text with an escape": `"` + prose("c", 90) + `\u00e9\n"`,
	} {
		body := []byte(`{"max_tokens": 4, "prompt": ` + prompt + `, "model": "demo"}`)
		first, second := b.post("/v1/completions", body), b.post("/v1/completions", body)
		if first.status != http.StatusOK || second.status != http.StatusOK {
			t.Fatalf("%s: status %d: %s", name, first.status, first.body)
		}
		b.intact(second, body)
		if second.target != first.target || second.matched < 64 {
			t.Errorf("%s: on %s, then on %s with %d tokens matched", name, first.target, second.target, second.matched)
		}
	}
}

// Salts and models separate caches.
func TestASaltSeparatesCaches(t *testing.T) {
	b := newBed(t, shape{})
	body := func(salt string) []byte {
		return []byte(`{"model":"demo","max_tokens":2,"cache_salt":"` + salt + `","prompt":"` + prose("salt", 100) + `"}`)
	}
	b.post("/v1/completions", body("a"))
	if r := b.post("/v1/completions", body("b")); r.matched != 0 || r.answer.Usage.Details.Cached != 0 {
		t.Errorf("another salt matched %d tokens, the engine says %d", r.matched, r.answer.Usage.Details.Cached)
	}
	if r := b.post("/v1/completions", body("a")); r.matched == 0 || r.matched != r.answer.Usage.Details.Cached {
		t.Errorf("the same salt matched %d tokens, the engine says %d", r.matched, r.answer.Usage.Details.Cached)
	}
}

// Bodies arrive unchanged, whatever their bytes.
func TestBodiesArriveIntact(t *testing.T) {
	for _, mode := range []string{"BUFFERED", "FULL_DUPLEX_STREAMED"} {
		t.Run(mode, func(t *testing.T) {
			b := newBed(t, shape{envoy: ", request_body: " + mode, engine: func(_ int, o *enginesim.Options) { o.Blocks, o.MaxModelLen = 1<<15, 500_000 }})
			odd := []byte("{ \"b\":1e5,\n\t\"messages\" : [ {\"content\":\"h\\u00e9 \\ud83d\\ude42 </b>\" , \"role\":\"user\"} ],\"a\":1.0,\"model\":\"demo\",\"max_tokens\":1 } \n")
			b.intact(b.post("/v1/chat/completions", odd), odd)
			long := chatBody(message{"user", prose("long", 100_000)})
			r := b.post("/v1/chat/completions", long)
			if r.status != http.StatusOK || r.answer.Usage.Prompt < 100_000 {
				t.Errorf("100k tokens: status %d, %d prompt tokens", r.status, r.answer.Usage.Prompt)
			}
			b.intact(r, long)
			// A chat of 10 MB: every character of its text is a six-byte escape.
			var text strings.Builder
			for _, c := range []byte(prose("huge", 340_000)) {
				fmt.Fprintf(&text, `\u%04x`, c)
			}
			huge := fmt.Appendf(nil, `{"model":"demo","max_tokens":1,"messages":[{"role":"user","content":"%s"}]}`, text.String())
			if len(huge) < 10<<20 {
				t.Fatalf("%d bytes", len(huge))
			}
			r = b.post("/v1/chat/completions", huge)
			if r.status != http.StatusOK || r.answer.Usage.Prompt < 300_000 {
				t.Errorf("10 MB: status %d, %d prompt tokens: %.300s", r.status, r.answer.Usage.Prompt, r.body)
			}
			b.intact(r, huge)
			// 10 MB that are not a prompt: the engine refuses the audio API, which it does not have, with 404.
			big := bytes.Repeat([]byte("0123456789"), 1<<20)
			if r := b.post("/v1/audio/transcriptions", big); r.status != http.StatusNotFound {
				t.Errorf("10 MB: status %d", r.status)
			}
			if r := b.post("/v1/audio/speech", []byte(`{"model": "demo", "input": "Hello", "voice": "alloy"}`)); r.status != http.StatusNotFound {
				t.Errorf("speech: got status %d, want the engine's 404", r.status)
			}
			if n := b.metric("kvlane_requests_total", `api="audio"`, `outcome="routed"`); n != 2 {
				t.Errorf("got %v audio requests routed, want 2", n)
			}
		})
	}
}
