//go:build tools

// Package sbom pins the tool that writes bills of materials.
package sbom

import _ "github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod"
