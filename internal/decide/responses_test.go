package decide

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/workers"
)

func fourWorkers() []workers.Worker {
	return []workers.Worker{worker("a", 0), worker("b", 0), worker("c", 0), worker("d", 0)}
}

// idSent is the id that the engine gives its answer, "" if Kvlane chose none.
func idSent(t *testing.T, d *extproc.Decision) string {
	t.Helper()
	if d.Body == nil {
		return ""
	}
	r, err := body.Parse(body.Responses, d.Body)
	if err != nil {
		t.Fatalf("%s: %v", d.Body, err)
	}
	return r.Text(body.FieldRequestID)
}

func (b *bench) respond(previous, more string, headers ...string) extproc.Decision {
	return b.Decide(b.t.Context(), b.request("/v1/responses",
		fmt.Sprintf(`{"model":"demo","input":%q,"previous_response_id":%q%s}`, strings.Repeat("sea ", 400), previous, more), headers...))
}

// flip changes the first digit.
func flip(digits string) string {
	if digits[0] == '0' {
		return "1" + digits[1:]
	}
	return "0" + digits[1:]
}

func (b *bench) get(method, path string, headers ...string) extproc.Decision {
	r := b.request(path, "", headers...)
	r.Method = method
	return b.Decide(b.t.Context(), r)
}

// Whatever the load, an answer is continued, read and cancelled at the worker that has it.
func TestAStoredResponseIsContinuedWhereItIs(t *testing.T) {
	b := newBench(t, "", fourWorkers()...)
	first := b.respond("", "")
	end(&first, 200)
	id, home, conversation := idSent(t, &first), first.Endpoint, ""
	for turn := range 6 {
		busy := b.respond(id, "")
		defer end(&busy, 200)
		for what, path := range map[string]string{"GET": "/v1/responses/" + id + "?stream=true", "POST": "/gateway/v1/responses/" + id + "/cancel", "DELETE": "/v1/%72esponses/" + id} {
			d := b.get(what, path)
			defer end(&d, 200)
			if d.Endpoint != home {
				t.Errorf("%s %s: got %s, want %s", what, path, d.Endpoint, home)
			}
		}
		if busy.Endpoint != home {
			t.Fatalf("turn %d: got %s, want %s", turn, busy.Endpoint, home)
		}
		next := idSent(t, &busy)
		e := b.decisions.Find(fmt.Sprintf("r%d", b.n-3))
		if turn == 0 {
			conversation = e.Conversation
		}
		if len(next) != len(id) || next == id || e.Conversation != conversation {
			t.Fatalf("turn %d: got id %s after %s, want another one of the same conversation", turn, next, id)
		}
		if e.Matched == 0 || !strings.HasPrefix(conversation, "resp_") {
			t.Errorf("turn %d: got %d tokens matched in conversation %q, want the earlier prompt matched", turn, e.Matched, conversation)
		}
		id = next
	}
	other := b.respond("", "")
	defer end(&other, 200)
	if other.Endpoint == home || idSent(t, &other) == id {
		t.Errorf("a new conversation: got %s, want another worker than the busy %s, and another conversation", other.Endpoint, home)
	}
}

func TestIDsThatKvlaneDidNotChooseDecideNothing(t *testing.T) {
	b, same, other := newBench(t, "", fourWorkers()...), newBench(t, "", fourWorkers()...), newBench(t, "index: {key: other}\n", fourWorkers()...)
	// All but the last worker are busy: that one gets what is free to choose.
	first := b.respond("", "")
	id, home := idSent(t, &first), first.Endpoint
	for i, c := range []struct {
		b        *bench
		previous string
		home     bool
	}{
		{b, id, true}, {same, id, true}, {other, id, false}, {b, "", false}, {b, "resp_", false}, {b, "resp_0123456789abcdef", false},
		{b, id + "00", false}, {b, id[:40] + "x" + id[41:], false}, {b, id[:40] + flip(id[40:]), false},
		{b, "resp_" + strings.Repeat("0", 64), false},
	} {
		at := map[string]int{}
		for range 8 {
			d := c.b.respond(c.previous, "")
			defer end(&d, 200)
			at[d.Endpoint]++
		}
		if (len(at) == 1 && at[home] == 8) != c.home || !c.home && len(at) < 3 {
			t.Errorf("%d, %q: got %v, want all at %s: %v", i, c.previous, at, home, c.home)
		}
	}
	end(&first, 200)
	for body, want := range map[string]string{`,"store":false`: "", `,"request_id":"an_id_of_a_client_that_knows"`: "an_id_of_a_client_that_knows"} {
		d := b.respond("x", body)
		if got := idSent(t, &d); got != want && (want == "" || d.Body != nil) {
			t.Errorf("%s: got id %q, want %q", body, got, want)
		}
		end(&d, 200)
	}
	if d, _ := b.ask("/v1/chat/completions", `{"model":"demo","messages":[{"role":"user","content":"x"}]}`); d.Body != nil {
		t.Errorf("got %s, want a chat unchanged", d.Body)
	}
}

// An answer is the tenant's that asked for it.
func TestNoTenantContinuesAnothersResponse(t *testing.T) {
	b := newBench(t, "tenants: {salt_header: X-Tenant}\n", worker("a", 0), worker("b", 0))
	first := b.respond("", `,"request_id":"mine"`, saltHeader, "alice")
	end(&first, 200)
	id := idSent(t, &first)
	for tenant, want := range map[string]int{"alice": 0, "mallory": 404, "": 403} {
		var headers []string
		if tenant != "" {
			headers = []string{saltHeader, tenant}
		}
		for what, d := range map[string]extproc.Decision{
			"continue": b.respond(id, "", headers...), "get": b.get("GET", "/v1/responses/"+id, headers...), "cancel": b.get("POST", "/v1/responses/"+id+"/cancel", headers...),
		} {
			got := 0
			if d.Reject != nil {
				got = d.Reject.Status
			} else if d.Endpoint != first.Endpoint {
				t.Errorf("%s by %q: got %s, want %s", what, tenant, d.Endpoint, first.Endpoint)
			}
			if got != want {
				t.Errorf("%s by %q: got status %d, want %d", what, tenant, got, want)
			}
			end(&d, 200)
		}
	}
	for _, more := range []string{`,"store":false,"request_id":"` + id + `"`, `,"store":false` + strings.Repeat(`,"x":0`, 2000) + `,"store":true,"request_id":"` + id + `"`} {
		d := b.respond("", more, saltHeader, "mallory")
		if got := idSent(t, &d); got == id || got == "" {
			t.Errorf("got id %q for the answer to %.40s, want one of Kvlane's: with the client's it would replace another's", got, more)
		}
		end(&d, 200)
	}
	if d := b.get("GET", "/v1/responses/mine", saltHeader, "alice"); d.Reject == nil || d.Reject.Status != http.StatusNotFound {
		t.Errorf("got %+v for an id of the client's, want 404: another tenant may have chosen it", d.Reject)
	}
}

// A full worker is waited for; one that must not be used is not.
func TestAStoredResponseOfAWorkerThatCannotServe(t *testing.T) {
	b := newBench(t, "routing: {policy: {limits: {max_active: 1}}}\n", fourWorkers()...)
	first := b.respond("", "")
	id, home := idSent(t, &first), first.Endpoint
	d := b.respond(id, "")
	if d.Reject == nil || d.Reject.Status != http.StatusTooManyRequests {
		t.Errorf("got %s %+v while its worker is full, want 429", d.Endpoint, d.Reject)
	}
	end(&d, 200)
	end(&first, 200)
	for what, change := range map[string]func(*workers.Worker){"draining": func(w *workers.Worker) { w.Draining = true }, "gone": func(w *workers.Worker) { w.Name += "2"; w.Generation++ }} {
		list := fourWorkers()
		for i := range list {
			if list[i].Address == home {
				change(&list[i])
			}
		}
		b.Fleet().SetWorkers(list)
		d := b.respond(id, "")
		if d.Endpoint == "" || what == "draining" && d.Endpoint == home {
			t.Errorf("%s: got %q %+v, want another worker", what, d.Endpoint, d.Reject)
		}
		end(&d, 200)
		b.Fleet().SetWorkers(fourWorkers())
	}
}

// Reading and cancelling an answer needs no room, and a worker that drains is not waited for.
func TestAStoredResponseWithAQueue(t *testing.T) {
	b := newBench(t, "flow: {max_requests: 100, zero_workers: 1m}\nrouting: {policy: {limits: {max_active: 1}}}\n", fourWorkers()...)
	first := b.respond("", "")
	id, home := idSent(t, &first), first.Endpoint
	for what, path := range map[string]string{"GET": "/v1/responses/" + id, "POST": "/v1/responses/" + id + "/cancel"} {
		if d := b.get(what, path); d.Endpoint != home {
			t.Errorf("%s %s while the worker is full: got %s %+v, want %s", what, path, d.Endpoint, d.Reject, home)
		} else {
			end(&d, 200)
		}
	}
	end(&first, 200)
	list := fourWorkers()
	for i := range list {
		list[i].Draining = list[i].Address == home
	}
	b.Fleet().SetWorkers(list)
	if d := b.respond(id, ""); d.Endpoint == "" || d.Endpoint == home {
		t.Errorf("draining: got %q %+v, want another worker", d.Endpoint, d.Reject)
	} else {
		end(&d, 200)
	}
}

// A client's id that must not reach the engine is replaced, not only removed.
func TestATenantsAnswerHasANameWithAConnector(t *testing.T) {
	for _, more := range []string{"", "disagg: {connector: p2p-nccl}\n", "disagg: {connector: nixl}\n"} {
		b := newBench(t, "tenants: {salt_header: X-Tenant}\n"+more, worker("a", 0), worker("b", 0))
		for _, id := range []string{"mine", "___prefill_addr_1.1.1.1:1___decode_addr_1.1.1.1:2_"} {
			d := b.respond("", `,"request_id":"`+id+`"`, saltHeader, "alice")
			if got := idSent(t, &d); !strings.HasPrefix(got, "resp_") {
				t.Errorf("%q, %q: got id %q %+v, want one of Kvlane's", more, id, got, d.Reject)
			}
			end(&d, 200)
		}
	}
}

// Without a prefill worker the worker that has the answer computes the prompt itself: another one does not have it. A
// target for the first token does not keep an answer from being read.
func TestAStoredResponseWithoutAPrefillWorker(t *testing.T) {
	list := []workers.Worker{worker("p", 0), worker("a", 0), worker("b", 0), worker("c", 0)}
	list[0].Role, list[0].Ready = "prefill", false
	for i := range list[1:] {
		list[i+1].Role = "decode"
	}
	b := newBench(t, "disagg: {connector: nixl}\nslo: {unmet: refuse}\nrouting: {disagg: {mode: threshold, threshold: 0}}\n", list...)
	first := b.respond("", "")
	end(&first, 200)
	id, home := idSent(t, &first), first.Endpoint
	for range 6 {
		d := b.respond(id, "")
		defer end(&d, 200)
		if d.Endpoint != home {
			t.Errorf("got %q %+v, want %s, which has the answer", d.Endpoint, d.Reject, home)
		}
	}
	if d := b.get("GET", "/v1/responses/"+id, ttftHeader, "1"); d.Endpoint != home {
		t.Errorf("read: got %q %+v, want %s", d.Endpoint, d.Reject, home)
	} else {
		end(&d, 200)
	}
}

// Ranks behind one address share what is stored, and the rank that computed the history is preferred; ranks with ports of
// their own are processes of their own.
func TestAStoredResponseOfARank(t *testing.T) {
	for _, by := range []string{"header", "port"} {
		w := worker("a", 4)
		w.RankBy = by
		b := newBench(t, "routing: {policy: {limits: {max_active: 1}}}\n", w)
		first, e := b.ask("/v1/responses", `{"model":"demo","input":"`+strings.Repeat("sea ", 400)+`"}`)
		end(&first, 200)
		id, home := idSent(t, &first), e.Target
		want := map[string]int{home: 1}
		var got []string
		for range 4 {
			d := b.respond(id, "")
			defer end(&d, 200)
			if d.Reject == nil {
				got = append(got, b.decisions.Find(fmt.Sprintf("r%d", b.n)).Target)
			}
		}
		if len(got) == 0 || want[got[0]] != 1 || (by == "port") != (len(got) == 1) {
			t.Errorf("%s: got %v, want %s first, and its other ranks only where they share its address", by, got, home)
		}
	}
}
