package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestPeers(t *testing.T) {
	c, err := Parse("f", []byte(`{index: {key: k, peers: {addresses: ["kvlane-peers:9002", "[::1]:9002"]}}}`))
	if err != nil || len(c.Index.Peers.Addresses) != 2 || c.Index.Peers.Timeout.Std() != 10*time.Second {
		t.Fatalf("%v, %+v", err, c)
	}
	for text, want := range map[string]string{
		`{index: {peers: {addresses: ["a:1"]}}}`:                      "needs index.key",
		`{index: {key: k, peers: {addresses: ["a"]}}}`:                "not host:port",
		`{index: {key: k, peers: {addresses: [":1"]}}}`:               "not host:port",
		`{index: {key: k, peers: {addresses: ["a:1"], timeout: 0s}}}`: "more than 0",
		`{index: {key: k, key_file: /k}}`:                             "not together with index.key",
	} {
		if _, err := Parse("f", []byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

func TestIndexKeys(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	for _, c := range []struct{ written, text, want, err string }{
		{"", `{}`, "", ""},
		{"", `{index: {key: k}}`, "k", ""},
		{" of a file\n", `{index: {key_file: FILE, peers: {addresses: ["a:1"]}}}`, "of a file", ""},
		{"\n", `{index: {key_file: FILE}}`, "", "is empty"},
		{"", `{index: {key_file: /none}}`, "", "no such file"},
	} {
		if err := os.WriteFile(file, []byte(c.written), 0o600); err != nil {
			t.Fatal(err)
		}
		config, err := Parse("f", []byte(strings.Replace(c.text, "FILE", file, 1)))
		if err != nil {
			t.Fatalf("%s: %v", c.text, err)
		}
		got, err := config.Index.Secret()
		if got != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: %q %v", c.text, got, err)
		}
	}
}

func TestPushedEvents(t *testing.T) {
	if _, err := Parse("f", []byte(`{workers: {static: [{address: "10.0.0.1:1", events: {endpoint: "push:"}}]}}`)); err != nil {
		t.Error(err)
	}
	for _, events := range []string{`{endpoint: "push"}`, `{endpoint: "push://x"}`, `{endpoint: "push:", replay: "push:"}`} {
		if _, err := Parse("f", []byte(`{workers: {static: [{address: "10.0.0.1:1", events: `+events+`}]}}`)); err == nil {
			t.Errorf("%s was accepted", events)
		}
	}
}
