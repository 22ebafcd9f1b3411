// Command truth compares Kvlane with recordings of real engines: the token ids that it makes of their requests, and the
// cached tokens that its index predicts from their KV events.
//
// It prints what was predicted and reported for each recording, one line for each difference, and ends with one line of
// totals. Exit code 1: something differs, 2: the recordings cannot be read.
package main

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"

	feedtruth "github.com/kvlane/kvlane/kvindex/feed/truth"

	"github.com/kvlane/kvlane/internal/model/truth"
)

func main() {
	models := flag.String("models", filepath.Join("internal", "models"), "`folder` with one folder of tokenizer files for each tokenizer")
	templates := flag.String("templates", "", "`folder` with the chat templates that recordings name (default: templates beside or above the recordings)")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: truth [flags] RECORDINGS")
		flag.PrintDefaults()
	}
	flag.Parse()
	if flag.NArg() != 1 {
		flag.Usage()
		os.Exit(2)
	}
	differ, err := run(os.Stdout, flag.Arg(0), *models, *templates)
	switch {
	case err != nil:
		fmt.Fprintln(os.Stderr, "truth:", err)
		os.Exit(2)
	case differ:
		os.Exit(1)
	}
}

// run compares both and reports whether anything differs.
func run(w io.Writer, recordings, models, templates string) (differ bool, err error) {
	if templates == "" {
		templates = findTemplates(recordings)
	}
	_, _ = fmt.Fprintln(w, "token ids of prompts")
	opts := truth.Options{Recordings: recordings, Models: models, Templates: templates}.Keep()
	ids, err := truth.Run(w, opts)
	if err != nil && !errors.Is(err, truth.ErrNone) {
		return false, err
	}
	noIDs := err != nil
	_, _ = fmt.Fprintln(w, "cached tokens")
	cached, err := feedtruth.Run(feedtruth.Options{Recordings: recordings, Prompts: func(recording string) (feedtruth.Prompts, error) {
		return truth.Prompts(recording, opts)
	}}, w)
	if err != nil && !errors.Is(err, feedtruth.ErrNone) {
		return false, err
	}
	if noIDs && err != nil {
		return false, fmt.Errorf("no recordings in %s", recordings)
	}
	_, err = fmt.Fprintf(w, "totals: %d prompts (%d answers with equal ids, %d equal refusals, %d differ, %d not judged); cached tokens of %d requests "+
		"(%d right, %d wrong, predicted %d and reported %d tokens; %d beside others within bounds, %d not judged)\n", ids.Requests, ids.SameIDs, ids.Refused, ids.Differ, ids.NotJudged,
		cached.Right+cached.Wrong+cached.Bounded+cached.NotJudged(), cached.Right, cached.Wrong, cached.Predicted, cached.Reported,
		cached.Bounded, cached.NotJudged())
	return ids.Differ > 0 || cached.Wrong > 0, err
}

// findTemplates looks for a folder named templates in the recordings' folder, in the one above, and in the data folder
// that KVLANE_SHARED names.
func findTemplates(recordings string) string {
	for _, path := range []string{
		filepath.Join(recordings, "templates"), filepath.Join(filepath.Dir(filepath.Clean(recordings)), "templates"),
		filepath.Join(cmp.Or(os.Getenv("KVLANE_SHARED"), filepath.Join("..", "shared")), "data", "templates"),
	} {
		if info, err := os.Stat(path); err == nil && info.IsDir() {
			return path
		}
	}
	return recordings
}
