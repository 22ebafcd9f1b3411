package decide

import (
	"context"
	"fmt"
	"strings"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/fleet"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/prompt"
)

// maxNamed bounds the model names in an answer to a client.
const maxNamed = 20

// whose finds out which workers serve the model that the request names. A name that
// no worker lists is refused: any worker would be a worker of another model.
func (j *job) whose(ctx context.Context) *extproc.Reject {
	d, v := j.d, j.d.fleet.View()
	if d.cfg.Limits.UnknownModel == "route" || v.OpenToAll() {
		return nil
	}
	name := j.request.Model()
	if name == "" {
		if !v.Split() {
			return nil
		}
		return &extproc.Reject{Status: 400, Details: "kvlane_model_missing", Body: prompt.AppendFailure(nil, j.api, prompt.Failure{Status: 400,
			Type: failureTypes[400], Param: "model", Message: `you must provide a "model": ` + servedHere(v) + " are served here"})}
	}
	if d.fleet.Known(v, name) {
		return nil
	}
	if j.served != nil {
		for _, other := range j.served.Names() {
			if v.Declares(other) {
				j.query.Model = other // an alias or an adapter that workers do not list
				return nil
			}
		}
	}
	if base, _, adapter := strings.Cut(name, ":"); adapter && d.fleet.Known(v, base) { // SGLang's base:adapter
		j.query.Model = base
		return nil
	}
	j.cpu.release()
	answered := d.fleet.List(ctx)
	j.cpu, _ = d.cpu.acquire(j.exact, len(j.r.Body))
	if reject := j.gone(ctx); reject != nil {
		return reject
	}
	switch {
	case d.fleet.Known(v, name) || ctx.Err() != nil || !answered:
		return nil
	case j.served != nil:
		return &extproc.Reject{Status: 503, Details: "kvlane_model_not_served", Body: j.failure(503, fmt.Sprintf("no worker serves the model `%s` at the moment", observe.Clip(name)))}
	}
	return &extproc.Reject{Status: 404, Details: "kvlane_model_not_found", Body: prompt.AppendFailure(nil, j.api, prompt.Failure{Status: 404,
		Type: failureTypes[404], Param: "model", Code: "model_not_found", Message: fmt.Sprintf("The model `%s` does not exist: %s are served here", observe.Clip(name), servedHere(v))})}
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
