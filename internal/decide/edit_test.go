package decide

import (
	"bytes"
	"context"
	"strings"
	"testing"
	"time"

	"github.com/kvlane/kvlane/extproc"
)

// late is a context that ends after a number of calls of Err.
type late struct {
	context.Context
	looks int
}

func (l *late) Err() error {
	if l.looks--; l.looks < 0 {
		return context.Canceled
	}
	return nil
}

// A client that disconnects at any moment, even while its body is edited, gets no worker,
// and no engine gets the unedited body.
func TestAClientLeavesWhileItsBodyIsEdited(t *testing.T) {
	body := `{"prompt":"` + strings.Repeat("word ", 400) + `"` + strings.Repeat(`,"x":1,"kv_transfer_params":{"remote_host":"evil"}`, 5000) + `}`
	check := func(t *testing.T, decide func(ctx context.Context) extproc.Decision, active func() int64) {
		for looks, rejected := 0, 0; ; looks++ {
			d := decide(&late{context.Background(), looks})
			if d.Reject == nil && d.Endpoint != "" {
				if bytes.Contains(d.Body, []byte("evil")) || len(d.Body) == 0 {
					t.Errorf("after %d looks: got %d bytes for the engine, want them without the client's parameters", looks, len(d.Body))
				}
				d.Ticket.End(time.Now())
				if rejected < 10 { // earlier stages check the context too
					t.Errorf("got %d refused clients, want some whose bodies were being edited", rejected)
				}
				break
			}
			if d.Ticket != nil { // it ends when the stream does
				d.Ticket.End(time.Now())
			} else if d.Reject == nil || d.Reject.Status != 499 {
				t.Fatalf("after %d looks: got %+v, want status 499", looks, d.Reject)
			}
			rejected++
		}
		if n := active(); n != 0 {
			t.Errorf("got %d booked, want none", n)
		}
	}
	t.Run("not split", func(t *testing.T) {
		b := newBench(t, "disagg: {connector: nixl}", worker("a", 0))
		check(t, func(ctx context.Context) extproc.Decision {
			return b.Decide(ctx, b.request("/v1/completions", `{"model":"demo",`+body[1:]))
		}, b.loads)
	})
	t.Run("split", func(t *testing.T) {
		p := newPoolsOf(t, "nixl")
		check(t, func(ctx context.Context) extproc.Decision {
			return p.Decide(ctx, &extproc.Request{ID: "r", Method: "POST", Path: "/v1/completions", Body: []byte(body)})
		}, func() int64 { return int64(p.router.Live()) })
	})
}

// Adding ids to a body ends with its client too: the copy that would be made is as large as the prompt.
func TestIDsAreNotAddedForAClientThatIsGone(t *testing.T) {
	b := newBench(t, "", worker("a", 0))
	b.fleet.Model("demo").Config.HandIDs = new(true)
	ask := func(ctx context.Context) extproc.Decision {
		d := b.Decide(ctx, b.request("/v1/completions", completion(40, "")))
		if d.Ticket != nil {
			d.Ticket.End(time.Now())
		}
		return d
	}
	if d := ask(t.Context()); !bytes.Contains(d.Body, []byte(`"prompt":[`)) {
		t.Fatalf("got %s, want ids in the place of the text", d.Body)
	}
	for looks := range 100 { // the first request that is routed ends while ids are added
		if d := ask(&late{context.Background(), looks}); d.Endpoint != "" {
			if d.Body != nil {
				t.Errorf("after %d looks: got ids added, want the body as it came", looks)
			}
			return
		}
	}
	t.Error("got no request routed in 100 looks")
}
