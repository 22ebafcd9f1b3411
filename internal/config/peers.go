package config

// PushEndpoint is the endpoint of a worker whose events are pushed by relays over gRPC.
const PushEndpoint = "push:"

// Peers are the other replicas; a starting replica copies the index from one of them.
type Peers struct {
	Addresses []string `yaml:"addresses" jsonschema_description:"'host:port' of other replicas' listen.address; a name may have many addresses (a headless service). If set, this replica serves copies too, and index.key must be set."`
	Timeout   Duration `yaml:"timeout" jsonschema_description:"How long the start waits for a copy, all peers together; after that it continues with an empty index."`
	CAFile    string   `yaml:"ca_file" jsonschema_description:"PEM certificates of the CAs that sign peers' certificates; empty: plaintext."`
	Name      string   `yaml:"server_name" jsonschema_description:"Name that peers' certificates must have; empty: the host of the address."`
}

// Secret is the key of the block hash, "" for a random one.
func (i *Index) Secret() (string, error) {
	if i.KeyFile == "" {
		return i.Key, nil
	}
	return readSecret("index.key_file", i.KeyFile)
}
