// Package gateway puts around the handler of requests what Kubernetes gateways
// ask for beyond ext_proc itself: a request for another pool is not answered as
// if it were for ours (Gate), and the conformance tests of the Gateway API
// inference extension can tell which pod to pick (Conformance).
package gateway
