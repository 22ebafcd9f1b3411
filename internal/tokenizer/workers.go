package tokenizer

import (
	"runtime"
	"sync"
)

// workers lends out as many workers as there are processors, so that the memory
// of their caches is bounded; whoever comes later waits. The last one given back
// goes out first, because its caches are warm. A worker is made when all others
// are in use.
type workers struct {
	tickets chan struct{}
	mu      sync.Mutex
	free    []*worker
}

func newWorkers() workers {
	return workers{tickets: make(chan struct{}, runtime.GOMAXPROCS(0))}
}

func (t *Tokenizer) acquire() *worker {
	p := &t.workers
	p.tickets <- struct{}{}
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.free); n > 0 {
		w := p.free[n-1]
		p.free = p.free[:n-1]
		return w
	}
	return newWorker(t)
}

func (t *Tokenizer) release(w *worker) {
	w.trim()
	p := &t.workers
	p.mu.Lock()
	p.free = append(p.free, w)
	p.mu.Unlock()
	<-p.tickets
}
