package truth

import (
	"slices"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
)

// chains keeps the whole token path to every block of an SGLang recording. It uses the
// feed's decoder, but not the index.
type chains struct {
	paths  map[chainKey][]uint32
	dec    *feed.Decoder
	marked [][]uint32 // paths that requests with an extra_key stored
}

type chainKey struct {
	source string
	hash   kvindex.EngineHash
}

func newChains() *chains {
	return &chains{paths: map[chainKey][]uint32{}, dec: feed.NewDecoder(feed.SGLang, 0)}
}

// learn adds an event record's paths and returns the longest.
func (c *chains) learn(r *record) []uint32 {
	var longest []uint32
	if len(r.Frames) == 0 {
		return nil
	}
	b, err := c.dec.Decode(r.Frames[len(r.Frames)-1])
	if err != nil {
		return nil
	}
	for i := range b.Events {
		e := &b.Events[i]
		if e.Kind != kvindex.Stored || e.BlockSize == 0 || e.Window > 0 {
			continue
		}
		var path []uint32
		if e.HasParent {
			path = c.paths[chainKey{r.Source, e.Parent}]
			if path == nil {
				continue
			}
		}
		for k, h := range e.Hashes {
			path = append(slices.Clip(path), e.Tokens[k*e.BlockSize:(k+1)*e.BlockSize]...)
			c.paths[chainKey{r.Source, h}] = path
		}
		if len(path) > len(longest) {
			longest = path
		}
	}
	return longest
}

// taint remembers what a request with an extra_key stored: the engine separates it, but its
// events do not show that.
func (c *chains) taint(window []*record, block int) {
	for _, r := range window {
		if path := c.learn(r); len(path) >= block {
			c.marked = append(c.marked, path)
		}
	}
}

// tainted reports whether a prompt begins like one with an extra_key.
func (c *chains) tainted(ids []uint32, block int) bool {
	return len(ids) >= block && slices.ContainsFunc(c.marked, func(p []uint32) bool { return slices.Equal(p[:block], ids[:block]) })
}
