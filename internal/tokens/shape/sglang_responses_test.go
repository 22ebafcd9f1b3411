package shape

import (
	"runtime"
	"testing"

	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// What SGLang takes and Kvlane does not convert is not refused, and arguments that its parser refuses are none.
func TestItemsOfSGLang(t *testing.T) {
	for raw, want := range map[string]string{
		`{"type":"custom_tool_call","call_id":"c","name":"f","input":"x"}`:              "not known",
		`{"type":"custom_tool_call_output","call_id":"c","output":"x"}`:                 "not known",
		`{"type":"item_reference","id":"x"}`:                                            "refused",
		`{"type":"function_call","call_id":"c","name":"f","arguments":{"a":1}}`:         "not known",
		`{"type":"function_call","call_id":"c","name":"f","arguments":"{\"a\":1}"}`:     `{"a":1}`,
		`{"type":"function_call","call_id":"c","name":"f","arguments":"{\"a\":NaN}"}`:   "{}",
		`{"type":"function_call","call_id":"c","name":"f","arguments":"{\"a\":1e999}"}`: "{}",
		`{"type":"function_call","call_id":"c","name":"f","arguments":"\ufeff{}"}`:      "{}",
		`{"type":"function_call","call_id":"c","name":"f","arguments":"[1]"}`:           "{}",
	} {
		v, err := jinja.ParseJSON([]byte(raw))
		if err != nil {
			t.Fatal(err)
		}
		msg, known, err := sglangItem(nil, v)
		got := "not known"
		if err != nil {
			got = "refused"
		} else if known {
			calls, _ := member(msg, "tool_calls").AsList()
			d, _ := calls[0].AsDict()
			got = textAt(dictAt(d, "function"), "arguments")
		}
		if got != want {
			t.Errorf("%s: got %s, want %s", raw, got, want)
		}
	}
}

// A turn of many items is joined once: four times as many items take about four times the memory.
func TestATurnIsJoinedOnce(t *testing.T) {
	took := func(n int) uint64 {
		items := make([]*jinja.Dict, 0, 2*n)
		for range n {
			said := chatMessage(roleAssistant, jinja.String("a text of some length, for it grows"))
			said.Set("reasoning_content", jinja.String("a thought of some length"))
			called := dict(kv{"role", jinja.String(roleAssistant)}, kv{"tool_calls", jinja.List([]jinja.Value{functionCall("c", "f", "{}")})})
			items = append(items, said, called)
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		var turns sglangTurns
		for _, msg := range items {
			turns.add(msg)
		}
		turns.finish()
		runtime.ReadMemStats(&after)
		calls, _ := member(turns.list[0], "tool_calls").AsList()
		text := textAt(turns.list[0], "content")
		if len(turns.list) != 1 || len(calls) != n || len(text) != 37*n-2 {
			t.Fatalf("got %d messages, %d calls and %d bytes, want one message with all %d", len(turns.list), len(calls), len(text), n)
		}
		return after.TotalAlloc - before.TotalAlloc
	}
	if one, four := took(1000), took(4000); four > 6*one {
		t.Errorf("got %d and %d bytes for 1,000 and 4,000 items, want about four times as many", one, four)
	}
}
