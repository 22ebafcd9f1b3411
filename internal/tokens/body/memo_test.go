package body

import (
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"
)

func TestMemoGivesWhatParseGives(t *testing.T) {
	m := NewMemo(1 << 20)
	bodies := []string{`{"model":"a","messages":[{},{}]}`, `{"model":"b"}`, `{"model":`, `[]`}
	for round := range 4 {
		for _, text := range bodies {
			for _, api := range []API{Chat, Completions} {
				body := []byte(text)
				got, err := m.Parse(api, body)
				want, wantErr := Parse(api, []byte(text))
				if fmt.Sprint(err) != fmt.Sprint(wantErr) {
					t.Fatalf("round %d %s: %v, want %v", round, text, err, wantErr)
				}
				if err != nil {
					continue
				}
				clear(body) // the memo must not refer to the caller's buffer, which may be reused after the request
				if round > 1 && string(got.Body) != text {
					t.Fatalf("round %d: body %q", round, got.Body)
				}
				if got.API != want.API || got.Count != want.Count || !reflect.DeepEqual(got.fields, want.fields) {
					t.Fatalf("round %d %s: %+v", round, text, got)
				}
			}
		}
	}
}

func TestMemoAttachesToEqualBodiesOnly(t *testing.T) {
	m := NewMemo(1 << 20)
	parse := func(text string) *Request {
		r, err := m.Parse(Chat, []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	parse(`{"n":1}`).Attach("key", 1, 8) // seen once: not kept
	if _, ok := parse(`{"n":1}`).Attached("key"); ok {
		t.Error("kept for a body seen once")
	}
	parse(`{"n":1}`).Attach("key", 2, 8)
	if v, ok := parse(`{"n":1}`).Attached("key"); !ok || v != 2 {
		t.Errorf("attached value: %v %v", v, ok)
	}
	if _, ok := parse(`{"n":2}`).Attached("key"); ok {
		t.Error("another body has it too")
	}
}

func TestMemoIsBounded(t *testing.T) {
	const limit = 64 << 10
	m := NewMemo(limit)
	for i := range 100 {
		body := []byte(fmt.Sprintf(`{"n":%d,"prompt":"%s"}`, i, strings.Repeat("x", 3000)))
		for range 3 {
			r, err := m.Parse(Completions, body)
			if err != nil {
				t.Fatal(err)
			}
			r.Attach("ids", i, 2000)
		}
		if m.Bytes() > limit {
			t.Fatalf("%d bytes", m.Bytes())
		}
	}
	if m.Bytes() == 0 {
		t.Error("got an empty memo, want kept bodies")
	}
}

func TestMemoIsSafeForConcurrentUse(t *testing.T) {
	m := NewMemo(32 << 10)
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := range 500 {
				body := []byte(fmt.Sprintf(`{"n":%d}`, (i+w)%20))
				r, err := m.Parse(Chat, body)
				if err != nil || string(r.Body) != string(body) {
					t.Errorf("%s: got body %s, %v, want an equal body", body, r.Body, err)
					return
				}
				if v, ok := r.Attached("k"); ok && v != string(body) {
					t.Errorf("%s has %v", body, v)
				}
				r.Attach("k", string(body), 100)
			}
		})
	}
	wg.Wait()
}

func BenchmarkMemo(b *testing.B) {
	body := conversation(81, 57000)
	m := NewMemo(1 << 20)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := m.Parse(Chat, body); err != nil {
			b.Fatal(err)
		}
	}
}
