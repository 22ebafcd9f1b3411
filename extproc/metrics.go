package extproc

import "time"

// Failure is an error or an oddity that the server survived.
type Failure string

// The failures that are counted.
const (
	FailurePanic           Failure = "panic"             // the handler or a ticket panicked; the request continued
	FailureBodyTooLarge    Failure = "body_too_large"    // answered with 413
	FailureTooManyBodies   Failure = "too_many_bodies"   // answered with 503: MaxBodies or MaxBodyBytes is reached
	FailureTooManyRequests Failure = "too_many_requests" // answered with 429: MaxPerAddress is reached
	FailureNoAddress       Failure = "no_address"        // with MaxPerAddress, a request whose client's address Envoy does not send
	FailureAbandoned       Failure = "abandoned"         // the stream ended, or a response arrived, before the decision
	FailureExtraMessage    Failure = "extra_message"     // a body message after the end of the body
	FailureUnexpected      Failure = "unexpected"        // a message that the protocol does not allow here
	FailureBadPick         Failure = "bad_pick"          // Decision.Endpoint is not an address
	FailureBadHeader       Failure = "bad_header"        // a header of the decision was left out
	FailureBadEdit         Failure = "bad_edit"          // a new body in a mode that does not allow body changes
	FailureLateFirstToken  Failure = "late_first_token"  // seen after the request's end: usual for responses that come in one piece
	FailureUnknownRequest  Failure = "unknown_request"   // first token or access log of a request that this server did not receive
	FailureOutcomeOverflow Failure = "outcome_overflow"  // a request was forgotten before its outcome arrived
	FailureProtocol        Failure = "protocol"          // a message that does not decode
	FailureObservedRequest Failure = "observed_request"  // an observing filter that sends requests, which cannot be decided there
	FailureCancelled       Failure = "cancelled"         // the client cancelled while Decide ran
)

// Failures lists all failures.
func Failures() []Failure {
	return []Failure{
		FailurePanic, FailureBodyTooLarge, FailureTooManyBodies, FailureTooManyRequests, FailureNoAddress, FailureAbandoned, FailureExtraMessage, FailureUnexpected, FailureBadPick,
		FailureBadHeader, FailureBadEdit, FailureLateFirstToken, FailureUnknownRequest, FailureOutcomeOverflow, FailureProtocol,
		FailureObservedRequest, FailureCancelled,
	}
}

// Metrics are hooks, called on the request path: they must be fast and safe for concurrent use. Nil hooks are allowed.
type Metrics struct {
	// Opened and Closed bracket each stream, starting with its first message.
	Opened func(m Mode)
	Closed func(m Mode)
	// Message counts a message received.
	Message func(k Kind)
	// Failure counts a failure.
	Failure func(f Failure)
	// Answered receives the time from the arrival of the last body byte until the last byte of
	// the decision was handed to gRPC.
	Answered func(m Mode, d time.Duration)
}

func (m Metrics) withDefaults() Metrics {
	if m.Opened == nil {
		m.Opened = func(Mode) {}
	}
	if m.Closed == nil {
		m.Closed = func(Mode) {}
	}
	if m.Message == nil {
		m.Message = func(Kind) {}
	}
	if m.Failure == nil {
		m.Failure = func(Failure) {}
	}
	if m.Answered == nil {
		m.Answered = func(Mode, time.Duration) {}
	}
	return m
}
