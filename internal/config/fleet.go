package config

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"time"
)

// Values of Fleet.Mode.
const (
	FleetOff      = "off"
	FleetEmbedded = "embedded"
	FleetExternal = "external"
)

// Fleet is how several replicas share bookings and conversations over NATS.
type Fleet struct {
	Mode        string      `yaml:"mode" jsonschema:"enum=off,enum=embedded,enum=external" jsonschema_description:"off: this replica routes alone. embedded: every replica runs a NATS server, and they form a cluster. external: the replicas use a NATS that is already there. See docs/replicas.md."`
	Name        string      `yaml:"name" jsonschema_description:"Prefix of the NATS subjects, and name of the embedded cluster. Fleets with different names on one NATS do not see each other."`
	Replica     string      `yaml:"replica" jsonschema_description:"Name of this replica in logs and metrics; empty: the host name. A random suffix is added at each start."`
	SyncTimeout Duration    `yaml:"sync_timeout" jsonschema_description:"How long readiness waits at the start for the state of the other replicas."`
	Embedded    FleetEmbed  `yaml:"embedded" jsonschema_description:"The NATS server in this process, with mode embedded. It opens a port for the other replicas; its client port is on loopback and takes this process only."`
	External    FleetExtern `yaml:"external" jsonschema_description:"The NATS to connect to, with mode external."`
	Persist     FleetStore  `yaml:"persist" jsonschema_description:"Store the bindings of conversations with JetStream, so that they survive the end of all replicas."`
}

// FleetStore is where bindings are stored.
type FleetStore struct {
	Enabled  bool     `yaml:"enabled" jsonschema_description:"Mode external needs a NATS with JetStream."`
	Folder   string   `yaml:"folder" jsonschema_description:"Mode embedded: folder of the store. Replicas may share it; each uses a subfolder of its own."`
	MaxBytes Bytes    `yaml:"max_bytes" jsonschema_description:"Size of the store, about 250 bytes a conversation. Beyond it those stored first are dropped."`
	TTL      Duration `yaml:"ttl" jsonschema_description:"How long the binding of a conversation is kept that is not used."`
}

// FleetEmbed is the embedded NATS server.
type FleetEmbed struct {
	Listen     string   `yaml:"listen" jsonschema_description:"'host:port' for the other replicas. Beyond loopback it needs secret_file."`
	Routes     []string `yaml:"routes" jsonschema_description:"'host:port' of the other replicas' listen; a name may have many addresses (a headless service), and is resolved again every few seconds. This replica's own address may be among them."`
	SecretFile string   `yaml:"secret_file" jsonschema_description:"File with the secret that all replicas share; surrounding white space is ignored. Replicas with another secret are refused."`
	TLS        FleetTLS `yaml:"tls" jsonschema_description:"Mutual TLS between replicas: each must show a certificate of the CA, whatever its name. Empty: plaintext."`
}

// FleetExtern is a NATS that is already there.
type FleetExtern struct {
	URL             string   `yaml:"url" jsonschema_description:"Servers, separated by commas: 'nats://host:4222' or 'tls://host:4222'."`
	CredentialsFile string   `yaml:"credentials_file" jsonschema_description:"NATS credentials file (JWT and seed)."`
	User            string   `yaml:"user" jsonschema_description:"User name, with password_file."`
	PasswordFile    string   `yaml:"password_file" jsonschema_description:"File with the password of user; surrounding white space is ignored."`
	TokenFile       string   `yaml:"token_file" jsonschema_description:"File with a token, instead of user or credentials_file; surrounding white space is ignored."`
	TLS             FleetTLS `yaml:"tls" jsonschema_description:"TLS to the servers: ca_file verifies them by name (empty: the system's CAs), cert_file and key_file are this client's."`
}

// FleetTLS names PEM files. They are read again for every connection, so that they may be replaced while Kvlane runs.
type FleetTLS struct {
	CertFile string `yaml:"cert_file" jsonschema_description:"PEM certificate of this replica, for both ends of a connection. Read again when it changes."`
	KeyFile  string `yaml:"key_file" jsonschema_description:"PEM key of cert_file."`
	CAFile   string `yaml:"ca_file" jsonschema_description:"PEM certificates of the CAs that sign the others' certificates."`
}

// Empty reports whether no file is named.
func (t *FleetTLS) Empty() bool { return *t == FleetTLS{} }

// Secret reads the secret of the embedded cluster, "" if there is none.
func (e *FleetEmbed) Secret() (string, error) {
	return readSecret("fleet.embedded.secret_file", e.SecretFile)
}

// Password reads the password of User, "" if there is none.
func (e *FleetExtern) Password() (string, error) {
	return readSecret("fleet.external.password_file", e.PasswordFile)
}

// Token reads the token, "" if there is none.
func (e *FleetExtern) Token() (string, error) {
	return readSecret("fleet.external.token_file", e.TokenFile)
}

func readSecret(key, file string) (string, error) {
	if file == "" {
		return "", nil
	}
	text, err := ReadFile(file)
	if err != nil {
		return "", fmt.Errorf("%s: %w", key, err)
	}
	secret := strings.TrimSpace(string(text))
	if secret == "" {
		return "", errors.New(key + ": " + file + " is empty")
	}
	return secret, nil
}

func (c *Config) validateFleet(bad report) {
	f := &c.Fleet
	if f.Name == "" || strings.Trim(f.Name, subjectRunes) != "" {
		bad("name", "%q: must be letters, digits, - or _ (it is part of NATS subjects)", f.Name)
	}
	if strings.Trim(f.Replica, subjectRunes) != "" || len(f.Replica) > maxReplica {
		bad("replica", "%q: must be at most %d letters, digits, - or _", f.Replica, maxReplica)
	}
	if f.Mode == FleetOff {
		return
	}
	p := &f.Persist
	bad.each([]wrong{
		{c.Index.Key+c.Index.KeyFile == "", "mode", "needs index.key or index.key_file, the same on all replicas: it hashes the ids of the conversations that they share"},
		{p.Enabled && f.Mode == FleetEmbedded && p.Folder == "", "persist.folder", "is needed with mode embedded: the store must survive this process"},
		{p.Enabled && p.MaxBytes < 1<<20, "persist.max_bytes", "must be at least 1 MiB"},
		{p.Enabled && p.TTL < Duration(time.Minute), "persist.ttl", "must be at least 1m"},
	})
	if f.Mode == FleetEmbedded {
		f.Embedded.validate(bad.under("embedded"))
	} else {
		f.External.validate(bad.under("external"))
	}
}

// subjectRunes may be in a token of a NATS subject.
const subjectRunes = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"

// maxReplica bounds a replica's name, which is in every message.
const maxReplica = 63

func (e *FleetEmbed) validate(bad report) {
	host, _, _ := net.SplitHostPort(e.Listen)
	if ip := net.ParseIP(host); e.SecretFile == "" && host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		bad("secret_file", "is needed if listen (%q) is not a loopback address: any client that reaches it could change the bookings", e.Listen)
	}
	for i, r := range e.Routes {
		if !isHostPort(r) {
			bad(item("routes", i), "%q is not host:port", r)
		}
	}
	if t := e.TLS; !t.Empty() && (t.CertFile == "" || t.KeyFile == "" || t.CAFile == "") {
		bad("tls", "needs cert_file, key_file and ca_file: both ends of a route show a certificate")
	}
}

func (e *FleetExtern) validate(bad report) {
	if e.URL == "" {
		bad("url", "names no server")
	}
	for server := range strings.SplitSeq(e.URL, ",") {
		if strings.Contains(e.URL, "@") { // no part of it is shown: passwords may have commas
			bad("url", "holds a user or password: use user and password_file, token_file or credentials_file")
			break
		}
		if u, err := url.Parse(strings.TrimSpace(server)); e.URL != "" && (err != nil || u.Host == "" || u.Scheme != "nats" && u.Scheme != "tls") {
			bad("url", "%q is not nats://host:port or tls://host:port", server)
		}
	}
	bad.each([]wrong{
		{(e.User == "") != (e.PasswordFile == ""), "user", "and password_file go together"},
		{e.CredentialsFile != "" && e.User+e.TokenFile != "" || e.User != "" && e.TokenFile != "", "", "only one of credentials_file, user and token_file"},
		{(e.TLS.CertFile == "") != (e.TLS.KeyFile == ""), "tls", "cert_file and key_file go together"},
	})
}
