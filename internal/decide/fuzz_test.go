package decide

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"
)

// FuzzHeaders sends any pins, exclusions, priorities, objectives and sessions. Trusted, a target that is named is used or left
// out as asked; not trusted, they refuse nothing. Nothing stays booked.
func FuzzHeaders(f *testing.F) {
	for _, s := range [][5]string{
		{"", "", "", "", ""}, {"b/1", "a", "-1", "s", "batch"}, {" b", "b/0, b/1,a", "9999999999999999999", " ", "x"}, {"c/0/1", ",,", "1.5", "s\x00", ""},
		{"/", "/-1", "+7", strings.Repeat("s", 5000), ""}, {"a/2147483648", "a/0", "", "\xff", ""}, {"b/01", "b/+1", "-0", "", ""}, {"c/0", "c/0/0,c/0/1", "", "", ""},
	} {
		f.Add(s[0], s[1], s[2], s[3], s[4])
	}
	targets := []string{"a", "b/0", "b/1", "c/0/0", "c/0/1"}
	named := func(name string) (out []string) { // the targets that a worker's or a target's name stands for
		for _, t := range targets {
			if t == name || name != "" && slices.Contains([]string{"b", "c/0"}, name) && strings.HasPrefix(t, name+"/") {
				out = append(out, t)
			}
		}
		return out
	}
	open := newBench(f, "", worker("a", 0), worker("b", 2), worker("c/0", 2))
	trusting := newBench(f, "routing: {trust_overrides: true, objectives: {batch: -5}}", worker("a", 0), worker("b", 2), worker("c/0", 2))
	f.Fuzz(func(t *testing.T, pin, exclude, priority, session, objective string) {
		for _, b := range []*bench{open, trusting} {
			r := b.request("/v1/completions", completion(3, ""), pinHeader, pin, excludeHeader, exclude, priorityHeader, priority,
				"x-session-id", session, objectiveHeader, objective)
			d := b.Decide(context.Background(), r)
			e := b.decisions.Find(r.ID)
			if d.Ticket != nil {
				d.Ticket.End(time.Now())
			}
			if left := b.loads(); left != 0 || b.router.Live() != 0 {
				t.Fatalf("got load %d and %d bookings after the end, want none", left, b.router.Live())
			}
			if b == open {
				if d.Reject != nil || d.Endpoint == "" || e == nil {
					t.Fatalf("got %+v by headers that are not trusted, want a target", d.Reject)
				}
				continue
			}
			if d.Reject != nil {
				continue
			}
			if want := named(strings.TrimSpace(pin)); len(want) > 0 && !slices.Contains(want, e.Target) {
				t.Fatalf("pin %q: got %s, want one of %s", pin, e.Target, want)
			}
			for name := range strings.SplitSeq(exclude, ",") {
				if slices.Contains(named(strings.TrimSpace(name)), e.Target) {
					t.Fatalf("exclude %q: got %s, want another", exclude, e.Target)
				}
			}
		}
	})
}
