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

// Bounds of request-supplied templates (Options.TrustTemplates), which are programs of clients.
const (
	// maxRequestTemplate is the largest source in bytes. The largest that models are published with have 25 KB.
	maxRequestTemplate = 64 << 10
	// keptTemplates bounds the sources whose compiled templates are kept, in bytes. Compiled, a hostile one takes 330 times
	// its size, a common one 100 times.
	keptTemplates = 64 << 10
	// compileCost is what compiling takes for each byte of the source.
	compileCost = 1 << 10
	// templateMemory bounds, process-wide, the memory of all such templates that run or are being compiled.
	templateMemory = 512 << 20
	// templateWait bounds how long a request waits for its share.
	templateWait = 200 * time.Millisecond
)

// Why a request-supplied template was not run. These are not Refusals: engines have other bounds.
var (
	errTemplateSize  = fmt.Errorf("the request's chat template has more than %d bytes", maxRequestTemplate)
	errTemplatesBusy = errors.New("too many request-supplied chat templates run concurrently")
)

// templateShare is the process-wide budget of templateMemory.
var templateShare = semaphore.NewWeighted(templateMemory)

// reserve takes bytes of templateShare; the caller returns them with release.
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

// templateCache holds the compiled templates of requests; the ones used longest ago go first. It is safe for concurrent use.
//
// Invariant: bytes is the length of all keys and at most keptTemplates.
type templateCache struct {
	mu      sync.Mutex
	entries *simplelru.LRU[string, *template]
	bytes   int
}

func newTemplateCache() (*templateCache, error) {
	c := &templateCache{}
	entries, err := simplelru.NewLRU(keptTemplates, func(source string, _ *template) { c.bytes -= len(source) })
	c.entries = entries
	return c, err
}

// Get returns the compiled template of a source that is not empty.
func (c *templateCache) Get(source string) (*template, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.entries.Get(source)
}

// Add keeps a template, if its source is not longer than all that is kept.
func (c *templateCache) Add(source string, t *template) {
	if len(source) > keptTemplates {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.entries.Contains(source) { // another request was faster
		return
	}
	for c.bytes += len(source); c.bytes > keptTemplates; {
		c.entries.RemoveOldest()
	}
	c.entries.Add(source, t)
}
