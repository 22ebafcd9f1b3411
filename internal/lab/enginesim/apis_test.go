package enginesim

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
)

func TestMessagesResponsesAndTokens(t *testing.T) {
	e := start(t, Options{BlockSize: 4, Ranks: 2})
	system := words("You", 30)
	pin := []string{"X-data-parallel-rank", "1"}
	chat := post(t, e.URL()+"/v1/chat/completions", m{"messages": []m{turn("system", system), turn("user", "Hi")}, "max_tokens": 5}, pin...)
	want := chat.body.Choices[0].Message.Content

	var msg struct {
		Content []struct {
			Text string `json:"text"`
		} `json:"content"`
		Usage struct {
			Input   int `json:"input_tokens"`
			Read    int `json:"cache_read_input_tokens"`
			Created int `json:"cache_creation_input_tokens"`
		} `json:"usage"`
	}
	a := post(t, e.URL()+"/v1/messages", m{"system": []m{{"type": "text", "text": system}}, "messages": []m{turn("user", "Hi")}, "max_tokens": 5}, pin...)
	if err := json.Unmarshal(a.raw, &msg); err != nil || a.status != 200 || msg.Content[0].Text != want || msg.Usage.Read == 0 || msg.Usage.Input+msg.Usage.Read+msg.Usage.Created != chat.body.Usage.Prompt {
		t.Errorf("messages: %v %s", err, a.raw)
	}
	// vLLM does not read the header here: an idle engine takes its first rank.
	var res struct {
		Output []struct {
			Content []struct {
				Text string `json:"text"`
			} `json:"content"`
		} `json:"output"`
	}
	a = post(t, e.URL()+"/v1/responses", m{"instructions": system, "input": "Hi", "max_output_tokens": 5}, pin...)
	recs := e.Stats().Requests
	if err := json.Unmarshal(a.raw, &res); err != nil || res.Output[0].Content[0].Text != want || recs[len(recs)-1].Rank != 0 {
		t.Errorf("responses: %v %s, rank %d", err, a.raw, recs[len(recs)-1].Rank)
	}
	var gen struct {
		Choices []struct {
			IDs []int32 `json:"token_ids"`
		} `json:"choices"`
	}
	a = post(t, e.URL()+"/inference/v1/generate", m{"token_ids": []int{1000, 1001, 1002}, "sampling_params": m{"max_tokens": 3}}, pin...)
	if err := json.Unmarshal(a.raw, &gen); err != nil || len(gen.Choices[0].IDs) != 3 {
		t.Errorf("tokens: %v %s", err, a.raw)
	}
	for path, last := range map[string]string{"/v1/messages": "message_stop", "/v1/responses": "response.completed"} {
		a := post(t, e.URL()+path, m{"input": "Hi", "messages": []m{turn("user", "Hi")}, "max_tokens": 3, "stream": true})
		if events := strings.Split(strings.TrimSpace(string(a.raw)), "\n\n"); !strings.HasPrefix(events[len(events)-1], "event: "+last+"\n") {
			t.Errorf("%s ends with %q", path, events[len(events)-1])
		}
	}
	for path, bad := range map[string]string{"/v1/messages": `{"messages":[{"role":"user","content":"x"}]}`, "/v1/responses": `{"input":[]}`, "/inference/v1/generate": `{}`} {
		if a := post(t, e.URL()+path, bad); a.status != 400 {
			t.Errorf("%s %s: %d", path, bad, a.status)
		}
	}
}

// TestResponsesStream: clients put the answer together from the events, and refuse a delta whose item and part were not
// announced.
func TestResponsesStream(t *testing.T) {
	e := start(t, Options{})
	a := post(t, e.URL()+"/v1/responses", m{"input": "Hi", "max_output_tokens": 3, "stream": true})
	type part struct {
		Type string
		Text string
	}
	type item struct {
		ID, Type, Role, Status string
		Content                []part
	}
	type event struct {
		Type         string
		Number       *int   `json:"sequence_number"`
		ItemID       string `json:"item_id"`
		OutputIndex  *int   `json:"output_index"`
		ContentIndex *int   `json:"content_index"`
		Delta, Text  string
		Part         part
		Item         item
		Response     struct {
			ID, Object, Status string
			Output             []item
			Usage              *struct {
				Output int `json:"output_tokens"`
			}
		}
	}
	var kinds []string
	last, text := map[string]event{}, ""
	for i, block := range strings.Split(strings.TrimSpace(string(a.raw)), "\n\n") {
		name, data, _ := strings.Cut(block, "\ndata: ")
		var ev event
		if err := json.Unmarshal([]byte(data), &ev); err != nil {
			t.Fatalf("%v: %s", err, block)
		}
		if name != "event: "+ev.Type || ev.Number == nil || *ev.Number != i {
			t.Errorf("event %d is %s", i, block)
		}
		if strings.Contains(ev.Type, "_part.") || strings.Contains(ev.Type, "_text.") {
			if ev.OutputIndex == nil || ev.ContentIndex == nil || ev.ItemID != last["response.output_item.added"].Item.ID || ev.ItemID == "" {
				t.Errorf("of which part is %s", block)
			}
		}
		text += ev.Delta
		kinds, last[ev.Type] = append(kinds, ev.Type), ev
	}
	want := []string{
		"response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
		"response.output_text.delta", "response.output_text.delta", "response.output_text.delta",
		"response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
	}
	if !slices.Equal(kinds, want) {
		t.Fatalf("%v", kinds)
	}
	whole := last["response.completed"].Response
	if whole.Object != "response" || whole.Status != "completed" || whole.Usage == nil || whole.Usage.Output != 3 || whole.ID != last["response.created"].Response.ID {
		t.Errorf("completed: %+v", whole)
	}
	for what, got := range map[string]string{
		"text done": last["response.output_text.done"].Text, "part done": last["response.content_part.done"].Part.Text,
		"item done": last["response.output_item.done"].Item.Content[0].Text, "completed": whole.Output[0].Content[0].Text,
	} {
		if got != text || text == "" {
			t.Errorf("%s: %q, the deltas are %q", what, got, text)
		}
	}
	if added := last["response.output_item.added"].Item; added.Type != "message" || added.Role != "assistant" || added.Status != "in_progress" || len(added.Content) != 0 {
		t.Errorf("item added: %+v", added)
	}
	if part := last["response.content_part.added"].Part; part.Type != "output_text" || part.Text != "" {
		t.Errorf("part added: %+v", part)
	}
}
