package main

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"
)

// file builds a KVW1 file: two ranks, a shared chain, lookups with exact answers.
func file(t *testing.T, wrong bool) string {
	le := binary.LittleEndian
	b := append([]byte(nil), make([]byte, headerSize)...)
	copy(b, "KVW1")
	le.PutUint32(b[4:], 1)
	le.PutUint32(b[8:], 2)
	le.PutUint32(b[12:], 16)
	le.PutUint64(b[72:], 2)
	copy(b[80:], "tiny")
	op := func(kind, flags byte, phase uint16, rank, n, aux uint32, parent uint64, words ...uint64) {
		b = append(b, kind, flags)
		b = le.AppendUint16(b, phase)
		b = le.AppendUint32(b, rank)
		b = le.AppendUint32(b, n)
		b = le.AppendUint32(b, aux)
		b = le.AppendUint64(b, parent)
		for _, w := range words {
			b = le.AppendUint64(b, w)
		}
	}
	longest := uint32(3)
	if wrong {
		longest = 2
	}
	op(opPhase, 0, 1, 0, 0, 0, 0)
	op(opStore, 0, 1, 0, 2, 0, 0, 11, 12, 101, 102)
	op(opStore, flagParent, 1, 0, 1, 0, 102, 13, 103)
	op(opStore, 0, 1, 1, 1, 0, 0, 11, 101)
	op(opBarrier, 0, 1, 0, 0, 0, 0)
	op(opLookup, flagExpect, 1, 2, 4, longest, 4, 11, 12, 13, 14)
	op(opRemove, 0, 1, 0, 3, 0, 0, 103, 102, 101)
	op(opRemove, 0, 1, 1, 1, 0, 0, 101)
	op(opBarrier, 0, 1, 0, 0, 0, 0)
	op(opLookup, flagExpect, 1, 0, 1, 0, 0, 11)
	path := filepath.Join(t.TempDir(), "tiny.kvw")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestReplayChecksAnswers(t *testing.T) {
	for _, single := range []bool{false, true} {
		r, err := replay(file(t, false), single, 0)
		if err != nil {
			t.Fatal(err)
		}
		if r.Wrong != 0 || r.Refused != 0 || r.UnknownRemovals != 0 || r.Lookups.Count != 2 || r.AfterRemoval == nil {
			t.Fatalf("%+v", r)
		}
		if r, err = replay(file(t, true), single, 0); err != nil || r.Wrong != 1 {
			t.Fatalf("a wrong expectation: %+v, %v", r, err)
		}
	}
}

func TestReplayRefusesOtherFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	for _, content := range []string{"", "KVW2", string(make([]byte, 200))} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := replay(path, false, 0); err == nil {
			t.Fatalf("%q was accepted", content)
		}
	}
}
