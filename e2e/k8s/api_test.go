//go:build linux

package k8s

import (
	"context"
	"encoding/json"
	"net/http"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"

	"github.com/kvlane/kvlane/internal/workers/kube"
)

// api asks the API server for any object, as JSON.
type api struct {
	*rest.RESTClient

	http *http.Client
}

func newAPI(kubeconfig string) (*api, error) {
	access, err := kube.Kubeconfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	config := access.Config
	config.QPS = -1
	config.GroupVersion = &schema.GroupVersion{Version: "v1"}
	config.NegotiatedSerializer = serializer.NewCodecFactory(runtime.NewScheme()).WithoutConversion()
	a := &api{}
	if a.http, err = rest.HTTPClientFor(config); err != nil {
		return nil, err
	}
	a.RESTClient, err = rest.RESTClientForConfigAndClient(config, a.http)
	return a, err
}

// read decodes what is at path, which may have a query.
func (a *api) read(ctx context.Context, path string, into any) error {
	return a.send(ctx, http.MethodGet, path, "", nil, into)
}

// send sends a body, if there is one, and decodes the answer if into is not nil.
func (a *api) send(ctx context.Context, method, path, contentType string, body []byte, into any) error {
	request := a.Verb(method).RequestURI(path)
	if body != nil {
		request = request.Body(body).SetHeader("Content-Type", contentType)
	}
	text, err := request.Do(ctx).Raw()
	if err != nil || into == nil {
		return err
	}
	return json.Unmarshal(text, into)
}
