package routing

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/kvlane/kvlane/kvindex"
)

// story runs one file of testdata: commands and, under ----, what happens.
//
//	new preset=NAME      a router; the input is JSON over the config ("policy" is the preset)
//	targets              one target a line: worker[/rank] [role=] [speed=] [zone=] [model=] [not-ready] [draining]
//	remove               targets to remove, one a line
//	pick ID [prompt=] [conv=] [overlap=(target:tokens,...)] [host=...] [spec=...] [exclude=(...)] [subset=(...)]
//	     [pin=target] [model=] [listed=] [priority=] [waited=] [ttft=] [blocks=FROM-TO] [tenant= share=] [sequences=] [explain]
//	spread n=N [turns=] prefix=ID [conv] [hold] and pick's arguments: counts per target; # in conv is the number / turns
//	first-token, prefill-done, end, fail: ids, one or more
//	report TARGET running= waiting= [kv=] [seq=] [full]
//	saturated            the targets that requests are held for, see Config.Hold
//	rebook ID target=
//	loads                every target's load
//	tick DURATION        moves the time
//	learn RATE           lets every target answer 64 prompts, this many tokens a second
type story struct {
	t     *testing.T
	r     *Router
	now   time.Duration
	next  kvindex.Slot
	slots map[string]kvindex.Slot
	ids   map[string]ReservationID
}

func TestStories(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no stories: %v", err)
	}
	for _, path := range files {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".txt"), func(t *testing.T) {
			s := &story{t: t}
			datadriven.RunTest(t, path, s.run)
		})
	}
}

func (s *story) run(t *testing.T, d *datadriven.TestData) string {
	s.t = t
	switch d.Cmd {
	case "new":
		return s.create(d)
	case "targets":
		for line := range strings.SplitSeq(d.Input, "\n") {
			s.addTarget(strings.Fields(line))
		}
		return "ok\n"
	case "remove":
		for name := range strings.FieldsSeq(d.Input) {
			s.r.RemoveTarget(s.slot(name))
			delete(s.slots, name)
		}
		return "ok\n"
	case "pick":
		q, overlaps := s.query(d.CmdArgs[0].Key, d.CmdArgs[1:])
		var ex *Explanation
		if d.HasArg("explain") {
			ex = new(Explanation)
		}
		plan, err := s.r.Pick(s.now, q, overlaps, ex)
		if ex != nil {
			s.note(q.ID, plan)
			return ex.String()
		}
		return s.answer(q.ID, plan, err)
	case "spread":
		return s.spread(d)
	case "first-token":
		return s.each(d, s.r.FirstToken)
	case "prefill-done":
		return s.each(d, s.r.PrefillDone)
	case "end":
		return s.each(d, s.r.Release)
	case "fail":
		return s.each(d, func(_ time.Duration, id ReservationID) bool {
			s.r.Failed(id)
			return true
		})
	case "report":
		return s.report(d)
	case "saturated":
		var out []string
		for _, slot := range s.r.order {
			if s.r.Saturated(s.now, slot) {
				out = append(out, s.r.targets[slot].name)
			}
		}
		full, work, rate := s.r.Saturation(s.now, "", s.r.config.Hold)
		return fmt.Sprintf("%q saturation=%.2f work=%d rate=%.0f\n", out, full, work, rate)
	case "rebook":
		var to string
		d.ScanArgs(t, "target", &to)
		return fmt.Sprintln(s.r.Rebook(s.now, s.ids[d.CmdArgs[0].Key], s.slot(to)))
	case "loads":
		return s.loads()
	case "learn":
		s.now += train(s.r, float64(s.number(d.CmdArgs[0].Key)))
		return "ok\n"
	case "tick":
		by, err := time.ParseDuration(d.CmdArgs[0].Key)
		if err != nil {
			t.Fatal(err)
		}
		s.now += by
		return s.now.String() + "\n"
	}
	t.Fatalf("unknown command %s", d.Cmd)
	return ""
}

func (s *story) create(d *datadriven.TestData) string {
	cfg := DefaultConfig()
	var preset string
	d.ScanArgs(s.t, "preset", &preset)
	policy, ok := Preset(preset)
	if !ok {
		s.t.Fatalf("no preset %q", preset)
	}
	cfg.Policy = policy
	for leg, to := range map[string]*Policy{"prefill": &cfg.Disagg.Prefill, "decode": &cfg.Disagg.Decode} {
		if d.HasArg(leg) {
			d.ScanArgs(s.t, leg, &preset)
			if *to, ok = Preset(preset); !ok {
				s.t.Fatalf("no preset %q", preset)
			}
		}
	}
	if d.Input != "" {
		if err := json.Unmarshal([]byte(d.Input), &cfg); err != nil {
			s.t.Fatal(err)
		}
	}
	r, err := New(cfg)
	if err != nil {
		return err.Error() + "\n"
	}
	*s = story{t: s.t, r: r, slots: map[string]kvindex.Slot{}, ids: map[string]ReservationID{}}
	return "ok\n"
}

func parseTarget(name string) kvindex.Target {
	worker, rank, ok := strings.Cut(name, "/")
	if !ok {
		return kvindex.Target{Worker: worker, Rank: kvindex.NoRank}
	}
	n, err := strconv.Atoi(rank)
	if err != nil {
		panic(err)
	}
	return kvindex.Target{Worker: worker, Rank: int32(n)}
}

func (s *story) addTarget(fields []string) {
	info := TargetInfo{Target: parseTarget(fields[0]), Ready: true}
	for _, f := range fields[1:] {
		key, value, _ := strings.Cut(f, "=")
		switch key {
		case "role":
			info.Role = map[string]Role{"prefill": Prefill, "decode": Decode, "both": Both}[value]
		case "speed":
			info.Speed, _ = strconv.ParseFloat(value, 64)
		case "zone":
			info.Zone = value
		case "model":
			info.Models = append(info.Models, value)
		case "not-ready":
			info.Ready = false
		case "draining":
			info.Draining = true
		default:
			s.t.Fatalf("unknown attribute %s", key)
		}
	}
	slot, ok := s.slots[fields[0]]
	if !ok {
		slot = s.next
		s.next++
		s.slots[fields[0]] = slot
	}
	s.r.SetTarget(slot, info)
}

func (s *story) slot(name string) kvindex.Slot {
	slot, ok := s.slots[name]
	if !ok {
		s.t.Fatalf("no target %s", name)
	}
	return slot
}

func (s *story) number(v string) int64 {
	n, err := strconv.ParseInt(v, 10, 64)
	if err != nil {
		s.t.Fatal(err)
	}
	return n
}

func (s *story) query(id string, args []datadriven.CmdArg) (*Query, []Overlap) {
	q := &Query{ID: id, PromptTokens: 1000}
	bySlot := map[kvindex.Slot]*Overlap{}
	var order []kvindex.Slot
	for _, a := range args {
		first := ""
		if len(a.Vals) > 0 {
			first = a.Vals[0]
		}
		switch a.Key {
		case "prompt":
			q.PromptTokens = s.number(first)
		case "conv":
			q.Conversation = first
		case "owner":
			q.Owner = first
		case "model", "listed":
			q.Model, q.Listed = first, a.Key == "listed"
		case "waited", "ttft":
			d, err := time.ParseDuration(first)
			if err != nil {
				s.t.Fatal(err)
			}
			if a.Key == "ttft" {
				q.TTFT = d
			} else {
				q.Waited = d
			}
		case "priority":
			q.Priority = int(s.number(first))
		case "tenant":
			q.Tenant = first
		case "share":
			q.Share, _ = strconv.ParseFloat(first, 64)
		case "sequences":
			q.Sequences = s.number(first)
		case "overlap", "host", "spec":
			for _, v := range a.Vals {
				name, tokens, _ := strings.Cut(v, ":")
				slot := s.slot(name)
				if bySlot[slot] == nil {
					bySlot[slot] = &Overlap{Slot: slot}
					order = append(order, slot)
				}
				switch n := int32(s.number(tokens)); a.Key {
				case "overlap":
					bySlot[slot].Tokens[kvindex.Device] = n
				case "host":
					bySlot[slot].Tokens[kvindex.Host] = n
				case "spec":
					bySlot[slot].Speculative = n
				}
			}
		case "exclude":
			for _, v := range a.Vals {
				q.Exclude = append(q.Exclude, s.slot(v))
			}
		case "subset":
			q.Subset = new(SlotSet)
			for _, v := range a.Vals {
				if v != "" {
					q.Subset.Add(s.slot(v))
				}
			}
		case "pin":
			t := parseTarget(first)
			q.Pin = &Pin{Worker: t.Worker, Rank: t.Rank}
		case "rank":
			q.Pin = &Pin{Rank: int32(s.number(first))}
		case "blocks":
			// A chain: block n follows from all before it, so equal starts hash alike.
			from, to, _ := strings.Cut(first, "+")
			h := uint64(1)
			for i := range s.number(from) {
				h = mix(h + uint64(i))
				q.Prefix = append(q.Prefix, h)
			}
			name, n, _ := strings.Cut(to, "*")
			for i := int64(0); to != "" && i < s.number(n); i++ {
				h = hashString(h, name)
				q.Prefix = append(q.Prefix, h)
			}
		case "explain", "n", "turns", "hold", "each":
		default:
			s.t.Fatalf("unknown argument %s", a.Key)
		}
	}
	var overlaps []Overlap
	for _, slot := range order {
		overlaps = append(overlaps, *bySlot[slot])
	}
	return q, overlaps
}

func (s *story) note(id string, plan Plan) {
	if plan.Reservation != 0 {
		s.ids[id] = plan.Reservation
	}
}

func (s *story) answer(id string, plan Plan, err error) string {
	if err != nil {
		return fmt.Sprintf("%s: %v\n", id, err)
	}
	s.note(id, plan)
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s", id, s.r.targets[plan.Decode].info.Target)
	if plan.Prefill != NoSlot {
		fmt.Fprintf(&b, " prefill %s", s.r.targets[plan.Prefill].info.Target)
	}
	fmt.Fprintf(&b, " by %s", plan.Via)
	if plan.FirstTurn {
		b.WriteString(", first turn")
	}
	if plan.RankFree {
		b.WriteString(", any rank")
	}
	if plan.Degraded != "" {
		b.WriteString(", degraded: " + string(plan.Degraded))
	}
	b.WriteByte('\n')
	return b.String()
}

func (s *story) spread(d *datadriven.TestData) string {
	n, turns := int64(0), int64(1)
	d.ScanArgs(s.t, "n", &n)
	d.MaybeScanArgs(s.t, "turns", &turns)
	counts := map[kvindex.Slot]int{}
	prefix := d.CmdArgs[0].Key
	errs := ""
	for i := range n {
		q, overlaps := s.query(fmt.Sprintf("%s%d", prefix, i), d.CmdArgs[1:])
		q.Conversation = strings.ReplaceAll(q.Conversation, "#", strconv.FormatInt(i/turns, 10))
		plan, err := s.r.Pick(s.now, q, overlaps, nil)
		if err != nil {
			errs = err.Error() + "\n"
			continue
		}
		counts[plan.Decode]++
		s.note(q.ID, plan)
		if !d.HasArg("hold") {
			s.r.Release(s.now, plan.Reservation)
		}
	}
	var b strings.Builder
	for i, slot := range s.r.order {
		if i > 0 {
			b.WriteByte(' ')
		}
		fmt.Fprintf(&b, "%s=%d", s.r.targets[slot].info.Target, counts[slot])
	}
	return b.String() + "\n" + errs
}

func (s *story) each(d *datadriven.TestData, f func(time.Duration, ReservationID) bool) string {
	var b strings.Builder
	for _, a := range d.CmdArgs {
		fmt.Fprintf(&b, "%s: %v\n", a.Key, f(s.now, s.ids[a.Key]))
	}
	return b.String()
}

func (s *story) report(d *datadriven.TestData) string {
	rep := Report{At: s.now, KVUsage: -1, Full: d.HasArg("full")}
	if d.HasArg("took") {
		rep.At -= time.Second
	}
	d.MaybeScanArgs(s.t, "running", &rep.Running)
	d.MaybeScanArgs(s.t, "waiting", &rep.Waiting)
	var kv string
	if d.MaybeScanArgs(s.t, "kv", &kv) {
		rep.KVUsage, _ = strconv.ParseFloat(kv, 64)
	}
	d.MaybeScanArgs(s.t, "seq", &rep.Seq)
	if d.HasArg("worker") {
		return fmt.Sprintln(s.r.ReportWorker(s.now, d.CmdArgs[0].Key, rep))
	}
	return fmt.Sprintln(s.r.Report(s.now, s.slot(d.CmdArgs[0].Key), rep))
}

func (s *story) loads() string {
	var b strings.Builder
	s.r.Targets(func(_ kvindex.Slot, info *TargetInfo, l Load) bool {
		fmt.Fprintf(&b, "%s queue=%d work=%d kv=%d active=%d", info.Target, l.Queue, l.Work, l.KV, l.Active)
		if l.Transferring != 0 {
			fmt.Fprintf(&b, " transferring=%d/%d", l.Transferring, l.TransferTokens)
		}
		b.WriteByte('\n')
		return true
	})
	return b.String()
}
