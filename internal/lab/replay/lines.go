package replay

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
)

// longest bounds the length of a line in bytes.
const longest = 1 << 24

// eachLine calls read for the non-blank lines of a trace. All errors, also those of read, name the line; what is
// "trace" or "spans".
func eachLine(in io.Reader, what string, read func(line []byte) error) error {
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, longest)
	number := 0
	for lines.Scan() {
		number++
		line := lines.Bytes()
		if number == 1 {
			line = bytes.TrimPrefix(line, []byte("\xef\xbb\xbf"))
		}
		if line = bytes.TrimSpace(line); len(line) == 0 {
			continue
		}
		if err := read(line); err != nil {
			return fmt.Errorf("%s, line %d: %w", what, number, plain(line, err))
		}
	}
	switch err := lines.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		return fmt.Errorf("%s, line %d: longer than %d MiB", what, number+1, longest>>20)
	case err != nil:
		return fmt.Errorf("%s, after line %d: %w", what, number, err)
	}
	return nil
}

// plain rewrites an error of encoding/json in a trace's terms.
func plain(line []byte, err error) error {
	if line[0] == '[' {
		return errors.New("a JSON array, want one object a line")
	}
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		before, _, _ := strings.Cut(err.Error(), "json: ")
		if field := strings.Trim(wrong.Field, "."); field != "" {
			before += field + ": "
		}
		return fmt.Errorf("%s%s does not fit", before, wrong.Value)
	}
	if _, ok := errors.AsType[*json.SyntaxError](err); ok {
		return fmt.Errorf("not a JSON object: %w", err)
	}
	return err
}

// count is a number of tokens. Some JSON writers turn 600 into 600.0.
type count int

// UnmarshalJSON accepts whole numbers in any notation.
func (c *count) UnmarshalJSON(text []byte) error {
	var v float64
	if err := json.Unmarshal(text, &v); err != nil || math.Trunc(v) != v || math.Abs(v) > 1<<53 {
		return fmt.Errorf("%.40s: want a whole number of tokens", text)
	}
	*c = count(v)
	return nil
}
