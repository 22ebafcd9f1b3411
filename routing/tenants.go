package routing

import "time"

// recently is how long others keep places free for a tenant after its last request. It covers the pauses of a person and
// the longest wait in a queue.
const recently = 5 * time.Minute

// tenants is what a target knows about the tenants of requests with Query.Share.
type tenants struct {
	// places is the number of sequences of each tenant's requests that have not ended.
	places map[Key]int64
	// asked holds the tenant that may have been placed here last, then the last other one.
	asked [2]asker
}

type asker struct {
	Tenant Key           `json:"tenant,omitzero"`
	At     time.Duration `json:"at,omitempty"` // 0: there is none
}

// ask notes that a tenant's request may be placed here, and returns when another tenant's last was, 0 for never.
func (t *tenants) ask(now time.Duration, tenant Key) time.Duration {
	if t.asked[0].Tenant != tenant {
		t.asked[0], t.asked[1] = asker{Tenant: tenant}, t.asked[0]
	}
	t.asked[0].At = max(now, 1)
	return t.asked[1].At
}

func (t *tenants) book(tenant Key, n int64) {
	if t.places == nil {
		t.places = map[Key]int64{}
	}
	if t.places[tenant] += n; t.places[tenant] == 0 {
		delete(t.places, tenant)
	}
}

// share sums up the targets that may serve a request, busy ones included: their places, those that its tenant holds, and
// when another tenant last asked for one.
type share struct {
	places, held int64
	other        time.Duration
}

func (d *decision) tally(t *target) {
	d.share.places += d.req.policy.Limits.MaxActive
	d.share.held += t.tenants.places[d.out.tenant]
	d.share.other = max(d.share.other, t.tenants.ask(d.now, d.out.tenant))
}

// exceeds reports whether the request would take more than its tenant's share of places that another tenant may want soon.
func (d *decision) exceeds() bool {
	s := &d.share
	if s.held == 0 || s.other == 0 || d.now-s.other > recently || float64(s.held+sequences(d.q.Sequences)) <= d.q.Share*float64(s.places) || d.q.Waited < 0 {
		return false
	}
	d.ex.sayf("share", "held: its tenant has %d of %d places, and others asked for some", s.held, s.places)
	return true
}

// sequences bounds a number that a client chooses.
func sequences(n int64) int64 { return min(max(n, 1), 1<<16) }
