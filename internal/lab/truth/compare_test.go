package truth

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/kvlane/kvlane/internal/tokens/conv"
	"github.com/kvlane/kvlane/internal/tokens/shape"
)

// recorded is the day of the recordings, for templates that print the date.
var recorded = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

// comparison is the shared state for the recordings of a folder.
type comparison struct {
	models, templates string
	loaded            map[modelKey]*shape.Model
	cache             *conv.Cache
	// The reports on ids and on cached tokens.
	ids, cached bytes.Buffer
}

// modelKey identifies a model and how its engine was configured.
type modelKey struct {
	tokenizer, template string
	tools               bool
	context             int
}

// model loads a model once.
func (c *comparison) model(tokenizer string, options shape.Options) (*shape.Model, error) {
	key := modelKey{tokenizer, options.ChatTemplate, options.ToolParser, options.MaxModelLen}
	if m := c.loaded[key]; m != nil {
		return m, nil
	}
	options.Now = func() time.Time { return recorded }
	m, err := shape.Load(os.DirFS(filepath.Join(c.models, tokenizer)), options)
	if err == nil {
		c.loaded[key] = m
	}
	return m, err
}

// run compares every recording of a folder and reports whether anything differs. A
// recording that cannot be read is an error, as is a folder without recordings.
func run(w io.Writer, recordings, models, templates string) (differ bool, err error) {
	if templates == "" {
		templates = findTemplates(recordings)
	}
	c := &comparison{models: models, templates: templates, loaded: map[modelKey]*shape.Model{}, cache: conv.New(64 << 20)}
	entries, err := os.ReadDir(recordings)
	if err != nil {
		return false, err
	}
	var ids idTotals
	cached := cachedTotals{skipped: map[string]int{}}
	for _, e := range entries {
		name := e.Name()
		if !strings.HasSuffix(name, ".jsonl") && !strings.HasSuffix(name, ".jsonl.gz") {
			continue
		}
		if err := c.compare(name, filepath.Join(recordings, name), &ids, &cached); err != nil {
			return false, err
		}
	}
	if ids.files+cached.files == 0 {
		return false, fmt.Errorf("no recordings in %s", recordings)
	}
	if ids.files > 0 {
		fmt.Fprintf(&c.ids, "total: %d recordings, %v\n", ids.files, &ids)
	}
	if cached.files > 0 {
		fmt.Fprintf(&c.cached, "total of %d recordings: %v\n", cached.files, &cached)
	}
	_, err = fmt.Fprintf(w, "token ids of prompts\n%scached tokens\n%stotals: %d prompts (%d answers with equal ids, %d equal refusals, %d differ, %d not judged); cached tokens of %d requests "+
		"(%d right, %d wrong, predicted %d and reported %d tokens; %d beside others within bounds, %d not judged)\n",
		&c.ids, &c.cached, ids.requests, ids.sameIDs, ids.refused, ids.differ, ids.notJudged,
		cached.right+cached.wrong+cached.bounded+cached.notJudged(), cached.right, cached.wrong, cached.predicted, cached.reported,
		cached.bounded, cached.notJudged())
	return ids.differ > 0 || cached.wrong > 0, err
}

// compare compares one file and adds to the totals. Files that are not recordings are
// skipped.
func (c *comparison) compare(name, path string, ids *idTotals, cached *cachedTotals) error {
	if strings.HasPrefix(name, "chat_") && strings.HasSuffix(name, ".gz") {
		one, err := c.chats(name, path)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		fmt.Fprintf(&c.ids, "%s: %v\n", name, &one)
		ids.add(one)
		return nil
	}
	recs, err := load(path)
	if errors.Is(err, errNotARecording) {
		return nil
	}
	if err != nil {
		return err
	}
	prompts, err := c.timeline(name, recs)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if prompts != nil {
		one := prompts.compare(&c.ids, recs)
		if one.requests > 0 {
			fmt.Fprintf(&c.ids, "%s: %v\n", name, &one)
		}
		ids.add(one)
	}
	one, err := check(name, recs, prompts, &c.cached)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	fmt.Fprintf(&c.cached, "%s: %v\n", name, &one)
	cached.add(one)
	return nil
}

// findTemplates looks for a folder named templates in the recordings' folder, in the
// one above, and in the data folder that KVLANE_SHARED names.
func findTemplates(recordings string) string {
	for _, path := range []string{
		filepath.Join(recordings, "templates"), filepath.Join(filepath.Dir(filepath.Clean(recordings)), "templates"),
		filepath.Join(os.Getenv("KVLANE_SHARED"), "data", "templates"),
	} {
		if info, err := os.Stat(path); err == nil && info.IsDir() {
			return path
		}
	}
	return recordings
}
