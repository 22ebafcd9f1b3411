package config

import (
	"errors"
	"fmt"
	"os"
	"strings"
)

// PushEndpoint stands for a worker whose events relays push over gRPC.
const PushEndpoint = "push:"

// Peers are the other replicas, of which one hands its index to this one when it
// starts.
type Peers struct {
	Addresses []string `yaml:"addresses" jsonschema_description:"'host:port' of other replicas' listen.address, also a name with many addresses (a headless service). With any, this replica hands out copies too, and index.key must be set."`
	Timeout   Duration `yaml:"timeout" jsonschema_description:"How long a start waits for a copy at most, all peers together; then it goes on with an empty index."`
	CAFile    string   `yaml:"ca_file" jsonschema_description:"PEM certificates that peers' certificates must come from; empty: plaintext."`
	Name      string   `yaml:"server_name" jsonschema_description:"Name that peers' certificates must bear; empty: the host of the address."`
}

// Secret is the key of the block hash, "" for a random one.
func (i *Index) Secret() (string, error) {
	if i.KeyFile == "" {
		return i.Key, nil
	}
	text, err := os.ReadFile(i.KeyFile)
	if err != nil {
		return "", fmt.Errorf("index.key_file: %w", err)
	}
	key := strings.TrimSpace(string(text))
	if key == "" {
		return "", errors.New("index.key_file: " + i.KeyFile + " is empty")
	}
	return key, nil
}
