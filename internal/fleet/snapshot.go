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

// warmTarget is a peer's knowledge of a target whose worker has not appeared here yet.
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

// CopySecret is the secret that replicas with the same key of the block hash share for copies of the index.
func (f *Fleet) CopySecret() []byte {
	m := hmac.New(sha256.New, f.Key[:])
	m.Write([]byte("kvlane copy of the index"))
	return m.Sum(nil)
}

// DumpIndex writes a copy of the index with the cursors of the feeds. Each target's blocks are the result of all
// batches up to its cursor. Events wait while the copy is made. Decisions do not wait, but prompts that are sent in that
// time get no speculative credit.
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

// Speculate credits a target with a prompt of that many tokens. It does nothing, and does not wait, during a copy.
func (f *Fleet) Speculate(slot kvindex.Slot, hashes []kvindex.Hash, tokens int, now time.Time) kvindex.Credit {
	if !f.feeds.snapshot.TryRLock() {
		return kvindex.Credit{}
	}
	defer f.feeds.snapshot.RUnlock()
	return f.index.SpeculatePrompt(slot, hashes, tokens, now)
}

// Withdraw removes the credit for prompts that their target did not accept.
func (f *Fleet) Withdraw(credit []kvindex.Credit) {
	if f.feeds.snapshot.TryRLock() {
		defer f.feeds.snapshot.RUnlock()
		for _, c := range credit {
			f.index.Withdraw(c)
		}
	}
}

// Expire removes expired credit.
func (f *Fleet) Expire(now time.Time) {
	if f.feeds.snapshot.TryRLock() {
		defer f.feeds.snapshot.RUnlock()
		f.index.Expire(now)
	}
}

// LoadIndex loads a copy written by another replica's DumpIndex. Call it before the first SetWorkers, so that workers
// find their targets in it and their feeds continue from its cursors. After an error the index is empty and another
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

// ForgetUnclaimed drops the targets of a loaded copy whose workers do not exist here.
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

// addSlot allocates a target's slot, with the blocks of a peer's copy if the feed can prove that it continues from
// there. resume is the cursor to continue from.
func (f *Fleet) addSlot(t kvindex.Target, w *config.Worker) (slot kvindex.Slot, resume *feed.Cursor, err error) {
	// No copy may be made in the meantime: slots would change owners under it.
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

// dropSlot forgets the blocks that a target holds.
func (f *Fleet) dropSlot(s kvindex.Slot) {
	f.feeds.snapshot.RLock()
	defer f.feeds.snapshot.RUnlock()
	f.index.Drop(s)
}

// resumable reports whether a worker's feed can prove that it resumes at a cursor: the engine must send the preceding
// batch again. TensorRT-LLM's events cannot be read without the first ones, which name the attention windows.
func resumable(w *config.Worker) bool {
	return w.Engine != string(feed.TRTLLM) && (w.Events.Replay != "" || w.Events.Endpoint == config.PushEndpoint)
}
