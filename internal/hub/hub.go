// Package hub resolves names like "hf:Org/Model@revision" to the tokenizer files of a model hub's repository. It speaks
// the hub's plain HTTP and keeps the files in the layout of the hub's own cache folder, so that each finds the other's
// downloads.
package hub

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Prefix begins the names of this package.
const Prefix = "hf:"

// ErrRefused is wrapped by errors that a retry does not fix: a repository that does not exist or may not be read, an
// answer that is out of bounds, or missing files while HF_HUB_OFFLINE is set.
var ErrRefused = errors.New("model hub")

// ErrUnavailable is wrapped by errors of a hub that is temporarily unavailable.
var ErrUnavailable = errors.New("model hub is not available")

// wanted are the files that the loader of tokenizers reads. It only checks whether marks exist.
var (
	wanted = []string{
		"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json", "generation_config.json",
		"processor_config.json", "preprocessor_config.json", "chat_template.jinja", "chat_template.json",
		"additional_chat_templates/*.jinja", "tekken.json", "tokenizer.model.v*", "tokenizer.model", "tiktoken.model", "qwen.tiktoken",
	}
	marks = "consolidated*.safetensors"
	// unread are the files of wanted that are not needed if there is a tokenizer.json.
	unread = []string{"tokenizer.model", "tiktoken.model", "qwen.tiktoken"}
)

const (
	maxFiles = 64
	maxFile  = 64 << 20  // bytes
	maxAll   = 256 << 20 // bytes of a repository's files together
)

var tooMuch = fmt.Sprintf("the tokenizer's files have more than %d bytes together", maxAll)

var (
	repository = regexp.MustCompile(`^([A-Za-z0-9_][\w.-]{0,95}/)?[A-Za-z0-9_][\w.-]{0,95}$`)
	revision   = regexp.MustCompile(`^\w[\w./-]{0,199}$`)
	commit     = regexp.MustCompile(`^[0-9a-f]{40}$`)
	hash       = regexp.MustCompile(`^([0-9a-f]{40}|[0-9a-f]{64})?$`)
	fileName   = regexp.MustCompile(`^(additional_chat_templates/)?\w[\w.-]{0,127}$`)
)

// Name is a parsed "hf:Org/Model@revision".
type Name struct {
	Repository string
	Revision   string // a branch, tag or commit
}

// Parse parses a name that begins with Prefix. The revision is main by default.
func Parse(text string) (Name, error) {
	repo, rev, given := strings.Cut(strings.TrimPrefix(text, Prefix), "@")
	if !given {
		rev = "main"
	}
	if !repository.MatchString(repo) || !revision.MatchString(rev) || strings.Contains(repo, "--") || strings.Contains(text, "..") ||
		rev != path.Clean(rev) {
		return Name{}, fmt.Errorf("%q is not like hf:Org/Model or hf:Org/Model@revision", text)
	}
	return Name{repo, rev}, nil
}

func (n Name) String() string { return Prefix + n.Repository + "@" + n.Revision }

// Fixed reports whether the revision is a commit, which cannot move.
func (n Name) Fixed() bool { return commit.MatchString(n.Revision) }

// Snapshot is the tokenizer files of a repository at one commit, read from the cache folder. It lists and opens no other
// files of that folder.
type Snapshot struct {
	Name
	Commit string
	// Stale is why the revision's commit could not be queried; the last known one is used.
	Stale error

	files fs.FS
	lines []string // hash, two spaces, name; sorted by name; the hash of a mark is "-"
}

// Lock returns the hash over the names and contents of the files.
func (s *Snapshot) Lock() string {
	sum := sha256.Sum256([]byte(s.manifest()))
	return "sha256:" + hex.EncodeToString(sum[:])
}

func (s *Snapshot) manifest() string { return strings.Join(s.lines, "\n") + "\n" }

// names returns the names of the files, and of marks.
func (s *Snapshot) names() []string {
	var names []string
	for _, line := range s.lines {
		_, name, _ := strings.Cut(line, "  ")
		names = append(names, name)
	}
	return names
}

// Open opens one of the files.
func (s *Snapshot) Open(name string) (fs.File, error) {
	if !slices.Contains(s.names(), name) {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	return s.files.Open(name)
}

// Glob lists files and marks. Marks are names only: they cannot be opened.
func (s *Snapshot) Glob(pattern string) (found []string, err error) {
	for _, name := range s.names() {
		if ok, err := path.Match(pattern, name); err != nil {
			return nil, err
		} else if ok {
			found = append(found, name)
		}
	}
	return found, nil
}

// relevant sorts the names of a repository's files and returns those that matter.
func relevant(all []string) []string {
	slices.Sort(all)
	all = slices.Compact(all)
	_, fast := slices.BinarySearch(all, "tokenizer.json")
	var names []string
	for _, name := range all {
		match := func(pattern string) bool { ok, _ := path.Match(pattern, name); return ok }
		ignored := fast && slices.Contains(unread, name)
		if (slices.ContainsFunc(wanted, match) || match(marks)) && !ignored {
			names = append(names, name)
		}
	}
	return names
}

func isMark(name string) bool {
	ok, _ := path.Match(marks, name)
	return ok
}

// Cache is where the files are kept, and how the hub is reached.
type Cache struct {
	Folder   string
	Endpoint string
	Token    string // "" for none
	Offline  bool   // the hub is not asked
}

// FromEnvironment reads the variables of the hub's own library.
func FromEnvironment() Cache {
	user, _ := os.UserCacheDir()
	if home, err := os.UserHomeDir(); err == nil {
		user = filepath.Join(home, ".cache") // on macOS too
	}
	home := cmp.Or(os.Getenv("HF_HOME"), filepath.Join(cmp.Or(os.Getenv("XDG_CACHE_HOME"), user), "huggingface"))
	token := cmp.Or(os.Getenv("HF_TOKEN"), os.Getenv("HUGGING_FACE_HUB_TOKEN"))
	if token == "" {
		stored, _ := os.ReadFile(cmp.Or(os.Getenv("HF_TOKEN_PATH"), filepath.Join(home, "token")))
		token = string(stored)
	}
	offline := strings.ToLower(os.Getenv("HF_HUB_OFFLINE"))
	return Cache{
		Folder:   cmp.Or(os.Getenv("HF_HUB_CACHE"), os.Getenv("HUGGINGFACE_HUB_CACHE"), filepath.Join(home, "hub")),
		Endpoint: strings.TrimSuffix(cmp.Or(os.Getenv("HF_ENDPOINT"), "https://huggingface.co"), "/"),
		Token:    strings.TrimSpace(token),
		Offline:  slices.Contains([]string{"1", "true", "yes", "on"}, offline),
	}
}

// folder is where a repository is kept: blobs, refs and snapshots of the hub's library, and manifests of ours in kvlane.
func (c *Cache) folder(n Name) string {
	return filepath.Join(c.Folder, "models--"+strings.ReplaceAll(n.Repository, "/", "--"))
}

// cached returns what the cache folder has of a revision.
func (c *Cache) cached(n Name) (*Snapshot, error) {
	sha := n.Revision
	if !n.Fixed() {
		ref, _ := os.ReadFile(filepath.Join(c.folder(n), "refs", filepath.FromSlash(n.Revision)))
		if sha = strings.TrimSpace(string(ref)); !commit.MatchString(sha) {
			return nil, fmt.Errorf("%w: %s is not in %s", ErrRefused, n, c.Folder)
		}
	}
	s := c.snapshot(n, sha)
	if noted, err := os.ReadFile(c.noted(n, sha)); err == nil {
		s.lines = strings.Split(strings.TrimSuffix(string(noted), "\n"), "\n")
		if err := s.sum(s.names()); err != nil {
			return nil, err
		} else if s.manifest() != string(noted) {
			return nil, fmt.Errorf("%w: files of %s in %s have changed", ErrRefused, n, c.Folder)
		}
		return s, nil
	}
	// Downloaded by the hub's library: the list of the repository's files is unknown.
	var all []string
	for _, pattern := range append([]string{marks}, wanted...) {
		found, _ := fs.Glob(s.files, pattern)
		all = append(all, found...)
	}
	if !c.Offline || !slices.ContainsFunc(all, func(name string) bool { return strings.HasPrefix(name, "tok") || strings.HasSuffix(name, ".tiktoken") }) {
		return nil, fmt.Errorf("%w: %s is not in %s, or incomplete", ErrRefused, n, c.Folder)
	}
	return s, s.sum(relevant(all))
}

func (c *Cache) snapshot(n Name, sha string) *Snapshot {
	return &Snapshot{Name: n, Commit: sha, files: os.DirFS(filepath.Join(c.folder(n), "snapshots", sha))}
}

// noted is the file with the manifest of a complete download.
func (c *Cache) noted(n Name, sha string) string { return filepath.Join(c.folder(n), "kvlane", sha) }

// sum hashes the files.
func (s *Snapshot) sum(names []string) error {
	s.lines = nil
	for _, name := range names {
		hash := "-"
		if !isMark(name) {
			f, err := s.files.Open(name)
			if err != nil {
				return fmt.Errorf("%w: %s: %v", ErrRefused, s.Name, err) //nolint:errorlint // not fs.ErrNotExist, which stands for a missing folder
			}
			h := sha256.New()
			_, err = io.Copy(h, io.LimitReader(f, maxFile+1))
			_ = f.Close()
			if err != nil {
				return fmt.Errorf("%s: %w", s.Name, err)
			}
			hash = hex.EncodeToString(h.Sum(nil))
		}
		s.lines = append(s.lines, hash+"  "+name)
	}
	return nil
}
