// Command bench is the load part of `make bench`: it puts the real Envoy between a load generator and engines that
// answer immediately, and measures what Kvlane's process costs per request, compared with a server that only speaks the
// protocol (the floor).
//
// Figures are CPU time from /proc, so they are valid on a busy machine. Envoy's configuration is what `kvlane
// envoy-config` prints. The engines publish KV events for every prompt in vLLM's encoding and share this process with
// the load generator; neither is counted.
package main
