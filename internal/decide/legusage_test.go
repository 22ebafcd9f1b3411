package decide

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/disagg"
)

const withUsage = `{"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"e"},` +
	`"usage":{"prompt_tokens":400,"prompt_tokens_details":{"cached_tokens":352}}}`

// The client gets the prefill leg's usage if that is configured, for both kinds of legs;
// otherwise response bodies are not read.
func TestUsageOfTheLeg(t *testing.T) {
	for _, connector := range []string{"nixl", "sglang"} {
		for _, told := range []string{config.UsageOfDecode, config.UsageOfPrefill} {
			t.Run(connector+" "+told, func(t *testing.T) {
				p := newPoolsOf(t, connector)
				p.cfg.Disagg.Usage = told
				p.both(answer(withUsage))
				d := p.ask(t.Context(), "r")
				defer end(&d, 200)
				edit, ok := d.Ticket.(extproc.EditTicket)
				if !ok {
					t.Fatalf("%+v", d)
				}
				d.Ticket.ResponseHeaders(200, "")
				if edit.EditsBody() != (told == config.UsageOfPrefill) {
					t.Fatalf("edits %v", edit.EditsBody())
				}
				if told == config.UsageOfDecode {
					return
				}
				var all strings.Builder
				for i, piece := range []string{"", `{"usage":{"prompt_tokens":400,"prom`, `pt_tokens_details":{"cached_tokens":1}},"a":1}`, ""} {
					out, changed, holds := edit.EditBody([]byte(piece), i == 3)
					if !changed {
						out = []byte(piece)
					}
					if holds != (i == 1) {
						t.Errorf("piece %d: holds %v", i, holds)
					}
					all.Write(out)
				}
				if want := `{"usage":{"prompt_tokens":400,"prompt_tokens_details":{"cached_tokens":352}},"a":1}`; all.String() != want {
					t.Errorf("%s", all.String())
				}
			})
		}
	}
}

// The body of an error is unchanged, and so is usage if the leg reported none.
func TestUsageThatStays(t *testing.T) {
	p := newPoolsOf(t, "nixl")
	p.cfg.Disagg.Usage = config.UsageOfPrefill
	d := p.ask(t.Context(), "r")
	edit, ok := d.Ticket.(extproc.EditTicket)
	if !ok {
		t.Fatalf("%+v", d)
	}
	d.Ticket.ResponseHeaders(http.StatusInternalServerError, "")
	if edit.EditsBody() {
		t.Error("an error is edited")
	}
	if out, changed, _ := edit.EditBody([]byte(`{"usage":{"prompt_tokens":7}}`), true); changed {
		t.Errorf("%s", out)
	}
	end(&d, 200)
}

// Usage that arrives before the leg has ended is held back for a bounded time, once.
func TestUsageBeforeTheLegsEnd(t *testing.T) {
	u := disagg.NewLegUsage()
	tk := &ticket{legUsage: u}
	usage := `{"prompt_tokens":7}`
	if got := string(tk.completeUsage(nil, []byte(usage))); got != usage || !tk.impatient {
		t.Errorf("%s, impatient %v", got, tk.impatient)
	}
	u.Keep(&disagg.Usage{Prompt: 400, Cached: 352})
	if got := string(tk.completeUsage(nil, []byte(usage))); got != `{"prompt_tokens":400}` {
		t.Errorf("%s", got)
	}
	u = disagg.NewLegUsage()
	time.AfterFunc(time.Millisecond, func() { u.Keep(nil) })
	if !u.Wait(time.Minute) || string(u.Edit(nil, []byte(usage))) != usage {
		t.Errorf("got %s, want the usage as it was", u.Edit(nil, []byte(usage)))
	}
}
