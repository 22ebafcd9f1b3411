package shape

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
	"golang.org/x/sync/semaphore"
)

// Bounds of request-supplied templates (Options.TrustTemplates), which are untrusted programs.
const (
	// maxRequestTemplate is the maximum source size in bytes. The largest templates of published models have 25 KB.
	maxRequestTemplate = 64 << 10
	// keptTemplates bounds, in bytes, the total source size of cached templates. A compiled
	// template takes up to 330 times its source size if hostile, and typically 100 times.
	keptTemplates = 64 << 10
	// compileCost is the memory, in bytes, that compiling takes per byte of source.
	compileCost = 1 << 10
	// templateMemory bounds, process-wide, the memory of all such templates that run or are being compiled.
	templateMemory = 512 << 20
	// templateWait bounds how long a request waits for its share.
	templateWait = 200 * time.Millisecond
)

// Reasons why a request-supplied template was not run. They are not Refusals: engines have other bounds.
var (
	errTemplateSize  = fmt.Errorf("the request's chat template has more than %d bytes", maxRequestTemplate)
	errTemplatesBusy = errors.New("too many request-supplied chat templates run concurrently")
)

// templateShare is the process-wide budget of templateMemory.
var templateShare = semaphore.NewWeighted(templateMemory)

// reserve acquires bytes of templateShare; the caller must call release.
func reserve(bytes int64) (release func(), err error) {
	bytes = min(bytes, templateMemory)
	if !templateShare.TryAcquire(bytes) {
		ctx, cancel := context.WithTimeout(context.Background(), templateWait)
		defer cancel()
		if templateShare.Acquire(ctx, bytes) != nil {
			return nil, errTemplatesBusy
		}
	}
	return func() { templateShare.Release(bytes) }, nil
}

// compileRequestTemplate compiles a request-supplied template.
func compileRequestTemplate(source string) (*template, error) {
	if len(source) > maxRequestTemplate {
		return nil, errTemplateSize
	}
	release, err := reserve(int64(len(source)) * compileCost)
	if err != nil {
		return nil, err
	}
	defer release()
	t, err := compile(source)
	if err == nil {
		t.fromRequest = true
	}
	return t, err
}

// templateCache is an LRU cache of compiled request-supplied templates. It is safe for concurrent use.
//
// Invariant: bytes is the length of all keys and at most keptTemplates.
type templateCache struct {
	mu      sync.Mutex
	entries *simplelru.LRU[string, *template]
	bytes   int
}

func newTemplateCache() *templateCache {
	c := &templateCache{}
	c.entries, _ = simplelru.NewLRU(keptTemplates, func(source string, _ *template) { c.bytes -= len(source) }) // an error is only for a size of 0
	return c
}

// Get returns the compiled template of a non-empty source.
func (c *templateCache) Get(source string) (*template, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.entries.Get(source)
}

// Add stores a template, unless its source alone exceeds keptTemplates.
func (c *templateCache) Add(source string, t *template) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(source) > keptTemplates || c.entries.Contains(source) { // another request was faster
		return
	}
	for c.bytes += len(source); c.bytes > keptTemplates; {
		c.entries.RemoveOldest()
	}
	c.entries.Add(source, t)
}
