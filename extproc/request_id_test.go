package extproc

import (
	"context"
	"strings"
	"testing"

	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
)

// Options.RequestID applies in every mode, whatever the decision.
func TestRequestIDsAreReplaced(t *testing.T) {
	rule := func(client string) string {
		if strings.Contains(client, "bad") || client == "" {
			return "ours"
		}
		return client
	}
	decisions := map[string]struct {
		decide func(context.Context, *Request) Decision
		want   string // instead of a bad id
	}{
		"a pick":         {func(context.Context, *Request) Decision { return Decision{Endpoint: "10.0.0.1:8000"} }, "ours"},
		"no pick":        {func(context.Context, *Request) Decision { return Decision{} }, "ours"},
		"a panic":        {func(context.Context, *Request) Decision { panic("no decision") }, "ours"},
		"its own id":     {func(context.Context, *Request) Decision { return Decision{Set: []Header{{requestIDKey, "leg"}}} }, "leg"},
		"an unset id":    {func(context.Context, *Request) Decision { return Decision{Remove: []string{"x-other"}} }, "ours"},
		"other headers":  {func(context.Context, *Request) Decision { return Decision{Set: []Header{{"x-rank", "1"}}} }, "ours"},
		"many endpoints": {func(context.Context, *Request) Decision { return Decision{Endpoint: "10.0.0.1:1,10.0.0.2:1"} }, "ours"},
	}
	ids := map[string]struct {
		headers []Header
		bad     bool
	}{
		"good":           {[]Header{{requestIDKey, "fine"}}, false},
		"bad":            {[]Header{{requestIDKey, "bad"}}, true},
		"none":           {nil, true},
		"repeated":       {[]Header{{requestIDKey, "fine"}, {requestIDKey, "bad"}}, true},
		"repeated first": {[]Header{{requestIDKey, "bad"}, {requestIDKey, "fine"}}, true},
	}
	for name, d := range decisions {
		var seen string
		h := handlerFunc(func(ctx context.Context, r *Request) Decision {
			seen = r.ID
			return d.decide(ctx, r)
		})
		b := newBed(t, Options{RequestID: rule}, h)
		for _, mode := range []filterv3.ProcessingMode_BodySendMode{
			filterv3.ProcessingMode_NONE, filterv3.ProcessingMode_STREAMED, filterv3.ProcessingMode_BUFFERED, filterv3.ProcessingMode_BUFFERED_PARTIAL,
			filterv3.ProcessingMode_FULL_DUPLEX_STREAMED,
		} {
			for which, id := range ids {
				c := &call{request: mode, headers: append([]Header{{":method", "POST"}, {":path", "/"}}, id.headers...), chunks: [][]byte{[]byte("{}")}, emptyEnd: true}
				res, err := b.play(t.Context(), c)
				if err != nil {
					t.Fatalf("%s, %s, %s: %v", name, mode, which, err)
				}
				want, wantSeen := "", "fine"
				if id.bad {
					want, wantSeen = d.want, "ours"
				} else if d.want == "leg" {
					want = "leg"
				}
				if got := res.set[requestIDKey]; got != want || seen != wantSeen {
					t.Errorf("%s, %s, %s: id set to %q, want %q; the handler saw %q, want %q", name, mode, which, got, want, seen, wantSeen)
				}
			}
		}
	}
}

// Without the option ids stay unchanged.
func TestRequestIDsStay(t *testing.T) {
	b := newBed(t, Options{}, &recorder{})
	res, err := b.play(t.Context(), &call{request: filterv3.ProcessingMode_BUFFERED, headers: []Header{{requestIDKey, "bad"}}, chunks: [][]byte{[]byte("{}")}})
	if _, set := res.set[requestIDKey]; err != nil || set {
		t.Errorf("got id %q, %v, want it unchanged", res.set[requestIDKey], err)
	}
}
