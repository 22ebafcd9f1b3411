package decide

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"

	"github.com/kvlane/kvlane/internal/fleet"
	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/shape"
)

// tenant returns the tenant in the gateway's header, "" if none. Of two such headers one may be the client's. It comes
// before the parsing of the body, which may be large.
func (j *job) tenant() (string, error) {
	t := &j.d.cfg.Tenants
	name, n := j.headers(t.SaltHeader)
	switch {
	case n > 1:
		return "", j.fail(403, "kvlane_tenant_ambiguous", "the request names more than one tenant")
	case name == "" && t.Required && t.SaltHeader != "":
		return "", j.fail(403, "kvlane_tenant_missing", "the request names no tenant")
	}
	return name, nil
}

// headers returns the last value of a header, and how many there are. An empty name finds none.
func (j *job) headers(name string) (value string, n int) {
	for i := range j.r.Headers {
		if h := &j.r.Headers[i]; name != "" && h.Name == name {
			value, n = h.Value, n+1
		}
	}
	return value, n
}

// readTenant sets the salt of a request, whose tenant is valid. The client's own salt still separates caches within a tenant. No client can
// produce the salt of another tenant, or of requests without a tenant.
func (j *job) readTenant(in *input) error {
	if j.d.cfg.Tenants.SaltHeader == "" {
		return nil
	}
	name, _ := j.headers(j.d.cfg.Tenants.SaltHeader)
	if in.body.NamesShared() {
		return j.fail(400, "kvlane_tenant_not_salted", "engines keep sessions, and media by uuid or hash, for all tenants alike: leave these fields out")
	}
	own := in.body.Raw(body.FieldCacheSalt)
	if string(own) == "null" {
		own = nil
	}
	// SGLang joins salt and extra_key: without a salt an extra_key could have the value of another tenant's salt.
	if name != "" || len(own) > 0 || len(in.body.Raw(body.FieldExtraKey)) > 0 {
		in.salt = TenantSalt(name, own)
	}
	return nil
}

// TenantSalt returns the cache_salt of a tenant's request; own is the client's cache_salt as
// written in the body, nil for none. Every engine accepts its characters and length.
func TenantSalt(tenant string, own []byte) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "kvlane tenant\x00%d\x00%s%s", len(tenant), tenant, own))
	return hex.EncodeToString(sum[:16])
}

// unsalted returns why the request must not be sent to a worker without its salt, "" if it may.
func (w *work) unsalted(e *fleet.Endpoint) string {
	t := &w.d.cfg.Tenants
	if _, always := shape.ReadsSalt(e.Member.Engine, w.api); t.SaltHeader == "" || !t.Required || !w.in.known || w.idle || always {
		return ""
	}
	return fmt.Sprintf("%s reads no cache_salt in requests of the %s API, or not in every version, and tenants.required is set", e.Member.Engine, w.api)
}

// mustSalt releases a plan and fails if the request must not be sent to a worker.
func (w *work) mustSalt(p *placed, e *fleet.Endpoint) error {
	if reason := w.unsalted(e); reason != "" {
		w.release(&p.plan)
		return w.fail(400, "kvlane_tenant_not_salted", reason)
	}
	return nil
}

// saltEdits returns the edits that give the request its tenant's salt. A request with its own salt, or with the
// extra_key that SGLang joins to it, gets one even where the engine is not known to read it. So do all of vLLM's
// requests: none refuses it, and each version reads it on more paths (/generative_scoring, /invocations).
func (w *work) saltEdits(e *fleet.Endpoint) (edits []body.Edit) {
	if w.d.cfg.Tenants.SaltHeader == "" {
		return nil
	}
	if w.api == body.Unknown { // SGLang's /vertex_generate
		parameters := body.Member(w.in.body.Body, "parameters")
		for _, f := range [...]body.Field{body.FieldCacheSalt, body.FieldExtraKey, body.FieldSessionID, body.FieldRoutingKey} {
			if body.Member(parameters, f.String()) != nil {
				edits = append(edits, body.Delete("parameters", f.String()))
			}
		}
	}
	if w.in.body.Has(body.FieldSessionID) { // SGLang marks blocks by it, for all tenants alike
		name, _ := w.headers(w.d.cfg.Tenants.SaltHeader)
		own := TenantSalt(name, append([]byte("session "), w.in.body.Raw(body.FieldSessionID)...))
		edits = append(edits, body.Set([]byte(`"`+own+`"`), body.FieldSessionID.String()))
	}
	if w.in.body.Span(body.FieldRoutingKey).Present() { // SGLang may prefer requests with the key of running ones
		edits = append(edits, body.Delete(body.FieldRoutingKey.String()))
	}
	reads, _ := shape.ReadsSalt(e.Member.Engine, w.api)
	reads = reads || w.in.body.Span(body.FieldCacheSalt).Present() || w.in.body.Span(body.FieldExtraKey).Present()
	if w.in.salt == "" || !reads && (w.idle || e.Member.Engine != shape.VLLM.String()) {
		return edits
	}
	return append(edits, body.Set([]byte(`"`+w.in.salt+`"`), body.FieldCacheSalt.String()))
}

// cacheSalt returns the salt under which the engine caches the request's blocks.
func (j *job) cacheSalt(in *input) string {
	if reads, _ := shape.ReadsSalt(in.model.Engine.String(), j.api); reads && in.salt != "" {
		return in.salt
	}
	return in.body.CacheSalt()
}

// ownConversation separates the conversations of different tenants, with an id or recognised by prefix. Ids of requests
// without a tenant get a prefix that no salt has, so that a client cannot use a tenant's id.
func (j *job) ownConversation(in *input) string {
	if in.salt == "" {
		if in.conversation == "" || j.d.cfg.Tenants.SaltHeader == "" {
			return in.conversation
		}
		return "-/" + in.conversation
	}
	sum := sha256.Sum256([]byte(in.salt))
	mask := binary.LittleEndian.Uint64(sum[:])
	for i := range j.s.prefix {
		j.s.prefix[i] ^= mask
	}
	if in.conversation == "" {
		return ""
	}
	return in.salt + "/" + in.conversation
}
