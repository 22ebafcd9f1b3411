package enginesim

import (
	"crypto/sha256"
	"encoding/binary"
	"slices"
)

// digest is a block's hash inside the engine: the chain of everything up to the block's end. It is not an engine's own
// function: readers of events take it for a name.
type digest [32]byte

// identity is what separates equal tokens of different requests.
type identity struct {
	salt  string
	lora  string
	extra string // SGLang extra_key: separates blocks, is not in the published hash
}

// next is the digest of the block after d; the zero digest precedes the block at token 0.
func (d digest) next(tokens []uint32, id identity) digest {
	b := append(slices.Clone(d[:]), id.salt+"\x00"+id.lora+"\x00"...)
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, t)
	}
	return sha256.Sum256(b)
}

// number is the hash that the engine publishes; SGLang writes it as a signed number.
func (d digest) number() uint64 { return binary.BigEndian.Uint64(d[:]) }
