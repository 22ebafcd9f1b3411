// Package feed brings the KV-cache events of engines to an index: vLLM and
// SGLang over ZMQ, TensorRT-LLM by polling HTTP or over ZMQ, and relays over
// gRPC.
//
// Its parts, in the order in which a batch meets them:
//
//   - a [Source] says where a worker's events come from; [Start] follows it,
//     [PushServer] takes what relays push, a [Player] plays what was recorded;
//   - [Machine] is the state of one publisher's sequence. It is pure: batches in,
//     actions out. It finds gaps, duplicates and restarts, asks for replays, puts
//     replayed and live batches in order, and says when everything that a target
//     holds has to be forgotten;
//   - [Decoder] turns a payload into events of package kvindex, whatever dialect
//     and version of it the engine speaks. A bad event costs itself alone;
//   - a [Sink] takes the events.
//
// # What can be believed
//
// Between two calls of Clear, a target's events are those of consecutive batches
// of one incarnation of its engine. Where batches are missing and cannot be had,
// the target is cleared and refills. After a broken connection the replay begins
// with the last batch that was applied: if the engine sends the same bytes again
// it is the same engine, otherwise it has restarted. Without a replay endpoint
// nothing proves that, so a new connection clears.
//
// What the sequence cannot show: an engine that reports blocks again that it has
// reported before (vLLM's kv_cache_report_mode "full") does not mark them, so
// they count as further copies; SGLang's extra_key separates blocks in the engine
// but not in its events.
package feed
