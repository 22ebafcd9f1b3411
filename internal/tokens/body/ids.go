package body

import (
	"errors"
	"fmt"
	"math"
	"strconv"
)

// AppendIDList appends ids as a JSON array.
func AppendIDList(dst []byte, ids []uint32) []byte {
	dst = append(dst, '[')
	for i, id := range ids {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendUint(dst, uint64(id), 10)
	}
	return append(dst, ']')
}

// AppendIDs appends the token ids of raw, a checked JSON array of non-negative integers below 2³².
func AppendIDs(dst []uint32, raw []byte) ([]uint32, error) {
	if len(raw) < 2 || raw[0] != '[' {
		return dst, errors.New("token ids must be an array")
	}
	for i := 1; i < len(raw)-1; {
		c := raw[i]
		switch {
		case c == ',' || c == ' ' || c == '\n' || c == '\r' || c == '\t':
			i++
		case c-'0' < 10:
			var id uint64
			for ; raw[i]-'0' < 10; i++ {
				if id = id*10 + uint64(raw[i]-'0'); id > math.MaxUint32 {
					return dst, fmt.Errorf("token id %d: larger than 32 bits", len(dst))
				}
			}
			if c := raw[i]; c == '.' || c|0x20 == 'e' {
				return dst, fmt.Errorf("token id %d: not an integer", len(dst))
			}
			dst = append(dst, uint32(id))
		default:
			return dst, fmt.Errorf("token id %d: not a non-negative integer", len(dst))
		}
	}
	return dst, nil
}
