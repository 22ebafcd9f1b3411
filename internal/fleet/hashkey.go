package fleet

import (
	"crypto/rand"
	"crypto/sha256"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/kvindex"
)

// NewKey derives the key of the block hash from the configured secret; without one it is random.
func NewKey(i *config.Index) (key kvindex.Key, err error) {
	text, err := i.Secret()
	switch {
	case err != nil:
	case text == "":
		_, err = rand.Read(key[:])
	default:
		sum := sha256.Sum256([]byte(text))
		copy(key[:], sum[:])
	}
	return key, err
}

// Derived derives a secret for another use from the key. Replicas with the same key get the same secret.
func Derived(key kvindex.Key, use string) [sha256.Size]byte {
	return sha256.Sum256(append([]byte(use+"\x00"), key[:]...))
}
