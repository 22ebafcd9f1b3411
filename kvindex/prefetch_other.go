//go:build !amd64 && !arm64

package kvindex

// prefetch does nothing where it is not written for the processor.
func prefetch(*uint64, int) {}
