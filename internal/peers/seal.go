package peers

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
)

// nonceSize is the size in bytes of the random numbers that both sides choose for a copy.
const nonceSize = 32

var errForged = errors.New("a piece that was not sealed for us: another key (index.key), or changed on the way")

func newNonce() []byte {
	n := make([]byte, nonceSize)
	_, _ = rand.Read(n) // never fails
	return n
}

func keyed(secret []byte, label string, parts ...[]byte) []byte {
	m := hmac.New(sha256.New, secret)
	m.Write([]byte(label))
	for _, p := range parts {
		m.Write(p)
	}
	return m.Sum(nil)
}

// proof is part of a request: a nonce and its MAC. A replayed request only yields a copy that cannot be read without
// the secret.
func proof(secret, nonce []byte) []byte {
	return append(bytes.Clone(nonce), keyed(secret, "kvlane copy request", nonce)...)
}

// proven returns the nonce of a request, nil if it does not come from a holder of the secret.
func proven(secret, p []byte) []byte {
	if len(p) != nonceSize+sha256.Size || !hmac.Equal(p, proof(secret, p[:nonceSize])) {
		return nil
	}
	return p[:nonceSize]
}

// seal encrypts and authenticates the pieces of one copy, in order. Its key is used for that
// copy alone, because both sides choose a nonce. It is for one goroutine.
type seal struct {
	aead cipher.AEAD
	n    uint64
}

func newSeal(secret, asked, answered []byte) *seal {
	block, err := aes.NewCipher(keyed(secret, "kvlane copy", asked, answered))
	if err != nil {
		panic(err) // the key has the right size
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		panic(err)
	}
	return &seal{aead: aead}
}

func (s *seal) next() []byte {
	nonce := make([]byte, s.aead.NonceSize())
	binary.LittleEndian.PutUint64(nonce, s.n)
	s.n++
	return nonce
}

func (s *seal) close(piece []byte) []byte {
	return s.aead.Seal(nil, s.next(), piece, nil) //nolint:gosec // the key is of one copy, and each piece has its own nonce
}

func (s *seal) open(piece []byte) ([]byte, error) {
	text, err := s.aead.Open(piece[:0], s.next(), piece, nil)
	if err != nil {
		return nil, errForged
	}
	return text, nil
}
