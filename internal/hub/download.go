package hub

import (
	"context"
	"crypto/sha1" //nolint:gosec // git's hash of a file
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"
)

const (
	maxList = 16 << 20 // bytes of the answer that lists a repository
	maxHead = 32 << 10 // bytes of a status and headers
	// answerIn bounds the time for the list, and the time until the first byte of a file.
	answerIn = 15 * time.Second

	tempPrefix = ".kvlane-"
)

// file is an entry of a repository's list. The hub leaves out sizes and hashes that it does not know.
type file struct {
	Name string `json:"rfilename"`
	Size int64  `json:"size"`
	Blob string `json:"blobId"` // git's hash
	LFS  struct {
		SHA256 string `json:"sha256"`
	} `json:"lfs"`
}

// Resolve returns the tokenizer files of a revision. It downloads what the cache folder does not have; several
// processes may share the folder. If the hub does not answer, it returns the cached revision, with the reason in Stale.
func (c *Cache) Resolve(ctx context.Context, n Name) (*Snapshot, error) {
	if c.Offline || n.Fixed() {
		if s, err := c.cached(n); err == nil {
			return s, nil
		} else if c.Offline {
			return nil, err
		}
	}
	s, err := c.download(ctx, n)
	if err == nil {
		return s, nil
	}
	local := *c
	local.Offline = true
	if old, missing := local.cached(n); missing == nil && !errors.Is(ctx.Err(), context.Canceled) {
		old.Stale = err
		return old, nil
	}
	return nil, fmt.Errorf("%s: %w", n, err)
}

func (c *Cache) download(ctx context.Context, n Name) (*Snapshot, error) {
	transport := http.DefaultTransport.(*http.Transport).Clone() //nolint:forcetypeassert // of net/http
	transport.ResponseHeaderTimeout, transport.MaxResponseHeaderBytes = answerIn, maxHead
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, CheckRedirect: checkRedirect}
	sha, files, err := c.list(ctx, client, n)
	if err != nil {
		return nil, err
	}
	c.tidy(n)
	s := c.snapshot(n, sha)
	folder := filepath.Join(c.folder(n), "snapshots", sha)
	var names []string
	var all int64
	for _, f := range files {
		names = append(names, f.Name)
		at := filepath.Join(folder, filepath.FromSlash(f.Name))
		if isMark(f.Name) {
			continue
		}
		if !f.intact(at) {
			if err := c.get(ctx, client, n, sha, &f); err != nil {
				return nil, err
			}
		}
		if st, err := os.Stat(at); err == nil {
			all += st.Size()
		}
		if all > maxAll { // the sizes in the list are optional
			return nil, fmt.Errorf("%w: %s", ErrRefused, tooMuch)
		}
	}
	if err := s.sum(names); err != nil {
		return nil, err
	}
	// Only later starts need these, and an existing download may be in a folder that cannot be written.
	_ = c.write(n, c.noted(n, sha), strings.NewReader(s.manifest()))
	if !n.Fixed() {
		_ = c.write(n, filepath.Join(c.folder(n), "refs", filepath.FromSlash(n.Revision)), strings.NewReader(sha))
	}
	return s, nil
}

// list queries a revision's commit and its relevant files.
func (c *Cache) list(ctx context.Context, client *http.Client, n Name) (sha string, files []file, err error) {
	ctx, cancel := context.WithTimeout(ctx, answerIn)
	defer cancel()
	body, err := c.ask(ctx, client, "/api/models/"+n.Repository+"/revision/"+url.PathEscape(n.Revision)+"?blobs=true")
	if err != nil {
		return "", nil, err
	}
	defer body.Close()
	text, err := io.ReadAll(io.LimitReader(body, maxList+1))
	if err != nil {
		return "", nil, err
	}
	var answer struct {
		SHA      string `json:"sha"`
		Siblings []file `json:"siblings"`
	}
	if len(text) > maxList || json.Unmarshal(text, &answer) != nil || !commit.MatchString(answer.SHA) || n.Fixed() && answer.SHA != n.Revision {
		return "", nil, fmt.Errorf("%w: %s answers with no list of files of that revision", ErrRefused, c.Endpoint)
	}
	byName := map[string]file{}
	var all []string
	for _, f := range answer.Siblings {
		byName[f.Name] = f
		all = append(all, f.Name)
	}
	var size int64
	for _, name := range relevant(all) {
		if !fileName.MatchString(name) || strings.Contains(name, "..") || !isMark(name) && byName[name].Size > maxFile {
			return "", nil, fmt.Errorf("%w: file %.100q: its name or size (%d bytes) is out of bounds", ErrRefused, name, byName[name].Size)
		}
		if f := byName[name]; !hash.MatchString(f.Blob) || !hash.MatchString(f.LFS.SHA256) {
			return "", nil, fmt.Errorf("%w: file %s is listed with %.100q and %.100q in place of hashes", ErrRefused, name, f.Blob, f.LFS.SHA256)
		}
		if files = append(files, byName[name]); !isMark(name) {
			size += max(byName[name].Size, 0)
		}
	}
	if size > maxAll {
		return "", nil, fmt.Errorf("%w: %s", ErrRefused, tooMuch)
	}
	if len(files) == 0 || len(files) > maxFiles {
		return "", nil, fmt.Errorf("%w: %d files of a tokenizer, want 1 to %d", ErrRefused, len(files), maxFiles)
	}
	return answer.SHA, files, nil
}

// get downloads a file, checks its hash and moves it to its place.
func (c *Cache) get(ctx context.Context, client *http.Client, n Name, sha string, f *file) error {
	body, err := c.ask(ctx, client, "/"+n.Repository+"/resolve/"+sha+"/"+f.Name)
	if err != nil {
		return fmt.Errorf("%s: %w", f.Name, err)
	}
	defer body.Close()
	to := filepath.Join(c.folder(n), "snapshots", sha, filepath.FromSlash(f.Name))
	if err := c.write(n, to, body, f.matches); err != nil {
		return fmt.Errorf("%s: %w", f.Name, err)
	}
	return nil
}

// ask sends a request and returns the body of an answer of status 200. An error wraps ErrRefused if a retry would get
// the same answer.
func (c *Cache) ask(ctx context.Context, client *http.Client, path string) (io.ReadCloser, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, c.Endpoint+path, nil)
	if err != nil {
		return nil, fmt.Errorf("%w: HF_ENDPOINT: %w", ErrRefused, err)
	}
	if c.Token != "" {
		r.Header.Set("Authorization", "Bearer "+c.Token)
	}
	resp, err := client.Do(r)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode == http.StatusOK {
		return resp.Body, nil
	}
	_ = resp.Body.Close()
	says := fmt.Sprintf("%s answers %d %s", c.Endpoint, resp.StatusCode, http.StatusText(resp.StatusCode))
	switch code := resp.StatusCode; {
	case code == http.StatusUnauthorized || code == http.StatusForbidden:
		return nil, fmt.Errorf("%w: %s: it does not exist, or needs a token (HF_TOKEN) that may read it", ErrRefused, says)
	case code == http.StatusNotFound:
		return nil, fmt.Errorf("%w: %s: no such model or revision", ErrRefused, says)
	case code/100 == 4 && code != http.StatusTooManyRequests && code != http.StatusRequestTimeout:
		return nil, fmt.Errorf("%w: %s", ErrRefused, says)
	}
	return nil, fmt.Errorf("%w: %s", ErrUnavailable, says)
}

// checkRedirect keeps the token from other hosts, where net/http only compares domains, and from plain text.
func checkRedirect(r *http.Request, via []*http.Request) error {
	first := via[0].URL
	if len(via) >= 10 || first.Scheme == "https" && r.URL.Scheme != "https" {
		return fmt.Errorf("%w: too many redirects, or one from https to %s", ErrRefused, r.URL.Scheme)
	}
	if r.URL.Host != first.Host {
		r.Header.Del("Authorization")
	}
	return nil
}

// write writes a file atomically: to a temporary file, which is renamed once each check accepts it.
func (c *Cache) write(n Name, to string, from io.Reader, checks ...func(file string) error) error {
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil { //nolint:gosec // as the hub's library does
		return err
	}
	tmp, err := os.CreateTemp(c.folder(n), tempPrefix+"*")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	size, err := io.Copy(tmp, io.LimitReader(from, maxFile+1))
	if err = errors.Join(err, tmp.Chmod(0o644), tmp.Close()); err != nil {
		return err
	}
	if size > maxFile {
		return fmt.Errorf("%w: more than %d bytes", ErrRefused, maxFile)
	}
	for _, check := range checks {
		if err := check(tmp.Name()); err != nil {
			return err
		}
	}
	return os.Rename(tmp.Name(), to)
}

// tidy removes temporary files that a killed process left. Younger ones may be of another process that downloads.
func (c *Cache) tidy(n Name) {
	files := os.DirFS(c.folder(n))
	left, _ := fs.Glob(files, tempPrefix+"*")
	for _, name := range left {
		if st, err := fs.Stat(files, name); err == nil && time.Since(st.ModTime()) > time.Hour {
			_ = os.Remove(filepath.Join(c.folder(n), name)) // the folder may be read-only
		}
	}
}

// intact reports whether a file exists with the contents that the hub lists; false if the hub lists no hash for it.
func (f *file) intact(at string) bool {
	return f.LFS.SHA256+f.Blob != "" && f.matches(at) == nil
}

// matches returns an error if a file does not have the hash that the hub lists.
func (f *file) matches(at string) error {
	in, err := os.Open(at)
	if err != nil {
		return err
	}
	defer in.Close()
	st, err := in.Stat()
	if err != nil {
		return err
	}
	want, h := f.Blob, sha1.New() //nolint:gosec // git's hash
	if f.LFS.SHA256 != "" {
		want, h = f.LFS.SHA256, sha256.New()
	} else {
		fmt.Fprintf(h, "blob %d\x00", st.Size())
	}
	if _, err := io.Copy(h, in); err != nil {
		return err
	}
	if got := hex.EncodeToString(h.Sum(nil)); want != "" && got != want {
		return fmt.Errorf("%s: got hash %s, want %s", path.Base(f.Name), got, want)
	}
	return nil
}
