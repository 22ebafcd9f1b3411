package replay

import (
	"bytes"
	"cmp"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// csvColumns are the names of the columns of the time, the prompt's and the output's tokens: those
// of Azure's LLM inference traces, and of BurstGPT, whose times are seconds.
var csvColumns = [][3]string{{"timestamp", "contexttokens", "generatedtokens"}, {"timestamp", "request tokens", "response tokens"}}

// ReadCSV reads a trace in the format of Azure's LLM inference traces or BurstGPT, recognized by the header. These have
// neither prompts nor hashes, so requests share nothing, and no conversations. Rows without output tokens are left out:
// these requests failed. Load divides the times; jitter (seconds, none if negative) spreads them.
func ReadCSV(in io.Reader, load, jitter float64) (Workload, error) {
	var trace []Request
	var at [3]int
	err := eachLine(in, "trace", func(line []byte) error {
		row, err := csv.NewReader(bytes.NewReader(line)).Read()
		if err != nil {
			return err
		}
		if at == [3]int{} { // no row has all three in its first column
			at, err = columns(row)
			return err
		}
		r, err := csvRequest(row, at)
		if err == nil && r.Output > 0 {
			trace = append(trace, r)
		}
		return err
	})
	if err = cmp.Or(err, inOrder(trace)); err != nil {
		return Workload{}, err
	}
	for i, start := 0, trace[0].At; i < len(trace); i++ {
		trace[i].At -= start
	}
	return Workload{Name: fmt.Sprintf("csv x%g", load), BlockSize: mooncakeBlock, Generate: spread(trace, load, max(jitter, 0))}, nil
}

// columns finds the columns by a header.
func columns(header []string) (at [3]int, err error) {
	for i := range header {
		header[i] = strings.ToLower(strings.TrimSpace(header[i]))
	}
	for _, names := range csvColumns {
		for i, name := range names {
			at[i] = slices.Index(header, name)
		}
		if slices.Min(at[:]) >= 0 {
			return at, nil
		}
	}
	return at, errors.New("want a header with TIMESTAMP, ContextTokens, GeneratedTokens (Azure) or Timestamp, Request tokens, Response tokens (BurstGPT)")
}

func csvRequest(row []string, at [3]int) (r Request, err error) {
	if len(row) <= slices.Max(at[:]) {
		return r, fmt.Errorf("%d columns, want more", len(row))
	}
	if r.At, err = csvTime(strings.TrimSpace(row[at[0]])); err != nil {
		return r, err
	}
	for i, to := range []*int{&r.Prompt, &r.Output} {
		v, err := strconv.ParseFloat(strings.TrimSpace(row[at[i+1]]), 64)
		if err != nil || v != math.Trunc(v) || v < 0 || v > maxTokens {
			return r, fmt.Errorf("%.40q: want a number of tokens, 0 to %d", row[at[i+1]], maxTokens)
		}
		*to = int(v)
	}
	r.Prompt = max(r.Prompt, 1)
	return r, nil
}

// csvTime reads seconds, or a date and time.
func csvTime(text string) (float64, error) {
	if v, err := strconv.ParseFloat(text, 64); err == nil && v >= 0 && v < latest {
		return v, nil
	}
	for _, layout := range []string{time.DateTime, time.DateTime + "-07:00"} {
		if t, err := time.Parse(layout, text); err == nil {
			return float64(t.UnixMicro()) / 1e6, nil
		}
	}
	return 0, fmt.Errorf("timestamp %.40q: want seconds, or a time like 2023-11-16 18:17:03.98", text)
}
