package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestFleet(t *testing.T) {
	for text, want := range map[string]string{
		`{}`:                   "",
		`{fleet: {mode: off}}`: "",
		`{index: {key: k}, fleet: {mode: embedded}}`: "",
		`{index: {key: k}, fleet: {mode: embedded, embedded: {listen: "0.0.0.0:6222", secret_file: /s, routes: ["kvlane:6222"]}}}`: "",
		`{index: {key: k}, fleet: {mode: external, external: {url: "nats://a:4222,tls://b:4222"}}}`:                                "",
		`{fleet: {mode: embedded}}`:                                                                                       "fleet.mode: needs index.key",
		`{index: {key: k}, fleet: {mode: on}}`:                                                                            "fleet.mode",
		`{index: {key: k}, fleet: {mode: embedded, name: "a.b"}}`:                                                         "fleet.name",
		`{index: {key: k}, fleet: {mode: embedded, name: ""}}`:                                                            "fleet.name",
		`{index: {key: k}, fleet: {mode: embedded, replica: "a b"}}`:                                                      "fleet.replica",
		`{index: {key: k}, fleet: {mode: embedded, embedded: {listen: "0.0.0.0:6222"}}}`:                                  "fleet.embedded.secret_file: is needed",
		`{index: {key: k}, fleet: {mode: embedded, embedded: {listen: ":6222"}}}`:                                         "fleet.embedded.secret_file: is needed",
		`{index: {key: k}, fleet: {mode: embedded, embedded: {listen: "x"}}}`:                                             "fleet.embedded.listen",
		`{index: {key: k}, fleet: {mode: embedded, embedded: {routes: ["x"]}}}`:                                           "fleet.embedded.routes[0]",
		`{index: {key: k}, fleet: {mode: embedded, embedded: {tls: {ca_file: /c}}}}`:                                      "fleet.embedded.tls: needs",
		`{index: {key: k}, fleet: {mode: embedded, embedded: {tls: {cert_file: /c, ca_file: /a}}}}`:                       "needs cert_file, key_file and ca_file",
		`{index: {key: k}, fleet: {mode: external, external: {url: "nats://a:1", tls: {cert_file: /c}}}}`:                 "cert_file and key_file go together",
		`{index: {key: k}, fleet: {mode: external}}`:                                                                      "fleet.external.url: names no server",
		`{index: {key: k}, fleet: {mode: external, external: {url: "http://a"}}}`:                                         "is not nats://",
		`{index: {key: k}, fleet: {mode: external, external: {url: "nats://u:p@a:1"}}}`:                                   "holds a user",
		`{index: {key: k}, fleet: {mode: external, external: {url: "nats://a:1", user: u}}}`:                              "go together",
		`{index: {key: k}, fleet: {mode: external, external: {url: "nats://a:1", token_file: /t, credentials_file: /c}}}`: "only one of",
	} {
		_, err := Parse("f", []byte(text))
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: got %v, want %q", text, err, want)
		}
	}
}

// A problem with a URL does not show its password.
func TestFleetProblemsShowNoPassword(t *testing.T) {
	for _, url := range []string{"nats://u:secret@a:1", "http://u:secret@a", "u:secret@a:1", "nats://u:secret,x@a:1", "nats://a:1,nats://u:sec/secret@b"} {
		_, err := Parse("k.yaml", []byte(`{index: {key: k}, fleet: {mode: external, external: {url: "`+url+`"}}}`))
		if err == nil || strings.Contains(err.Error(), "secret,") || strings.Contains(err.Error(), ":sec") || !strings.Contains(err.Error(), "holds a user") {
			t.Errorf("%s: got %v, want a problem without the password", url, err)
		}
	}
	_, err := Parse("k.yaml", []byte(`{index: {key: k}, fleet: {mode: external, external: {url: "nats://a:1,http://b"}}}`))
	if err == nil || !strings.Contains(err.Error(), `"http://b" is not nats://`) {
		t.Errorf("got %v, want the server that is wrong", err)
	}
}

func TestFleetSecret(t *testing.T) {
	file := filepath.Join(t.TempDir(), "secret")
	for text, want := range map[string]string{" s\n": "s", "\n": ""} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := (&FleetEmbed{SecretFile: file}).Secret()
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q: got %q, %v, want %q", text, got, err, want)
		}
	}
	if got, err := (&FleetEmbed{}).Secret(); got != "" || err != nil {
		t.Errorf("without a file: got %q, %v, want none", got, err)
	}
}
