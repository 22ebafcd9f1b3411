package tokenizer

import (
	"encoding/binary"
	"math/bits"
	"math/rand/v2"
)

// Multipliers of the word hash, after wyhash.
const (
	mulA = 0xa0761d6478bd642f
	mulB = 0xe7037ed1a0b428db
	mulC = 0x9e3779b97f4a7c15
)

// hashSeed is random per process, so that collisions cannot be prepared. It
// affects time only: every hit compares the bytes.
var hashSeed = rand.Uint64()

func fold(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	return hi ^ lo
}

// hashBytes hashes a word or a paragraph.
func hashBytes(b []byte) uint64 {
	n := len(b)
	h := hashSeed ^ uint64(n)*mulC
	switch {
	case n > 16:
		tail := b[n-16:]
		for len(b) > 16 {
			h = fold(binary.LittleEndian.Uint64(b)^mulA, binary.LittleEndian.Uint64(b[8:16])^h)
			b = b[16:]
		}
		return fold(fold(binary.LittleEndian.Uint64(tail)^mulB, binary.LittleEndian.Uint64(tail[8:])^h), mulC)
	case n >= 8:
		return fold(fold(binary.LittleEndian.Uint64(b)^mulA, binary.LittleEndian.Uint64(b[n-8:])^h), mulB)
	case n >= 4:
		x := uint64(binary.LittleEndian.Uint32(b))<<32 | uint64(binary.LittleEndian.Uint32(b[n-4:]))
		return fold(fold(x^mulA, h), mulB)
	case n > 0:
		x := uint64(b[0])<<16 | uint64(b[n>>1])<<8 | uint64(b[n-1])
		return fold(fold(x^mulA, h), mulB)
	}
	return h
}
