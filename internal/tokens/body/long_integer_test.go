package body

import (
	"strings"
	"testing"
)

// Python's json reads integers of 4,300 digits and floats of any length.
func TestLongIntegers(t *testing.T) {
	most := strings.Repeat("7", LongestInteger)
	for value, long := range map[string]bool{
		most: false, "-" + most: false, most + "7": true, "-" + most + "7": true, most + "7.5": false, most + "7e1": false, most + "7E-1": false,
		"1." + most + "7": false, "1e" + most + "7": false, `"` + most + `7"`: false, `[{"a":[1,` + most + `7]}]`: true,
	} {
		for _, body := range []string{`{"prompt":"x","unknown":` + value + `}`, `{"prompt":` + value + `,"n":1}`, `{"a":{"b":` + value + ` }}`} {
			r, err := Parse(Completions, []byte(body))
			if err != nil || r.LongInteger != long {
				t.Errorf("%.40s... (%d bytes): %v, %v", body, len(body), r.LongInteger, err)
			}
		}
	}
}
