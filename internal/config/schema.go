package config

import _ "embed"

//go:generate go run ./schemagen

//go:embed schema.json
var schema []byte

// Schema returns the JSON schema of the file. It is made from the Go types, their
// comments and Default by schemagen.
func Schema() []byte { return schema }

// Elements returns the defaults of sections that Default does not have: elements of lists.
func Elements() []any {
	return []any{defaultModel(), defaultWorker(), defaultModel().Check, defaultDNS()}
}
