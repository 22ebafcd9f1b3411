package shape

import (
	"encoding/json"
	"math"
	"math/big"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// naiveNumber reads the JSON values that pydantic takes for a number; nil: it takes no such value.
func naiveNumber(v any) *big.Rat {
	switch v := v.(type) {
	case bool:
		if v {
			return big.NewRat(1, 1)
		}
		return new(big.Rat)
	case json.Number:
		if !strings.ContainsAny(v.String(), ".eE") {
			n, _ := new(big.Int).SetString(v.String(), 10)
			return new(big.Rat).SetInt(n)
		}
		x, err := v.Float64()
		if err != nil {
			return nil
		}
		return new(big.Rat).SetFloat64(x)
	case string:
		if n := laxInteger.FindStringSubmatch(strings.TrimSpace(v)); n != nil {
			whole, _ := new(big.Int).SetString(n[1]+strings.ReplaceAll(n[2], "_", ""), 10)
			return new(big.Rat).SetInt(whole)
		}
	}
	return nil
}

var laxInteger = regexp.MustCompile(`^([+-]?)(_?[0-9]+(?:_[0-9]+)*)(?:\.0+)?$`)

// naiveInt is laxInt by the values of encoding/json and by arithmetic without bounds.
func naiveInt(v any) (int64, bool) {
	n := naiveNumber(v)
	text, isText := v.(string)
	switch low, high := big.NewRat(math.MinInt64, 1), big.NewRat(math.MaxInt64, 1); {
	case n == nil || !n.IsInt() || isText && strings.HasPrefix(strings.TrimSpace(text), "_"):
		return 0, false
	case n.Cmp(low) < 0:
		return math.MinInt64, true
	case n.Cmp(high) > 0:
		return math.MaxInt64, true
	default:
		return n.Num().Int64(), true
	}
}

// naiveBool is laxBool.
func naiveBool(v any) (value, ok bool) {
	switch v := v.(type) {
	case bool:
		return v, true
	case json.Number:
		x, err := v.Float64()
		return x == 1, err == nil && (x == 1 || x == 0)
	case string:
		word := strings.ToLower(v)
		yes := slices.Contains([]string{"1", "on", "t", "true", "y", "yes"}, word)
		return yes, yes || slices.Contains([]string{"0", "off", "f", "false", "n", "no"}, word)
	}
	return false, false
}

// FuzzLax compares the reading of lax values, of lists of ids and of wide integers with plain implementations.
func FuzzLax(f *testing.F) {
	for _, s := range []string{
		`true`, `"yes"`, `"OFF"`, `1`, `0.0`, `-0.0`, `2`, `" yes "`, `null`, `[]`, `{}`, `"\ud800"`, `1e400`, `" 2 "`, `"1.0"`, `"+3"`, `"-3"`, `"1_0"`,
		`99999999999999999999`, `-1e300`, `"1__0"`, `"_1"`, `"."`, `"1.0_0"`, `"\u0031"`, `"9223372036854775808"`, `-9223372036854775808`,
		`-9223372036854775809`, `18446744073709551615`, `18446744073709551616`, `[1, 2,3]`, `[4294967295]`, `[4294967296]`, `[1.0,"2",true]`, `[-1]`, `[1e2 , 0]`,
		`[1,[2]]`, `{"a":[18446744073709551616,"\\\"99999999999999999999",-0,1.5e3]}`, `"\u00a01\u3000"`, `9223372036854774784.0`, `9.3e18`, `[01]`, `"1."`, `".0"`, `"-"`,
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		raw := []byte(strings.TrimSpace(s))
		if body.Valid(raw) != nil || len(raw) > 2000 {
			return
		}
		v := decoded(raw)
		if v == nil && string(raw) != "null" {
			return // not what encoding/json reads
		}
		if got, ok := laxBool(raw); ok {
			if want, wanted := naiveBool(v); got != want || !wanted {
				t.Fatalf("laxBool(%s): got %v, want %v, %v", raw, got, want, wanted)
			}
		} else if want, wanted := naiveBool(v); wanted {
			t.Fatalf("laxBool(%s): got no boolean, want %v", raw, want)
		}
		n, ok := laxInt(raw)
		if want, wanted := naiveInt(v); ok != wanted || ok && n != want {
			t.Fatalf("laxInt(%s): got %d, %v, want %d, %v", raw, n, ok, want, wanted)
		}
		if list, isList := v.([]any); isList {
			checkLaxIDs(t, raw, list)
		}
		checkWide(t, raw)
	})
}

// decoded is the value of encoding/json, with the digits of numbers.
func decoded(raw []byte) (v any) {
	d := json.NewDecoder(strings.NewReader(string(raw)))
	d.UseNumber()
	if d.Decode(&v) != nil {
		return nil
	}
	return v
}

func checkLaxIDs(t *testing.T, raw []byte, list []any) {
	t.Helper()
	want, valid := []uint32{}, true
	for _, item := range list {
		n, ok := naiveInt(item)
		if valid = valid && ok && n >= 0 && n <= math.MaxUint32; valid {
			want = append(want, uint32(n))
		}
	}
	got, err := laxIDs(raw)
	if valid != (err == nil) || valid && !slices.Equal(got, want) {
		t.Fatalf("laxIDs(%s): got %v, %v, want %v, %v", raw, got, err, want, valid)
	}
}

// checkWide compares each token of the text, before and after.
func checkWide(t *testing.T, raw []byte) {
	t.Helper()
	before, after := json.NewDecoder(strings.NewReader(string(raw))), json.NewDecoder(strings.NewReader(string(wideIntegers(raw))))
	before.UseNumber()
	after.UseNumber()
	for {
		want, err := before.Token()
		got, gotErr := after.Token()
		if (err == nil) != (gotErr == nil) {
			t.Fatalf("wideIntegers(%s) is %s: %v, want %v", raw, wideIntegers(raw), gotErr, err)
		}
		if err != nil {
			return
		}
		if n, isNumber := want.(json.Number); isNumber {
			_, small := strconv.ParseInt(n.String(), 10, 64)
			_, large := strconv.ParseUint(n.String(), 10, 64)
			if small != nil && large != nil && !strings.ContainsAny(n.String(), ".eE") {
				want = n + ".0"
			}
		}
		if got != want {
			t.Fatalf("wideIntegers(%s): got %v, want %v", raw, got, want)
		}
	}
}
