package kvindex

import (
	"bufio"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"hash/crc64"
	"io"
	"maps"
	"slices"
)

// A snapshot is a stream: the magic and the version; block size and a proof of the hash key; the
// targets with their cursors, aliases, pages and (version 2) windows; the segments; a checksum. Numbers are unsigned
// varints, hashes 8 bytes little endian.
const (
	snapshotMagic   = "KVLANEIX"
	snapshotVersion = 2 // 1 if no target has windows, which older replicas can read
	maxText         = 1 << 16
	maxItems        = 1 << 31
	maxFreeSlots    = 1 << 16 // unused numbers below the highest slot
)

// ErrSnapshot is wrapped by Load's errors: the stream is not a valid snapshot for this index.
var ErrSnapshot = errors.New("bad index snapshot")

var crcTable = crc64.MakeTable(crc64.ECMA)

// Dump writes a snapshot to w. cursor returns each target's current position in its feed, opaque
// to the index; nil for none. Lookups continue meanwhile, but changes wait until w has accepted
// everything: pass a buffer if it is slow. Speculative credit is not included.
func (x *Index) Dump(w io.Writer, cursor func(Slot) []byte) error {
	x.lock()
	defer x.unlock()
	d := &dumper{sum: crc64.New(crcTable)}
	d.w = bufio.NewWriterSize(io.MultiWriter(w, d.sum), 1<<16)
	d.raw([]byte(snapshotMagic))
	version := uint64(1)
	if len(x.windows) > 0 {
		version = snapshotVersion
	}
	d.num(version)
	d.num(uint64(x.cfg.BlockSize))
	d.word(uint64(x.hasher.Seed("", "", "")))
	d.num(uint64(len(x.byTarget)))
	for i := range x.slots {
		st := &x.slots[i]
		if !st.inUse {
			continue
		}
		d.num(uint64(i))
		d.text([]byte(st.target.Worker))
		d.num(uint64(uint32(st.target.Rank)))
		d.text([]byte(st.model))
		d.num(uint64(st.blockSize))
		d.num(uint64(uint32(st.group)))
		d.flag(st.hasGroup)
		var c []byte
		if cursor != nil {
			c = cursor(Slot(i))
		}
		d.text(c)
		d.aliases(st.aliases)
		d.pages(st.pages)
		if version == snapshotVersion {
			d.windows(st.windows)
		}
	}
	for id := range x.segments {
		if x.alive(uint32(id)) {
			d.segment(x.seg(uint32(id)))
		}
	}
	d.num(0)
	if err := d.w.Flush(); err != nil {
		return fmt.Errorf("dump index: %w", err)
	}
	var sum [8]byte
	binary.LittleEndian.PutUint64(sum[:], d.sum.Sum64())
	if _, err := w.Write(sum[:]); err != nil {
		return fmt.Errorf("dump index: %w", err)
	}
	return nil
}

// dumper writes the parts of a snapshot; its writer keeps the first error.
type dumper struct {
	w   *bufio.Writer
	sum hash.Hash64
	buf [binary.MaxVarintLen64]byte
}

func (d *dumper) raw(b []byte)  { _, _ = d.w.Write(b) }
func (d *dumper) num(v uint64)  { d.raw(d.buf[:binary.PutUvarint(d.buf[:], v)]) }
func (d *dumper) text(b []byte) { d.num(uint64(len(b))); d.raw(b) }

func (d *dumper) word(v uint64) {
	binary.LittleEndian.PutUint64(d.buf[:], v)
	d.raw(d.buf[:8])
}

func (d *dumper) flag(b bool) {
	if b {
		d.num(1)
	} else {
		d.num(0)
	}
}

func (d *dumper) segment(g segment) {
	real := 0
	for _, r := range g.runs() {
		if runTier(r) < NumTiers {
			real++
		}
	}
	if real == 0 {
		return
	}
	d.num(uint64(g.blocks()))
	d.num(uint64(real))
	for _, r := range g.runs() {
		if runTier(r) < NumTiers {
			d.word(r)
		}
	}
	for _, h := range g.own() {
		d.word(h)
	}
	for _, n := range g.names() {
		d.word(n)
	}
}

func (d *dumper) units(units map[unit]uint32) {
	keys := slices.SortedFunc(maps.Keys(units), func(a, b unit) int {
		return cmp.Or(cmp.Compare(a.name, b.name), cmp.Compare(a.group, b.group), cmp.Compare(a.tier, b.tier))
	})
	d.num(uint64(len(keys)))
	for _, u := range keys {
		d.word(u.name)
		d.num(uint64(uint32(u.group)))
		d.num(uint64(u.tier))
		d.num(uint64(units[u]))
	}
}

func (d *dumper) aliases(a *aliases) {
	d.flag(a != nil)
	if a == nil {
		return
	}
	d.units(a.units)
	names := slices.Sorted(maps.Keys(a.names))
	d.num(uint64(len(names)))
	for _, n := range names {
		v := a.names[n]
		d.word(n)
		d.word(v.own)
		d.word(v.canonical)
		d.num(uint64(v.units))
	}
	held := slices.SortedFunc(maps.Keys(a.held), func(a, b aliasHeld) int { return cmp.Or(cmp.Compare(a.own, b.own), cmp.Compare(a.tier, b.tier)) })
	d.num(uint64(len(held)))
	for _, h := range held {
		d.word(h.own)
		d.num(uint64(h.tier))
		d.num(uint64(a.held[h].units))
		d.flag(a.held[h].plain)
	}
}

// pages are written parents first.
func (d *dumper) pages(p *pages) {
	d.flag(p != nil)
	if p == nil {
		return
	}
	d.units(p.units)
	d.num(uint64(len(p.byName)))
	index := make([]uint32, len(p.nodes))
	count := uint32(0)
	var chain []uint32
	for i := 1; i < len(p.nodes) || len(chain) > 0; {
		if len(chain) == 0 {
			for id := uint32(i); p.nodes[id].name != 0 && index[id] == 0; id = p.nodes[id].parent {
				chain = append(chain, id)
			}
			i++
			continue
		}
		id := chain[len(chain)-1]
		chain = chain[:len(chain)-1]
		count++
		index[id] = count
		n := &p.nodes[id]
		d.num(uint64(index[n.parent]))
		d.word(n.name)
		d.word(uint64(n.before))
		d.word(uint64(n.own))
		d.word(n.content)
		for _, t := range n.tail {
			d.num(uint64(t))
		}
		d.num(uint64(n.fill))
		d.num(uint64(n.tiers))
		for _, h := range n.holders {
			d.num(uint64(h))
		}
		d.flag(n.final)
	}
}

// windows are the groups, the units and what their names stand for.
func (d *dumper) windows(w *windows) {
	if w == nil {
		w = &windows{}
	}
	d.num(uint64(len(w.groups)))
	if len(w.groups) == 0 {
		return
	}
	for _, g := range w.groups {
		d.num(uint64(uint32(g.id)))
		d.num(uint64(g.window))
		d.num(uint64(g.block))
	}
	d.units(w.units)
	names := slices.Sorted(maps.Keys(w.names))
	d.num(uint64(len(names)))
	for _, n := range names {
		d.word(n)
		d.word(uint64(w.names[n].own))
	}
}

// Load fills an empty index, to which no target was ever added, from a snapshot and returns the cursors by slot. Block
// size and key must be those of the index that wrote it. After an error the index is empty again.
func (x *Index) Load(r io.Reader) (map[Slot][]byte, error) {
	x.lock()
	defer x.unlock()
	if len(x.slots) > 0 {
		return nil, errors.New("load index: it is not empty")
	}
	l := &loader{r: bufio.NewReaderSize(r, 1<<16), sum: crc64.New(crcTable), aliased: map[uint64]bool{}}
	x.gate.shut()
	cursors, err := x.load(l)
	if err == nil {
		err = l.err
	}
	if err == nil {
		sum := l.sum.Sum64()
		if l.word() != sum || l.err != nil {
			err = errors.New("checksum differs")
		}
	}
	if err != nil {
		x.arena, x.segments, x.freed = arena{}, []handle{noRecord}, nil
		x.starts, x.names, x.repeated, x.leaving = table{}, table{}, 0, nil
		x.slots, x.freeSlots, x.byTarget, x.parts, x.windows = nil, nil, map[Target]Slot{}, nil, nil
		x.postings, x.mapBytes, x.liveBlocks = 0, 0, 0
	}
	x.gate.open()
	if err != nil {
		return nil, fmt.Errorf("load index: %w: %w", ErrSnapshot, err)
	}
	x.evict()
	return cursors, nil
}

// loader reads the parts of a snapshot and keeps the first error; after an error it returns zeros.
type loader struct {
	r   *bufio.Reader
	sum hash.Hash64
	err error
	buf [8]byte
	// aliased are the own hashes of blocks that aliases refer to by the name under which they are entered.
	aliased map[uint64]bool
}

// ReadByte implements io.ByteReader for binary.ReadUvarint.
func (l *loader) ReadByte() (byte, error) {
	b, err := l.r.ReadByte()
	if err == nil {
		l.buf[0] = b
		_, _ = l.sum.Write(l.buf[:1])
	}
	return b, err
}

func (l *loader) failf(format string, args ...any) {
	if l.err == nil {
		l.err = fmt.Errorf(format, args...)
	}
}

func (l *loader) num(limit uint64) uint64 {
	if l.err != nil {
		return 0
	}
	v, err := binary.ReadUvarint(l)
	if err != nil {
		l.failf("read number: %w", err)
		return 0
	}
	if v > limit {
		l.failf("number %d is above %d", v, limit)
		return 0
	}
	return v
}

func (l *loader) word() uint64 {
	if l.err != nil {
		return 0
	}
	if _, err := io.ReadFull(l.r, l.buf[:]); err != nil {
		l.failf("read hash: %w", err)
		return 0
	}
	_, _ = l.sum.Write(l.buf[:])
	return binary.LittleEndian.Uint64(l.buf[:])
}

func (l *loader) text() []byte {
	n := l.num(maxText)
	if n == 0 {
		return nil
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(l.r, b); err != nil {
		l.failf("read text: %w", err)
		return nil
	}
	_, _ = l.sum.Write(b)
	return b
}

func (x *Index) load(l *loader) (map[Slot][]byte, error) {
	for _, want := range []byte(snapshotMagic) {
		if b, err := l.ReadByte(); err != nil || b != want {
			return nil, errors.New("not a snapshot")
		}
	}
	version := l.num(maxItems)
	if version < 1 || version > snapshotVersion {
		return nil, fmt.Errorf("version %d, want at most %d", version, snapshotVersion)
	}
	if v := l.num(maxItems); v != uint64(x.cfg.BlockSize) {
		return nil, fmt.Errorf("block size %d, want %d", v, x.cfg.BlockSize)
	}
	if l.word() != uint64(x.hasher.Seed("", "", "")) {
		return nil, errors.New("another hash key")
	}
	cursors := map[Slot][]byte{}
	for n := l.num(MaxSlots); n > 0 && l.err == nil; n-- {
		s := Slot(l.num(MaxSlots - 1))
		t := Target{Worker: string(l.text())}
		t.Rank = int32(l.num(1<<32 - 1))
		model := string(l.text())
		size := int(l.num(1 << 20))
		if size != 0 && !x.fits(size) {
			l.failf("engine blocks of %d tokens", size)
		}
		if _, double := x.byTarget[t]; double || int(s) < len(x.slots) || len(x.freeSlots)+int(s)-len(x.slots) > maxFreeSlots {
			l.failf("targets are not in order")
		}
		if l.err != nil {
			break
		}
		for Slot(len(x.slots)) < s {
			x.freeSlots = append(x.freeSlots, Slot(len(x.slots)))
			x.slots = append(x.slots, slotState{})
		}
		x.slots = append(x.slots, slotState{target: t, model: model, inUse: true, blockSize: size, seed: x.hasher.Seed(model, "", "")})
		x.byTarget[t] = s
		st := &x.slots[s]
		if k := uint32(size / x.cfg.BlockSize); k > 1 {
			for int(s) >= len(x.parts) {
				x.parts = append(x.parts, 1)
			}
			x.parts[s] = k
		}
		st.group = int32(l.num(1<<32 - 1))
		st.hasGroup = l.num(1) == 1
		if c := l.text(); c != nil {
			cursors[s] = c
		}
		l.aliases(st)
		l.pages(st)
		if version == snapshotVersion {
			l.windows(x, s)
		}
		x.mapBytes += st.mapBytes()
	}
	for l.err == nil {
		n := int(l.num(maxSegment))
		if n == 0 {
			break
		}
		x.loadSegment(l, n)
	}
	return cursors, nil
}

func (l *loader) units() map[unit]uint32 {
	units := map[unit]uint32{}
	for n := l.num(maxItems); n > 0 && l.err == nil; n-- {
		u := unit{name: l.word(), group: int32(l.num(1<<32 - 1)), tier: Tier(l.num(NumTiers - 1))}
		units[u] = uint32(l.num(1<<32 - 1))
	}
	return units
}

func (l *loader) aliases(st *slotState) {
	if l.num(1) == 0 {
		return
	}
	a := st.needAliases()
	a.units = l.units()
	for n := l.num(maxItems); n > 0 && l.err == nil; n-- {
		name, n := l.word(), aliasName{own: l.word(), canonical: l.word(), units: uint32(l.num(1<<32 - 1))}
		a.names[name], l.aliased[n.own] = n, true
	}
	for n := l.num(maxItems); n > 0 && l.err == nil; n-- {
		key := aliasHeld{own: l.word(), tier: Tier(l.num(NumTiers - 1))}
		a.held[key] = aliasCount{units: uint32(l.num(1<<32 - 1)), plain: l.num(1) == 1}
	}
}

func (l *loader) pages(st *slotState) {
	if l.num(1) == 0 {
		return
	}
	p := &pages{byName: map[uint64]uint32{}, nodes: make([]page, 1)}
	st.pages = p
	p.units = l.units()
	for n := l.num(maxItems); n > 0 && l.err == nil; n-- {
		parent := uint32(l.num(uint64(len(p.nodes) - 1)))
		q := page{parent: parent, name: l.word(), before: Hash(l.word()), own: Hash(l.word()), content: l.word()}
		for i := range q.tail {
			q.tail[i] = uint32(l.num(1<<32 - 1))
		}
		q.fill = int32(l.num(MaxBlockSize))
		q.tiers = uint8(l.num(1<<NumTiers - 1))
		for i := range q.holders {
			q.holders[i] = uint16(l.num(1<<16 - 1))
		}
		q.final = l.num(1) == 1
		if p.byName[q.name] != 0 {
			l.failf("page %x twice", q.name)
		}
		if l.err == nil {
			id := p.add(q)
			for t := range Tier(NumTiers) {
				if q.tiers&(1<<t) != 0 {
					p.link(id, t)
				}
			}
		}
	}
}

// windows reads what dumper.windows writes.
func (l *loader) windows(x *Index, s Slot) {
	for n := l.num(maxWindowGroups); n > 0 && l.err == nil; n-- {
		e := Event{Group: int32(l.num(1<<32 - 1)), Window: int(l.num(maxItems)), BlockSize: int(l.num(1 << 20))}
		if _, err := x.announce(s, &e); l.err == nil && err != nil {
			l.failf("group %d: %w", e.Group, err)
		}
	}
	w := x.slots[s].windows
	if w == nil || l.err != nil {
		return
	}
	units := l.units()
	own := map[uint64]Hash{}
	for n := l.num(maxItems); n > 0 && l.err == nil; n-- {
		own[l.word()] = Hash(l.word())
	}
	for u, n := range units {
		place := w.index(u.group)
		if place < 0 {
			l.failf("block of group %d, which has no window", u.group)
			return
		}
		w.add(u, n, own[u.name], 1<<place)
	}
}

func (x *Index) loadSegment(l *loader, n int) {
	runs := make([]run, 0, 4)
	for k := l.num(maxItems); k > 0 && l.err == nil; k-- {
		r := l.word()
		s := runSlot(r)
		switch {
		case len(runs) > 0 && (r <= runs[len(runs)-1] || sameHolder(r, runs[len(runs)-1]) && runStart(r) <= runEnd(runs[len(runs)-1])),
			int(s) >= len(x.slots) || !x.slots[s].inUse, runTier(r) >= NumTiers,
			runStart(r) >= runEnd(r), runEnd(r) > n, r != makeRun(s, runTier(r), runStart(r), runEnd(r)):
			l.failf("run %x does not fit", r)
		default:
			runs = append(runs, r)
		}
	}
	words := make([]uint64, 0, 64)
	for range 2 * n {
		words = append(words, l.word())
		if l.err != nil {
			return
		}
	}
	if len(runs) == 0 || x.findStart(words[0]) != 0 {
		l.failf("segment is empty or double")
		return
	}
	id := x.newSegment(n, len(runs))
	g := x.seg(id)
	g.setBlocks(n)
	copy(g.own(), words[:n])
	clear(g.names())
	x.starts.insert(x.hasher.mixName(words[0]), placeAt(id, 0))
	x.liveBlocks += int64(n)
	for _, r := range runs {
		x.hold(id, runSlot(r), runTier(r), runStart(r), runEnd(r))
	}
	g = x.seg(id)
	dead := 0
	g.uncovered(0, n, func(a, b int) {
		dead += b - a
		clear(words[n+a : n+b])
	})
	for i, name := range words[n:] {
		switch {
		case name == 0:
		case l.aliased[words[i]]:
			x.put(g, name, placeAt(id, i), x.named(name)) // aliases refer to the name
		default:
			g.names()[i] = name
			g.addDeferred(1)
			x.enter(g, placeAt(id, i))
		}
	}
	// blocks that only speculative credit kept alive are gone
	x.liveBlocks -= int64(dead)
	g.addDead(dead)
	if end := g.maxEnd(); end < n {
		g[2] -= uint64(n - end)
		g.setBlocks(end)
	}
}
