// Package conformance makes the InferencePool conformance tests one test binary.
package conformance

import (
	"testing"

	"sigs.k8s.io/gateway-api-inference-extension/conformance"
)

func TestConformance(t *testing.T) { conformance.RunConformance(t) }
