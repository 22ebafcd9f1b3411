package kube

import (
	"fmt"
	"net/http"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
)

// Client lists and watches the objects from which workers are derived. It is safe for
// concurrent use.
type Client struct {
	http      *http.Client
	of        map[schema.GroupVersion]*rest.RESTClient
	namespace string
}

// NewClient returns a client. It connects on first use.
func NewClient(a Access) (*Client, error) {
	config := rest.CopyConfig(a.Config)
	config.UserAgent = "kvlane"
	// No client-side rate limit: informers have their backoff, and the API server its
	// fairness.
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
