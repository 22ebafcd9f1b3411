package truth

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/kvlane/kvlane/kvindex/feed"
)

// form checks a recording's records one after the other.
type form struct {
	decoder *feed.Decoder // none before the meta record
}

func (f *form) check(r *record, line []byte) error {
	if f.decoder == nil {
		return f.begin(r)
	}
	switch r.Kind {
	case "event":
		return f.event(r)
	case "http":
		return asked(r, line)
	case "replay", "note":
		return nil
	case "meta":
		return errors.New("a second meta record")
	}
	return fmt.Errorf("record of kind %q, want meta, http, event, replay or note", r.Kind)
}

func (f *form) begin(r *record) error {
	if r.Kind != "meta" {
		return fmt.Errorf("the first record is of kind %q, want meta", r.Kind)
	}
	known := []feed.Engine{feed.VLLM, feed.SGLang, feed.TRTLLM}
	if !slices.Contains(known, feed.Engine(r.Engine)) {
		return fmt.Errorf("meta names the engine %q, want one of %v", r.Engine, known)
	}
	f.decoder = feed.NewDecoder(feed.Engine(r.Engine), 0)
	return nil
}

// event checks that a message is a batch of events that can be decoded.
func (f *form) event(r *record) error {
	if r.Source == "" {
		return errors.New("event without source")
	}
	seq, payload, ok := feed.SplitFrames(r.Frames)
	if !ok {
		return fmt.Errorf("event of %s: %d frames, want topic, number in 8 bytes, payload", r.Source, len(r.Frames))
	}
	b, err := f.decoder.Decode(payload)
	if err != nil {
		return fmt.Errorf("event of %s, batch %d: %w", r.Source, seq, err)
	}
	for _, d := range b.Dropped {
		if d.Reason == feed.Malformed || d.Reason == feed.Misaligned {
			return fmt.Errorf("event of %s, batch %d: %s", r.Source, seq, d.Reason)
		}
	}
	return nil
}

// asked checks that a request has the times that say which events came before it.
func asked(r *record, line []byte) error {
	var times struct {
		Sent *float64 `json:"t_sent"`
		T    *float64 `json:"t"`
	}
	if err := json.Unmarshal(line, &times); err != nil {
		return err
	}
	switch {
	case times.Sent == nil:
		return errors.New("http record without t_sent")
	case times.T == nil:
		return errors.New("http record without t")
	case r.T < r.Sent:
		return fmt.Errorf("http record that ended at %g, before it was sent at %g", r.T, r.Sent)
	}
	return nil
}
