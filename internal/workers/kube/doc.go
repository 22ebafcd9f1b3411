// Package kube lists workers from Kubernetes: the pods of InferencePools, or of
// a label selector where there is no such resource.
//
// It speaks the API server's REST interface itself: a list, then a watch from
// its resource version, with bookmarks, a new list when the server does not know
// the version, and backoff (docs/kubernetes.md has it in full). client-go's dynamic informers do the same and add 24.3 MB to a
// binary of 30.4 MB (v0.36.3, stripped); this adds 0.4 MB.
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
