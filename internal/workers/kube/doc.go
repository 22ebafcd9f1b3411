// Package kube lists workers from Kubernetes: the pods of InferencePools, or of
// a label selector where there is no such resource.
//
// Informers of client-go do the listing and watching, over types of our own that
// hold what is read of an object and nothing else.
//
//	client, err := kube.NewClient(cfg) // from InCluster or Kubeconfig
//	src := kube.Start(ctx, kube.Options{Client: client, Kubernetes: k, Set: registry.Set, ...})
//	src.Waiting() // "" once every pool and its pods were listed
//	src.Close()
//
// What is known of a pod comes from, in this order, its annotations and labels,
// the configuration's template, and the engine's own answers (see
// workers.Ask); the engine kind is the exception: the engine knows better than
// the template. Only list and watch on pods and inferencepools of the
// namespaces in question are needed, so a Role is enough.
package kube
