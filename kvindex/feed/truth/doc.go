// Package truth checks predictions against recordings of real engines: it plays
// a recording's KV events through the feed and the index, and before each
// request predicts the cached_tokens that the engine then reported.
//
// A recording is gzip JSON lines in order of arrival: "meta", "http" (an
// exchange, standing after the events that came while it ran), "event" (frames of
// a source as a SUB socket got them), "replay", "note".
//
// Judged are requests that name their rank and ran alone, whose prompt ids are
// known (from the answer, the request, a /tokenize beside it, or, for SGLang, the
// events that the request itself caused), and that SGLang's events can tell
// apart (extra_key leaves no mark there). Everything else is counted with the
// reason why it was not judged.
package truth
