package decide

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/kvindex"
)

// hashKey derives the key of the block hash from the configured secret; without
// one it is random.
func hashKey(c *config.Config) (kvindex.Key, error) {
	var key kvindex.Key
	text, err := c.Index.Secret()
	if err != nil {
		return key, err
	}
	if text == "" {
		_, err = rand.Read(key[:])
		return key, err
	}
	sum := sha256.Sum256([]byte(text))
	copy(key[:], sum[:])
	return key, nil
}

// routingSeed returns the seed of the router's hashes: derived from the key of the block
// hash, so that replicas that share the key share the seed; random otherwise.
func routingSeed(key kvindex.Key) uint64 {
	sum := sha256.Sum256(append([]byte("routing\x00"), key[:]...))
	return binary.LittleEndian.Uint64(sum[:])
}
