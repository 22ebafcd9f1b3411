//go:build tools

// Package unittest pins helm-unittest, which needs a replacement that `go install`
// does not know.
package unittest

import _ "github.com/helm-unittest/helm-unittest/cmd/helm-unittest"
