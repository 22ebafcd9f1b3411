package config

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/kvlane/kvlane/routing"
)

func TestProblemsOfFlow(t *testing.T) {
	_, err := Parse("k.yaml", []byte(`envoy: {message_timeout: 1m}
routing: {wait: {max_requests: 5}}
flow:
  max_requests: 5
  timeout: 1m
  zero_workers: 2m
  fairness: luck
  weights: {a: 0}
  tenant_share: 1.5
  bands:
  - {priority: 1, models: [m], timeout: 90s}
  - {priority: 1, models: [m]}
`))
	wantProblems(t, err,
		`k.yaml:4:17: flow.max_requests: not together with routing.wait, which flow replaces`,
		`k.yaml:5:12: flow.timeout: 1m0s: Envoy waits for 1m0s only (envoy.message_timeout)`,
		`k.yaml:6:17: flow.zero_workers: 2m0s: Envoy waits for 1m0s only (envoy.message_timeout)`,
		`k.yaml:7:13: flow.fairness: "luck" is not one of tenant, api_key, model, none`,
		`k.yaml:8:16: flow.weights.a: 0 is not above 0 and at most 1000000`,
		`k.yaml:9:17: flow.tenant_share: 1.5 must be at most 1`,
		`k.yaml:11:41: flow.bands[0].timeout: 1m30s: Envoy waits for 1m0s only (envoy.message_timeout)`,
		`k.yaml:12:16: flow.bands[1].priority: 1 is the priority of another band`,
		`k.yaml:12:28: flow.bands[1].models[0]: "m" is in another band`)
	if _, err := Parse("k.yaml", []byte("flow: {timeout: 1h}\n")); err != nil {
		t.Errorf("got %v without a queue, want no problem", err)
	}
}

// A queue that takes all bodies that may be in memory leaves none for requests that need not
// wait: check says so.
func TestWarningsOfFlow(t *testing.T) {
	const first = "\nenvoy: {first_token: true}"
	for text, want := range map[string]string{
		"flow: {max_requests: 10000}" + first:                                     "flow.max_requests: 10000 requests are not fewer than limits.bodies_in_flight.count",
		"flow: {max_requests: 10, max_bytes: 1GiB}" + first:                       "flow.max_bytes: is not below limits.bodies_in_flight.bytes",
		"flow: {max_requests: 10, fairness: api_key}" + first:                     "flow.fairness: clients can invent API keys",
		"flow: {max_requests: 10, weights: {a: 2}}\ntenants: {header: X}" + first: "",
		"flow: {max_requests: 10}":                                                "flow.hold_tokens: a prompt counts as queued until the response headers",
		"flow: {max_requests: 10, hold_tokens: 0}":                                "",
	} {
		c, err := Parse("k.yaml", []byte(text+"\n"))
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		var ps places
		var found ProblemsError
		c.warnFlow(ps.reporter(&found).under("flow"))
		for _, p := range found {
			got = append(got, p.Path+": "+p.Message)
		}
		if all := strings.Join(got, "\n"); want == "" && all != "" || !strings.HasPrefix(all, want) {
			t.Errorf("%s: got %q, want %q", text, all, want)
		}
	}
}

// A weight changes the odds between a tenant and the others, so that no weight allows all places or none.
func TestShareOfATenant(t *testing.T) {
	f := &Flow{Requests: 1, TenantShare: 0.75, Weights: map[string]float64{"gold": 4, "batch": 0.25}}
	for tenant, want := range map[string]float64{"": 0.75, "other": 0.75, "gold": 12.0 / 13, "batch": 3.0 / 7} {
		if got := f.Share(tenant); math.Abs(got-want) > 1e-9 {
			t.Errorf("%q: got %v, want %v", tenant, got, want)
		}
	}
	for _, off := range []Flow{{TenantShare: 0.75}, {Requests: 1, TenantShare: 1}, {Requests: 1, TenantShare: 0.75, Fairness: FairNone}} {
		if off.Bounded() || !f.Bounded() {
			t.Errorf("%+v: got a bound, want none", off)
		}
	}
}

func TestBoundsAndBandsOfFlow(t *testing.T) {
	c, err := Parse("k.yaml", []byte(`routing: {wait: {timeout: 7s}}
flow: {max_requests: 100, max_bytes: 1MiB, bands: [{priority: -1, models: [batch], max_requests: 10, timeout: 2m}, {priority: 3}]}
tenants: {header: X-Team, salt_header: X-Tenant}
`))
	if err != nil {
		t.Fatal(err)
	}
	var q routing.Queue
	c.SetBounds(&q)
	if q.Bounds != (routing.Bounds{Requests: 100, Bytes: 1 << 20}) || q.Bands[-1] != (routing.Bounds{Requests: 10, Bytes: 1 << 20}) || q.Bands[3] != q.Bounds {
		t.Errorf("got bounds %+v and %+v", q.Bounds, q.Bands)
	}
	if a, b, d := c.MaxWait(-1), c.MaxWait(0), c.MaxWait(3); a != 2*time.Minute || b != 30*time.Second || d != b {
		t.Errorf("got waits of %s, %s and %s, want 2m, 30s and 30s", a, b, d)
	}
	if a, b := c.Flow.Priority("batch"), c.Flow.Priority("other"); a != -1 || b != 0 {
		t.Errorf("got priorities %d and %d, want -1 and 0", a, b)
	}
	if got := strings.Join(c.Tenants.Headers(), " "); got != "x-tenant x-cache-salt x-smg-routing-key x-team" || c.Tenants.Name() != "x-team" {
		t.Errorf("got headers %s and the tenant in %s", got, c.Tenants.Name())
	}
	c.Tenants.TrustIngress = true
	if got := strings.Join(c.Tenants.Stripped(), " "); got != "x-cache-salt" {
		t.Errorf("got %s removed from trusted requests, want x-cache-salt", got)
	}
	c.Flow.Requests, c.Routing.Wait.Requests = 0, 4
	if c.SetBounds(&q); q.Bounds != (routing.Bounds{Requests: 4}) || q.Bands != nil || c.MaxWait(-1) != 7*time.Second {
		t.Errorf("routing.wait: got %+v, %+v and %s", q.Bounds, q.Bands, c.MaxWait(-1))
	}
}
