package feed

import (
	"strings"

	"github.com/kvlane/kvlane/kvindex"
)

// media maps engines' names of storage media to tiers: vLLM (GPU, CPU, and its connectors'
// STORAGE, FS, OBJ), SGLang's HiCache (CPU_PINNED, DISK, EXTERNAL) and the names of relays.
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

// tierOf looks up a medium, ignoring case, because connectors differ in it.
func tierOf(medium []byte) (kvindex.Tier, bool) {
	tier, ok := media[string(medium)]
	if !ok {
		tier, ok = media[strings.ToUpper(string(medium))]
	}
	return tier, ok
}

// mainAttention maps the kinds of KV-cache group to whether they hold the prefix by which hits
// are counted. An event without a kind counts as main attention.
var mainAttention = map[string]bool{
	"":                    true,
	"full_attention":      true,
	"mla_attention":       true,
	"sink_full_attention": true,
}

// local maps the values of locality and ownership to whether the block belongs to the publishing
// rank.
var local = map[string]bool{"": true, "LOCAL": true, "OWNED": true, "EXCLUSIVE": true}
