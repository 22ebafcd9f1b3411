package tokenizer

import (
	"runtime"
	"sync"
)

// workers lends out as many workers as there are processors, two at least, so that the
// memory of their caches is bounded; whoever comes later waits. The last one given back
// goes out first, because its caches are warm. A worker is made when all others
// are in use.
type workers struct {
	tickets chan struct{}
	mu      sync.Mutex
	free    []*worker
}

func newWorkers() workers {
	return workers{tickets: make(chan struct{}, max(2, runtime.GOMAXPROCS(0)))}
}

// acquire is nil if nobody wants the ids any more: stop is closed.
func (t *Tokenizer) acquire(stop <-chan struct{}) *worker {
	p := &t.workers
	select {
	case p.tickets <- struct{}{}:
	case <-stop:
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	var w *worker
	if n := len(p.free); n > 0 {
		w = p.free[n-1]
		p.free = p.free[:n-1]
	} else {
		w = newWorker(t)
	}
	w.watch = watch{stop: stop}
	return w
}

func (t *Tokenizer) release(w *worker) {
	w.trim()
	w.watch, w.match.text = watch{}, "" // keep nothing of the request alive
	p := &t.workers
	p.mu.Lock()
	p.free = append(p.free, w)
	p.mu.Unlock()
	<-p.tickets
}
