package body

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"pgregory.net/rapid"
)

// The result does not depend on the bodies parsed before, and a remembered turn always describes
// the same messages.
func TestTurnsChangeNothing(t *testing.T) {
	m := NewMemo(512 << 10)
	fill := strings.Repeat("what a long day it was; ", 60)
	messages := []string{
		`{"role":"user","content":"` + fill + `"}`, `{"role":"assistant","content":"` + fill + `\"é\" 1"}`, `{"role":"user","content":""}`,
		`"text"`, `[1,"x"]`, `7`, `null`, `{"a":{"b":[{}]}}`, `{"a":1,}`, `{"role":"user","content":"` + fill + "\x01" + `"}`, `{"open":`,
	}
	heads := []string{`{"messages":[`, `{"model":"a","messages":[`, `{"messages":["old"],"model":"b", "messages":[`, `{"tools":[{"messages":[1]}],"messages" : [ `}
	tails := []string{`]}`, `],"model":"c"}`, `],"messages":[{}]}`, `],"max_tokens":1,"tools":[]} `, `]`, `,]}`, ``, `]}x`}
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(3, 8).Draw(t, "messages")
		all := make([]string, 0, n)
		for range n {
			k := rapid.IntRange(0, len(messages)+5).Draw(t, "message")
			all = append(all, messages[max(0, k-6)])
		}
		head, gap := rapid.SampledFrom(heads).Draw(t, "head"), rapid.SampledFrom([]string{",", ", ", "\n,"}).Draw(t, "gap")
		for turn := 1; turn <= n; turn++ {
			if rapid.IntRange(0, 5).Draw(t, "change") == 0 {
				all[rapid.IntRange(0, n-1).Draw(t, "which")] = messages[rapid.IntRange(0, len(messages)-1).Draw(t, "other")]
			}
			text := head + strings.Join(all[:turn], gap) + rapid.SampledFrom(tails).Draw(t, "tail")
			got, err := m.Parse(Chat, []byte(text))
			want, wantErr := Parse(Chat, []byte(text))
			if fmt.Sprint(err) != fmt.Sprint(wantErr) {
				t.Fatalf("%s\n%v, want %v", text, err, wantErr)
			}
			if err != nil {
				continue
			}
			if got.Form != want.Form || got.Prompt != want.Prompt || got.Count != want.Count || !slices.Equal(got.Elements, want.Elements) ||
				!reflect.DeepEqual(got.fields, want.fields) {
				t.Fatalf("%s\n%+v\nwant %+v", text, got, want)
			}
		}
	})
}

func TestTurnsAreReused(t *testing.T) {
	m := NewMemo(1 << 20)
	text := `{"messages":[`
	for turn := range 20 {
		text += fmt.Sprintf(`%s{"role":"user","content":"%d %s"}`, strings.Repeat(",", min(turn, 1)), turn, strings.Repeat("x", 2000))
		body := []byte(text + `]}`)
		if _, _, known := m.turns.find(m.turns.digest(nil, body)); turn > 3 && len(known) != turn {
			t.Errorf("turn %d: %d messages are known", turn, len(known))
		}
		if _, err := m.Parse(Chat, body); err != nil {
			t.Fatal(err)
		}
	}
}

func TestTurnsAreBoundedAndShared(t *testing.T) {
	const limit = 256 << 10
	m := NewMemo(limit)
	var all sync.WaitGroup
	for g := range 4 {
		all.Go(func() {
			for c := range 30 {
				text := fmt.Sprintf(`{"id":%d,"messages":[{"n":%d}`, g/2, c)
				for turn := range 12 {
					text += fmt.Sprintf(`,{"turn":%d,"text":"%s"}`, turn, strings.Repeat("y", 1000))
					r, err := m.Parse(Chat, []byte(text+`]}`))
					if err != nil || r.Count != turn+2 {
						t.Errorf("%v: %d messages in turn %d", err, r.Count, turn)
						return
					}
				}
				if n := m.Bytes(); n > limit*5/2 {
					t.Errorf("%d bytes", n)
				}
			}
		})
	}
	all.Wait()
	m.turns.mu.Lock()
	defer m.turns.mu.Unlock()
	size := int64(0)
	for e := m.turns.recent.Front(); e != nil; e = e.Next() {
		turn, _ := e.Value.(*turn)
		size += turn.size
	}
	if size != m.turns.bytes || size == 0 {
		t.Errorf("%d bytes counted, %d in turns", m.turns.bytes, size)
	}
}

// A turn's text is not overwritten while a reader compares it, even if the turn is evicted;
// afterwards its memory is reused.
func TestDroppedTurnsServeAgain(t *testing.T) {
	m := NewMemo(256 << 10)
	body := func(i int) []byte {
		return fmt.Appendf(nil, `{"messages":[{"n":"%03d","text":"%s"}]}`, i, strings.Repeat("y", 20_000))
	}
	parse := func(i int) {
		if _, err := m.Parse(Chat, body(i)); err != nil {
			t.Fatal(err)
		}
	}
	parse(0)
	e, text, _ := m.turns.find(m.turns.digest(nil, body(0)))
	if e == nil {
		t.Fatal("got no cached turn, want one")
	}
	before := string(text)
	for i := range 50 {
		parse(1 + i)
	}
	if e.place != nil {
		t.Fatal("there is room for everything: nothing is tested")
	}
	if string(text) != before {
		t.Error("got overwritten text while a reader holds it, want it unchanged")
	}
	m.turns.leave(e)
	if e.text != nil {
		t.Error("got text still attached after its last reader left, want it recycled")
	}
	again := false
	for range 50 {
		again = again || unsafe.SliceData(m.turns.texts.Take(len(before))) == unsafe.SliceData(text)
	}
	if !again {
		t.Error("got fresh memory, want the recycled slice")
	}
}
