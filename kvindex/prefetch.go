//go:build amd64 || arm64

package kvindex

// prefetch asks the processor for so many cache lines, at least one, from the one
// with p on. It reads nothing, so p may be about to change and the lines may end
// outside of p's slice.
//
//go:noescape
func prefetch(p *uint64, lines int)
