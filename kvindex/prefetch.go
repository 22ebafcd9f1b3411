//go:build amd64 || arm64

package kvindex

// prefetch asks the processor to load the given number of cache lines, at least one, starting with the one that
// contains p. It reads nothing, so p may change concurrently and the lines may extend past p's slice.
//
//go:noescape
func prefetch(p *uint64, lines int)
