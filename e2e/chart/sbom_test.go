package chart

import (
	"debug/buildinfo"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

// The bill of materials, made as `make sbom` does, names the modules in the
// binary and no others, and is the same each time.
func TestSBOM(t *testing.T) {
	t.Parallel()
	var texts [2]string
	for i := range texts {
		file := filepath.Join(t.TempDir(), "sbom.json")
		if _, err := run(nil, tool("cyclonedx-gomod"), "bin", "-json", "-std", "-noserial", "-notimestamp", "-version", "v1.2.3", "-output", file, kvlane); err != nil {
			t.Fatal(err)
		}
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		texts[i] = string(content)
	}
	if texts[0] != texts[1] {
		t.Error("two bills of the same binary differ")
	}
	file := filepath.Join(t.TempDir(), "sbom.json")
	if err := os.WriteFile(file, []byte(texts[0]), 0o600); err != nil {
		t.Fatal(err)
	}
	checkBill(t, file, kvlane, "v1.2.3")
}

// checkBill: a bill names the modules in a binary and no others.
func checkBill(t *testing.T, file, binary, version string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	type component struct{ Name, Version string }
	var bill struct {
		BOMFormat  string `json:"bomFormat"`
		Metadata   struct{ Component component }
		Components []component
	}
	if err := json.Unmarshal(text, &bill); err != nil {
		t.Fatal(err)
	}
	if main := (component{"github.com/kvlane/kvlane", version}); bill.BOMFormat != "CycloneDX" || bill.Metadata.Component != main {
		t.Errorf("it is a %q of %v", bill.BOMFormat, bill.Metadata.Component)
	}
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"std": info.GoVersion}
	for _, d := range info.Deps {
		want[d.Path] = d.Version
	}
	for _, c := range bill.Components {
		if want[c.Name] != c.Version {
			t.Errorf("%s %s, the binary has %q", c.Name, c.Version, want[c.Name])
		}
		delete(want, c.Name)
	}
	if len(want) > 0 {
		t.Errorf("not named: %v", want)
	}
}
