// Package chart holds the tests of the Helm chart and of the image, without a
// cluster and without a container engine: the real Helm, helm-unittest, kubeconform
// with schemas of the API server and of CRDs, Envoy's own validation, and the build
// steps of the Dockerfile.
//
// `make test-chart` builds the tools and runs it.
package chart
