package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/kvlane/kvlane/internal/observe"
)

// traceLine is a request in Mooncake's format, which `kvlane replay` reads.
type traceLine struct {
	Timestamp    int64    `json:"timestamp"` // milliseconds since the first request
	InputLength  int64    `json:"input_length"`
	OutputLength int64    `json:"output_length"`
	HashIDs      []uint64 `json:"hash_ids"`
}

var errRecorded = errors.New("recorded enough")

// runRecord writes a line for each request that ends while it runs: lengths, times and keyed hashes, but no text.
func runRecord(ctx context.Context, io streams, args []string) error {
	f := flags("record")
	c := adminFlags(f, io.err)
	file := f.String("out", "", "`file` to write (default: standard output)")
	most := f.Int("n", 1_000_000, "end after this number of requests")
	lasting := f.Duration("duration", 0, "end after this time (0: until Ctrl-C)")
	assumed := f.Int64("output-length", 128, "output `tokens` of requests whose engine reported none to Kvlane (envoy.response_body: NONE)")
	if err := parse(io, f, args, 0); err != nil {
		return err
	}
	if *most < 1 || *assumed < 0 || *lasting < 0 {
		return usageError{"--n must be 1 or more, --output-length and --duration 0 or more"}
	}
	to := io.out
	if *file != "" {
		created, err := os.Create(*file)
		if err != nil {
			return err
		}
		defer created.Close()
		to = created
	}
	if *lasting > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, *lasting)
		defer cancel()
	}
	out := bufio.NewWriter(to)
	lines := json.NewEncoder(out)
	var first, shown time.Time
	var written, left, unknown, skipped int
	progress := func() {
		fmt.Fprintf(io.err, "requests recorded: %d (with an assumed output length: %d), left out (failed, or without a prompt): %d, missed: %d\n", written, unknown, left, skipped)
	}
	err := c.rows(ctx, "n=0&hashes=true", func(line string, row *observe.Row) error {
		if row == nil {
			var n int
			if _, err := fmt.Sscanf(line, ": skipped %d", &n); err == nil {
				skipped += n
			}
			return nil
		}
		if first.IsZero() {
			first = row.At
		}
		if !row.Ended {
			return nil
		}
		if row.Status != 0 && row.Status/100 != 2 || row.PromptTokens < 1 {
			left++
			return nil
		}
		t := traceLine{Timestamp: max(row.At.Sub(first).Milliseconds(), 0), InputLength: row.PromptTokens, OutputLength: *assumed, HashIDs: row.HashIDs}
		if row.OutputTokens != nil {
			t.OutputLength = *row.OutputTokens
		} else {
			unknown++
		}
		if err := lines.Encode(t); err != nil {
			return err
		}
		if written++; written == *most {
			return errRecorded
		}
		if time.Since(shown) > 2*time.Second {
			shown = time.Now()
			progress()
			return out.Flush()
		}
		return nil
	})
	if ctx.Err() != nil || errors.Is(err, errRecorded) {
		err = nil
	}
	progress()
	return errors.Join(err, out.Flush())
}
