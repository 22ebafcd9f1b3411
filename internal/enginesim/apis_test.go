package enginesim

import (
	"encoding/json"
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
