package feed

import (
	"strings"

	"github.com/kvlane/kvlane/kvindex"
)

// tierNamed maps engines' names of storage media to tiers: vLLM (GPU, CPU, and its connectors' STORAGE, FS, OBJ),
// SGLang's HiCache (CPU_PINNED, DISK, EXTERNAL) and the names of relays. Here and below a switch is faster than a map.
func tierNamed(medium string) (kvindex.Tier, bool) {
	switch medium {
	case "", "GPU", "DEVICE":
		return kvindex.Device, true
	case "CPU", "CPU_PINNED", "CPU_TIER1", "HOST":
		return kvindex.Host, true
	case "CPU_TIER2", "STORAGE", "FS", "DISK", "NVME":
		return kvindex.Disk, true
	case "OBJ", "EXTERNAL", "NETWORK", "REMOTE", "SHARED":
		return kvindex.External, true
	}
	return 0, false
}

// tierOf looks up a medium, ignoring case, because connectors differ in it.
func tierOf(medium []byte) (kvindex.Tier, bool) {
	tier, ok := tierNamed(string(medium))
	if !ok {
		tier, ok = tierNamed(strings.ToUpper(string(medium)))
	}
	return tier, ok
}

// mainAttention reports whether a kind of KV-cache group holds the prefix by which hits are
// counted. An event without a kind counts as main attention.
func mainAttention(kind []byte) bool {
	return len(kind) == 0 || string(kind) == "full_attention" || string(kind) == "mla_attention" || string(kind) == "sink_full_attention"
}

// slidingWindow returns the window of a stored event's group in tokens, 0 for a group without one. Layers with a recurrent
// state count as a window of two tokens: to reuse a prefix they need the state at its end, which its last block holds.
func slidingWindow(e *blockEvent) int {
	switch kind := string(e.kind); {
	case kind == "mamba":
		return 2
	case kind != "sliding_window" && kind != "sliding_window_mla" || e.window > 1<<30:
		return 0
	}
	return int(max(e.window, 0))
}

// local reports whether a block with this locality or ownership belongs to the publishing rank.
func local(value []byte) bool {
	return len(value) == 0 || string(value) == "LOCAL" || string(value) == "OWNED" || string(value) == "EXCLUSIVE"
}
