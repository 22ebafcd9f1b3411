package replicas

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
)

// seal encrypts messages with a key derived from the fleet's secret, so that a process without it can neither read nor
// write them, even if NATS routes lead to it: a route's password authenticates only the side that connects. nil leaves
// messages as they are.
type seal struct{ cipher.AEAD }

func newSeal(secret string) (*seal, error) {
	if secret == "" {
		return nil, nil //nolint:nilnil // no secret, no seal
	}
	block, err := aes.NewCipher(derive(secret, "messages"))
	if err != nil {
		return nil, err
	}
	gcm, err := cipher.NewGCMWithRandomNonce(block)
	return &seal{gcm}, err
}

// routePassword must not reveal the secret, because it is sent to other servers.
func routePassword(secret string) string { return hex.EncodeToString(derive(secret, "routes")) }

func derive(secret, use string) []byte {
	h := hmac.New(sha256.New, []byte(secret))
	h.Write([]byte("kvlane " + use))
	return h.Sum(nil)
}

// close encrypts data for a subject.
func (s *seal) close(subject string, data []byte) []byte {
	if s == nil {
		return data
	}
	return s.Seal(nil, nil, data, []byte(subject)) //nolint:gosec // NewGCMWithRandomNonce makes the nonce
}

// open decrypts what close made for the same subject.
func (s *seal) open(subject string, data []byte) ([]byte, error) {
	if s == nil {
		return data, nil
	}
	return s.Open(nil, nil, data, []byte(subject))
}
