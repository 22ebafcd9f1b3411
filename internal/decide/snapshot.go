package decide

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

// warmTarget is what a peer's index had of a target that no worker has claimed
// yet.
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

// KeyProof shows another replica that we have its key of the block hash, and
// says nothing else about it.
func (d *Decider) KeyProof() []byte {
	m := hmac.New(sha256.New, d.key[:])
	m.Write([]byte("kvlane snapshot"))
	return m.Sum(nil)
}

// DumpIndex writes a copy of the index with the cursors of the feeds. Every
// target's blocks are those of whole batches up to its cursor: events wait
// meanwhile, decisions do not, but get no credit for what they send.
func (d *Decider) DumpIndex(w io.Writer) error {
	d.feeds.still.Lock()
	defer d.feeds.still.Unlock()
	cursors := d.feeds.cursors()
	var buf [cursorSize]byte
	return d.index.Dump(w, func(s kvindex.Slot) []byte {
		c, ok := cursors[s]
		if !ok {
			return nil
		}
		return appendCursor(buf[:0], c)
	})
}

// speculate gives a target credit for a prompt that is sent to it, but not while
// a copy of the index is made: no request waits for that.
func (d *Decider) speculate(slot kvindex.Slot, hashes []kvindex.Hash, now time.Time) kvindex.Credit {
	if !d.feeds.still.TryRLock() {
		return kvindex.Credit{}
	}
	defer d.feeds.still.RUnlock()
	return d.index.Speculate(slot, hashes, now)
}

// withdraw ends the credit for a prompt that its target did not take.
func (d *Decider) withdraw(c kvindex.Credit) {
	if d.feeds.still.TryRLock() {
		defer d.feeds.still.RUnlock()
		d.index.Withdraw(c)
	}
}

// expire ends credit that has run out: nobody may have asked for long.
func (d *Decider) expire(now time.Time) {
	if d.feeds.still.TryRLock() {
		defer d.feeds.still.RUnlock()
		d.index.Expire(now)
	}
}

// LoadIndex takes a copy that DumpIndex of another replica wrote, before the
// first SetWorkers. Workers that come then find their targets in it, and their
// feeds go on from its cursors. After an error the index is empty and another
// copy may be tried.
func (d *Decider) LoadIndex(r io.Reader) error {
	cursors, err := d.index.Load(r)
	if err != nil {
		return err
	}
	d.feeds.warmMu.Lock()
	defer d.feeds.warmMu.Unlock()
	for _, t := range d.index.Stats().Targets {
		c, ok := readCursor(cursors[t.Slot])
		if !ok {
			// Nothing joins what the peer had of it to the events that we shall see.
			d.index.Drop(t.Slot)
			continue
		}
		d.feeds.warm[t.Target] = warmTarget{t.Slot, c}
	}
	d.feeds.warmed.Store(int64(len(d.feeds.warm)))
	return nil
}

// ForgetUnclaimed drops what a loaded copy had of workers that do not exist here.
func (d *Decider) ForgetUnclaimed() {
	d.feeds.still.RLock()
	defer d.feeds.still.RUnlock()
	d.feeds.warmMu.Lock()
	defer d.feeds.warmMu.Unlock()
	for t, w := range d.feeds.warm {
		d.index.Drop(w.slot)
		delete(d.feeds.warm, t)
	}
}

// addSlot gives a target its slot, with what a peer's copy had of it if its feed
// can prove that it goes on from there: resume is where.
func (d *Decider) addSlot(t kvindex.Target, w *config.Worker) (slot kvindex.Slot, resume *feed.Cursor, err error) {
	// No copy is made meanwhile: slots would change hands under it.
	d.feeds.still.RLock()
	defer d.feeds.still.RUnlock()
	d.feeds.warmMu.Lock()
	warm, ok := d.feeds.warm[t]
	delete(d.feeds.warm, t)
	d.feeds.warmMu.Unlock()
	model := d.cacheModel(w.Models)
	if ok {
		if resumable(w) {
			if slot, err = d.index.Add(t, model, w.BlockSize); err == nil {
				return slot, &warm.cursor, nil
			}
		}
		d.index.Drop(warm.slot)
	}
	if slot, err = d.index.Add(t, model, w.BlockSize); err != nil {
		return 0, nil, fmt.Errorf("target %s: %w", t, err)
	}
	return slot, nil, nil
}

// dropSlot forgets a target.
func (d *Decider) dropSlot(s kvindex.Slot) {
	d.feeds.still.RLock()
	defer d.feeds.still.RUnlock()
	d.index.Drop(s)
}

// resumable says whether a worker's feed can show that it goes on from a cursor:
// it has to send the batch before it again. TensorRT-LLM's events mean nothing
// without its first ones, which name the attention windows.
func resumable(w *config.Worker) bool {
	return w.Engine != string(feed.TRTLLM) && (w.Events.Replay != "" || w.Events.Endpoint == config.PushEndpoint)
}
