// Package feed delivers the KV-cache events of engines to an index: vLLM and SGLang over ZMQ,
// TensorRT-LLM by polling HTTP or over ZMQ, and relays over gRPC.
//
// Its parts, in the order in which a batch passes them:
//
//   - a [Source] describes where a worker's events come from; [Start] follows it,
//     [PushServer] receives what relays push, a [Player] plays recordings;
//   - [Machine] is the state machine of one publisher's sequence. It does no I/O:
//     batches are its input, actions its output. It detects gaps, duplicates and
//     restarts, requests replays, orders replayed and live batches, and decides when
//     everything that a target holds has to be forgotten;
//   - [Decoder] turns a payload into events of package kvindex, whatever dialect
//     and version of it the engine uses. An invalid event is dropped alone;
//   - a [Sink] receives the events.
//
// # Guarantees
//
// Between two calls of Clear, a target's events are those of consecutive batches of one incarnation of its engine. If
// batches are missing and cannot be recovered, the target is cleared and refills. After a broken connection the replay
// starts with the last batch that was applied: if the engine sends the same bytes again it is the same incarnation,
// otherwise it has restarted. Without a replay endpoint this cannot be verified, so a new connection clears.
//
// The sequence cannot reveal two things: an engine that reports blocks again (vLLM's kv_cache_report_mode "full") does not mark
// them, so they count as further copies; and SGLang's extra_key separates blocks in the engine but not in its events.
package feed
