package shape

import (
	"math"
	"strings"
	"testing"
)

// Each case was tried with pydantic 2.14.
func TestLaxConversions(t *testing.T) {
	for raw, want := range map[string]bool{`true`: true, `"yes"`: true, `"OFF"`: false, `1`: true, `0.0`: false, `-0.0`: false, `"t"`: true} {
		if got, ok := laxBool([]byte(raw)); !ok || got != want {
			t.Errorf("laxBool(%s): got %v, %v, want %v, true", raw, got, ok, want)
		}
	}
	for raw := range strings.SplitSeq(`2|" yes "|null|[]|""|{}|"\ud800"||NaN|1e400`, "|") {
		if got, ok := laxBool([]byte(raw)); ok {
			t.Errorf("laxBool(%s): got %v, want no boolean", raw, got)
		}
	}
	for raw, want := range map[string]int64{`1`: 1, `"1"`: 1, `" 2 "`: 2, `1.0`: 1, `"1.0"`: 1, `"+3"`: 3, `"-3"`: -3, `"1_0"`: 10, `true`: 1,
		`false`: 0, `1e1`: 10, `-0.0`: 0, `99999999999999999999`: math.MaxInt64, `-1e300`: math.MinInt64, `"-99999999999999999999"`: math.MinInt64, `1e300`: math.MaxInt64,
		strings.Repeat("7", 1<<20): math.MaxInt64} {
		if got, ok := laxInt([]byte(raw)); !ok || got != want {
			t.Errorf("laxInt(%.40s): got %d, %v, want %d, true", raw, got, ok, want)
		}
	}
	for raw := range strings.SplitSeq(`"x"|1.5|""|"1e1"|"0x1"|[]|{}|NaN|1e400|"1__0"|"_1"|null||"."|"99999999999999999999x"`, "|") {
		if got, ok := laxInt([]byte(raw)); ok {
			t.Errorf("laxInt(%s): got %d, want no integer", raw, got)
		}
	}
}
