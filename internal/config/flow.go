package config

import (
	"cmp"
	"slices"
	"time"

	"github.com/kvlane/kvlane/routing"
)

// Values of Flow.Fairness and Flow.Order.
const (
	FairTenant  = "tenant"
	FairKey     = "api_key"
	FairModel   = "model"
	FairNone    = "none"
	OrderShort  = "shortest"
	OrderServed = "least_served"
	OrderFirst  = "arrival"
)

// Flow is the queue for requests that would wait in engines.
type Flow struct {
	Requests    int                `yaml:"max_requests" jsonschema:"minimum=0,maximum=1000000" jsonschema_description:"Maximum number of waiting requests; 0: no queue, requests wait in engines. A full queue makes room by dropping requests of lower priority, then of the tenant that takes the most of its band."`
	Bytes       Bytes              `yaml:"max_bytes" jsonschema_description:"Memory of the bodies of waiting requests, which count in limits.bodies_in_flight too, and of the token ids that they keep, 4 bytes each (hand_ids: true, or prefill pools). 0: no limit."`
	Timeout     Duration           `yaml:"timeout" jsonschema_description:"Longest wait; after that the request is answered 429. Must be shorter than envoy.message_timeout."`
	ZeroWorkers Duration           `yaml:"zero_workers" jsonschema_description:"Longest wait of requests that arrive while no worker can serve them, such as those of a pool that scales from zero; 0s: they are answered 503. Must be shorter than envoy.message_timeout."`
	Hold        int64              `yaml:"hold_tokens" jsonschema:"minimum=0,maximum=10000000" jsonschema_description:"A request waits here while its best target has more uncached tokens than this queued. One step of the engine keeps it busy. 0: requests wait only at the limits of routing.policy.limits."`
	KVTokens    int64              `yaml:"kv_tokens" jsonschema:"minimum=0" jsonschema_description:"KV cache of one target in tokens, divided by the number of replicas of Kvlane. New conversations (with an id) then wait while those that have begun use 60 % of the memory of all targets, so that agents whose contexts exceed the memory do not all compute them anew each turn. 0: all are admitted."`
	Fairness    string             `yaml:"fairness" jsonschema:"enum=tenant,enum=api_key,enum=model,enum=none" jsonschema_description:"Between whom capacity is shared within a priority, by tokens served: tenants (tenants.header or tenants.salt_header), API keys (only where a gateway has verified them: clients can invent keys), models, or none of them."`
	Weights     map[string]float64 `yaml:"weights" jsonschema_description:"Shares by name of tenant or model, or by the first 16 hex digits of an API key's SHA-256; others have 1."`
	TenantShare float64            `yaml:"tenant_share" jsonschema:"exclusiveMinimum=0,maximum=1" jsonschema_description:"Part of the places of a model's workers (routing.policy.limits.max_active of each, unbounded without) that one tenant may hold while others have sent requests within 5 minutes: further ones wait though places are free. For a tenant with the weight w, s*w/(s*w+1-s). A tenant may always have one. 1: no bound."`
	Order       string             `yaml:"order" jsonschema:"enum=shortest,enum=least_served,enum=arrival" jsonschema_description:"Order within a tenant: fewest uncached tokens first, fewest tokens served to the conversation so far first (both less 2,000 for each second of waiting), or first in first out."`
	Bands       []Band             `yaml:"bands" jsonschema_description:"Bounds and models of single priorities. The priority of a request comes from x-kvlane-priority (with routing.trust_overrides) or an objective (routing.trust_objectives), else from the band that lists its model, else it is 0."`
}

// Band is the requests of one priority.
type Band struct {
	Priority int      `yaml:"priority" jsonschema_description:"The priority; greater ones are served first, those below 0 may be shed for others."`
	Models   []string `yaml:"models" jsonschema_description:"Models whose requests have this priority unless a trusted header says otherwise."`
	Requests int      `yaml:"max_requests" jsonschema:"minimum=0,maximum=1000000" jsonschema_description:"Maximum number of waiting requests of the band; 0: flow.max_requests."`
	Bytes    Bytes    `yaml:"max_bytes" jsonschema_description:"The same for its waiting requests; 0: flow.max_bytes."`
	Timeout  Duration `yaml:"timeout" jsonschema_description:"Longest wait of its requests; 0s: flow.timeout."`
}

func defaultFlow() Flow {
	return Flow{Bytes: 128 << 20, Timeout: Duration(30 * time.Second), Hold: 8192, Fairness: FairTenant, TenantShare: 0.75, Order: OrderShort}
}

// Waits reports whether requests may wait in Kvlane.
func (c *Config) Waits() bool { return c.Routing.Wait.Requests > 0 || c.Flow.Requests > 0 }

// Bounded reports whether tenants may hold a part of the places only.
func (f *Flow) Bounded() bool { return f.Requests > 0 && f.TenantShare < 1 && f.Fairness != FairNone }

// Share is the part of the places that a tenant may hold: TenantShare against others of weight 1.
func (f *Flow) Share(tenant string) float64 {
	s := f.TenantShare * cmp.Or(f.Weights[tenant], 1)
	return s / (s + 1 - f.TenantShare)
}

// SetBounds gives a queue the bounds of the configuration.
func (c *Config) SetBounds(q *routing.Queue) {
	f := &c.Flow
	if f.Requests == 0 {
		q.Bounds, q.Bands = routing.Bounds{Requests: c.Routing.Wait.Requests}, nil
		return
	}
	q.Bounds, q.Bands = routing.Bounds{Requests: f.Requests, Bytes: int64(f.Bytes)}, map[int]routing.Bounds{}
	for i := range f.Bands {
		b := &f.Bands[i]
		q.Bands[b.Priority] = routing.Bounds{Requests: cmp.Or(b.Requests, f.Requests), Bytes: int64(cmp.Or(b.Bytes, f.Bytes))}
	}
}

// MaxWait returns how long a request of a priority may wait.
func (c *Config) MaxWait(priority int) time.Duration {
	f := &c.Flow
	if f.Requests == 0 {
		return c.Routing.Wait.Timeout.Std()
	}
	for i := range f.Bands {
		if b := &f.Bands[i]; b.Priority == priority && b.Timeout > 0 {
			return b.Timeout.Std()
		}
	}
	return f.Timeout.Std()
}

// Priority returns the priority of a model's requests.
func (f *Flow) Priority(model string) int {
	for i := range f.Bands {
		if slices.Contains(f.Bands[i].Models, model) {
			return f.Bands[i].Priority
		}
	}
	return 0
}

func (c *Config) validateFlow(bad report) {
	f := &c.Flow
	if f.Requests == 0 {
		return
	}
	bad.each([]wrong{
		{c.Routing.Wait.Requests > 0, "max_requests", "not together with routing.wait, which flow replaces"},
		{f.Timeout <= 0, "timeout", "must be more than 0"},
	})
	wait := func(key string, d Duration) {
		if d >= c.Envoy.MessageTimeout {
			bad(key, "%s: Envoy waits for %s only (envoy.message_timeout)", d.Std(), c.Envoy.MessageTimeout.Std())
		}
	}
	wait("timeout", f.Timeout)
	wait("zero_workers", f.ZeroWorkers)
	for name, w := range f.Weights {
		if !(w > 0 && w <= 1e6) {
			bad("weights."+name, "%v is not above 0 and at most 1000000", w)
		}
	}
	priorities, models := map[int]bool{}, map[string]bool{}
	for i := range f.Bands {
		b, at := &f.Bands[i], item("bands", i)
		wait(at+".timeout", b.Timeout)
		if priorities[b.Priority] {
			bad(at+".priority", "%d is the priority of another band", b.Priority)
		}
		priorities[b.Priority] = true
		for n, m := range b.Models {
			if models[m] {
				bad(item(at+".models", n), "%q is in another band", m)
			}
			models[m] = true
		}
	}
}

// warnUnusedFlow is warnUnused for a queue that is on. trusted: some requests may have a priority of their own.
func (c *Config) warnUnusedFlow(trusted bool, note report) {
	f, noTenant := &c.Flow, "no request has a tenant: name the header (tenants.header)"
	one, none, weighs := f.Fairness == FairTenant && c.Tenants.Name() == "", f.Fairness == FairNone, len(f.Weights) > 0
	shares := f.TenantShare != defaultFlow().TenantShare && f.TenantShare < 1
	note.each([]wrong{
		{weighs && one, "weights", noTenant},
		{weighs && none, "weights", "have no effect: fairness is none"},
		{shares && one, "tenant_share", noTenant},
		{shares && none, "tenant_share", "has no effect: fairness is none"},
		{shares && c.Routing.Policy.Limits.MaxActive+c.Routing.Disagg.Decode.Limits.MaxActive == 0, "tenant_share",
			"has no effect: without routing.policy.limits.max_active there are no places"},
	})
	for i := range f.Bands {
		b, at := &f.Bands[i], item("bands", i)
		note.under(at).each([]wrong{
			{!trusted && len(b.Models) == 0 && b.Priority != 0, "priority", "no request has it: list models, or honour priorities of requests (routing.trust_overrides)"},
			{b.Requests > f.Requests, "max_requests", "has no effect above flow.max_requests"},
			{f.Bytes > 0 && b.Bytes > f.Bytes, "max_bytes", "has no effect above flow.max_bytes"},
		})
		for n, name := range b.Models {
			for k := range c.Models {
				if m := &c.Models[k]; name != m.Name && slices.Contains(m.names(), name) {
					note(item(at+".models", n), "has no effect: %q is another name of %q, whose band all of its requests have", name, m.Name)
				}
			}
		}
	}
}

// warnFlow reports settings that defeat the purpose of the queue.
func (c *Config) warnFlow(note report) {
	f, b := &c.Flow, &c.Limits.Bodies
	if f.Requests == 0 {
		return
	}
	if b.Count > 0 && f.Requests >= b.Count {
		note("max_requests", "%d requests are not fewer than limits.bodies_in_flight.count (%d): a full queue keeps out requests that need not wait", f.Requests, b.Count)
	}
	if b.Bytes > 0 && (f.Bytes == 0 || f.Bytes >= b.Bytes) {
		note("max_bytes", "is not below limits.bodies_in_flight.bytes (%d): a full queue keeps out requests that need not wait", b.Bytes)
	}
	note.each([]wrong{
		{f.Hold > 0 && !c.Envoy.FirstToken, "hold_tokens", "a prompt counts as queued until the response headers, which engines may send before they compute it: set envoy.first_token: true"},
		{f.Fairness == FairKey, "fairness", "clients can invent API keys: use api_key only behind a gateway that has verified them"},
	})
}
