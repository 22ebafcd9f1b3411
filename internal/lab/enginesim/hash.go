package enginesim

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
)

// digest is a block's hash inside the engine: the chain of everything up to the block's end.
type digest [32]byte

// identity is what separates equal tokens of different requests.
type identity struct {
	salt  string
	lora  string
	extra string // SGLang extra_key: separates blocks, is not in the published hash
}

// hasher chains block digests as one engine does.
type hasher interface {
	// next is the digest of a block after parent; nil and first set for the block at token 0.
	next(parent *digest, tokens []uint32, id identity, first bool) digest
	// event is the number that the engine publishes for a digest.
	event(d digest) uint64
}

// vllmHasher is vLLM's sha256 over a Python pickle. Text blocks without extra keys hash the same
// bytes as in the engine; digests of blocks with an adapter or salt differ from Python's.
type vllmHasher struct{ none digest }

func newVLLMHasher(seed string) vllmHasher {
	b := append(make([]byte, 0, 64), 0x80, 5, 0x95)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(seed)+4))
	b = append(b, 0x8C, byte(len(seed)))
	b = append(b, seed...)
	return vllmHasher{sha256.Sum256(append(b, 0x94, '.'))}
}

func (h vllmHasher) next(parent *digest, tokens []uint32, id identity, first bool) digest {
	if parent == nil {
		parent = &h.none
	}
	extras := ""
	if id.lora != "" {
		extras = "lora\x00" + id.lora
	}
	if id.salt != "" && first {
		extras += "\x00cache_salt\x00" + id.salt
	}
	body := append(make([]byte, 0, 64+5*len(tokens)), 'C', 32)
	body = append(append(body, parent[:]...), 0x94, '(')
	for _, t := range tokens {
		switch {
		case t < 1<<8:
			body = append(body, 'K', byte(t))
		case t < 1<<16:
			body = binary.LittleEndian.AppendUint16(append(body, 'M'), uint16(t))
		default:
			body = binary.LittleEndian.AppendUint32(append(body, 'J'), t)
		}
	}
	body = append(body, 't', 0x94)
	if extras == "" {
		body = append(body, 'N')
	} else {
		body = append(append(body, 0x8C, byte(len(extras))), extras...)
	}
	body = append(body, 0x87, 0x94, '.')
	b := binary.LittleEndian.AppendUint64(append(make([]byte, 0, len(body)+11), 0x80, 5, 0x95), uint64(len(body)))
	return sha256.Sum256(append(b, body...))
}

// event is the low 64 bits of the digest.
func (vllmHasher) event(d digest) uint64 { return binary.BigEndian.Uint64(d[24:]) }

// sglangHasher is SGLang's seedless chain over little-endian token words.
type sglangHasher struct{}

func (sglangHasher) next(parent *digest, tokens []uint32, id identity, first bool) digest {
	h := sha256.New()
	switch {
	case parent != nil:
		h.Write(parent[:])
	case first && (id.salt != "" || id.lora != ""):
		root := sha256.Sum256([]byte("sglang-cache-salt-v1\x00" + id.salt + id.lora))
		h.Write(root[:])
	}
	b := make([]byte, 0, 4*len(tokens))
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, t)
	}
	h.Write(b)
	return digest(h.Sum(nil))
}

// event is the first 64 bits; SGLang publishes them as a signed number.
func (sglangHasher) event(d digest) uint64 { return binary.BigEndian.Uint64(d[:]) }

// trtllmHasher gives opaque unsigned 64-bit keys: a reader cannot compute TensorRT-LLM's V1 block keys either.
type trtllmHasher struct{}

func (trtllmHasher) next(parent *digest, tokens []uint32, id identity, _ bool) digest {
	h := sha256.New()
	if parent != nil {
		h.Write(parent[:])
	}
	fmt.Fprintf(h, "v1|%s|%s|%v", id.salt, id.lora, tokens)
	return digest(h.Sum(nil))
}

func (trtllmHasher) event(d digest) uint64 { return binary.LittleEndian.Uint64(d[:]) }
