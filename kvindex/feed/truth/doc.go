// Package truth checks predictions against recordings of real engines: it plays
// a recording's KV events through the feed and the index, and before each
// request predicts the cached_tokens that the engine then reported.
//
// A recording is gzip JSON lines in order of arrival: "meta", "http" (an
// exchange, standing after the events that came while it ran), "event" (frames of
// a source as a SUB socket got them), "replay", "note".
//
// Judged are requests whose prompt ids are known: from the answer, the request, a
// /tokenize beside it, Options.Prompts or, for SGLang, the events that the request
// itself caused. The rank is the one that the request names, or else the one whose
// events came while it ran alone. Of a request that ran beside others on its rank
// only bounds can be said: at least what the rank held before, at most what its
// prompt shares with theirs too. Not judged, and counted with the reason, are
// requests with several answers, those that used blocks which SGLang announced later, those that get blocks from another engine, and
// those that SGLang's events cannot tell apart (extra_key leaves no mark there).
package truth
