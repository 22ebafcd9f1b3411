package extproc_test

import (
	"context"
	"fmt"
	"strings"

	"github.com/kvlane/kvlane/extproc"
)

// byModel sends each model to its own worker.
type byModel map[string]string

// Decide implements extproc.Handler.
func (b byModel) Decide(_ context.Context, r *extproc.Request) extproc.Decision {
	if r.Partial {
		return extproc.Decision{} // not the whole body: let Envoy choose
	}
	for model, worker := range b {
		if strings.Contains(string(r.Body), `"`+model+`"`) {
			return extproc.Decision{Endpoint: worker}
		}
	}
	return extproc.Decision{Reject: &extproc.Reject{Status: 404, Body: []byte(`{"error":{"message":"no such model"}}`)}}
}

func ExampleHandler() {
	h := byModel{"qwen3": "10.0.0.1:8000"}
	fmt.Println(h.Decide(context.Background(), &extproc.Request{Body: []byte(`{"model":"qwen3"}`)}).Endpoint)
	fmt.Println(h.Decide(context.Background(), &extproc.Request{Body: []byte(`{"model":"other"}`)}).Reject.Status)
	// Output:
	// 10.0.0.1:8000
	// 404
}
