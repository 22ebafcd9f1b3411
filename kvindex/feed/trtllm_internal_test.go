package feed

import (
	"encoding/json"
	"slices"
	"testing"
)

// The fast path for tokens agrees with the general decoder wherever it does not give up.
func FuzzTokens(f *testing.F) {
	f.Add([]byte(`[{"type":"unique_token","token_id":1,"token_extra_id":0},{"token_id":4294967295,"token_extra_id":18446744073709551615}]`))
	f.Add([]byte(`[ ]`))
	f.Add([]byte(`[{"token_id":1,"TOKEN_ID":2}]`))
	f.Add([]byte(`[{"token_id":1,"Token_Extra_Id":"x"}]`))
	f.Add([]byte(`[{"token_id":01}]`))
	f.Add([]byte(`[{"token_id":1,"token_id":2}]`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if !json.Valid(b) {
			return
		}
		fast, ok := appendTokens(nil, b)
		if !ok {
			return
		}
		var slow []trtToken
		if err := json.Unmarshal(b, &slow); err != nil || !slices.Equal(fast, slow) {
			t.Fatalf("%s: %v, but %v (%v)", b, fast, slow, err)
		}
	})
}
