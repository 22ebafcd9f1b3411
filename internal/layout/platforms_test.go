package layout

import (
	"go/build"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// linuxOnly finds names of packages syscall and unix that other systems lack. `make build-darwin` compiles for them, which takes
// minutes; this finds what has broken it.
var linuxOnly = regexp.MustCompile(`\b(syscall|unix)\.(CLONE_\w+|Epoll\w+|EPOLL\w+|Prctl|PR_\w+|Sysinfo\w*|SYS_MEMFD\w*|SO_PEERCRED|SIGSTKFLT)|\bPdeathsig:`)

// What ships for macOS uses nothing that only Linux has.
func TestProductBuildsOnMacOS(t *testing.T) {
	darwin := build.Default
	darwin.GOOS, darwin.GOARCH, darwin.CgoEnabled = "darwin", "arm64", false
	used := 0
	for _, dir := range []string{"cmd", "envoy", "extproc", "internal", "kvindex", "proto", "routing"} {
		err := filepath.WalkDir(filepath.Join(root, dir), func(path string, d os.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			found := linuxOnly.Find(text)
			if found == nil {
				return nil
			}
			used++
			if built, err := darwin.MatchFile(filepath.Split(path)); err != nil || built {
				t.Errorf("%s: got %s in a file that is built for macOS too (%v), want it in one for Linux alone", path, found, err)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if used == 0 {
		t.Error("got no file with what only Linux has, want envoy/child_linux.go: the pattern finds nothing")
	}
}
