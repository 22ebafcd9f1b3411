package jinja

import (
	"slices"
	"strconv"
	"strings"
)

// linearLimit is the number of entries up to which a linear search is faster than a Go map.
const linearLimit = 16

type entry struct{ key, value Value }

// Dict is a Python dict: ordered by first insertion, with keys that are None, bools, numbers,
// strs or Undefined. The zero Dict is empty and ready to use; a nil *Dict reads as an empty one,
// like a nil map. Concurrent reads are safe, concurrent writes are not.
//
// Invariant: index is nil while there are at most linearLimit entries; otherwise it maps the hash
// text of every key to its position.
type Dict struct {
	entries []entry
	index   map[string]int32
}

// NewDict returns an empty dict with capacity for that many entries.
func NewDict(capacity int) *Dict { return &Dict{entries: make([]entry, 0, capacity)} }

// Len returns the number of entries.
func (d *Dict) Len() int {
	if d == nil {
		return 0
	}
	return len(d.entries)
}

// Range calls f for each entry in insertion order until f returns false.
func (d *Dict) Range(f func(key, value Value) bool) {
	for i := range d.Len() {
		if !f(d.entries[i].key, d.entries[i].value) {
			return
		}
	}
}

// Get returns the value under a str key.
func (d *Dict) Get(key string) (Value, bool) {
	if i := d.findString(key); i >= 0 {
		return d.entries[i].value, true
	}
	return Value{}, false
}

// Set stores v under a str key. An existing key keeps its position, as in Python.
func (d *Dict) Set(key string, v Value) {
	if i := d.findString(key); i >= 0 {
		d.entries[i].value = v
		return
	}
	d.add(String(key), v)
}

// Delete removes a str key if it is present.
func (d *Dict) Delete(key string) {
	i := d.findString(key)
	if i < 0 {
		return
	}
	d.entries = slices.Delete(d.entries, i, i+1)
	d.index = nil
	d.reindex()
}

// Clone returns a shallow copy. The copy of a nil *Dict is empty.
func (d *Dict) Clone() *Dict {
	if d == nil {
		return new(Dict)
	}
	c := &Dict{entries: append(make([]entry, 0, len(d.entries)+1), d.entries...)}
	c.reindex()
	return c
}

func (d *Dict) add(key, v Value) {
	d.entries = append(d.entries, entry{key, v})
	if d.index != nil {
		d.index[hashText(key)] = int32(len(d.entries) - 1)
		return
	}
	d.reindex()
}

func (d *Dict) reindex() {
	if len(d.entries) <= linearLimit {
		return
	}
	d.index = make(map[string]int32, 2*len(d.entries))
	for i := range d.entries {
		d.index[hashText(d.entries[i].key)] = int32(i)
	}
}

func (d *Dict) findString(key string) int {
	if d == nil {
		return -1
	}
	if d.index != nil {
		return d.find(String(key))
	}
	for i := range d.entries {
		k := &d.entries[i].key
		if k.kind == KindString && k.n == uint64(len(key)) && k.str() == key {
			return i
		}
	}
	return -1
}

// find looks up a key of any kind; the caller has checked that it is hashable.
func (d *Dict) find(key Value) int {
	if d.index != nil {
		if i, ok := d.index[hashText(key)]; ok {
			return int(i)
		}
		return -1
	}
	if key.kind == KindString {
		return d.findString(key.str())
	}
	return slices.IndexFunc(d.entries, func(e entry) bool { return keyEqual(e.key, key) })
}

// hashMark starts the hash text of a key that is not a str. It is doubled for a str that starts with it.
const hashMark = "\x00"

// hashText maps keys that are equal in Python to the same text: 1, 1.0 and True are the same key.
func hashText(key Value) string {
	switch key.kind {
	case KindString:
		if s := key.str(); !strings.HasPrefix(s, hashMark) {
			return s
		}
		return hashMark + key.str()
	case KindNone:
		return hashMark + "n"
	case KindBool, KindInt:
		return hashMark + "i" + key.big().String()
	case KindFloat:
		if n, ok := floatToInt(key.float()); ok {
			return hashMark + "i" + n.String()
		}
		return hashMark + "f" + strconv.FormatFloat(key.float(), 'g', -1, 64)
	}
	return hashMark + "u"
}

// keyEqual is Python's == for two keys. Its cost was charged by mustHash.
func keyEqual(a, b Value) bool {
	switch {
	case a.kind == KindString:
		return b.kind == KindString && a.str() == b.str()
	case a.isNumber() && b.isNumber():
		c, ok := compareNumbers(a, b)
		return ok && c == 0
	default:
		return a.kind == b.kind && (a.kind == KindNone || a.kind == KindUndefined)
	}
}
