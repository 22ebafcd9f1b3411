package enginesim

import (
	"encoding/hex"
	"testing"
)

func upTo(from, to uint32) []uint32 {
	var ids []uint32
	for i := from; i <= to; i++ {
		ids = append(ids, i)
	}
	return ids
}

// The numbers were recorded from events of vLLM 0.32 and SGLang 0.5.23, or computed with
// Python's pickle.
func TestHashVectors(t *testing.T) {
	for _, row := range []struct {
		name   string
		h      hasher
		block  uint32
		id     identity
		events []uint64
	}{
		{"vllm sha256, block 32", newVLLMHasher("vllm-none-hash"), 32, identity{}, []uint64{15055828968291616402, 5204843658281419474}},
		{"vllm sha256, block 16", newVLLMHasher("vllm-none-hash"), 16, identity{}, []uint64{7322446309363477352, 17027874615116373601}},
		{"vllm sha256, seed 0", newVLLMHasher("0"), 16, identity{}, []uint64{16823396573910764246, 9852303496387231819}},
		{"sglang", sglangHasher{}, 16, identity{}, []uint64{5740554423035903369, 1<<64 - 278502217879090434}},
		{"sglang salted", sglangHasher{}, 16, identity{salt: "tenant-a"}, []uint64{1<<64 - 5929660020070110275}},
	} {
		var parent *digest
		for i, want := range row.events {
			from := 1000 + uint32(i)*row.block
			d := row.h.next(parent, upTo(from, from+row.block-1), row.id, i == 0)
			if got := row.h.event(d); got != want {
				t.Errorf("%s block %d: %d (%x), want %d", row.name, i, got, d, want)
			}
			parent = &d
		}
	}
	none := newVLLMHasher("vllm-none-hash").none
	if got := hex.EncodeToString(none[:4]); got != "066b1e89" {
		t.Errorf("seed digest %s", got)
	}
}
