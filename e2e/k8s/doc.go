// Package k8s holds the tests on a real Kubernetes API server, with a real istiod
// and real Envoys, without containers.
//
// The test process creates its own network, mount and PID
// namespaces, in which it starts etcd, the API server, the controller manager and
// istiod. It then plays kubelet, scheduler, kube-proxy, load balancer and DNS
// (node): each pod gets a network namespace with an address and runs what its
// image stands for: the kvlane binary in a file system of its own and as the user
// that the pod asks for, Envoy with the configuration that istiod sends, or an
// echo server. Services are addresses that lead to ready pods.
// When the process ends, however it ends, the kernel ends all of the rest.
//
// `make test-k8s` builds the tools and runs it; it needs root for namespaces.
// able.sh reports whether a machine can run it.
package k8s
