package decide

import (
	"crypto/rand"
	"crypto/sha256"

	"github.com/kvlane/kvlane/kvindex"
)

// hashKey makes the block hash's key from the configured text; a random one if
// there is none.
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
