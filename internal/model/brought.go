package model

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
	"golang.org/x/sync/semaphore"
)

// Bounds of the templates that come with requests (Options.TrustTemplates), which are programs of clients.
const (
	// maxBrought is the largest source in bytes. The largest that models are published with have 25 KB.
	maxBrought = 64 << 10
	// keptBrought bounds the sources whose compiled templates are kept, in bytes. Compiled, a hostile one takes 330 times
	// its size, a common one 100 times.
	keptBrought = 64 << 10
	// compileCost is what compiling takes for each byte of the source.
	compileCost = 1 << 10
	// broughtMemory bounds what all such templates of the process may take at once, running or being compiled.
	broughtMemory = 512 << 20
	// broughtWait bounds how long a request waits for its share.
	broughtWait = 200 * time.Millisecond
)

// Why a template that came with a request was not run. These are no Refusals: an engine has other bounds.
var (
	errBroughtSize = fmt.Errorf("the request's chat template has more than %d bytes", maxBrought)
	errBroughtBusy = errors.New("too many chat templates of requests run at once")
)

// broughtShare is shared by all models: it is memory of the process.
var broughtShare = semaphore.NewWeighted(broughtMemory)

// reserve takes bytes of the process's share for request templates; the caller hands them back with release.
func reserve(bytes int64) (release func(), err error) {
	bytes = min(bytes, broughtMemory)
	if !broughtShare.TryAcquire(bytes) {
		ctx, cancel := context.WithTimeout(context.Background(), broughtWait)
		defer cancel()
		if broughtShare.Acquire(ctx, bytes) != nil {
			return nil, errBroughtBusy
		}
	}
	return func() { broughtShare.Release(bytes) }, nil
}

// compileBrought compiles a template that came with a request.
func compileBrought(source string) (*template, error) {
	if len(source) > maxBrought {
		return nil, errBroughtSize
	}
	release, err := reserve(int64(len(source)) * compileCost)
	if err != nil {
		return nil, err
	}
	defer release()
	t, err := compile(source)
	if err == nil {
		t.brought = true
	}
	return t, err
}

// broughtCache holds the compiled templates of requests; the ones used longest ago go first. It is safe for concurrent use.
//
// Invariant: bytes is the length of all keys and at most keptBrought.
type broughtCache struct {
	mu      sync.Mutex
	entries *simplelru.LRU[string, *template]
	bytes   int
}

func newBroughtCache() (*broughtCache, error) {
	c := &broughtCache{}
	entries, err := simplelru.NewLRU(keptBrought, func(source string, _ *template) { c.bytes -= len(source) })
	c.entries = entries
	return c, err
}

// Get returns the compiled template of a source that is not empty.
func (c *broughtCache) Get(source string) (*template, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.entries.Get(source)
}

// Add keeps a template, if its source is not longer than all that is kept.
func (c *broughtCache) Add(source string, t *template) {
	if len(source) > keptBrought {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.entries.Contains(source) { // another request was faster
		return
	}
	for c.bytes += len(source); c.bytes > keptBrought; {
		c.entries.RemoveOldest()
	}
	c.entries.Add(source, t)
}
