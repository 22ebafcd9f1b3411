//go:build !amd64 && !arm64

package kvindex

// prefetch does nothing on processors for which it is not implemented.
func prefetch(*uint64, int) {}
