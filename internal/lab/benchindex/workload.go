package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A KVW1 file is a header of 128 bytes and operations of 24 bytes and a payload
// of 64-bit hashes, little endian; see the fields of header and operation.
const (
	headerSize    = 128
	operationSize = 24

	opStore   = 1
	opRemove  = 2
	opLookup  = 3
	opBarrier = 4
	opPhase   = 5

	flagParent = 1
	flagExpect = 2
)

type header struct {
	ranks, block           uint32
	stored, removed, looks uint64
	name                   string
}

type operation struct {
	kind, flags byte
	phase       uint16
	rank, n     uint32
	aux         uint32
	parent      uint64
	// words are the payload, mapped from the file: contents and engine hashes of a
	// store, engine hashes of a removal, contents of a lookup.
	words []uint64
}

// workload is a KVW1 file mapped into memory, so that its pages belong to the page cache
// and not to the measured memory.
type workload struct {
	header
	data []byte
	at   int
}

func openWorkload(path string) (*workload, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() < headerSize {
		return nil, fmt.Errorf("%s: no KVW1 file", path)
	}
	data, err := unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", path, err)
	}
	le := binary.LittleEndian
	if string(data[:4]) != "KVW1" || le.Uint32(data[4:]) != 1 {
		return nil, fmt.Errorf("%s: no KVW1 file of version 1", path)
	}
	w := &workload{data: data, at: headerSize}
	w.ranks, w.block = le.Uint32(data[8:]), le.Uint32(data[12:])
	w.stored, w.removed = le.Uint64(data[32:]), le.Uint64(data[40:])
	w.looks = le.Uint64(data[72:])
	name := data[80:headerSize]
	for i, b := range name {
		if b == 0 {
			name = name[:i]
			break
		}
	}
	w.name = string(name)
	return w, nil
}

func (w *workload) about() header { return w.header }

// next reads one operation; ok is false at the end.
func (w *workload) next() (op operation, ok bool, err error) {
	if w.at == len(w.data) {
		return op, false, nil
	}
	if len(w.data)-w.at < operationSize {
		return op, false, errors.New("file ends inside an operation")
	}
	b, le := w.data[w.at:], binary.LittleEndian
	op = operation{kind: b[0], flags: b[1], phase: le.Uint16(b[2:]), rank: le.Uint32(b[4:]), n: le.Uint32(b[8:]), aux: le.Uint32(b[12:]), parent: le.Uint64(b[16:])}
	words := 0
	switch op.kind {
	case opStore:
		words = 2 * int(op.n)
	case opRemove, opLookup:
		words = int(op.n)
	}
	w.at += operationSize
	if len(w.data)-w.at < 8*words {
		return op, false, errors.New("file ends inside a payload")
	}
	if words > 0 {
		// header, operations and payloads are multiples of 8 bytes
		op.words = unsafe.Slice((*uint64)(unsafe.Pointer(&w.data[w.at])), words)
	}
	w.at += 8 * words
	return op, true, nil
}
