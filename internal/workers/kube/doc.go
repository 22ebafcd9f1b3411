// Package kube lists workers from Kubernetes: the pods of InferencePools, or of
// a label selector where there is no such resource.
//
// client-go's informers do the listing and watching, over our own types, which have only the fields that are read.
//
//	client, err := kube.NewClient(cfg) // from InCluster or Kubeconfig
//	src := kube.Start(ctx, kube.Options{Client: client, Kubernetes: k, Set: registry.Set, ...})
//	src.Waiting() // "" once every pool and its pods were listed
//	src.Close()
//
// A pod's description comes from, in this order, its annotations and labels, the
// configuration's template, and the engine's own answers (see workers.Asker); for the
// engine kind the engine's answer precedes the template. Only list and watch on pods and
// inferencepools (and inferenceobjectives, where configured) of the namespace are needed, so a Role is enough.
package kube
