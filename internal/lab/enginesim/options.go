package enginesim

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// EngineKind names the simulated engine.
type EngineKind string

// The engines.
const (
	VLLM   EngineKind = "vllm"
	SGLang EngineKind = "sglang"
	TRTLLM EngineKind = "trtllm"
)

// Role is an engine's part in prefill/decode disaggregation.
type Role string

// The roles. A prefill engine refuses requests that are not prefill legs, a decode engine those that are.
const (
	Both    Role = "both"
	Prefill Role = "prefill"
	Decode  Role = "decode"
)

// Options configure an engine. The zero value of a field means its default.
type Options struct {
	Engine    EngineKind // default vllm
	Model     string     // default "demo"
	LoRA      []string   // names of adapters that are served as models of their own
	Listen    string     // default 127.0.0.1:0; with PortPerRank and a port that is not 0, rank r listens on port + r
	SideAddr  string     // block transfers and /sim, also while the API refuses connections; default 127.0.0.1:0
	Ranks     int        // data-parallel ranks, default 1
	StartRank int        // global number of rank 0 (vLLM's hybrid balancing): events and metrics carry global numbers
	// PortPerRank gives each rank an API of its own, as vLLM's external balancing does; rank headers then have no effect.
	PortPerRank bool
	BlockSize   int // tokens, default 16
	Blocks      int // per rank, default 4096; vLLM keeps one for itself
	MaxModelLen int // tokens of prompt and answer, default what the blocks hold, at most 131072

	Tokenizer *Tokenizer // required; see LoadTokenizer; may be shared between engines

	EventsEndpoint string // "tcp://127.0.0.1:0" (any port), "tcp://*:5557" (port + rank), "ipc://path"; empty: no events
	EventsConnect  bool   // connect to a bound subscriber instead of binding
	EventsTopic    string
	ReplayEndpoint string // like EventsEndpoint; empty: no replay
	ReplaySteps    int    // batches kept for replay, default 10000
	OldReplay      bool   // replay replies without a topic frame, as engines before mid 2026
	ArrayEvents    bool   // events as arrays, as engines before mid 2026
	RawHashes      bool   // vLLM: whole digests instead of 64-bit numbers

	Time         TimeModel
	CoupledRanks bool // ranks step together (attention data parallel)

	Role Role // default both
	// Connector is the protocol between prefill and decode: nixl (vLLM's default), nixl-push, mooncake, p2p-nccl, moriio,
	// moriio-write, lmcache, sharedstorage; bootstrap (SGLang's default), trtllm (TensorRT-LLM's).
	Connector string
	KVLease   time.Duration // how long a prefill engine keeps blocks that are not fetched; default 30 s
	Bootstrap string        // "host:port" of the bootstrap server of SGLang and Mooncake, default 127.0.0.1:0
	Shared    *SharedStore  // what the connector sharedstorage shares

	// OutputTokens is the length of an answer whose request names none; default 16.
	OutputTokens int
	Faults       Faults
}

// TimeModel gives the duration of a step of a rank: A + P·prefill tokens + Q·Σ chunk·(start + chunk/2) + B·decoding
// requests + C·resident tokens of decoding requests, where Q and C are picoseconds. The constants of public figures for
// a 70B model are in D70.
type TimeModel struct {
	A, P, B time.Duration
	Q, C    float64
	Budget  int     // tokens per step, default 8192
	MaxSeqs int     // concurrent requests, default 256
	Scale   float64 // of real time; 0 means that steps take no time
}

// D70 stands for a dense 70B model in FP8 on four H100 as one rank.
var D70 = TimeModel{A: 10 * time.Millisecond, P: 50 * time.Microsecond, Q: 1300, B: 30 * time.Microsecond, C: 35_000, Budget: 8192, MaxSeqs: 256, Scale: 1}

// load is the work of a step.
type load struct {
	prefill, decoding, resident int
	quadratic                   float64 // Σ chunk·(start + chunk/2)
}

func (m TimeModel) step(l load) time.Duration {
	ps := float64(m.A+m.P*time.Duration(l.prefill)+m.B*time.Duration(l.decoding))*1000 + m.Q*l.quadratic + m.C*float64(l.resident)
	return time.Duration(ps / 1000 * m.Scale)
}

// BindFlags registers flags for the options that are useful on a command line.
func (o *Options) BindFlags(f *flag.FlagSet) {
	f.Func("engine", "engine to play: vllm (default), sglang, trtllm", func(s string) error { o.Engine = EngineKind(s); return nil })
	f.StringVar(&o.Model, "model", "demo", "served model `name`")
	f.Func("lora", "comma-separated `names` of adapters", func(s string) error { o.LoRA = strings.Split(s, ","); return nil })
	f.StringVar(&o.Listen, "listen", "127.0.0.1:8000", "`address` of the API")
	f.StringVar(&o.SideAddr, "side-listen", "127.0.0.1:0", "`address` for block transfers and /sim")
	bounded(f, &o.Ranks, "ranks", 1, 1, maxRanks, "data-parallel ranks")
	bounded(f, &o.StartRank, "start-rank", 0, 0, 1<<20, "global number of the first rank")
	f.BoolVar(&o.PortPerRank, "port-per-rank", false, "one API port for each rank")
	bounded(f, &o.BlockSize, "block-size", 16, 1, maxBlockSize, "`tokens` in a KV block")
	bounded(f, &o.Blocks, "blocks", 4096, 2, maxBlocks, "KV blocks of a rank")
	f.IntVar(&o.MaxModelLen, "max-model-len", 0, "`tokens` of prompt and answer (0: what the blocks hold)")
	f.StringVar(&o.EventsEndpoint, "events", "tcp://127.0.0.1:5557", "KV event `endpoint`, port + rank; empty for none")
	f.BoolVar(&o.EventsConnect, "events-connect", false, "connect to the event endpoint instead of binding it")
	f.StringVar(&o.EventsTopic, "events-topic", "", "`topic` of the events")
	f.StringVar(&o.ReplayEndpoint, "replay", "", "replay `endpoint`, port + rank; empty for none")
	bounded(f, &o.ReplaySteps, "replay-steps", 10000, 1, 1<<20, "`batches` kept for replay")
	f.BoolVar(&o.OldReplay, "old-replay", false, "replay replies without a topic frame")
	f.BoolVar(&o.ArrayEvents, "array-events", false, "events as arrays instead of maps")
	f.BoolVar(&o.RawHashes, "raw-hashes", false, "block hashes as bytes (vllm)")
	f.BoolVar(&o.CoupledRanks, "coupled-ranks", false, "ranks step together")
	f.Func("time-model", "d70: steps take as long as those of a dense 70B model; or none", func(s string) error {
		t, ok := map[string]TimeModel{"d70": D70, "none": {}}[s]
		if !ok {
			return fmt.Errorf("time model %q: want d70 or none", s)
		}
		o.Time = t
		return nil
	})
	f.DurationVar(&o.Time.A, "step-base", 0, "`time` of an empty step")
	f.DurationVar(&o.Time.P, "step-prefill", 0, "`time` a prefill token")
	f.DurationVar(&o.Time.B, "step-decode", 0, "`time` a decoding request and step")
	bounded(f, &o.Time.Budget, "step-tokens", 8192, 1, 1<<24, "`tokens` a step")
	bounded(f, &o.Time.MaxSeqs, "max-seqs", 256, 1, 1<<16, "`requests` that run concurrently on a rank")
	f.Float64Var(&o.Time.Scale, "time-scale", 1, "`factor` on every step's time; 0 for none")
	f.Func("role", "both (default), prefill or decode", func(s string) error { o.Role = Role(s); return nil })
	f.StringVar(&o.Connector, "connector", "", "prefill/decode `protocol` (default: nixl, bootstrap or trtllm, by engine)")
	f.DurationVar(&o.KVLease, "kv-lease", 30*time.Second, "`time` for which prefilled blocks wait to be fetched")
	f.StringVar(&o.Bootstrap, "bootstrap", "127.0.0.1:0", "`address` of the bootstrap server (sglang prefill)")
	bounded(f, &o.OutputTokens, "output-tokens", 16, 1, maxRequestTokens, "length of an answer whose request names none")
}

// Bounds of one process. A block takes about 100 bytes of memory.
const (
	maxRanks     = 256
	maxBlockSize = 1 << 16
	maxBlocks    = 1 << 22 // of a rank
	maxAllBlocks = 1 << 24 // of all ranks
	maxScale     = 1e6
)

// bounded makes a flag for a number within bounds, which the usage and the error name.
func bounded(f *flag.FlagSet, p *int, name string, value, least, most int, usage string) {
	*p = value
	f.Func(name, fmt.Sprintf("%s, %d to %d (default %d)", usage, least, most, value), func(s string) error {
		n, err := strconv.Atoi(s)
		if err != nil || n < least || n > most {
			return fmt.Errorf("want a number from %d to %d", least, most)
		}
		*p = n
		return nil
	})
}

// OptionsError describes an invalid option of an engine.
type OptionsError struct{ error }

// complete fills in defaults and rejects invalid options.
func (o *Options) complete() error {
	o.Engine, o.Role, o.Model = cmp.Or(o.Engine, VLLM), cmp.Or(o.Role, Both), cmp.Or(o.Model, "demo")
	for _, address := range []*string{&o.Listen, &o.SideAddr, &o.Bootstrap} {
		*address = cmp.Or(*address, "127.0.0.1:0")
	}
	o.Ranks, o.BlockSize, o.Blocks = cmp.Or(o.Ranks, 1), cmp.Or(o.BlockSize, 16), cmp.Or(o.Blocks, 4096)
	o.ReplaySteps, o.OutputTokens = cmp.Or(o.ReplaySteps, 10_000), cmp.Or(o.OutputTokens, 16)
	o.Time.Budget, o.Time.MaxSeqs = cmp.Or(o.Time.Budget, 8192), cmp.Or(o.Time.MaxSeqs, 256)
	o.KVLease = cmp.Or(o.KVLease, 30*time.Second)
	usable := (o.Blocks - 1) * o.BlockSize
	o.MaxModelLen = cmp.Or(o.MaxModelLen, min(usable, 131072))
	o.Connector = cmp.Or(o.Connector, map[EngineKind]string{VLLM: "nixl", SGLang: "bootstrap", TRTLLM: "trtllm"}[o.Engine])
	switch {
	case o.Engine != VLLM && o.Engine != SGLang && o.Engine != TRTLLM:
		return fmt.Errorf("engine %q: want vllm, sglang or trtllm", o.Engine)
	case o.Role != Both && o.Role != Prefill && o.Role != Decode:
		return fmt.Errorf("role %q: want both, prefill or decode", o.Role)
	case connectors[o.Connector] == nil:
		return fmt.Errorf("connector %q is not known", o.Connector)
	case o.Ranks < 1 || o.Ranks > maxRanks:
		return fmt.Errorf("%d ranks: want 1 to %d", o.Ranks, maxRanks)
	case o.BlockSize < 1 || o.BlockSize > maxBlockSize:
		return fmt.Errorf("block size %d: want 1 to %d", o.BlockSize, maxBlockSize)
	case o.Blocks < 2 || o.Blocks > maxBlocks || o.Ranks*o.Blocks > maxAllBlocks:
		return fmt.Errorf("%d blocks on each of %d ranks: want 2 to %d, and at most %d on all", o.Blocks, o.Ranks, maxBlocks, maxAllBlocks)
	case o.MaxModelLen < 0:
		return fmt.Errorf("max model len %d: want a number of tokens, or 0 for what the blocks hold", o.MaxModelLen)
	case min(o.Time.A, o.Time.P, o.Time.B) < 0:
		return errors.New("the times of a step (step-base, step-prefill, step-decode) are from 0 on")
	case !(o.Time.Scale >= 0 && o.Time.Scale <= maxScale):
		return fmt.Errorf("time scale %g: want 0 to %g", o.Time.Scale, float64(maxScale))
	case o.KVLease < 0:
		return fmt.Errorf("kv lease %v: want a time from 0 on", o.KVLease)
	case o.MaxModelLen > usable:
		return fmt.Errorf("max model len %d is more than the cache holds (%d tokens)", o.MaxModelLen, usable)
	case o.Tokenizer == nil:
		return errors.New("no tokenizer")
	}
	return nil
}
