package bpe

import (
	"errors"
	"sync"
	"unsafe"
)

// encoder holds the word caches and the scratch memory; one Encode at a time uses it.
type encoder struct {
	t       *Tokenizer
	front   *[1 << (frontBits - 1)][2]frontWord
	broad   *[1 << (broadBits - 1)][2]broadWord
	long    *store
	merge   merger
	match   regexSearch
	ends    [512]uint32 // ends of words
	parts   [512]uint32 // ends of the parts of one word
	invalid bool        // a segment of the text is not valid UTF-8
	space   uint64      // Cut.Space
	nfc     []byte
	normal  normalizer
	text    []byte // text with U+2581 turned into spaces
	spacing []byte // text with a space put before it
	added   []byte // text as the normalizer of a SentencePiece model leaves it
	steps   []uint32
	paths   []openPath // see viterbi
	sum     float64    // of the text before the word
	sure    bool       // the ids of the word are the same after any text, see summed

	// recording, cuts, cutBase and lastCut record the cuts of the text being encoded.
	recording bool
	cuts      []Cut
	cutBase   int // ids in the result before those of the text
	lastCut   int

	watch watch
}

func newEncoder(t *Tokenizer) *encoder {
	return &encoder{t: t, sure: true, front: new([1 << (frontBits - 1)][2]frontWord), broad: new([1 << (broadBits - 1)][2]broadWord), long: newStore(1<<13, longText, longText/4)}
}

// maxScratch bounds, in bytes, each buffer that is kept between texts.
const maxScratch = 1 << 20

// trim releases unusually large buffers and all references to the text.
func (enc *encoder) trim() {
	for _, b := range []*[]byte{&enc.nfc, &enc.text, &enc.spacing, &enc.added} {
		if cap(*b) > maxScratch {
			*b = nil
		}
	}
	if cap(enc.steps) > maxScratch/4 {
		enc.steps = nil
	}
	if cap(enc.normal.marks) > maxScratch/8 {
		enc.normal.marks = nil
	}
	enc.watch, enc.match.text = watch{}, ""
}

// encoders is a pool of at most max(2, GOMAXPROCS) encoders, which bounds the memory of their caches; further calls
// wait. The encoder released last is reused first, because its caches are warm.
type encoders struct {
	tickets chan struct{}
	mu      sync.Mutex
	free    []*encoder
}

// acquire waits for an encoder. It returns nil if stop is closed first.
func (t *Tokenizer) acquire(stop <-chan struct{}, space uint64) *encoder {
	p := t.encoders
	select {
	case p.tickets <- struct{}{}:
	case <-stop:
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	var enc *encoder
	if n := len(p.free); n > 0 {
		enc = p.free[n-1]
		p.free = p.free[:n-1]
	} else {
		enc = newEncoder(t)
	}
	enc.watch, enc.space = watch{stop: stop}, space
	return enc
}

func (t *Tokenizer) release(enc *encoder) {
	enc.trim()
	p := t.encoders
	p.mu.Lock()
	p.free = append(p.free, enc)
	p.mu.Unlock()
	<-p.tickets
}

// ErrStopped is returned when encoding was stopped before its end.
var ErrStopped = errors.New("tokenizing was stopped")

// lookEvery is the number of bytes of text between two checks of the stop channel, mergesEvery
// the number of merges of one long word. Both take about a millisecond.
const (
	lookEvery   = 64 << 10
	mergesEvery = 16 << 10
)

// watch reports to an encoder that its caller has stopped it.
type watch struct {
	stop    <-chan struct{} // nil: never
	left    int             // bytes until the next check
	stopped bool
}

// over accounts for the next n bytes of text and reports whether the work was stopped.
func (w *watch) over(n int) bool {
	w.left -= n
	return w.left < 0 && w.look()
}

// look checks the stop channel now.
func (w *watch) look() bool {
	if w.stopped {
		return true
	}
	select {
	case <-w.stop:
		w.stopped = true
		return true
	default:
		w.left = lookEvery
		return false
	}
}

// bytesOf returns the bytes of s, which must not be modified.
func bytesOf(s string) []byte { return unsafe.Slice(unsafe.StringData(s), len(s)) }

// stringOf returns b as a string that is valid only until b is modified.
func stringOf(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
