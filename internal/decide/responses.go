package decide

import (
	"math"
	"net/http"

	"github.com/kvlane/kvlane/internal/fleet"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/routing"
)

// findStored reads the id of the answer that a request continues, reads or cancels. Where tenants are
// separated, an id that was not made for the request's tenant is answered as one that does not exist;
// elsewhere the client or the engine chose it.
func (j *job) findStored(text string) error {
	if text == "" {
		return nil
	}
	tenant, err := j.tenant()
	tenants := j.d.cfg.Tenants.SaltHeader != ""
	if err != nil && tenants {
		return err
	}
	var ok bool
	if j.stored, ok = j.d.responses.Read(j.d.fleet.View(), tenant, text); !ok && tenants {
		return j.failure("kvlane_response_not_found", body.Failure{Status: http.StatusNotFound, Param: "response_id",
			Message: "Response with id '" + observe.Clip(text) + "' not found."})
	}
	return nil
}

// overlapStored credits the target of the answer that the request continues with its prompt, whose
// tokens only the engine knows.
func (j *job) overlapStored() {
	if j.stored.Pin != nil && j.stored.Tokens > 0 && j.cacheReads > 0 {
		j.s.overlaps = append(j.s.overlaps, routing.Overlap{Slot: j.stored.Slot, Speculative: int32(min(j.stored.Tokens, math.MaxInt32))})
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
	return []body.Edit{body.Set([]byte(`"`+w.d.responses.ID(tenant, w.stored.Root, w.tokens.count, e)+`"`), body.FieldRequestID.String())}
}
