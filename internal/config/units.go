package config

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Duration is a time.Duration written like "1m30s".
type Duration time.Duration

// UnmarshalText reads "300ms", "2s", "1h"; a bare 0 is allowed.
func (d *Duration) UnmarshalText(text []byte) error {
	if string(text) == "0" {
		*d = 0
		return nil
	}
	v, err := time.ParseDuration(string(text))
	if err != nil {
		return fmt.Errorf("%q is not a duration such as 300ms, 2s or 1m30s", text)
	}
	if v < 0 {
		return fmt.Errorf("%q is negative", text)
	}
	*d = Duration(v)
	return nil
}

// MarshalText writes what UnmarshalText reads.
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// Std returns the value as a time.Duration.
func (d Duration) Std() time.Duration { return time.Duration(d) }

// Bytes is a size written like "16MiB" or as a number.
type Bytes int64

var sizeUnits = []struct {
	suffix string
	factor int64
}{
	{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"Ki", 1 << 10}, {"Mi", 1 << 20}, {"Gi", 1 << 30}, {"kB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"B", 1}, {"", 1},
}

// UnmarshalText reads "16MiB", "16Mi", "2GB" or a number of bytes.
func (b *Bytes) UnmarshalText(text []byte) error {
	s := strings.TrimSpace(string(text))
	for _, u := range sizeUnits {
		digits, ok := strings.CutSuffix(s, u.suffix)
		if !ok {
			continue
		}
		n, err := strconv.ParseInt(strings.TrimSpace(digits), 10, 64)
		if err != nil || n < 0 || n > (1<<62)/u.factor {
			break
		}
		*b = Bytes(n * u.factor)
		return nil
	}
	return fmt.Errorf("%q is not a size such as 1048576, 16MiB or 2GB", text)
}

// MarshalText writes the largest binary unit that divides the size.
func (b Bytes) MarshalText() ([]byte, error) {
	for _, u := range []int{2, 1, 0} {
		if f := sizeUnits[u].factor; b > 0 && int64(b)%f == 0 {
			return []byte(strconv.FormatInt(int64(b)/f, 10) + sizeUnits[u].suffix), nil
		}
	}
	return []byte(strconv.FormatInt(int64(b), 10)), nil
}
