package fleet

import (
	"fmt"
	"testing"

	"github.com/kvlane/kvlane/kvindex"
)

func TestPromptTokensOfTheLastBlockAreNeverCounted(t *testing.T) {
	m := kvindex.Matches{Holders: []kvindex.Match{{Slot: 1, Blocks: [kvindex.NumTiers]uint32{2, 1}, Speculative: 3}}}
	for _, c := range []struct {
		tokens, engine int
		want           string
	}{
		{96, 0, "[32 16 0 0] 32"}, {97, 0, "[32 16 0 0] 48"}, {33, 0, "[32 0 0 0] 0"}, {32, 0, "[16 0 0 0] 0"},
		{96, 32, "[32 16 0 0] 16"}, {97, 32, "[32 16 0 0] 48"}, {64, 32, "[32 0 0 0] 0"}, {32, 32, "[0 0 0 0] 0"},
		{96, 1, "[32 16 0 0] 47"}, {32, 1, "[31 0 0 0] 0"},
	} {
		o := appendOverlaps(nil, &m, 16, c.tokens, func(kvindex.Slot) int { return c.engine })[0]
		if got := fmt.Sprint(o.Tokens, o.Speculative); got != c.want {
			t.Errorf("%d tokens, engine blocks of %d: %s, want %s", c.tokens, c.engine, got, c.want)
		}
		if c.engine != 0 {
			continue
		}
		if same := appendOverlaps(nil, &m, 16, c.tokens, nil)[0]; same != o {
			t.Errorf("%d tokens, all blocks alike: %+v, one by one %+v", c.tokens, same, o)
		}
	}
}
