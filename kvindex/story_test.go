package kvindex

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// Stories: see testdata. A chain is written as a word, with one letter per engine block of equal
// tokens; "from=2" selects its blocks from the third on, "to=3" up to the third. Engine hashes
// are those of an engine that chains them; hash-by=NAME uses another engine's.
func TestStories(t *testing.T) {
	datadriven.Walk(t, "testdata/stories", func(t *testing.T, path string) {
		s := &story{slots: map[string]Slot{}, blocks: map[string]int{}, sent: map[string]Credit{}}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string { return s.run(t, d) })
	})
}

type story struct {
	x      *Index
	slots  map[string]Slot
	blocks map[string]int
	sent   map[string]Credit
	now    time.Time
}

func (s *story) run(t *testing.T, d *datadriven.TestData) string {
	switch d.Cmd {
	case "index":
		block, ttl := 4, 30
		d.MaybeScanArgs(t, "block", &block)
		d.MaybeScanArgs(t, "ttl", &ttl)
		s.x = mustIndex(t, Config{BlockSize: block, SpeculativeTTL: time.Duration(ttl) * time.Second})
		s.now = time.Unix(0, 0)
		return "ok"
	case "add":
		block := s.x.BlockSize()
		d.MaybeScanArgs(t, "block", &block)
		slot, err := s.x.Add(target(d.CmdArgs[0].Key), "m", block)
		if err != nil {
			return err.Error()
		}
		s.slots[d.CmdArgs[0].Key], s.blocks[d.CmdArgs[0].Key] = slot, block
		return fmt.Sprintf("slot %d", slot)
	case "drop":
		s.x.Drop(s.slots[d.CmdArgs[0].Key])
		delete(s.slots, d.CmdArgs[0].Key)
		return "ok"
	case "wait":
		seconds, err := strconv.Atoi(d.CmdArgs[0].Key)
		if err != nil {
			return err.Error()
		}
		s.now = s.now.Add(time.Duration(seconds) * time.Second)
		s.x.Expire(s.now)
		return "ok"
	case "match":
		var m Matches
		s.x.Match(s.hashes(t, d, d.CmdArgs[0].Key, s.x.BlockSize()), &m)
		return s.describe(&m)
	case "send":
		name := ""
		d.MaybeScanArgs(t, "as", &name)
		s.sent[name] = s.x.Speculate(s.slots[d.CmdArgs[0].Key], s.hashes(t, d, d.CmdArgs[1].Key, s.x.BlockSize()), s.now)
		return "ok"
	case "refused": // what was sent last under the name
		name := ""
		d.MaybeScanArgs(t, "as", &name)
		s.x.Withdraw(s.sent[name])
		return "ok"
	case "store", "remove", "clear":
		return s.event(t, d)
	case "stats":
		st := s.x.Stats()
		return fmt.Sprintf("%d blocks in %d segments, held %d times, refused %v, unknown removals %d", st.Blocks, st.Segments, st.HolderBlocks, st.Refused, st.UnknownRemoved)
	}
	return "unknown command"
}

func target(name string) Target {
	worker, rank, ranked := strings.Cut(name, "/")
	t := Target{Worker: worker, Rank: NoRank}
	if ranked {
		n, err := strconv.Atoi(rank)
		if err != nil {
			panic(err)
		}
		t.Rank = int32(n)
	}
	return t
}

func (s *story) hashes(t *testing.T, d *datadriven.TestData, word string, block int) []Hash {
	adapter, salt := "", ""
	d.MaybeScanArgs(t, "adapter", &adapter)
	d.MaybeScanArgs(t, "salt", &salt)
	return s.x.Hasher().AppendHashes(nil, s.x.Hasher().Seed("m", adapter, salt), spell(word, block), block)
}

// spell repeats every letter as n tokens.
func spell(word string, n int) []uint32 {
	var tokens []uint32
	for _, c := range word {
		for range n {
			tokens = append(tokens, uint32(c))
		}
	}
	return tokens
}

func (s *story) event(t *testing.T, d *datadriven.TestData) string {
	name := d.CmdArgs[0].Key
	e := Event{}
	if d.Cmd == "clear" {
		e.Kind = Cleared
	} else {
		word := d.CmdArgs[1].Key
		// letters may be pages smaller than the engine's block in the index
		letter := s.x.BlockSize()
		d.MaybeScanArgs(t, "letter", &letter)
		block := s.blocks[name]
		tokens := spell(word, letter)
		from, to, group, family := 0, len(tokens)/block, 0, ""
		d.MaybeScanArgs(t, "from", &from)
		d.MaybeScanArgs(t, "to", &to)
		d.MaybeScanArgs(t, "group", &group)
		d.MaybeScanArgs(t, "hash-by", &family)
		tier := ""
		d.MaybeScanArgs(t, "tier", &tier)
		d.MaybeScanArgs(t, "adapter", &e.Adapter)
		d.MaybeScanArgs(t, "salt", &e.Salt)
		e.Tier = map[string]Tier{"": Device, "host": Host, "disk": Disk, "external": External}[tier]
		e.Group = int32(group)
		all := engineHashes(uint64(len(family)), "m", e.Adapter, e.Salt, tokens, nil, block)
		e.Hashes = slices.Clone(all[from:to])
		if d.Cmd == "remove" {
			e.Kind = Removed
			if !d.HasArg("root-first") {
				slices.Reverse(e.Hashes) // engines free the last block first
			}
		} else {
			e.Kind = Stored
			if from > 0 {
				e.Parent, e.HasParent = all[from-1], true
				e.Adapter, e.Salt = "", "" // inherited
			}
			if !d.HasArg("placeholder") {
				e.Tokens, e.BlockSize = tokens[from*block:to*block], block
			}
			if d.HasArg("masked") {
				e.Hashes = e.Hashes[1:]
			}
			d.MaybeScanArgs(t, "claims-block", &e.BlockSize)
		}
	}
	if err := s.x.Apply(s.slots[name], &e); err != nil {
		return "refused: " + err.Error()
	}
	return "ok"
}

func (s *story) describe(m *Matches) string {
	if len(m.Holders) == 0 {
		return "nobody"
	}
	var b strings.Builder
	for _, h := range m.Holders {
		for name, slot := range s.slots {
			if slot == h.Slot {
				fmt.Fprintf(&b, "%s: device %d", name, h.Blocks[Device])
			}
		}
		for i, tier := range []string{"", "host", "disk", "external"} {
			if i > 0 && h.Blocks[i] > 0 {
				fmt.Fprintf(&b, ", %s +%d", tier, h.Blocks[i])
			}
		}
		if h.Speculative > 0 {
			fmt.Fprintf(&b, ", speculative +%d", h.Speculative)
		}
		b.WriteByte('\n')
	}
	return b.String()
}
