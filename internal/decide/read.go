package decide

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/disagg"
	"github.com/kvlane/kvlane/internal/fleet"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/tokens/body"
)

// maxNamed bounds the model names in an answer to a client.
const maxNamed = 20

// input is the parsed request.
type input struct {
	// body is nil if it was not parsed, known reports that it is a prompt. It may be shared with other requests.
	body  *body.Request
	known bool
	// model is the configured model, nil if there is none; name is the model name that is sent to workers.
	model *fleet.Model
	name  string
	// listed reports that workers list name, or did before: workers of other models would answer 404.
	listed       bool
	conversation string
	// salt is the cache_salt that the request gets for its tenant, "" if the client's is kept.
	salt string
}

// modelName is the name of the configured model, else the name that is sent to workers.
func (in *input) modelName() string {
	if in.model != nil {
		return in.model.Config.Name
	}
	return in.name
}

// read parses the request's body. A body that is not JSON is refused, as is a compressed
// one: no engine would accept it. A body that an engine may accept but Kvlane cannot parse
// is routed by load, unless it may contain fields that only Kvlane may set.
func (j *job) read(ctx, exact context.Context) (*input, error) {
	switch {
	case j.api == body.Models:
		return j.listModels(ctx, exact)
	case j.api == body.Realtime:
		return j.readRealtime(ctx, exact)
	case !j.api.Read():
		return j.readUnknown()
	case j.r.Partial:
		j.degraded = degradedPartial
		return &input{}, j.unread("its body is not here whole")
	}
	if coding, ok := j.r.Header("content-encoding"); ok && coding != "" && !strings.EqualFold(coding, "identity") {
		return nil, j.fail(415, "kvlane_compressed_body", "the request's body is compressed (content-encoding: "+observe.Clip(coding)+
			"), and engines do not decompress: send it as it is, or let a decompressor filter stand before Kvlane")
	}
	var err error
	if j.s.turn.Tenant, err = j.tenant(); err != nil {
		return nil, err
	}
	err = j.d.cache.Parse(j.s.turn, j.api, j.r.Body)
	req := j.s.turn.Request
	if unread, ok := errors.AsType[*body.UnreadError](err); ok {
		j.degraded, j.entry.Refusal = degradedBody, unread.Reason
		if j.d.fleet.SGLang(nil) != nil { // it may read the body, and end by its token ids
			return nil, j.cannotRead("it might end SGLang", unread.Reason)
		}
		return &input{}, j.unread(unread.Reason)
	}
	if err != nil {
		return nil, j.fail(400, "kvlane_invalid_json", err.Error())
	}
	in := &input{body: req, known: true, name: req.Model()}
	if err := cmp.Or(j.readNames(req), j.readMedia(req), j.readTenant(in)); err != nil {
		return nil, err
	}
	in.conversation = j.conversation(req)
	if j.api == body.Responses {
		if err := j.findStored(req.Text(body.FieldPreviousResponseID)); err != nil {
			return nil, err
		}
		if in.conversation == "" && j.stored.Root != nil {
			in.conversation = j.stored.Conversation()
		}
	}
	in.model = j.d.fleet.Model(in.name)
	j.entry.Model, j.entry.Conversation = observe.Clip(in.name), observe.Clip(in.conversation)
	return in, j.findServed(ctx, exact, in)
}

// listModels answers a request for the list of models with the models of all workers. The request is forwarded if no
// worker is known to list any model, or if the data plane restricts it to some workers. A request for one model gets
// its entry, or 404 if all workers have answered and none lists it.
func (j *job) listModels(ctx, exact context.Context) (*input, error) {
	if j.r.HasSubset {
		return j.readUnknown()
	}
	j.cpu.release()
	list := j.d.fleet.Listed(ctx)
	forward := func() (*input, error) {
		j.cpu = j.d.cpu.place(ctx, exact, len(j.r.Body)) // it may have a body
		return j.readUnknown()
	}
	switch {
	case ctx.Err() != nil:
		return nil, errClientGone
	case list.JSON == nil:
		return forward()
	}
	text := list.JSON
	if name := body.ListedModel(j.r.Path); name != "" {
		model, ok := list.Models[name]
		switch {
		case !ok && !list.Whole:
			return forward()
		case !ok:
			return nil, j.failure("kvlane_model_not_found", body.Failure{Status: http.StatusNotFound, Param: "model",
				Code: "model_not_found", Message: fmt.Sprintf("The model `%s` does not exist", observe.Clip(name))})
		}
		var err error
		if text, err = json.Marshal(model); err != nil {
			return nil, err
		}
	}
	return nil, &answerError{outcome: "answered", Reject: &extproc.Reject{Status: http.StatusOK, Body: text, Details: "kvlane_models"}}
}

// readRealtime is readUnknown with the model from the query. Messages of the WebSocket are not read.
func (j *job) readRealtime(ctx, exact context.Context) (*input, error) {
	in, err := j.readUnknown()
	if err != nil {
		return nil, err
	}
	_, query, _ := strings.Cut(j.r.Path, "?")
	values, _ := url.ParseQuery(query) // what can be parsed
	in.name = values.Get("model")
	in.model = j.d.fleet.Model(in.name)
	j.entry.Model = observe.Clip(in.name)
	return in, j.findServed(ctx, exact, in)
}

// readUnknown parses the body of an unknown API to remove the fields that only Kvlane may set, because engines accept
// these on other paths too (vLLM's /invocations).
func (j *job) readUnknown() (*input, error) {
	if err := j.findStored(body.StoredResponse(j.r.Path)); err != nil {
		return nil, err
	}
	j.stored.Tokens = 0 // nothing is computed
	if len(j.r.Body) > 0 || j.r.Partial {
		if _, err := j.tenant(); err != nil {
			return nil, err
		}
		if t := &j.d.cfg.Tenants; t.SaltHeader != "" && t.Required && j.stored.Root == nil {
			return nil, j.fail(400, "kvlane_tenant_not_salted", "this API is not known to separate the caches of tenants (tenants.required)")
		}
	}
	_, upgrades := j.r.Header("upgrade") // a content-type of the upgrade request says nothing about what the WebSocket carries
	kind, _ := j.r.Header("content-type")
	if kind = strings.ToLower(kind); strings.Contains(kind, "form") && !j.d.cfg.Disagg.Trust && (j.r.Partial && j.d.legs != nil || disagg.FormMayName(kind, j.r.Body)) {
		return nil, j.fail(400, "kvlane_unread_body", "vllm_xargs of a form might name hosts to an engine: leave it out, and every charset but UTF-8, US-ASCII and ISO-8859-1")
	}
	if len(j.r.Body) == 0 && !j.r.Partial || j.d.guards(nil) == "" && j.d.cfg.Disagg.Trust || kind != "" && !upgrades && !strings.Contains(kind, "json") {
		return &input{}, nil
	}
	if j.r.Partial {
		return &input{}, j.unread("its body is not here whole")
	}
	req, err := body.Parse(body.Unknown, j.r.Body)
	if unread, ok := errors.AsType[*body.UnreadError](err); ok {
		return &input{}, j.unread(unread.Reason)
	}
	if in := (&input{body: req}); err == nil { // engines refuse other bodies, too
		return in, cmp.Or(j.readNames(req), j.readMedia(req), j.readTenant(in))
	}
	return &input{}, nil
}

// findStored reads the id of the answer that a request continues, reads or cancels. Where tenants are separated, an id
// that was not made for the request's tenant is treated as unknown. Elsewhere ids may come from the client or the
// engine.
func (j *job) findStored(text string) error {
	if text == "" {
		return nil
	}
	tenant, err := j.tenant()
	if err != nil {
		return err
	}
	var ok bool
	if j.stored, ok = j.d.responses.Read(j.d.fleet.View(), tenant, text); !ok && j.d.cfg.Tenants.SaltHeader != "" {
		return j.failure("kvlane_response_not_found", body.Failure{Status: http.StatusNotFound, Param: "response_id",
			Message: "Response with id '" + observe.Clip(text) + "' not found."})
	}
	return nil
}

// maxName is the length in bytes, as written, of the longest salt, id of a session or uuid of a medium that passes: engines
// repeat it in the event of each block, and keep thousands of events.
const maxName = 4096

func (j *job) readNames(req *body.Request) error {
	if req.NamesMediumAtLength(maxName) {
		return j.fail(400, "kvlane_name_too_long", "the uuid or hash of a medium has at most 4096 bytes")
	}
	for _, raw := range [...][]byte{req.Raw(body.FieldSessionID), req.Raw(body.FieldCacheSalt), req.Raw(body.FieldExtraKey), req.Member(body.FieldVLLMXArgs, "session_id")} {
		longest := len(raw)
		if longest > maxName && raw[0] == '[' {
			longest = 0
			body.EachItem(raw, func(item []byte) { longest = max(longest, len(item)) })
		}
		if longest > maxName {
			return j.fail(400, "kvlane_name_too_long", "cache_salt, extra_key and session_id have at most 4096 bytes")
		}
	}
	return nil
}

// readMedia refuses media that an engine would fetch from a host which is not allowed: it may be any in the engine's network.
func (j *job) readMedia(req *body.Request) (err error) {
	live := j.d.live.Load()
	if live.AnyMedia() {
		return nil
	}
	req.EachMediaURL(func(text []byte) {
		if url, ok := body.TextOf(text); err == nil && (!ok || !live.FetchesMedia(url)) {
			err = j.fail(400, "kvlane_media_url", "images, audio and video are not fetched from everywhere: send them as data: URLs (limits.media_urls)")
		}
	})
	return err
}

// guards returns why clients' KV transfer fields, salts, or URLs of media, must not reach an engine, "" if they may. A body
// that may have some has to be parsed, because fields can only be changed in a parsed body. unread is a body that was not.
func (d *Decider) guards(unread []byte) string {
	switch {
	case d.cfg.Tenants.SaltHeader != "":
		return "tenants have caches of their own"
	case !d.live.Load().AnyMedia():
		return "limits.media_urls bounds what engines fetch"
	case !d.cfg.Disagg.Trust && (d.legs != nil || disagg.MayName(unread)):
		return "it might name hosts to an engine"
	}
	return ""
}

// PanicReject returns the answer to a request whose decision panicked, nil if it may pass unchanged.
func (d *Decider) PanicReject() *extproc.Reject {
	if d.guards(nil) == "" {
		return nil
	}
	return rejection(body.Unknown, "kvlane_panic", body.Failure{Status: 500, Message: "the request could not be prepared"})
}

// unread returns the answer to a request whose body cannot be edited, nil if it may pass: nothing in it needs an edit.
func (j *job) unread(reason string) error {
	if why := j.d.guards(j.r.Body); why != "" {
		return j.cannotRead(why, reason)
	}
	return nil
}

func (j *job) cannotRead(why, reason string) error {
	return j.fail(400, "kvlane_unread_body", "the body has to be read, because "+why+": "+reason)
}

// findServed finds the name under which workers serve the requested model. A name that no worker lists is refused:
// every worker would answer with a different model.
func (j *job) findServed(ctx, exact context.Context, in *input) error {
	d, v, name := j.d, j.d.fleet.View(), in.name
	if d.live.Load().Limits.UnknownModel == "route" || v.OpenToAll() {
		return nil
	}
	if name == "" {
		if !v.Split() {
			return nil
		}
		return j.failure("kvlane_model_missing", body.Failure{Status: 400, Param: "model",
			Message: `you must provide a "model"; served here: ` + servedHere(v)})
	}
	in.listed = true
	if d.fleet.Known(v, name) {
		return nil
	}
	if in.model != nil {
		for _, other := range in.model.Names() {
			if v.Declares(other) {
				in.name = other
				return nil // name is an alias or an adapter that workers do not list
			}
		}
	}
	if base, _, adapter := strings.Cut(name, ":"); adapter && d.fleet.Known(v, base) { // SGLang's base:adapter
		in.name = base
		return nil
	}
	j.cpu.release()
	answered := d.fleet.List(ctx)
	j.cpu = d.cpu.place(ctx, exact, len(j.r.Body))
	known := d.fleet.Known(v, name)
	in.listed = known || answered
	switch {
	case ctx.Err() != nil:
		return errClientGone
	case known, !answered, in.model != nil && d.live.Load().Flow.ZeroWorkers > 0: // it may wait for a worker
		return nil
	case in.model != nil:
		return j.fail(503, "kvlane_model_not_served", fmt.Sprintf("no worker serves the model `%s` at the moment", observe.Clip(name)))
	}
	return j.failure("kvlane_model_not_found", body.Failure{Status: 404, Param: "model", Code: "model_not_found",
		Message: fmt.Sprintf("The model `%s` does not exist; served here: %s", observe.Clip(name), servedHere(v))})
}

// servedHere lists the model names for clients.
func servedHere(v *fleet.View) string {
	names := v.Names()
	more := ""
	if len(names) > maxNamed {
		names, more = names[:maxNamed], ", ..."
	}
	return "`" + strings.Join(names, "`, `") + "`" + more
}
