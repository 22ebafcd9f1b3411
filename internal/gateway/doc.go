// Package gateway wraps the request handler with what Kubernetes gateways need beyond
// ext_proc itself: Gate rejects requests for another InferencePool, and Conformance lets
// the conformance tests of the Gateway API inference extension choose the pod.
package gateway
