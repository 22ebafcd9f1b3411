package kube

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Access is the connection to an API server.
type Access struct {
	// Config is client-go's.
	Config *rest.Config
	// Namespace is the default for names without a namespace.
	Namespace string
}

// namespaceFile is where the kubelet writes a pod's namespace.
const namespaceFile = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

// InCluster returns the API access of the pod that this process runs in.
func InCluster() (Access, error) {
	config, err := rest.InClusterConfig()
	if errors.Is(err, rest.ErrNotInCluster) {
		return Access{}, errors.New("not in a pod (KUBERNETES_SERVICE_HOST is not set): name a kubeconfig")
	}
	namespace, unread := os.ReadFile(namespaceFile)
	if err = errors.Join(err, unread); err != nil {
		return Access{}, fmt.Errorf("service account: %w", err)
	}
	return Access{Config: config, Namespace: strings.TrimSpace(string(namespace))}, nil
}

// Kubeconfig returns the API access of a kubeconfig's current context.
func Kubeconfig(path string) (Access, error) {
	file := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(&clientcmd.ClientConfigLoadingRules{ExplicitPath: path}, &clientcmd.ConfigOverrides{})
	config, err := file.ClientConfig()
	namespace := ""
	if err == nil {
		namespace, _, err = file.Namespace()
	}
	if err != nil {
		return Access{}, fmt.Errorf("kubeconfig %s: %w", path, err)
	}
	return Access{Config: config, Namespace: namespace}, nil
}

// Client lists and watches the objects from which workers are derived. It is safe for concurrent use.
type Client struct {
	http      *http.Client
	of        map[schema.GroupVersion]*rest.RESTClient
	namespace string
}

// NewClient returns a client. It connects on first use.
func NewClient(a Access) (*Client, error) {
	config := rest.CopyConfig(a.Config)
	config.UserAgent = "kvlane"
	// No client-side rate limit: informers back off by themselves, and the API server has priority and fairness.
	config.QPS = -1
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme()).WithoutConversion()
	shared, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("API server: %w", err)
	}
	c := &Client{http: shared, namespace: a.Namespace, of: map[schema.GroupVersion]*rest.RESTClient{}}
	for _, version := range append([]schema.GroupVersion{podVersion, poolVersion}, objectiveVersions...) {
		one := rest.CopyConfig(config)
		one.APIPath, one.GroupVersion = "/apis", &version
		if version.Group == "" {
			one.APIPath = "/api"
		}
		if c.of[version], err = rest.RESTClientForConfigAndClient(one, shared); err != nil {
			return nil, fmt.Errorf("API server: %w", err)
		}
	}
	return c, nil
}

// Namespace returns the namespace of the access.
func (c *Client) Namespace() string { return c.namespace }

// Close drops idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }
