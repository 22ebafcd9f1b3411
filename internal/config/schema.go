package config

import _ "embed"

//go:embed schema.json
var schema []byte

// Schema returns the JSON schema of the file. TestSchema makes it from the Go types, their comments and Default.
func Schema() []byte { return schema }
