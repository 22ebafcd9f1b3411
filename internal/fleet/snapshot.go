package fleet

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"time"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
)

// warmTarget is what a peer's index held of a target that no worker here has
// claimed yet.
type warmTarget struct {
	slot   kvindex.Slot
	cursor feed.Cursor
}

// cursorSize is a feed.Cursor in a copy: two little-endian numbers.
const cursorSize = 16

func appendCursor(dst []byte, c feed.Cursor) []byte {
	return binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(dst, c.Next), c.Sum)
}

func readCursor(b []byte) (c feed.Cursor, ok bool) {
	if len(b) != cursorSize {
		return c, false
	}
	c.Next, c.Sum = binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:])
	return c, c.Next > 0
}

// KeyProof shows another replica that we have its key of the block hash, without
// revealing the key.
func (f *Fleet) KeyProof() []byte {
	m := hmac.New(sha256.New, f.Key[:])
	m.Write([]byte("kvlane snapshot"))
	return m.Sum(nil)
}

// DumpIndex writes a copy of the index with the cursors of the feeds. Every
// target's blocks are those of whole batches up to its cursor: events wait
// meanwhile, decisions do not, but get no credit for what they send.
func (f *Fleet) DumpIndex(w io.Writer) error {
	f.feeds.snapshot.Lock()
	defer f.feeds.snapshot.Unlock()
	cursors := f.feeds.cursors()
	var buf [cursorSize]byte
	return f.index.Dump(w, func(s kvindex.Slot) []byte {
		c, ok := cursors[s]
		if !ok {
			return nil
		}
		return appendCursor(buf[:0], c)
	})
}

// Speculate credits a target with a prompt that is sent to it, but not while a copy
// of the index is made: no request waits for that.
func (f *Fleet) Speculate(slot kvindex.Slot, hashes []kvindex.Hash, now time.Time) kvindex.Credit {
	if !f.feeds.snapshot.TryRLock() {
		return kvindex.Credit{}
	}
	defer f.feeds.snapshot.RUnlock()
	return f.index.Speculate(slot, hashes, now)
}

// Withdraw ends the credit for a prompt that its target did not take.
func (f *Fleet) Withdraw(c kvindex.Credit) {
	if f.feeds.snapshot.TryRLock() {
		defer f.feeds.snapshot.RUnlock()
		f.index.Withdraw(c)
	}
}

// Expire ends credit whose TTL is over.
func (f *Fleet) Expire(now time.Time) {
	if f.feeds.snapshot.TryRLock() {
		defer f.feeds.snapshot.RUnlock()
		f.index.Expire(now)
	}
}

// LoadIndex takes a copy that DumpIndex of another replica wrote, before the
// first SetWorkers. Workers that come then find their targets in it, and their
// feeds go on from its cursors. After an error the index is empty and another
// copy may be tried.
func (f *Fleet) LoadIndex(r io.Reader) error {
	cursors, err := f.index.Load(r)
	if err != nil {
		return err
	}
	f.feeds.warmMu.Lock()
	defer f.feeds.warmMu.Unlock()
	for _, t := range f.index.Stats().Targets {
		c, ok := readCursor(cursors[t.Slot])
		if !ok {
			// Without a cursor our events cannot continue the peer's.
			f.index.Drop(t.Slot)
			continue
		}
		f.feeds.warm[t.Target] = warmTarget{t.Slot, c}
	}
	f.feeds.warmed.Store(int64(len(f.feeds.warm)))
	return nil
}

// ForgetUnclaimed drops what a loaded copy had of workers that do not exist here.
func (f *Fleet) ForgetUnclaimed() {
	f.feeds.snapshot.RLock()
	defer f.feeds.snapshot.RUnlock()
	f.feeds.warmMu.Lock()
	defer f.feeds.warmMu.Unlock()
	for t, w := range f.feeds.warm {
		f.index.Drop(w.slot)
		delete(f.feeds.warm, t)
	}
}

// addSlot gives a target its slot, with what a peer's copy had of it if its feed
// can prove that it goes on from there: resume is where.
func (f *Fleet) addSlot(t kvindex.Target, w *config.Worker) (slot kvindex.Slot, resume *feed.Cursor, err error) {
	// No copy is made meanwhile: slots would change hands under it.
	f.feeds.snapshot.RLock()
	defer f.feeds.snapshot.RUnlock()
	f.feeds.warmMu.Lock()
	warm, ok := f.feeds.warm[t]
	delete(f.feeds.warm, t)
	f.feeds.warmMu.Unlock()
	model := f.cacheModel(w.Models)
	if ok {
		if resumable(w) {
			if slot, err = f.index.Add(t, model, w.BlockSize); err == nil {
				return slot, &warm.cursor, nil
			}
		}
		f.index.Drop(warm.slot)
	}
	if slot, err = f.index.Add(t, model, w.BlockSize); err != nil {
		return 0, nil, fmt.Errorf("target %s: %w", t, err)
	}
	return slot, nil, nil
}

// dropSlot forgets what a target holds.
func (f *Fleet) dropSlot(s kvindex.Slot) {
	f.feeds.snapshot.RLock()
	defer f.feeds.snapshot.RUnlock()
	f.index.Drop(s)
}

// resumable reports whether a worker's feed can prove that it resumes at a cursor: it
// has to send the batch before it again. TensorRT-LLM's events mean nothing without
// its first ones, which name the attention windows.
func resumable(w *config.Worker) bool {
	return w.Engine != string(feed.TRTLLM) && (w.Events.Replay != "" || w.Events.Endpoint == config.PushEndpoint)
}
