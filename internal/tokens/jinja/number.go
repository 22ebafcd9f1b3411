package jinja

import (
	"math"
	"math/big"
	"slices"
	"strconv"
)

// floatToInt returns the int that equals f, if there is one.
func floatToInt(f float64) (*big.Int, bool) {
	if math.IsInf(f, 0) || math.IsNaN(f) || f != math.Trunc(f) {
		return nil, false
	}
	if f >= -1<<62 && f <= 1<<62 {
		return big.NewInt(int64(f)), true
	}
	n, _ := new(big.Float).SetFloat64(f).Int(nil)
	return n, true
}

// appendFloat writes f like Python's repr: the shortest digits that round-trip, with an exponent below 1e-4 and from 1e16 on.
func appendFloat(dst []byte, f float64) []byte {
	switch {
	case math.IsNaN(f):
		return append(dst, "nan"...)
	case math.IsInf(f, 1):
		return append(dst, "inf"...)
	case math.IsInf(f, -1):
		return append(dst, "-inf"...)
	}
	if a := math.Abs(f); a != 0 && (a < 1e-4 || a >= 1e16) {
		return strconv.AppendFloat(dst, f, 'e', -1, 64)
	}
	start := len(dst)
	dst = strconv.AppendFloat(dst, f, 'f', -1, 64)
	if slices.Contains(dst[start:], '.') {
		return dst
	}
	return append(dst, ".0"...)
}

func appendInt(dst []byte, v Value) []byte {
	if v.p != nil {
		return v.big().Append(dst, 10)
	}
	return strconv.AppendInt(dst, int64(v.n), 10)
}
