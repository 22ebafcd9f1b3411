package fleet

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"hash/fnv"
	"math"
	"strings"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

// An engine keeps an answer of /v1/responses in the process that made it. Only there can it be continued
// (previous_response_id), read or cancelled. The engines (vLLM 0.32, SGLang, TensorRT-LLM) use the body's request_id as
// its name, so Kvlane sets that to an id that contains a hash of the target. This needs no table: any replica with the
// same index.key can read the id, even after a restart.
//
// The id is responseMark and, encrypted (AES-GCM) and in hex: 8 random bytes common to a conversation's answers, the
// prompt's length in tokens (4 bytes) and a hash of the target's name (8 bytes). The tenant is the additional data, so
// an id is valid for its tenant only. A client can neither read, change nor forge an id.
const (
	responseMark  = "resp_"
	responseBytes = 20
)

// Responses makes and reads the ids of answers. It is safe for concurrent use.
type Responses struct{ aead cipher.AEAD }

// NewResponses returns Responses that can read the ids of every replica with the same key.
func NewResponses(key kvindex.Key) (*Responses, error) {
	secret := Derived(key, "responses")
	block, err := aes.NewCipher(secret[:])
	if err != nil {
		return nil, err
	}
	aead, err := cipher.NewGCMWithRandomNonce(block)
	return &Responses{aead}, err
}

// Response is an answer that an engine may have stored.
type Response struct {
	Root   []byte // identifies its conversation
	Tokens int64  // of its prompt
	Slot   kvindex.Slot
	Pin    *routing.Pin // nil if its target is gone
}

// Conversation returns the id of the conversation.
func (r *Response) Conversation() string { return responseMark + hex.EncodeToString(r.Root) }

// Read reads an id; ok is false for one that was not made for the tenant.
func (s *Responses) Read(v *View, tenant, text string) (r Response, ok bool) {
	digits, marked := strings.CutPrefix(text, responseMark)
	id, err := hex.DecodeString(digits)
	if err == nil {
		id, err = s.aead.Open(nil, nil, id, []byte(tenant))
	}
	if !marked || err != nil || len(id) != responseBytes {
		return r, false
	}
	r.Root, r.Tokens = id[:8], int64(binary.LittleEndian.Uint32(id[8:]))
	for slot, e := range v.Endpoints {
		if nameHash(e) == binary.LittleEndian.Uint64(id[12:]) {
			r.Slot, r.Pin = slot, &routing.Pin{Worker: e.Target.Worker, Rank: kvindex.NoRank, Strict: true}
			if e.Member.RankBy == "port" { // each rank is a process of its own
				r.Pin.Rank = e.Target.Rank
			}
			break
		}
	}
	return r, true
}

// ID returns the id of a target's answer to a prompt of that many tokens; root is nil for a new conversation.
func (s *Responses) ID(tenant string, root []byte, tokens int64, e *Endpoint) string {
	id := make([]byte, 8, responseBytes)
	if copy(id, root) == 0 {
		_, _ = rand.Read(id) // never fails
	}
	id = binary.LittleEndian.AppendUint32(id, uint32(min(tokens, math.MaxInt32)))
	id = binary.LittleEndian.AppendUint64(id, nameHash(e))
	return responseMark + hex.EncodeToString(s.aead.Seal(nil, nil, id, []byte(tenant))) //nolint:gosec // the nonce is random
}

func nameHash(e *Endpoint) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(e.Name))
	return h.Sum64()
}
