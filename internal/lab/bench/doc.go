// Command bench is the load part of `make bench`: it puts the real Envoy between
// a load generator and engines that answer at once, and says what Kvlane's process costs a
// request, beside a server that does nothing but speak the protocol (the floor).
//
// Figures are processor time from /proc, so they hold on a machine that does
// other things too. Envoy is told what `kvlane envoy-config` prints. The engines
// publish KV events for every prompt in vLLM's encoding and share this process with
// the load generator; neither is counted.
package main
