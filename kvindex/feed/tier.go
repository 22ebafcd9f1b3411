package feed

import (
	"strings"

	"github.com/kvlane/kvlane/kvindex"
)

// media maps the names that engines give to storage to tiers: vLLM (GPU, CPU, and its
// connectors' STORAGE, FS, OBJ), SGLang's HiCache (CPU_PINNED, DISK, EXTERNAL) and
// the names of relays.
var media = map[string]kvindex.Tier{
	"":           kvindex.Device,
	"GPU":        kvindex.Device,
	"DEVICE":     kvindex.Device,
	"CPU":        kvindex.Host,
	"CPU_PINNED": kvindex.Host,
	"CPU_TIER1":  kvindex.Host,
	"HOST":       kvindex.Host,
	"CPU_TIER2":  kvindex.Disk,
	"STORAGE":    kvindex.Disk,
	"FS":         kvindex.Disk,
	"DISK":       kvindex.Disk,
	"NVME":       kvindex.Disk,
	"OBJ":        kvindex.External,
	"EXTERNAL":   kvindex.External,
	"NETWORK":    kvindex.External,
	"REMOTE":     kvindex.External,
	"SHARED":     kvindex.External,
}

// tierOf finds a medium in any case; connectors write their own.
func tierOf(medium []byte) (kvindex.Tier, bool) {
	tier, ok := media[string(medium)]
	if !ok {
		tier, ok = media[strings.ToUpper(string(medium))]
	}
	return tier, ok
}

// mainAttention says which kinds of KV-cache group hold the prefix that a hit is
// counted by. A kind that is absent from an event counts as main attention.
var mainAttention = map[string]bool{
	"":                    true,
	"full_attention":      true,
	"mla_attention":       true,
	"sink_full_attention": true,
}

// local says which values of locality and ownership mean that the block is the
// publishing rank's own.
var local = map[string]bool{"": true, "LOCAL": true, "OWNED": true, "EXCLUSIVE": true}
