package kube

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Access is the connection to an API server.
type Access struct {
	// Config is client-go's.
	Config *rest.Config
	// Namespace is that of names without a namespace.
	Namespace string
}

// namespaceFile is where the kubelet writes a pod's namespace.
const namespaceFile = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

// InCluster returns the access of the pod that this process runs in.
func InCluster() (Access, error) {
	config, err := rest.InClusterConfig()
	if errors.Is(err, rest.ErrNotInCluster) {
		return Access{}, errors.New("not in a pod (KUBERNETES_SERVICE_HOST is not set): name a kubeconfig")
	}
	if err != nil {
		return Access{}, fmt.Errorf("service account: %w", err)
	}
	namespace, err := os.ReadFile(namespaceFile)
	if err != nil {
		return Access{}, fmt.Errorf("service account: %w", err)
	}
	return Access{Config: config, Namespace: strings.TrimSpace(string(namespace))}, nil
}

// Kubeconfig returns the access of a kubeconfig's current context.
func Kubeconfig(path string) (Access, error) {
	file := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(&clientcmd.ClientConfigLoadingRules{ExplicitPath: path}, &clientcmd.ConfigOverrides{})
	config, err := file.ClientConfig()
	if err != nil {
		return Access{}, fmt.Errorf("kubeconfig %s: %w", path, err)
	}
	namespace, _, err := file.Namespace()
	if err != nil {
		return Access{}, fmt.Errorf("kubeconfig %s: %w", path, err)
	}
	return Access{Config: config, Namespace: namespace}, nil
}
