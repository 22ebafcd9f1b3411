package decide

import (
	"fmt"
	"strings"
	"testing"
)

// Engines fetch media from inside, so a client names no host that limits.media_urls does not, in any API and form.
func TestNoClientHasMediaFetchedFromEverywhere(t *testing.T) {
	const (
		chat      = "/v1/chat/completions"
		listed    = "https://images.example.com/a.png"
		port      = "http://10.0.0.1:9000/b"
		elsewhere = "http://169.254.169.254/latest"
	)
	part := func(part string) string {
		return `{"model":"demo","messages":[{"role":"user","content":[{"type":"text","text":"image_url"},` + part + `]}],"max_tokens":1}`
	}
	deep := strings.Repeat("[", 600) + strings.Repeat("]", 600)
	for _, c := range []struct{ path, body string }{
		{chat, part(`{"type":"image_url","image_url":{"url":"%s"}}`)},
		{chat, part(`{"image_url":{"url":"%s"},"type":"image_url"}`)},
		{chat, part(`{"type":"image_url","image_url":{"detail":"low","url":"data:,x","\u0075rl":"%s"}}`)},
		{chat, part(`{"type":"image_url","image_url":{"url":"%s","url":"data:,x"}}`)},
		{chat, part(`{"type":"image_url","image\u005furl" : {"url":"%s"},"image_url":{"url":"data:,x"}}`)},
		{chat, part(`{"image_url":"%s"}`)},
		{chat, part(`{"audio_url":"%s"}`)},
		{chat, part(`{"type":"audio_url","audio_url":{"url":"%s"}}`)},
		{chat, part(`{"type":"video_url","video_url":{"url":"%s"}}`)},
		{chat, part(`{"type":"input_image","image_url":"%s"}`)},
		{chat, `{"messages":[{"content":{"image_url":{"url":["data:,x",{"url":"%s"}]}}}],"model":"demo"}`},
		{"/v1/chat/completions/batch", `{"model":"demo","messages":[[{"role":"user","content":[{"type":"image_url","image_url":{"url":"%s"}}]}]]}`},
		{"/v1/responses", `{"model":"demo","input":[{"role":"user","content":[{"type":"input_image","image_url":"%s"}]}]}`},
		{"/v1/responses", `{"model":"demo","input":[{"type":"function_call_output","call_id":"c","output":[{"type":"input_image","image_url":"%s"}]}]}`},
		{"/v1/messages", `{"model":"demo","max_tokens":1,"messages":[{"role":"user","content":[{"type":"image","source":{"type":"url","url":"%s"}}]}]}`},
		{"/v1/messages", `{"model":"demo","max_tokens":1,"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"t","content":[{"type":"image","source":{"url":"%s","type":"x"}}]}]}]}`},
		{"/v1/messages/count_tokens", `{"model":"demo","messages":[{"role":"user","content":[{"type":"image","source":{"type":"url","url":"%s"}}]}]}`},
		{"/generate", `{"text":"x","image_data":"%s"}`},
		{"/generate", `{"image_data":["data:,x",{"url":"data:,x","format":"y"},"%s"],"text":"x"}`},
		{"/generate", `{"text":["x"],"video_data":[["%s"]]}`},
		{"/generate", `{"text":"x","audio_data":[{"url":"%s"}]}`},
		{"/vertex_generate", `{"instances":[{"text":"x","image_data":"%s"}]}`},
		{"/vertex_generate", `{"instances":[{"text":"x"}],"parameters":{"audio_data":"%s"}}`},
		{"/inference/v1/generate", `{"model":"demo","token_ids":[1],"content_parts":[{"type":"image_url","url":"%s"}]}`},
		{"/v1/embeddings", `{"model":"demo","input":[{"text":"x","image":"%s"}]}`},
		{"/v1/embeddings", `{"model":"demo","input":[{"text":"x","video":"%s"}]}`},
		{"/v2/embed", `{"model":"demo","images":["%s"]}`},
		{"/v1/systemone", `{"model":"demo","state":"x","questions":{},"images":["data:,x","%s"]}`},
		{"/pooling", part(`{"type":"image_url","image_url":{"url":"%s"}}`)},
		{"/v1/audio/speech", `{"model":"demo","input":"x","ref_audio":"%s"}`},
		{"/v1/audio/speech", `{"model":"demo","input":"x","ref_audio":["data:,x","%s"],"ref_audio_2":"data:,x"}`},
		{"/v1/audio/speech", `{"model":"demo","input":"x","ref_audio_2":"%s"}`},
		{"/v1/audio/speech", `{"model":"demo","input":"x","references":[{"text":"x","audio_path":"%s"}]}`},
		{"/tokenize", part(`{"type":"image_url","image_url":{"url":"%s"}}`)},
		{"/score", `{"model":"demo","queries":"x","documents":[{"content":[{"type":"image_url","image_url":{"url":"%s"}}]}]}`},
		{"/v1/rerank", `{"model":"demo","query":{"content":[{"type":"video_url","video_url":{"url":"%s"}}]},"documents":["x"]}`},
		{"/invocations", part(`{"type":"image_url","image_url":{"url":"%s"}}`)},
		{"/other", `{"a":[[{"b":{"image_url":[["%s"]]}}]]}`},
	} {
		for _, s := range []struct {
			yaml    string
			passing []string
		}{
			{"", []string{listed, port, elsewhere, "data:,x", "file:///etc/passwd"}},
			{"limits: {media_urls: [any]}\ntenants: {salt_header: x-tenant, required: false}\n", []string{listed, port, elsewhere, "data:,x"}},
			{"tenants: {salt_header: x-tenant, required: false}\n", []string{"data:,x", `d\u0061ta:,x`, ""}},
			{"limits: {media_urls: [data]}\n", []string{"data:,x", `d\u0061ta:,x`, ""}},
			{"limits: {media_urls: [images.example.com, \"10.0.0.1:9000\"]}\n", []string{"data:,x", `d\u0061ta:,x`, "", listed, port, `http:\/\/images.example.com/x?y#z`, "http://images.example.com"}},
		} {
			w := worker("a", 0)
			w.Models = nil
			b := newBench(t, s.yaml, w)
			urls := append([]string{"", "data:,x", `d\u0061ta:,x`, listed, port, elsewhere, `h\u0074tp://127.1/`, "http://data/", "http://any/", "HTTP://images.example.com/", "http://images.example.com./",
				"http://a@images.example.com/", "http://images.example.com@evil/", `http://images.example.com\\@evil/`, `http://images.example.com\t.evil/`, "http://images.example.com:80/",
				"http://images.example.com?@evil/", "http://images.example.com#@evil/", "http://images.example.comevil/", "http:images.example.com/", "http:///images.example.com/", "ftp://images.example.com/",
				"file:///etc/passwd", "/etc/passwd", "a.png", "DATA:,x", " data:,x", `\ud800`, "http://[::1]/", "http://0x7f.1/", "http://localhost/"}, s.passing...)
			passes := map[string]bool{}
			for _, url := range s.passing {
				passes[url] = true
			}
			for _, url := range urls {
				if strings.Contains(s.yaml, "any") || s.yaml == "" {
					passes[url] = true
				}
				d := b.Decide(t.Context(), b.request(c.path, strings.ReplaceAll(c.body, "%s", url)))
				got := d.Reject != nil && d.Reject.Details == "kvlane_media_url"
				if got == passes[url] || got && d.Reject.Status != 400 {
					t.Errorf("%q, %s %s with %q: got refused %v, want %v", s.yaml, c.path, c.body, url, got, !passes[url])
				}
				end(&d, 200)
			}
		}
	}
	strict := newBench(t, "limits: {media_urls: [data]}\n", worker("a", 0))
	for name, c := range map[string]struct {
		path, body string
		partial    bool
		refused    bool
	}{
		"a tool's parameters":      {chat, `{"model":"demo","tools":[{"function":{"parameters":{"properties":{"image_url":{"default":"http://a","examples":[{"image_url":"http://a"}]}}}}}],"messages":[{"role":"user","content":"x"}]}`, false, false},
		"a tool's arguments":       {"/v1/messages", `{"model":"demo","max_tokens":1,"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"t","name":"f","input":{"url":"http://a","image_url":"http://a","source":{"url":"http://a"}}}]},{"role":"user","content":"x"}]}`, false, false},
		"arguments as text":        {chat, `{"model":"demo","messages":[{"role":"assistant","tool_calls":[{"id":"t","type":"function","function":{"name":"f","arguments":"{\"image_url\":\"http://a\"}"}}]},{"role":"user","content":"x"}]}`, false, false},
		"a text":                   {chat, part(`{"type":"text","text":"\"image_url\":\"http://a\" {\"image_url\":{\"url\":\"http://a\"}}"}`), false, false},
		"a source that is no part": {"/v1/messages", `{"model":"demo","max_tokens":1,"messages":[{"role":"user","content":[{"type":"search_result","source":"https://a","title":"x","url":"http://a","content":[{"type":"text","text":"http://a"}]}]}]}`, false, false},
		"a base64 source":          {"/v1/messages", `{"model":"demo","max_tokens":1,"messages":[{"role":"user","content":[{"type":"image","source":{"type":"base64","media_type":"image/png","data":"/9j/http://"}}]}]}`, false, false},
		"an audio's data":          {chat, part(`{"type":"input_audio","input_audio":{"data":"http://","format":"wav"}}`), false, false},
		"a schema, a label":        {chat, `{"model":"demo","metadata":{"image":"a:1"},"response_format":{"x":{"images":["a"]}},"messages":[{"role":"user","content":"x"}]}`, false, false},
		"processed media":          {"/inference/v1/generate", `{"model":"demo","token_ids":[1],"features":{"mm_hashes":{"image":["x"]},"kwargs_data":{"image":["AAAA"]}}}`, false, false},
		"what precedes a list":     {"/generate", `{"image_data":["data:,x"],"text":["http://a"]}`, false, false},
		"a list within a part":     {chat, part(`{"image_url":{"url":"data:,x"},"y":["http://a",{"z":["http://a"]}]}`), false, false},
		"deep":                     {chat, part(`{"image_url":"data:,x","y":` + deep + `}`), false, true},
		"surrogates":               {chat, strings.Replace(part(`{"image_url":"data:,x"}`), "text", "\xed\xa0\x80", 1), false, true},
		"UTF-16":                   {"/other", strings.Join(strings.Split(`{"image_url":"http://a"}`, ""), "\x00") + "\x00", false, true},
		"partial":                  {chat, part(`{"image_url":"data:,x"}`), true, true},
	} {
		for b, refused := range map[*bench]bool{strict: c.refused, newBench(t, "", worker("a", 0)): false} {
			r := b.request(c.path, c.body)
			r.Partial = c.partial
			d := b.Decide(t.Context(), r)
			if got := d.Reject != nil && (d.Reject.Details == "kvlane_media_url" || d.Reject.Details == "kvlane_unread_body"); got != refused {
				t.Errorf("%s: got %v, want refused %v", name, fmt.Sprint(d.Reject), refused)
			}
			end(&d, 200)
		}
	}
}
