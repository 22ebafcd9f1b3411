// Command benchindex replays an index workload (a KVW1 file, or generated: stores, removals and lookups with their
// exact answers) and prints its measurements as one JSON object. It uses one thread for the index. Writes are timed per
// batch with the process's CPU clock, all threads, garbage collector included; lookups individually with the monotonic
// clock, timer included.
package main

import (
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"github.com/kvlane/kvlane/internal/lab/cpu"
	"github.com/kvlane/kvlane/kvindex"
)

func main() {
	single := flag.Bool("single", false, "one removal event for each hash, as engines send them")
	budget := flag.Int64("max-bytes", 0, "byte budget of the index, 0 for none")
	profile := flag.String("cpuprofile", "", "write a CPU profile here")
	var made shape
	flag.IntVar(&made.depth, "depth", 0, "generate a workload of chains of this many blocks, instead of a file")
	flag.IntVar(&made.holders, "holders", 1, "ranks that hold each generated chain")
	flag.IntVar(&made.ranks, "ranks", 1, "ranks of a generated workload")
	flag.IntVar(&made.blocks, "blocks", 10_000_000, "holder-blocks of a generated workload")
	brief := flag.Bool("brief", false, "print one line instead of JSON")
	flag.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: benchindex [flags] WORKLOAD, or benchindex -depth N [flags]\nThe time of writes has the chaining of contents to hashes, as for an event; lookups start from hashes.")
		flag.PrintDefaults()
	}
	flag.Parse()
	if (flag.NArg() != 1) == (made.depth == 0) {
		flag.Usage()
		os.Exit(2)
	}
	wrong, err := run(made, flag.Arg(0), *profile, *single, *brief, *budget)
	if err != nil {
		fmt.Fprintln(os.Stderr, "benchindex:", err)
	}
	if err != nil || wrong > 0 {
		os.Exit(1)
	}
}

// run measures a generated workload, or that of a file, and prints the result.
func run(made shape, file, profile string, single, brief bool, budget int64) (wrong uint64, err error) {
	if profile != "" {
		f, err := os.Create(profile)
		if err == nil {
			err = pprof.StartCPUProfile(f)
		}
		if err != nil {
			return 0, err
		}
		defer pprof.StopCPUProfile()
	}
	// the index has no pointers: frequent collections cost almost nothing
	debug.SetGCPercent(25)
	var w source
	if made.depth > 0 {
		w, err = newSynthetic(made)
	} else {
		w, err = openWorkload(file)
	}
	if err != nil {
		return 0, err
	}
	r, err := replay(w, single, budget)
	if err != nil {
		return 0, err
	}
	if brief {
		fmt.Println(r.line())
		return r.Wrong, nil
	}
	out := json.NewEncoder(os.Stdout)
	out.SetIndent("", "  ")
	return r.Wrong, out.Encode(r)
}

type result struct {
	Name            string                  `json:"name"`
	Single          bool                    `json:"single_hash_removals"`
	Chaining        string                  `json:"chaining"`
	StoredBlocks    uint64                  `json:"stored_blocks"`
	RemovedBlocks   uint64                  `json:"removed_blocks"`
	WritesPerCPU    float64                 `json:"written_blocks_M_per_cpu_s"`
	EventsPerCPU    float64                 `json:"events_M_per_cpu_s"`
	AllPerCPU       float64                 `json:"all_block_ops_M_per_cpu_s"`
	Phases          map[string]*phaseResult `json:"phases"`
	Lookups         percentiles             `json:"lookups_ns"`
	Wrong           uint64                  `json:"wrong_answers"`
	Peak            memory                  `json:"memory_at_peak"`
	AfterRemoval    *memory                 `json:"memory_when_empty,omitempty"`
	GCCPUShare      float64                 `json:"gc_cpu_share"`
	LongestGCPause  float64                 `json:"longest_gc_pause_us"`
	Refused         int64                   `json:"refused_events"`
	UnknownRemovals int64                   `json:"unknown_removals"`
}

type phaseResult struct {
	WrittenBlocks uint64      `json:"written_blocks,omitempty"`
	WritesPerCPU  float64     `json:"written_blocks_M_per_cpu_s,omitempty"`
	Lookups       percentiles `json:"lookups_ns"`

	cpu   time.Duration
	times []uint32
}

type percentiles struct {
	Count int    `json:"count"`
	P50   uint32 `json:"p50"`
	P99   uint32 `json:"p99"`
	P999  uint32 `json:"p99_9"`
}

type memory struct {
	HolderBlocks int64   `json:"holder_blocks"`
	Live         int64   `json:"index_bytes"`
	Reserved     int64   `json:"reserved_bytes"`
	RSS          int64   `json:"rss_growth_bytes"`
	LivePer      float64 `json:"index_bytes_per_holder_block,omitempty"`
	RSSPer       float64 `json:"rss_bytes_per_holder_block,omitempty"`
}

// phaseNames are the phases of the generator.
var phaseNames = map[uint16]string{
	1: "replay", 2: "final", 10: "load", 11: "cold", 12: "hot", 13: "half", 14: "miss", 15: "drain",
}

type runner struct {
	x      *kvindex.Index
	slots  []kvindex.Slot
	single bool
	out    *result
	// a batch, copied from the file outside of the timed part
	events          []event
	words           []uint64
	lookups         []operation
	hashes          []kvindex.Hash
	matches         kvindex.Matches
	seed            kvindex.Hash
	all             []uint32
	phases          map[uint16]*phaseResult
	baseline        int64
	cpu, lookupTime time.Duration
	nEvents         uint64
	looked          uint64 // blocks that lookups asked for
}

type event struct {
	slot     kvindex.Slot
	event    kvindex.Event
	contents []uint64
}

// line is the result of a generated workload in one line.
func (r *result) line() string {
	var kept float64
	if r.AfterRemoval != nil {
		kept = 100 * float64(r.AfterRemoval.RSS) / float64(max(r.Peak.RSS, 1))
	}
	phase := func(name string) phaseResult {
		if p := r.Phases[name]; p != nil {
			return *p
		}
		return phaseResult{}
	}
	cold := phase("cold").Lookups
	return fmt.Sprintf("%s: stores %.1f, removals %.1f M blocks/cpu-s; lookup cold p50 %d, p99 %d, miss p50 %d ns; %.1f bytes/holder-block, kept when empty %.0f %%; GC %.1f %%; %d wrong",
		r.Name, phase("load").WritesPerCPU, phase("drain").WritesPerCPU, cold.P50, cold.P99, phase("miss").Lookups.P50, r.Peak.RSSPer, kept, 100*r.GCCPUShare, r.Wrong)
}

// source yields a workload's operations. Their words are valid until the next barrier has been read.
type source interface {
	about() header
	next() (op operation, ok bool, err error)
}

func replay(from source, single bool, budget int64) (*result, error) {
	w := from.about()
	x, err := kvindex.New(kvindex.Config{BlockSize: int(w.block), MaxBytes: budget, Key: kvindex.Key{1}})
	if err != nil {
		return nil, err
	}
	r := &runner{x: x, single: single, phases: map[uint16]*phaseResult{}, seed: x.Hasher().Seed("m", "", "")}
	r.out = &result{Name: w.name, Single: single, Chaining: "in writes, not in lookups", StoredBlocks: w.stored, RemovedBlocks: w.removed, Phases: map[string]*phaseResult{}}
	for i := range w.ranks {
		s, err := x.Add(kvindex.Target{Worker: "w", Rank: int32(i)}, "m", int(w.block))
		if err != nil {
			return nil, err
		}
		r.slots = append(r.slots, s)
	}
	r.hashes = make([]kvindex.Hash, 0, 1<<18)
	r.all = make([]uint32, 0, w.looks+1)
	for i := range r.all[:cap(r.all)] {
		r.all[:cap(r.all)][i] = 1 // touched before the baseline is taken
	}
	r.words = make([]uint64, 1<<22)
	for i := range r.words {
		r.words[i] = 1
	}
	r.events = make([]event, 1<<16)
	runtime.GC()
	if r.baseline, err = anonymousRSS(); err != nil {
		return nil, err
	}
	if err := r.run(from); err != nil {
		return nil, err
	}
	r.finish()
	return r.out, nil
}

func (r *runner) run(w source) error {
	r.events, r.words = r.events[:0], r.words[:0]
	var held, peak int64
	var phase uint16
	for {
		op, ok, err := w.next()
		if err != nil {
			return err
		}
		if !ok {
			break
		}
		switch op.kind {
		case opStore:
			e := kvindex.Event{Kind: kvindex.Stored, BlockSize: r.x.BlockSize(), Parent: kvindex.EngineHash(op.parent), HasParent: op.flags&flagParent != 0}
			words := r.copy(op.words)
			e.Hashes = engineHashes(words[op.n:])
			r.events = append(r.events, event{slot: r.slots[op.rank], event: e, contents: words[:op.n]})
			held += int64(op.n)
		case opRemove:
			held -= int64(op.n)
			hashes := engineHashes(r.copy(op.words))
			step := len(hashes)
			if r.single {
				step = 1
			}
			for part := range slices.Chunk(hashes, max(step, 1)) {
				r.events = append(r.events, event{slot: r.slots[op.rank], event: kvindex.Event{Kind: kvindex.Removed, Hashes: part}})
			}
		case opLookup:
			r.lookups = append(r.lookups, op)
		case opBarrier:
			r.batch(phase)
		case opPhase:
			r.batch(phase)
			if phase = op.phase; held > peak {
				peak = held
				r.out.Peak = r.memory(held)
			}
		}
	}
	r.batch(phase)
	if held > peak {
		r.out.Peak = r.memory(held)
	}
	if held == 0 {
		debug.FreeOSMemory()
		m := r.memory(0)
		r.out.AfterRemoval = &m
	}
	return nil
}

func (r *runner) copy(words []uint64) []uint64 {
	at := len(r.words)
	r.words = append(r.words, words...)
	return r.words[at:]
}

// batch does the lookups and then the writes since the last barrier.
func (r *runner) batch(number uint16) {
	p := r.phases[number]
	if p == nil {
		p = &phaseResult{}
		r.phases[number] = p
	}
	for _, op := range r.lookups {
		r.hashes = r.x.Hasher().AppendContents(r.hashes[:0], r.seed, op.words)
		start := time.Now()
		r.x.Match(r.hashes, &r.matches)
		took := time.Since(start)
		r.lookupTime += took
		r.looked += uint64(op.n)
		r.all = append(r.all, uint32(took))
		p.times = append(p.times, uint32(took))
		if op.flags&flagExpect != 0 {
			sum := uint64(0)
			for i := range r.matches.Holders {
				sum += uint64(r.matches.Holders[i].Blocks[kvindex.Device])
			}
			if len(r.matches.Holders) != int(op.rank) || r.matches.Blocks != int(op.aux) || sum != op.parent {
				r.out.Wrong++
			}
		}
	}
	r.lookups = r.lookups[:0]
	if len(r.events) == 0 {
		return
	}
	start := cpu.Process()
	for i := range r.events {
		e := &r.events[i]
		// refusals are counted by the index and reported at the end
		if e.contents != nil {
			_ = r.x.ApplyContent(e.slot, &e.event, e.contents)
		} else {
			_ = r.x.Apply(e.slot, &e.event)
		}
	}
	took := cpu.Process() - start
	p.cpu += took
	r.cpu += took
	for i := range r.events {
		p.WrittenBlocks += uint64(len(r.events[i].event.Hashes))
	}
	r.nEvents += uint64(len(r.events))
	r.events, r.words = r.events[:0], r.words[:0]
}

func (r *runner) memory(held int64) memory {
	s := r.x.Stats()
	rss, err := anonymousRSS()
	if err != nil {
		fmt.Fprintln(os.Stderr, "benchindex:", err)
	}
	m := memory{HolderBlocks: s.HolderBlocks, Live: s.Bytes, Reserved: s.Reserved, RSS: rss - r.baseline}
	if held > 0 {
		m.LivePer = float64(m.Live) / float64(held)
		m.RSSPer = float64(m.RSS) / float64(held)
	}
	return m
}

func (r *runner) finish() {
	written := uint64(0)
	for number, p := range r.phases {
		if p.WrittenBlocks > 0 {
			p.WritesPerCPU = float64(p.WrittenBlocks) / p.cpu.Seconds() / 1e6
		}
		p.Lookups = percentilesOf(p.times)
		written += p.WrittenBlocks
		if p.WrittenBlocks > 0 || len(p.times) > 0 {
			r.out.Phases[cmp.Or(phaseNames[number], strconv.Itoa(int(number)))] = p
		}
	}
	r.out.WritesPerCPU = float64(written) / r.cpu.Seconds() / 1e6
	r.out.EventsPerCPU = float64(r.nEvents) / r.cpu.Seconds() / 1e6
	r.out.AllPerCPU = float64(written+r.looked) / (r.cpu + r.lookupTime).Seconds() / 1e6
	r.out.Lookups = percentilesOf(r.all)
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	r.out.GCCPUShare = m.GCCPUFraction
	for _, p := range m.PauseNs {
		r.out.LongestGCPause = max(r.out.LongestGCPause, float64(p)/1e3)
	}
	s := r.x.Stats()
	for _, n := range s.Refused {
		r.out.Refused += n
	}
	r.out.UnknownRemovals = s.UnknownRemoved
}

func percentilesOf(times []uint32) percentiles {
	if len(times) == 0 {
		return percentiles{}
	}
	slices.Sort(times)
	at := func(q float64) uint32 { return times[min(int(q*float64(len(times))), len(times)-1)] }
	return percentiles{Count: len(times), P50: at(0.5), P99: at(0.99), P999: at(0.999)}
}

// engineHashes converts words to engine hashes without copying.
func engineHashes(words []uint64) []kvindex.EngineHash {
	if len(words) == 0 {
		return nil
	}
	return unsafe.Slice((*kvindex.EngineHash)(unsafe.Pointer(&words[0])), len(words))
}

// anonymousRSS is the process's resident memory without mapped files, in bytes.
func anonymousRSS() (int64, error) {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, err
	}
	for line := range strings.SplitSeq(string(b), "\n") {
		if rest, ok := strings.CutPrefix(line, "RssAnon:"); ok {
			kb, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			return kb << 10, err
		}
	}
	return 0, fmt.Errorf("no RssAnon in /proc/self/status")
}
