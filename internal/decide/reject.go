package decide

import (
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/routing"
)

// Reasons why a decision was made with less knowledge than usual (metric degraded_total).
const (
	degradedPartial     = "body_not_seen"
	degradedBody        = "body_not_read"
	degradedModel       = string(routing.DegradedModel)
	degradedTokenizer   = "no_tokenizer"
	degradedSuspended   = "tokenizer_differs"
	degradedRefused     = "engine_would_refuse"
	degradedTokens      = "tokens_unknown"
	degradedFront       = "prompt_known_in_part"
	degradedShortPrompt = "shorter_than_a_block"
	degradedDeadline    = "deadline"
	degradedPrefill     = "prefill_failed"
	degradedNoPrefill   = string(routing.DegradedNoPrefill)
)

// degradations are the reasons above that can occur in any installation; their counters are created at start.
var degradations = []string{
	degradedPartial, degradedBody, degradedModel, degradedTokenizer, degradedSuspended, degradedRefused, degradedTokens, degradedFront, degradedShortPrompt,
	degradedDeadline,
}

// errClientGone ends a decision whose client has disconnected.
var errClientGone = errors.New("the client went away before the decision")

// answerError ends a decision with an answer to the client instead of a target.
type answerError struct {
	*extproc.Reject

	why     string // details for the decision log only
	outcome string // the label of requests_total; "" for a rejection
}

// Error returns the reason, which is the details in Envoy's access log too.
func (e *answerError) Error() string { return e.Details }

// fail returns a rejection as the error of a step.
func (j *job) fail(status int, details, message string) error {
	return j.failure(details, body.Failure{Status: status, Message: message})
}

func (j *job) failure(details string, f body.Failure) error {
	return &answerError{Reject: rejection(j.api, details, f)}
}

// failureTypes maps statuses to OpenAI's error types.
var failureTypes = map[int]string{400: "invalid_request_error", 403: "permission_error", 404: "invalid_request_error", 413: "invalid_request_error", 415: "invalid_request_error", 431: "invalid_request_error", 429: "rate_limit_error", 500: "internal_server_error", 503: "service_unavailable_error"}

// answer turns the error of a step into the answer to the client. The message explains what the client can do; counts
// and names of workers are only in the decision log.
func (j *job) answer(err error) extproc.Decision {
	if e, ok := errors.AsType[*answerError](err); ok {
		if e.why != "" {
			j.entry.Refusal = observe.Clip(e.why)
		}
		if e.outcome == "" {
			return j.reject(e.Reject)
		}
		j.entry.After.Status, j.entry.After.Ended = e.Status, new(j.clock)
		j.d.metrics.Requests.WithLabelValues(j.entry.API, e.outcome).Inc()
		j.d.decisions.Add(j.entry)
		return extproc.Decision{Reject: e.Reject}
	}
	j.entry.Refusal = observe.Clip(err.Error())
	if errors.Is(err, errClientGone) {
		return j.reject(&extproc.Reject{Status: 499, Details: "kvlane_client_gone"})
	}
	details, message := "", "all workers that could serve this request are busy"
	// A request that was held waits on when flow is switched off.
	_, held := errors.AsType[*routing.HeldError](err)
	if _, full := errors.AsType[*routing.CapacityError](err); full || held {
		details = "kvlane_capacity_exhausted"
	} else if unmet, ok := errors.AsType[*routing.UnmetError](err); ok {
		details, message = "kvlane_ttft_unmet", "no worker can begin its answer within "+unmet.TTFT.String()
	}
	if details != "" {
		return j.reject(j.tooMany(details, message+"; try again in ", retryAfter(err)))
	}
	return j.reject(rejection(j.api, "kvlane_no_eligible_worker", body.Failure{Status: http.StatusServiceUnavailable,
		Message: "no worker can serve this request at the moment"}))
}

// tooMany is the answer 429. after is when to try again: the header retry-after, and the end of the message.
func (j *job) tooMany(details, message string, after time.Duration) *extproc.Reject {
	seconds := strconv.Itoa(int(after.Round(time.Second).Seconds()))
	r := rejection(j.api, details, body.Failure{Status: http.StatusTooManyRequests, Message: message + seconds + " s"})
	r.Headers = []extproc.Header{{Name: "retry-after", Value: seconds}}
	return r
}

// rejection returns the answer of a failure, in the shape that the API's clients expect.
func rejection(api body.API, details string, f body.Failure) *extproc.Reject {
	f.Type = failureTypes[f.Status]
	return &extproc.Reject{Status: f.Status, Details: details, Body: body.AppendFailure(nil, api, f)}
}

func (j *job) reject(r *extproc.Reject) extproc.Decision {
	j.entry.Rejected, j.entry.Reason = r.Status, r.Details
	j.d.metrics.Rejected.WithLabelValues(strconv.Itoa(r.Status), r.Details).Inc()
	j.d.metrics.Requests.WithLabelValues(j.entry.API, "rejected").Inc()
	j.log()
	return extproc.Decision{Reject: r}
}

// log enters the decision into the decision log, and into the process's log if log.decisions is on.
func (j *job) log() {
	j.d.decisions.Add(j.entry)
	if !j.d.live.Load().Log.Decisions {
		return
	}
	e := j.entry
	line := j.d.log.Info().Str("request", e.ID).Str("api", e.API).Str("model", e.Model)
	if e.Rejected != 0 {
		line.Int("status", e.Rejected).Str("reason", e.Reason).Str("detail", e.Refusal).Msg("rejected")
		return
	}
	if e.Prefill != "" {
		line.Str("prefill", e.Prefill)
	}
	line.Str("target", e.Target).Str("endpoint", e.Endpoint).Str("via", e.Via).Int64("prompt_tokens", e.PromptTokens).
		Int64("matched_tokens", e.Matched).Str("degraded", e.Degraded).Dur("took_ms", j.clock.Sub(j.began)).Msg("routed")
}
