package hub

import (
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
)

// answers is a hub that answers every request with the same bytes.
type answers []byte

func (a answers) RoundTrip(r *http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(string(a))), Request: r}, nil
}

// FuzzList reads any answer of a hub for any name of a model: files have bounded sizes and places below the repository's folder.
func FuzzList(f *testing.F) {
	good := `{"sha":"` + sha + `","siblings":[{"rfilename":"tokenizer.json","size":2,"blobId":"00"},{"rfilename":"additional_chat_templates/a.jinja"},{"rfilename":"consolidated.safetensors","size":99999999999}]}`
	f.Add("hf:Org/Model", []byte(good))
	f.Add("hf:Org/Model@"+sha, []byte(strings.Replace(good, "tokenizer.json", "../../tokenizer.json", 1)))
	f.Add("hf:gpt2@refs/pr/1", []byte(strings.Replace(good, "a.jinja", "..jinja", 1)))
	f.Add("hf:../..@..", []byte(strings.Replace(good, sha, "../../etc", 1)))
	f.Add("hf:Org/Model@a/../b", []byte(`{"sha":"`+sha+`","siblings":[{"rfilename":"tokenizer.json","size":-1,"lfs":{"sha256":""}},{"rfilename":"tokenizer.json"}]}`))
	f.Fuzz(func(t *testing.T, text string, answer []byte) {
		n, err := Parse(text)
		if err != nil {
			return
		}
		if again, err := Parse(n.String()); err != nil || again != n {
			t.Fatalf("got %+v, %v for %s, want %+v", again, err, n, n)
		}
		c := Cache{Folder: "/cache", Endpoint: "http://hub"}
		inside := func(at, below string) {
			if rel, err := filepath.Rel(below, at); err != nil || rel == "." || strings.HasPrefix(rel, "..") {
				t.Fatalf("got %s, want a place below %s", at, below)
			}
		}
		inside(c.folder(n), c.Folder)
		inside(filepath.Join(c.folder(n), "refs", filepath.FromSlash(n.Revision)), filepath.Join(c.folder(n), "refs"))
		commitOf, files, err := c.list(t.Context(), &http.Client{Transport: answers(answer)}, n)
		if err != nil {
			return
		}
		if !commit.MatchString(commitOf) || len(files) == 0 || len(files) > maxFiles {
			t.Fatalf("got commit %q and %d files, want a hash and 1 to %d", commitOf, len(files), maxFiles)
		}
		folder := filepath.Join(c.folder(n), "snapshots", commitOf)
		inside(folder, c.folder(n))
		for _, file := range files {
			if inside(filepath.Join(folder, filepath.FromSlash(file.Name)), folder); file.Size > maxFile && !isMark(file.Name) {
				t.Fatalf("got a file %+v, want at most %d bytes", file, maxFile)
			}
		}
	})
}
