package extproc

// Mode is how a request body reaches the server, as protocol_config states it.
type Mode uint8

// The modes, in the order of Envoy's ProcessingMode.BodySendMode; the last two are defined here.
const (
	ModeNone Mode = iota
	ModeStreamed
	ModeBuffered
	ModeBufferedPartial
	ModeFullDuplex
	ModeGRPC
	// ModeStreamedHeld is STREAMED with send_body_without_waiting_for_header_response: the
	// headers answer can wait for the body.
	ModeStreamedHeld
	// ModeObserve is observability_mode: Envoy sends copies and does not read answers.
	ModeObserve
	// NumModes is the number of modes.
	NumModes
)

var modeNames = [...]string{"none", "streamed", "buffered", "buffered_partial", "full_duplex", "grpc", "streamed_held", "observe"}

// String returns the mode's metric label.
func (m Mode) String() string {
	if int(m) < len(modeNames) {
		return modeNames[m]
	}
	return "unknown"
}

// holds reports whether the headers answer is held back until the body has arrived.
func (m Mode) holds() bool { return m == ModeStreamedHeld || m.duplex() }

// duplex reports whether the server holds the body and has to echo it.
func (m Mode) duplex() bool { return m == ModeFullDuplex || m == ModeGRPC }

// Kind is the kind of a message from Envoy.
type Kind uint8

// The kinds are the field numbers of ProcessingRequest's oneof.
const (
	KindNone             Kind = 0
	KindRequestHeaders   Kind = 2
	KindResponseHeaders  Kind = 3
	KindRequestBody      Kind = 4
	KindResponseBody     Kind = 5
	KindRequestTrailers  Kind = 6
	KindResponseTrailers Kind = 7
	// NumKinds is above all of them.
	NumKinds Kind = 8
)

var kindNames = [...]string{"none", "none", "request_headers", "response_headers", "request_body", "response_body", "request_trailers", "response_trailers"}

// String returns the kind's metric label.
func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return "unknown"
}

func (k Kind) isBody() bool    { return k == KindRequestBody || k == KindResponseBody }
func (k Kind) isHeaders() bool { return k == KindRequestHeaders || k == KindResponseHeaders }
