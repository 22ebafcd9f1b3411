package hub

import (
	"context"
	"crypto/sha1"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const sha = "0123456789abcdef0123456789abcdef01234567"

// stub is a model hub. Files whose names end in .model are stored by another server, as LFS files are.
type stub struct {
	*httptest.Server
	storage *httptest.Server

	mu     sync.Mutex
	sha    string
	files  map[string]string
	status int               // of every answer, if not 0
	token  string            // needed, if not ""
	broken string            // file that ends early
	sizes  map[string]int64  // in place of the true ones
	hashes map[string]string // in place of the true ones
	asked  []string
	leaked []string // Authorization that reached the storage
}

func newStub(t *testing.T, files map[string]string) *stub {
	s := &stub{sha: sha, files: files, sizes: map[string]int64{}, hashes: map[string]string{}}
	s.Server = httptest.NewServer(http.HandlerFunc(s.serve))
	s.storage = httptest.NewServer(http.HandlerFunc(s.store))
	t.Cleanup(s.Close)
	t.Cleanup(s.storage.Close)
	return s
}

func (s *stub) serve(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = append(s.asked, r.URL.Path)
	switch {
	case s.status != 0:
		w.WriteHeader(s.status)
	case s.token != "" && r.Header.Get("Authorization") != "Bearer "+s.token:
		w.WriteHeader(http.StatusUnauthorized)
	case r.URL.EscapedPath() == "/api/models/Org/Model/revision/main", r.URL.EscapedPath() == "/api/models/Org/Model/revision/refs%2Fpr%2F1", r.URL.Path == "/api/models/Org/Model/revision/"+s.sha:
		var list []map[string]any
		for _, name := range slices.Sorted(maps.Keys(s.files)) {
			text := s.files[name]
			entry := map[string]any{"rfilename": name, "size": len(text)}
			if size, ok := s.sizes[name]; ok {
				entry["size"] = size
			}
			if strings.HasSuffix(name, ".model") {
				sum := sha256.Sum256([]byte(text))
				entry["lfs"] = map[string]any{"sha256": hex.EncodeToString(sum[:])}
			} else {
				sum := sha1.Sum(fmt.Appendf(nil, "blob %d\x00%s", len(text), text))
				entry["blobId"] = hex.EncodeToString(sum[:])
			}
			if hash, ok := s.hashes[name]; ok {
				entry["blobId"] = hash
			}
			list = append(list, entry)
		}
		text, err := json.Marshal(map[string]any{"sha": s.sha, "siblings": list})
		if err != nil {
			panic(err)
		}
		_, _ = w.Write(text)
	case strings.HasPrefix(r.URL.Path, "/Org/Model/resolve/"+s.sha+"/"):
		name := strings.TrimPrefix(r.URL.Path, "/Org/Model/resolve/"+s.sha+"/")
		if strings.HasSuffix(name, ".model") {
			http.Redirect(w, r, s.storage.URL+"/"+name, http.StatusFound)
			return
		}
		s.write(w, name)
	default:
		w.WriteHeader(http.StatusNotFound)
	}
}

func (s *stub) write(w http.ResponseWriter, name string) {
	text := s.files[name]
	if name == s.broken {
		w.Header().Set("Content-Length", fmt.Sprint(len(text)+10))
	}
	_, _ = w.Write([]byte(text))
}

func (s *stub) store(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a := r.Header.Get("Authorization"); a != "" {
		s.leaked = append(s.leaked, a)
	}
	s.write(w, strings.TrimPrefix(r.URL.Path, "/"))
}

func (s *stub) cache(t *testing.T) Cache {
	return Cache{Folder: t.TempDir(), Endpoint: s.URL, Token: s.token}
}

func name(t *testing.T, text string) Name {
	t.Helper()
	n, err := Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func ordinary() map[string]string {
	return map[string]string{
		"tokenizer.json": "{}", "tokenizer_config.json": `{"a": 1}`, "README.md": "text", "model-1.safetensors": "weights",
		"config.json": "{}", "additional_chat_templates/tool.jinja": "t", "tokenizer.model.v3": "spm", "tokenizer.model": "spm",
	}
}

// tree returns the regular files below a folder.
func tree(t *testing.T, folder string) (files []string) {
	t.Helper()
	err := filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			rel, _ := filepath.Rel(folder, path)
			files = append(files, filepath.ToSlash(rel))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func TestParse(t *testing.T) {
	for text, want := range map[string]Name{
		"hf:Org/Model":              {"Org/Model", "main"},
		"hf:gpt2@v1.0":              {"gpt2", "v1.0"},
		"hf:Org/Model@refs/pr/1":    {"Org/Model", "refs/pr/1"},
		"hf:Org/My_Mo.del-2@" + sha: {"Org/My_Mo.del-2", sha},
	} {
		if got, err := Parse(text); err != nil || got != want {
			t.Errorf("Parse(%q): got %v, %v, want %v", text, got, err, want)
		}
	}
	for _, text := range []string{
		"hf:", "hf:/Model", "hf:../../etc", "hf:Org/..", "hf:Org/a/b", "hf:Org/Model@", "hf:Org/Model@../x", "hf:Org/Model@a/../b", "hf:Org/Model@/a",
		"hf:Org/Model@a//b", "hf:Org/Model@a?b", "hf:Org/Model@a%2e", "hf:Org--x/Model", "hf:Org/Mo del", "hf:Org/Model@a\nb", "hf:.hidden/x", "hf:Org\\x/Model",
	} {
		if got, err := Parse(text); err == nil {
			t.Errorf("Parse(%q): got %v, want an error", text, got)
		}
	}
	if !name(t, "hf:a/b@"+sha).Fixed() || name(t, "hf:a/b").Fixed() {
		t.Error("Fixed: want true for a commit and false for a branch")
	}
}

func TestOnlyNeededFilesAreDownloadedOnce(t *testing.T) {
	hub := newStub(t, ordinary())
	c := hub.cache(t)
	s, err := c.Resolve(t.Context(), name(t, "hf:Org/Model"))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"additional_chat_templates/tool.jinja", "config.json", "tokenizer.json", "tokenizer.model.v3", "tokenizer_config.json"}
	if got := s.names(); !slices.Equal(got, want) {
		t.Errorf("got files %q, want %q", got, want)
	}
	if text, err := fs.ReadFile(s, "tokenizer_config.json"); err != nil || string(text) != `{"a": 1}` {
		t.Errorf("tokenizer_config.json: got %q, %v", text, err)
	}
	if _, err := fs.ReadFile(s, "README.md"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("README.md: got %v, want fs.ErrNotExist", err)
	}
	for _, f := range tree(t, c.Folder) {
		if strings.Contains(f, ".kvlane-") || strings.Contains(f, "README") {
			t.Errorf("got file %s in the cache folder, want only whole files of the tokenizer", f)
		}
	}
	ref, _ := os.ReadFile(filepath.Join(c.Folder, "models--Org--Model", "refs", "main"))
	if string(ref) != sha || s.Commit != sha {
		t.Errorf("got ref %q and commit %q, want %q", ref, s.Commit, sha)
	}

	asked := len(hub.asked)
	if again, err := c.Resolve(t.Context(), name(t, "hf:Org/Model")); err != nil || again.Lock() != s.Lock() {
		t.Errorf("second time: got %v, want the same lock", err)
	}
	if got := len(hub.asked) - asked; got != 1 {
		t.Errorf("second time: got %d requests, want 1 for the commit of the branch", got)
	}
	asked = len(hub.asked)
	if fixed, err := c.Resolve(t.Context(), name(t, "hf:Org/Model@"+sha)); err != nil || fixed.Lock() != s.Lock() {
		t.Errorf("by commit: got %v, want the same lock", err)
	}
	if got := len(hub.asked) - asked; got != 0 {
		t.Errorf("by commit: got %d requests, want none", got)
	}
	if _, err := c.Resolve(t.Context(), name(t, "hf:Org/Model@refs/pr/1")); err != nil {
		t.Errorf("refs/pr/1: got %v, want its files", err)
	}
}

func TestLockIsOfNamesAndContents(t *testing.T) {
	locks := map[string]bool{}
	for _, change := range []func(map[string]string){
		func(map[string]string) {}, func(f map[string]string) { f["tokenizer.json"] = "{ }" },
		func(f map[string]string) { f["chat_template.jinja"] = "" }, func(f map[string]string) { f["consolidated.safetensors"] = "w" },
	} {
		files := ordinary()
		change(files)
		hub := newStub(t, files)
		c := hub.cache(t)
		s, err := c.Resolve(t.Context(), name(t, "hf:Org/Model"))
		if err != nil {
			t.Fatal(err)
		}
		locks[s.Lock()] = true
	}
	if len(locks) != 4 {
		t.Errorf("got %d locks of four sets of files, want 4", len(locks))
	}
	files := ordinary()
	files["README.md"] = "other"
	hub := newStub(t, files)
	c := hub.cache(t)
	if s, err := c.Resolve(t.Context(), name(t, "hf:Org/Model")); err != nil || !locks[s.Lock()] {
		t.Errorf("another README: got %v, want the lock of the first set", err)
	}
}

// Whether a repository has weights in Mistral's format decides which file is read, so it is known without them.
func TestWeightsAreSeenAndNotDownloaded(t *testing.T) {
	files := ordinary()
	files["consolidated-00001.safetensors"] = "weights"
	hub := newStub(t, files)
	hub.sizes["consolidated-00001.safetensors"] = 1 << 40
	c := hub.cache(t)
	s, err := c.Resolve(t.Context(), name(t, "hf:Org/Model"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := fs.Glob(s, "consolidated*.safetensors"); err != nil || len(got) != 1 {
		t.Errorf("Glob: got %q, %v, want the weights", got, err)
	}
	if i := slices.IndexFunc(tree(t, c.Folder), func(f string) bool { return strings.HasSuffix(f, ".safetensors") }); i >= 0 {
		t.Error("the weights are in the cache folder, want them left out")
	}
}

func TestTokenStaysAtTheHub(t *testing.T) {
	hub := newStub(t, ordinary())
	hub.files["tiktoken.model"] = "bpe"
	delete(hub.files, "tokenizer.json")
	hub.token = "secret-token"
	c := hub.cache(t)
	if _, err := c.Resolve(t.Context(), name(t, "hf:Org/Model")); err != nil {
		t.Fatal(err)
	}
	if len(hub.leaked) > 0 {
		t.Errorf("got %q at the storage's host, want no token there", hub.leaked)
	}
	c = Cache{Folder: t.TempDir(), Endpoint: hub.URL, Token: "other-secret"}
	_, err := c.Resolve(t.Context(), name(t, "hf:Org/Model"))
	if !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "HF_TOKEN") || strings.Contains(err.Error(), "other-secret") {
		t.Errorf("with another token: got %v, want a refusal that names HF_TOKEN and not the token", err)
	}
}

func TestRefusals(t *testing.T) {
	for status, refused := range map[int]bool{401: true, 403: true, 404: true, 410: true, 408: false, 429: false, 500: false, 503: false} {
		hub := newStub(t, ordinary())
		hub.status = status
		c := hub.cache(t)
		if _, err := c.Resolve(t.Context(), name(t, "hf:Org/Model")); err == nil || errors.Is(err, ErrRefused) != refused {
			t.Errorf("%d: got %v, want an error that wraps ErrRefused: %v", status, err, refused)
		}
	}
	c := Cache{Folder: t.TempDir(), Endpoint: "http://127.0.0.1:1"}
	if _, err := c.Resolve(t.Context(), name(t, "hf:Org/Model")); err == nil || errors.Is(err, ErrRefused) {
		t.Errorf("no hub: got %v, want an error that another attempt may mend", err)
	}
}

func TestBrokenDownloadLeavesNothing(t *testing.T) {
	for what, spoil := range map[string]func(*stub){
		"ends early": func(s *stub) { s.broken = "tokenizer_config.json" },
		"other hash": func(s *stub) { s.hashes["tokenizer_config.json"] = strings.Repeat("0", 40) },
	} {
		hub := newStub(t, ordinary())
		spoil(hub)
		c := hub.cache(t)
		if _, err := c.Resolve(t.Context(), name(t, "hf:Org/Model")); err == nil || errors.Is(err, ErrRefused) {
			t.Errorf("%s: got %v, want an error that another attempt may mend", what, err)
		}
		for _, f := range tree(t, c.Folder) {
			if strings.HasSuffix(f, "tokenizer_config.json") || strings.Contains(f, ".kvlane-") || strings.Contains(f, "/kvlane/") || strings.Contains(f, "/refs/") {
				t.Errorf("%s: got file %s, want nothing of the broken download", what, f)
			}
		}
		hub.broken, hub.hashes = "", map[string]string{}
		if _, err := c.Resolve(t.Context(), name(t, "hf:Org/Model")); err != nil {
			t.Errorf("%s, then mended: got %v, want the files", what, err)
		}
	}
}

func TestHostileHub(t *testing.T) {
	long := map[string]string{"tokenizer.json": "{}"}
	for i := range maxFiles {
		long[fmt.Sprintf("additional_chat_templates/%d.jinja", i)] = "x"
	}
	for what, hostile := range map[string]func(*stub){
		"dots in a file":       func(s *stub) { s.files["additional_chat_templates/..jinja"] = "x" },
		"a backslash":          func(s *stub) { s.files[`additional_chat_templates/..\..\x.jinja`] = "x" },
		"a query":              func(s *stub) { s.files["additional_chat_templates/a?b.jinja"] = "x" },
		"a size out of bounds": func(s *stub) { s.sizes["tokenizer.json"] = maxFile + 1 },
		"a commit with a path": func(s *stub) { s.sha = "../../../../etc" },
		"large files": func(s *stub) {
			for i := range 5 {
				name := fmt.Sprintf("additional_chat_templates/%d.jinja", i)
				s.files[name], s.sizes[name] = "x", 60<<20
			}
		},
		"many files": func(s *stub) { s.files = long },
		"no files":   func(s *stub) { s.files = map[string]string{"README.md": ""} },
	} {
		hub := newStub(t, ordinary())
		hostile(hub)
		c := hub.cache(t)
		if _, err := c.Resolve(t.Context(), name(t, "hf:Org/Model")); !errors.Is(err, ErrRefused) {
			t.Errorf("%s: got %v, want a refusal", what, err)
		}
		if got := tree(t, c.Folder); len(got) > 0 {
			t.Errorf("%s: got files %q, want none", what, got)
		}
	}
	// What is not wanted is not an error, whatever its name is.
	hub := newStub(t, ordinary())
	hub.files["../../tokenizer.json"], hub.files["/etc/config.json"] = "x", "x"
	c := hub.cache(t)
	if _, err := c.Resolve(t.Context(), name(t, "hf:Org/Model")); err != nil {
		t.Errorf("names of other folders: got %v, want them left out", err)
	}
	for _, f := range tree(t, filepath.Dir(c.Folder)) {
		if !strings.Contains(f, "models--Org--Model/") {
			t.Errorf("got file %s, want all below the repository's folder", f)
		}
	}
}

func TestOffline(t *testing.T) {
	hub := newStub(t, ordinary())
	c := hub.cache(t)
	offline := c
	offline.Offline = true
	if _, err := offline.Resolve(t.Context(), name(t, "hf:Org/Model")); !errors.Is(err, ErrRefused) || len(hub.asked) > 0 {
		t.Errorf("empty folder: got %v and requests %q, want a refusal without requests", err, hub.asked)
	}
	online, err := c.Resolve(t.Context(), name(t, "hf:Org/Model"))
	if err != nil {
		t.Fatal(err)
	}
	asked := len(hub.asked)
	if s, err := offline.Resolve(t.Context(), name(t, "hf:Org/Model")); err != nil || s.Lock() != online.Lock() || len(hub.asked) > asked {
		t.Errorf("after a download: got %v, want the same files without a request", err)
	}

	// A hub that does not answer.
	hub.status = http.StatusBadGateway
	if s, err := c.Resolve(t.Context(), name(t, "hf:Org/Model")); err != nil || s.Stale == nil || s.Lock() != online.Lock() {
		t.Errorf("hub down: got %+v, %v, want the files of before and why", s, err)
	}

	// A changed file is not used, and is downloaded again.
	at := filepath.Join(c.Folder, "models--Org--Model", "snapshots", sha, "tokenizer.json")
	if err := os.WriteFile(at, []byte("changed"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := offline.Resolve(t.Context(), name(t, "hf:Org/Model")); !errors.Is(err, ErrRefused) || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("changed file: got %v, want a refusal", err)
	}
	hub.status = 0
	if s, err := c.Resolve(t.Context(), name(t, "hf:Org/Model@"+sha)); err != nil || s.Lock() != online.Lock() {
		t.Errorf("changed file, hub up: got %v, want it downloaded again", err)
	}
}

// The hub's library keeps files as links to blobs.
func TestDownloadOfTheHubsLibraryIsFound(t *testing.T) {
	folder := t.TempDir()
	repo := filepath.Join(folder, "models--Org--Model")
	for path, text := range map[string]string{"refs/main": sha, "blobs/b1": "{}", "snapshots/" + sha + "/README.md": "x"} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(repo, path)), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(repo, path), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	c := Cache{Folder: folder, Endpoint: "http://127.0.0.1:1", Offline: true}
	if _, err := c.Resolve(t.Context(), name(t, "hf:Org/Model")); !errors.Is(err, ErrRefused) {
		t.Errorf("without a tokenizer: got %v, want a refusal", err)
	}
	if err := os.Symlink("../../blobs/b1", filepath.Join(repo, "snapshots", sha, "tokenizer.json")); err != nil {
		t.Fatal(err)
	}
	s, err := c.Resolve(t.Context(), name(t, "hf:Org/Model"))
	if err != nil || !slices.Equal(s.names(), []string{"tokenizer.json"}) {
		t.Fatalf("got %v, want tokenizer.json", err)
	}
}

func TestProcessesShareAFolder(t *testing.T) {
	hub := newStub(t, ordinary())
	c := hub.cache(t)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if _, err := c.Resolve(t.Context(), name(t, "hf:Org/Model")); err != nil {
				t.Errorf("got %v, want the files", err)
			}
		})
	}
	wg.Wait()
}

func TestCancelled(t *testing.T) {
	hub := newStub(t, ordinary())
	c := hub.cache(t)
	if _, err := c.Resolve(t.Context(), name(t, "hf:Org/Model")); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Resolve(ctx, name(t, "hf:Org/Model")); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
}

func TestFromEnvironment(t *testing.T) {
	for _, v := range []string{"HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_ENDPOINT", "HF_HUB_OFFLINE", "XDG_CACHE_HOME"} {
		t.Setenv(v, "")
	}
	home := t.TempDir()
	t.Setenv("HOME", home)
	want := Cache{Folder: filepath.Join(home, ".cache/huggingface/hub"), Endpoint: "https://huggingface.co"}
	if got := FromEnvironment(); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	t.Setenv("HF_HOME", home)
	if err := os.WriteFile(filepath.Join(home, "token"), []byte("stored\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	want = Cache{Folder: filepath.Join(home, "hub"), Endpoint: "http://mirror", Token: "stored", Offline: true}
	t.Setenv("HF_ENDPOINT", "http://mirror/")
	t.Setenv("HF_HUB_OFFLINE", "1")
	if got := FromEnvironment(); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	want.Folder, want.Token = "/c", "t2"
	t.Setenv("HF_HUB_CACHE", "/c")
	t.Setenv("HUGGING_FACE_HUB_TOKEN", "t2")
	if got := FromEnvironment(); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	t.Setenv("HF_TOKEN", "t1")
	if got := FromEnvironment(); got.Token != "t1" {
		t.Errorf("HF_TOKEN: got %q, want t1", got.Token)
	}
}

// A list of 16 MiB has 500,000 names.
func TestTheCostOfAListIsLinear(t *testing.T) {
	cost := func(n int) time.Duration {
		names := make([]string, n)
		for i := range names {
			names[i] = "tokenizer.model"
		}
		before := processorTime(t)
		if got := relevant(names); len(got) != 1 {
			t.Errorf("got %q, want one name", got)
		}
		return processorTime(t) - before
	}
	cost(1000)
	few, many := cost(20_000), cost(80_000)
	if many > 10*max(few, 5*time.Millisecond) {
		t.Errorf("80,000 names took %v of a processor, 20,000 %v, want 4 times as much", many, few)
	}
}

func processorTime(t *testing.T) time.Duration {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// What a hub says is not written to the log by the megabyte.
func TestTextsOfAHubAreShort(t *testing.T) {
	const size = 1 << 20
	long := strings.Repeat("x", size)
	for what, answer := range map[string]func(w http.ResponseWriter, conn net.Conn){
		"a hash": func(w http.ResponseWriter, _ net.Conn) {
			fmt.Fprintf(w, `{"sha":%q,"siblings":[{"rfilename":"tokenizer.json","size":5,"blobId":%q}]}`, sha, long)
		},
		"a hash of LFS": func(w http.ResponseWriter, _ net.Conn) {
			fmt.Fprintf(w, `{"sha":%q,"siblings":[{"rfilename":"tokenizer.json","size":5,"lfs":{"sha256":%q}}]}`, sha, long)
		},
		"a status": func(_ http.ResponseWriter, conn net.Conn) { fmt.Fprintf(conn, "HTTP/1.1 500 %s\r\n\r\n", long) },
		"a redirect": func(_ http.ResponseWriter, conn net.Conn) {
			fmt.Fprintf(conn, "HTTP/1.1 302 x\r\nLocation: /%s\r\n\r\n", long)
		},
		"a short status": func(_ http.ResponseWriter, conn net.Conn) {
			fmt.Fprintf(conn, "HTTP/1.1 503 %s\r\nContent-Length: 0\r\n\r\n", long[:20_000])
		},
	} {
		t.Run(what, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				if strings.Contains(what, "hash") {
					answer(w, nil)
					return
				}
				conn, _, err := w.(http.Hijacker).Hijack() //nolint:forcetypeassert // of net/http
				if err != nil {
					panic(err)
				}
				defer conn.Close()
				answer(nil, conn)
			}))
			defer server.Close()
			c := Cache{Folder: t.TempDir(), Endpoint: server.URL}
			_, err := c.Resolve(t.Context(), name(t, "hf:Org/Model"))
			if err == nil || len(err.Error()) > 1000 {
				t.Errorf("got an error of %d bytes, want a short one: %.300v", len(fmt.Sprint(err)), err)
			}
		})
	}
}

// What a killed process left goes after an hour; until then another one may write it.
func TestLeftoversOfKilledDownloadsGo(t *testing.T) {
	hub := newStub(t, ordinary())
	c := hub.cache(t)
	folder := filepath.Join(c.Folder, "models--Org--Model")
	if err := os.MkdirAll(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, age := range map[string]time.Duration{".kvlane-old": 2 * time.Hour, ".kvlane-new": time.Minute, "other-old": 2 * time.Hour} {
		at := filepath.Join(folder, name)
		if err := os.WriteFile(at, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(at, time.Time{}, time.Now().Add(-age)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.Resolve(t.Context(), name(t, "hf:Org/Model")); err != nil {
		t.Fatal(err)
	}
	entries, err := filepath.Glob(filepath.Join(folder, "*-*"))
	if hidden, _ := filepath.Glob(filepath.Join(folder, ".*-*")); err == nil {
		entries = append(entries, hidden...)
	}
	for i := range entries {
		entries[i] = filepath.Base(entries[i])
	}
	slices.Sort(entries)
	entries = slices.Compact(entries)
	if want := []string{".kvlane-new", "other-old"}; !slices.Equal(entries, want) {
		t.Errorf("got %q, want %q", entries, want)
	}
}

// The files of a repository are bounded together, too, where the list has no true sizes.
func TestFilesAreBoundedTogether(t *testing.T) {
	files := ordinary()
	text := strings.Repeat("x", 60<<20)
	hub := newStub(t, files)
	for i := range 5 {
		name := fmt.Sprintf("additional_chat_templates/%d.jinja", i)
		files[name], hub.sizes[name] = text, 1
	}
	c := hub.cache(t)
	if _, err := c.Resolve(t.Context(), name(t, "hf:Org/Model")); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "together") {
		t.Errorf("300 MB: got %v, want a refusal", err)
	}
	delete(files, "additional_chat_templates/0.jinja")
	if _, err := c.Resolve(t.Context(), name(t, "hf:Org/Model")); err != nil {
		t.Errorf("240 MB: got %v, want the files", err)
	}
}
