package decide

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash/fnv"
	"math"
	"net/http"
	"strings"

	"github.com/kvlane/kvlane/internal/fleet"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

// An engine keeps an answer of /v1/responses in the process that made it: only there can it be
// continued (previous_response_id), read or cancelled. The engines (vLLM 0.32, SGLang, TensorRT-LLM)
// name it by the body's request_id. Kvlane sets that to an id that tells which target has the
// answer. No table is needed: any replica with the same index.key reads the id, also after a restart.
//
// The id is responseMark and in hex, sealed: 8 random bytes common to a conversation's answers, the prompt's length in
// tokens (4 bytes) and a hash of the target's name (8 bytes). The tenant is authenticated, not contained. No client can
// read an id, change it or make one.
const (
	responseMark  = "resp_"
	responseBytes = 20
)

// responseCipher seals the ids of answers.
func responseCipher(key kvindex.Key) (cipher.AEAD, error) {
	sum := sha256.Sum256(append([]byte("responses\x00"), key[:]...))
	block, err := aes.NewCipher(sum[:])
	if err != nil {
		return nil, err
	}
	return cipher.NewGCMWithRandomNonce(block)
}

// stored is the answer that a request continues, reads or cancels, the zero value if there is none or its
// target is not known.
type stored struct {
	root   []byte // of its conversation
	tokens int64  // of its prompt
	slot   kvindex.Slot
	pin    *routing.Pin // nil if its target is gone
}

// findStored reads the id of an answer. Where tenants are separated, an id that was not made for the
// request's tenant is answered as one that does not exist.
func (j *job) findStored(text string) error {
	if text == "" {
		return nil
	}
	tenant, err := j.tenant()
	tenants := j.d.cfg.Tenants.SaltHeader != ""
	if err != nil && tenants {
		return err
	}
	digits, marked := strings.CutPrefix(text, responseMark)
	sealed, err := hex.DecodeString(digits)
	var id []byte
	if err == nil {
		id, err = j.d.responses.Open(nil, nil, sealed, []byte(tenant))
	}
	if !marked || err != nil || len(id) != responseBytes {
		if !tenants {
			return nil // the client or the engine chose it
		}
		return j.failure("kvlane_response_not_found", body.Failure{Status: http.StatusNotFound, Param: "response_id",
			Message: "Response with id '" + observe.Clip(text) + "' not found."})
	}
	j.stored.root, j.stored.tokens = id[:8], int64(binary.LittleEndian.Uint32(id[8:]))
	for slot, e := range j.d.fleet.View().Endpoints {
		if nameHash(e) == binary.LittleEndian.Uint64(id[12:]) {
			j.stored.slot, j.stored.pin = slot, &routing.Pin{Worker: e.Target.Worker, Rank: kvindex.NoRank, Strict: true}
			if e.Member.RankBy == "port" { // each rank is a process of its own
				j.stored.pin.Rank = e.Target.Rank
			}
			break
		}
	}
	return nil
}

func nameHash(e *fleet.Endpoint) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(e.Name))
	return h.Sum64()
}

// overlapStored credits the target of the answer that the request continues with its prompt, whose
// tokens only the engine knows.
func (j *job) overlapStored() {
	if j.stored.pin != nil && j.stored.tokens > 0 && j.cacheReads > 0 {
		j.s.overlaps = append(j.s.overlaps, routing.Overlap{Slot: j.stored.slot, Speculative: int32(min(j.stored.tokens, math.MaxInt32))})
	}
}

// responseEdits returns the edit that names an answer which the engine may store. Without tenants
// a client may choose the name.
func (w *work) responseEdits(e *fleet.Endpoint) []body.Edit {
	r, tenants := w.in.body, w.d.cfg.Tenants.SaltHeader != ""
	if w.api != body.Responses || !w.in.known || string(r.Get("store")) == "false" || r.Has(body.FieldRequestID) && !tenants {
		return nil
	}
	tenant, _ := w.tenant() // an error has been answered before
	id := make([]byte, 8, responseBytes)
	if copy(id, w.stored.root) == 0 {
		_, _ = rand.Read(id) // never fails
	}
	id = binary.LittleEndian.AppendUint32(id, uint32(min(w.tokens.count, math.MaxInt32)))
	id = binary.LittleEndian.AppendUint64(id, nameHash(e))
	name := responseMark + hex.EncodeToString(w.d.responses.Seal(nil, nil, id, []byte(tenant))) //nolint:gosec // the nonce is random
	return []body.Edit{body.Set([]byte(`"`+name+`"`), body.FieldRequestID.String())}
}
