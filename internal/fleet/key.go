package fleet

import (
	"crypto/rand"
	"crypto/sha256"

	"github.com/kvlane/kvlane/kvindex"
)

// hashKey derives the key of the block hash from the configured secret; without
// one it is random.
func hashKey(text string) (kvindex.Key, error) {
	var key kvindex.Key
	if text == "" {
		_, err := rand.Read(key[:])
		return key, err
	}
	sum := sha256.Sum256([]byte(text))
	copy(key[:], sum[:])
	return key, nil
}
