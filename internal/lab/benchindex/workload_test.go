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

func replayFile(path string, single bool) (*result, error) {
	w, err := openWorkload(path)
	if err != nil {
		return nil, err
	}
	return replay(w, single, 0)
}

func TestGeneratedWorkloads(t *testing.T) {
	for _, s := range []shape{{2, 1, 1, 2000}, {24, 1, 8, 50_000}, {78, 5, 7, 50_000}} {
		g, err := newSynthetic(s)
		if err != nil {
			t.Fatal(err)
		}
		r, err := replay(g, false, 0)
		if err != nil {
			t.Fatal(err)
		}
		written := uint64(s.blocks / s.depth / s.holders * s.depth * s.holders)
		if r.Wrong != 0 || r.Refused != 0 || r.UnknownRemovals != 0 || r.Lookups.Count != 4*lookupsOfAPhase || r.AfterRemoval == nil ||
			r.Phases["load"].WrittenBlocks != written || r.Phases["drain"].WrittenBlocks != written || r.Peak.HolderBlocks != int64(written) {
			t.Errorf("%+v: %+v", s, r)
		}
	}
	for _, s := range []shape{{1, 1, 1, 100}, {10, 2, 1, 100}, {10, 10, 10, 50}} {
		if _, err := newSynthetic(s); err == nil {
			t.Errorf("%+v was accepted", s)
		}
	}
}

func TestReplayChecksAnswers(t *testing.T) {
	for _, single := range []bool{false, true} {
		r, err := replayFile(file(t, false), single)
		if err != nil {
			t.Fatal(err)
		}
		if r.Wrong != 0 || r.Refused != 0 || r.UnknownRemovals != 0 || r.Lookups.Count != 2 || r.AfterRemoval == nil {
			t.Fatalf("%+v", r)
		}
		if r, err = replayFile(file(t, true), single); err != nil || r.Wrong != 1 {
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
		if _, err := replayFile(path, false); err == nil {
			t.Fatalf("%q was accepted", content)
		}
	}
}
