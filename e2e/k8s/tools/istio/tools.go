//go:build tools

// Package istio pins istiod. Three dependencies are raised above what it asks
// for, see go.mod: its own versions are not published as modules.
package istio

import _ "istio.io/istio/pilot/cmd/pilot-discovery"
