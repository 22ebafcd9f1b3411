package decide

import (
	"bytes"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/disagg"
	"github.com/kvlane/kvlane/internal/fleet"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/steering"
	"github.com/kvlane/kvlane/internal/tokens/shape"
	"github.com/kvlane/kvlane/internal/workers"
)

// evilFields are fields in which a client may name a host, a port, an engine, a room, a request id or a rank, or make an engine
// report blocks again, in the body of any engine: the values are "evil" or 666666666.
const evilFields = `"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_host":"evil","remote_port":666666666,"remote_engine_id":"evil",` +
	`"remote_request_id":"evil","remote_block_ids":[[666666666]],"tp_size":666666666,"transfer_id":"evil","transfer_mode":"evil","remote_bootstrap_addr":"http://evil:666666666",` +
	`"remote_handshake_port":666666666,"remote_notify_port":666666666,"remote_dp_rank":666666666,"remote_dp_rank_override":666666666,"remote_dp_size":666666666,"remote_hosts":["evil"],` +
	`"is_request_leader":"evil","disagg_spec":{"req_id":"evil","receiver_host":"evil","receiver_init_port":[666666666]},"ret_first_tok":"evil","first_tok":666666666,` +
	`"remote_prefiller":{"remote_host":"evil","remote_port":666666666},"remote_decoder":{"kv_request_id":"evil"},"remote_kv_source":{"remote_host":"evil"},` +
	`"lmcache.pd_handoff_id":"evil","prompt_token_ids":[1,2]},"kv_transfer\u005fparams":{"remote_host":"evil"},` +
	`"encoder_urls":["http://evil"],"need_wait_for_mm_inputs":"evil","num_items_assigned":{"IMAGE":[666666666]},"kv_hints":{"message_id":"evil"},` +
	`"ec_transfer_params":{"peer":"evil"},"bootstrap_host":"evil","bootstrap_port":666666666,"bootstrap_pair_key":"evil","decode_tp_size":666666666,` +
	`"disagg_prefill_dp_rank":666666666,"http_worker_ipc":"tcp://evil:666666666","disaggregated_params":{"request_type":"generation_only","ctx_info_endpoint":"http://evil",` +
	`"encoded_opaque_state":"evil","ctx_request_id":666666666,"disagg_request_id":666666666,"ctx_dp_rank":666666666,"route_hint":{"dp_rank":666666666}},` +
	`"vllm_xargs":{"kv_transfer_params":"evil","ec_transfer_params":"evil","kv_cache_report_mode":"evil"},"request_id":"___prefill_addr_evil:666666666___decode_addr_evil:666666666_0"`

// evilHeaders are the same in headers, some of them in unusual spelling.
var evilHeaders = []extproc.Header{
	{Name: "x-request-id", Value: "___prefill_addr_evil:666666666___decode_addr_evil:666666666_0"},
	{Name: "x-prefiller-host-port", Value: "evil:666666666"}, {Name: "x-prefiller-url", Value: "http://evil"}, {Name: "x-encoder-hosts-ports", Value: "evil:666666666"},
	{Name: "x-data-parallel-host-port", Value: "evil:666666666"}, {Name: "x-kv-cache-source-host-port", Value: "evil:666666666"}, {Name: "x-data-parallel-rank", Value: "666666666"},
	{Name: "x-override-rid", Value: "evil"}, {Name: "x-override-bootstrap-host", Value: "evil"}, {Name: "x-override-bootstrap-port", Value: "666666666"},
	{Name: "x-override-bootstrap-room", Value: "666666666"}, {Name: "x-override-routed-dp-rank", Value: "666666666"}, {Name: "x-override-disagg-prefill-dp-rank", Value: "666666666"},
	{Name: "x-gateway-destination-endpoint", Value: "evil:666666666"}, {Name: "x-gateway-destination-endpoint-subset", Value: "evil:666666666"},
	{Name: "x-kvlane-endpoint", Value: "evil:666666666"}, {Name: "x-kvlane-pin", Value: "evil"},
}

// evil reports whether a text has any of these values.
func evil(text string) bool {
	return strings.Contains(text, "evil") || strings.Contains(text, "666666666")
}

// reach returns the headers that the worker gets after the ext_proc server's edits.
func reach(r *extproc.Request, d *extproc.Decision) []extproc.Header {
	list := append([]extproc.Header{{Name: "x-request-id", Value: r.ID}}, d.Set...)
	for _, h := range r.Headers {
		if !steering.Steers(h.Name) && !slices.Contains(d.Remove, h.Name) && !slices.ContainsFunc(list, func(s extproc.Header) bool { return s.Name == h.Name }) {
			list = append(list, h)
		}
	}
	return list
}

// engineSettings work for every connector.
const engineSettings = ", workers: {receiver_host: h, receiver_init_ports: [1], receiver_alloc_ports: [2], zmq: \"10.9.9.9:1\", engine_id: e}"

// prefillAnswer is an answer of prefill engines that works for all connectors.
const prefillAnswer = `{"choices":[{"text":"a","finish_reason":"length","disaggregated_params":{"request_type":"context_only","ctx_request_id":1,"disagg_request_id":1}}],` +
	`"prompt_token_ids":[1,2],"kv_transfer_params":{"do_remote_prefill":true,"remote_engine_id":"e","first_tok":5},` +
	`"0":{"engine_id":"e"},"disaggregated_params":{"ctx_info_endpoint":"http://x","request_type":"context_only","ctx_request_id":1,"disagg_request_id":1}}`

// No client can name a host, port, engine, room, request id or rank to an engine, with any
// connector, on any path of its request. A case may be refused: then no engine gets the
// request either.
func TestNoClientNamesAPeerToAnEngine(t *testing.T) {
	long := strings.Repeat("1,", 400) + "1"
	cases := map[string]struct {
		path, body string
		change     func(p *pools, r *extproc.Request)
		unreadable bool // must be refused
	}{
		"split":             {path: "/v1/completions", body: `{"model":"demo","prompt":[` + long + `],%s}`},
		"split chat":        {path: "/v1/chat/completions", body: `{"model":"demo","messages":[{"role":"user","content":"` + strings.Repeat("word ", 400) + `"}],%s}`},
		"split responses":   {path: "/v1/responses", body: `{"model":"demo","input":"` + strings.Repeat("word ", 400) + `",%s}`},
		"split generate":    {path: "/inference/v1/generate", body: `{"model":"demo","token_ids":[` + long + `],"sampling_params":{"extra_args":{"kv_transfer_params":{"remote_host":"evil"},"ec_transfer_params":"evil","kv_cache_report_mode":"evil"}},%s}`},
		"SGLang's generate": {path: "/generate", body: `{"input_ids":[` + long + `],%s}`},
		"short":             {path: "/v1/completions", body: `{"model":"demo","prompt":"x",%s}`},
		"two answers":       {path: "/v1/completions", body: `{"model":"demo","n":2,"prompt":[` + long + `],%s}`},
		"another API":       {path: "/v1/embeddings", body: `{"model":"demo","input":"x",%s}`},
		"unknown API":       {path: "/invocations", body: `{"model":"demo","prompt":"x","parameters":{"bootstrap_host":"evil","bootstrap_room":666666666,"data_parallel_rank":666666666},%s}`},
		"unknown model":     {path: "/v1/completions", body: `{"model":"other","prompt":"x",%s}`},
		"no prefill workers": {path: "/v1/completions", body: `{"model":"demo","prompt":[` + long + `],%s}`, change: func(p *pools, _ *extproc.Request) {
			list := slices.Clone(p.list)
			for i := range list[1:] {
				list[i+1].Ready = false
			}
			p.Fleet().SetWorkers(list)
		}},
		"failed legs": {path: "/v1/completions", body: `{"model":"demo","prompt":[` + long + `],%s}`, change: func(p *pools, _ *extproc.Request) {
			p.both(status(500))
		}},
		"whole worker": {path: "/v1/completions", body: `{"model":"demo","prompt":[` + long + `],%s}`, change: func(p *pools, _ *extproc.Request) {
			list := slices.Clone(p.list[:1])
			list[0].Role = "both"
			p.Fleet().SetWorkers(list)
		}},
		"partial":          {path: "/v1/completions", body: `{"model":"demo","prompt":"x",%s}`, change: func(_ *pools, r *extproc.Request) { r.Partial = true }, unreadable: true},
		"partial, unknown": {path: "/invocations", body: `{"model":"demo","prompt":"x",%s}`, change: func(_ *pools, r *extproc.Request) { r.Partial, r.Body = true, nil }, unreadable: true},
		"a WebSocket":      {path: "/v1/realtime", body: `%s`, change: func(_ *pools, r *extproc.Request) { r.Method, r.Partial, r.Body = "GET", true, nil }, unreadable: true},
		"a WebSocket of another type": {path: "/v1/realtime", body: `%s`, change: func(_ *pools, r *extproc.Request) {
			r.Method, r.Partial, r.Body = "GET", true, nil
			r.Headers = append(slices.DeleteFunc(slices.Clone(r.Headers), func(h extproc.Header) bool { return h.Name == "content-type" }),
				extproc.Header{Name: "upgrade", Value: "websocket"}, extproc.Header{Name: "content-type", Value: "text/plain"})
		}, unreadable: true},
		"nested too deep":     {path: "/v1/completions", body: `{"prompt":"x","y":` + strings.Repeat("[", 600) + strings.Repeat("]", 600) + `,%s}`, unreadable: true},
		"surrogates, unknown": {path: "/invocations", body: "{\"prompt\":\"\xed\xa0\x80\",%s}", unreadable: true},
		"a byte order mark":   {path: "/vertex_generate", body: "\xef\xbb\xbf" + `{"parameters":{"bootstrap_host":"evil","bootstrap_room":666666666},%s}`},
		"a content-type without a value": {path: "/vertex_generate", body: `{"parameters":{"bootstrap_host":"evil","bootstrap_room":666666666},%s}`, change: func(_ *pools, r *extproc.Request) {
			r.Headers = append(slices.DeleteFunc(slices.Clone(r.Headers), func(h extproc.Header) bool { return h.Name == "content-type" }), extproc.Header{Name: "content-type"})
		}},
		"deep, unknown": {path: "/invocations", body: `{"prompt":"x","y":` + strings.Repeat("[", 600) + strings.Repeat("]", 600) + `,%s}`, unreadable: true},
	}
	went := map[string]int{} // by case
	for _, connector := range slices.Sorted(maps.Keys(config.ConnectorEngines)) {
		rule := disagg.RequestIDs(connector, false)
		var legs atomic.Int64 // concurrent ones may come after the decision
		engine := config.ConnectorEngines[connector]
		t.Run(connector, func(t *testing.T) {
			for name, c := range cases {
				once := strings.Replace(evilFields, `"kv_transfer\u005fparams":{"remote_host":"evil"},`, "", 1) // what repeats a field is not split
				for i, fields := range []string{evilFields, once, evilFields + `,"bootstrap_room":666666666`} { // SGLang's other fields have no effect without a room
					t.Run(fmt.Sprint(name, i), func(t *testing.T) {
						served := servedQwen(t)
						p := newPoolsServing(t, connector+engineSettings, "routing: {disagg: {mode: threshold, threshold: 64}}\n", []*fleet.Model{served})
						p.both(answer(prefillAnswer))
						p.leg = func(r *http.Request, body []byte) {
							legs.Add(1)
							if leg := fmt.Sprint(r.URL, r.Header, string(body)); evil(leg) {
								t.Errorf("the prefill engine gets %s", leg)
							}
						}
						for i := range p.list {
							p.list[i].Engine, p.list[i].Generation = engine, p.list[i].Generation+10
							p.list[i].Disagg.ZMQ, p.list[i].Disagg.EngineID = "10.9.9.9:1", "e"
						}
						p.Fleet().SetWorkers(slices.Clone(p.list))
						if engine == "sglang" {
							fields += `,"routed_dp_rank":666666666,"data_parallel_rank":666666666`
						}
						r := &extproc.Request{ID: rule(evilHeaders[0].Value), Method: "POST", Path: c.path, Headers: slices.Clone(evilHeaders), Body: fmt.Appendf(nil, c.body, fields)}
						if c.change != nil {
							c.change(p, r)
						}
						d := p.Decide(t.Context(), r)
						defer end(&d, 200)
						switch headers := reach(r, &d); {
						case d.Reject != nil && evil(string(d.Reject.Body)):
							t.Errorf("refused with %s", d.Reject.Body)
						case d.Reject != nil:
						case c.unreadable:
							t.Error("went on, want it refused")
						case d.Body == nil:
							t.Error("the body goes on as the client wrote it")
						case evil(string(d.Body)):
							t.Errorf("the engine gets %s", d.Body)
						case evil(fmt.Sprint(headers)):
							t.Errorf("the engine gets %v", headers)
						default:
							went[name]++
						}
					})
				}
			}
		})
		if p, err := disagg.New(connector, disagg.Options{}); err == nil && !p.NoLeg && legs.Load() == 0 {
			t.Errorf("%s: no leg was looked at", connector)
		}
	}
	for name, c := range cases { // refusing all of a kind would pass, too
		if !c.unreadable && went[name] == 0 {
			t.Errorf("%s: refused with every connector, want it to go on with one at least", name)
		}
	}
}

// Without a connector Kvlane cannot know which one an engine runs: clients name no hosts there either, on any path, to any engine.
// A body that cannot be parsed passes unless it might name one.
func TestNoClientNamesAPeerWithoutAConnector(t *testing.T) {
	deep := strings.Repeat("[", 600) + strings.Repeat("]", 600)
	for name, c := range map[string]struct {
		path, body string
		partial    bool
		passes     bool // is to be neither refused nor changed
	}{
		"completion":           {path: "/v1/completions", body: `{"model":"demo","prompt":"x",%s}`},
		"chat":                 {path: "/v1/chat/completions", body: `{"model":"demo","messages":[{"role":"user","content":"x"}],%s}`},
		"responses":            {path: "/v1/responses", body: `{"model":"demo","input":"x",%s}`},
		"messages":             {path: "/v1/messages", body: `{"model":"demo","max_tokens":9,"messages":[{"role":"user","content":"x"}],%s}`},
		"generate":             {path: "/generate", body: `{"text":"x",%s}`},
		"vLLM's generate":      {path: "/inference/v1/generate", body: `{"model":"demo","token_ids":[1],"sampling_params":{"extra_args":{"kv_transfer_params":"evil"}},%s}`},
		"embeddings":           {path: "/v1/embeddings", body: `{"model":"demo","input":"x",%s}`},
		"unknown API":          {path: "/vertex_generate", body: `{"prompt":"x","parameters":{"encoder_urls":["evil"],"data_parallel_rank":666666666},%s}`},
		"unknown model":        {path: "/v1/completions", body: `{"model":"other","prompt":"x",%s}`},
		"too deep":             {path: "/v1/completions", body: `{"model":"demo","prompt":"x","y":` + deep + `,%s}`},
		"too deep, unknown":    {path: "/invocations", body: `{"y":` + deep + `,%s}`},
		"too deep, escaped":    {path: "/invocations", body: `{"y":` + deep + `,"\u0065ncoder\u005Furls":["evil"]}`},
		"surrogates":           {path: "/v1/completions", body: "{\"prompt\":\"\xed\xa0\x80\",%s}"},
		"UTF-16":               {path: "/invocations", body: strings.Join(strings.Split(`{"encoder_urls":"evil"}`, ""), "\x00") + "\x00"},
		"partial":              {path: "/v1/completions", body: `{"model":"demo",%s`, partial: true},
		"partial, unknown":     {path: "/invocations", body: `{"model":"demo",%s`, partial: true},
		"deep and good":        {path: "/v1/completions", body: `{"model":"demo","prompt":"\u00e9","sampling_params":{},"y":` + deep + `}`, passes: true},
		"partial and good":     {path: "/generate", body: `{"text":"\u00e9","sampling_params":{}`, partial: true, passes: true},
		"deep, a spaced id":    {path: "/invocations", body: `{"y":` + deep + `,"request_id" :` + "\n" + ` "a___decode_\u0061ddr_evil:1"}`},
		"UTF-16 with U+2200":   {path: "/invocations", body: strings.Join(strings.Split(`{"a":"`, ""), "\x00") + "\x00\x00\x22" + strings.Join(strings.Split(`","encoder_urls":"evil"}`, ""), "\x00") + "\x00"},
		"deep, of hosts only":  {path: "/v1/completions", body: `{"model":"demo","prompt":"sock_addr_in bootstrap_x \\u0061 \"encoder_urls\": {\"kv_hints\":1}, name*","y":` + deep + `,"request_id":"a"}`, passes: true},
		"partial, of hosts":    {path: "/v1/completions", body: `{"model":"demo","stop":["\\"],"prompt":"\"rid\":\"_addr_\", kv_transfer_params: `, partial: true, passes: true},
		"good, of unknown API": {path: "/invocations", body: `{"prompt":"\u00e9"}`, passes: true},
	} {
		for _, engine := range []string{"vllm", "sglang", "trtllm"} {
			w := worker("a", 0)
			w.Engine = engine
			w.Models = nil
			b := newBench(t, "", w)
			r := b.request(c.path, strings.Replace(c.body, "%s", evilFields+`,"bootstrap_room":666666666`, 1))
			r.Partial = c.partial
			d := b.Decide(t.Context(), r)
			switch {
			case c.passes && engine == "sglang" && strings.Contains(c.body, deep): // an id might end it
				if d.Reject == nil || d.Reject.Details != "kvlane_unread_body" {
					t.Errorf("%s, %s: got %+v, want it refused", engine, name, d.Reject)
				}
			case c.passes && (d.Reject != nil || d.Body != nil):
				t.Errorf("%s, %s: got %+v and body %s, want an unchanged request", engine, name, d.Reject, d.Body)
			case !c.passes && d.Reject == nil && (d.Body == nil || evil(string(d.Body))):
				t.Errorf("%s, %s: the engine gets %s", engine, name, d.Body)
			case d.Reject != nil && (evil(string(d.Reject.Body)) || d.Reject.Status != 400):
				t.Errorf("%s, %s: refused with %d %s", engine, name, d.Reject.Status, d.Reject.Body)
			}
			end(&d, 200)
		}
	}
}

// vLLM reads vllm_xargs from forms, too. These are not edited: one that has the field, or might have it, is refused.
func TestNoFormNamesAPeer(t *testing.T) {
	const (
		file  = "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\nContent-Type: audio/wav\r\n\r\nRIFF\x00\xff\r\n"
		field = "--b\r\ncontent-disposition: form-data; %s\r\n\r\n" + `{"kv_transfer_params":"evil"}` + "\r\n"
		last  = "--b--\r\n"
		form  = "multipart/form-data; boundary=b"
	)
	with := newPoolsServing(t, "nixl", "", nil).Decider
	without := newBench(t, "", worker("a", 0)).Decider
	trusting := newBench(t, "disagg: {trust_client_params: true}\n", worker("a", 0)).Decider
	for name, c := range map[string]struct {
		kind, body string
		partial    bool
		refused    bool
	}{
		"the field":            {kind: form, body: file + fmt.Sprintf(field, `name="vllm_xargs"`) + last, refused: true},
		"without quotes":       {kind: form, body: fmt.Sprintf(field, `x=1; name=vllm_xargs`) + file + last, refused: true},
		"another name":         {kind: form, body: file + fmt.Sprintf(field, `name="prompt"`) + last},
		"an encoded name":      {kind: form, body: file + fmt.Sprintf(field, `name*=utf-8''vllm%5Fxargs`) + last, refused: true},
		"a name in pieces":     {kind: form, body: file + fmt.Sprintf(field, `name*0="vllm_"; name*1="xargs"`) + last, refused: true},
		"capitals":             {kind: form, body: file + fmt.Sprintf(field, `NAME*0="vllm_"; Name *1="xargs"`) + last, refused: true},
		"an encoded NAME":      {kind: form, body: file + fmt.Sprintf(field, `Name*=utf-8''vllm%5Fxargs`) + last, refused: true},
		"a file's NAME":        {kind: form, body: strings.Replace(file, `filename="a.wav"`, `FileName*=utf-8''%C3%A9.wav`, 1) + last},
		"a file's name":        {kind: form, body: strings.Replace(file, `filename="a.wav"`, `filename*=utf-8''%C3%A9.wav`, 1) + last},
		"UTF-7":                {kind: "multipart/form-data; Charset=utf-7; boundary=b", body: file + fmt.Sprintf(field, `name="vllm+AF8-xargs"`) + last, refused: true},
		"two encodings":        {kind: "multipart/form-data; charset=UTF-8; charset=utf-7; boundary=b", body: file + fmt.Sprintf(field, `name="vllm+AF8-xargs"`) + last, refused: true},
		"UTF-8":                {kind: `Multipart/Form-Data; charset="UTF-8"; boundary=b`, body: file + last},
		"ASCII":                {kind: "multipart/form-data; charset=us-ascii; boundary=b", body: file + last},
		"Latin-1":              {kind: "multipart/form-data; charset=ISO-8859-1; boundary=b", body: file + last},
		"a boundary like JSON": {kind: "multipart/form-data; boundary=json", body: strings.ReplaceAll(file+fmt.Sprintf(field, `name="vllm_xargs"`)+last, "--b", "--json"), refused: true},
		"the beginning":        {kind: form, body: fmt.Sprintf(field, `name="vllm_xargs"`), partial: true, refused: true},
	} {
		for _, path := range []string{"/v1/audio/transcriptions", "/v1/audio/translations", "/other"} {
			for b, refused := range map[*Decider]bool{with: c.refused, without: c.refused, trusting: false} {
				r := &extproc.Request{ID: "r", Method: "POST", Path: path, Body: []byte(c.body), Headers: []extproc.Header{{Name: "content-type", Value: c.kind}}, Partial: c.partial}
				d := b.Decide(t.Context(), r)
				if got := d.Reject != nil && d.Reject.Status == 400; got != refused || d.Body != nil {
					t.Errorf("%s, %s: got %+v and body %q, want refused %v", name, path, d.Reject, d.Body, refused)
				} else if got && !bytes.Contains(d.Reject.Body, []byte("UTF-8, US-ASCII and ISO-8859-1")) {
					t.Errorf("%s: got %s, want every encoding that passes", name, d.Reject.Body)
				}
				end(&d, 200)
			}
		}
	}
	r := &extproc.Request{ID: "r", Method: "POST", Path: "/v1/audio/transcriptions", Body: []byte(file), Headers: []extproc.Header{{Name: "content-type", Value: form}}, Partial: true}
	if d := with.Decide(t.Context(), r); d.Reject == nil {
		t.Error("a beginning that names none goes on with a connector, want it refused: the rest is not seen")
	}
}

// SGLang aborts every request whose id begins with that of a client that left, so no client chooses one, and none that is short
// for its responses.
func TestNoClientNamesRequestsOfOthers(t *testing.T) {
	deep := strings.Repeat("[", 600) + strings.Repeat("]", 600)
	long := strings.Repeat("x", 30)
	for _, c := range []struct {
		path, body, want string // "": 400; "same": unchanged
	}{
		{"/v1/completions", `{"model":"demo","prompt":"x","rid":"a"}`, `{"model":"demo","prompt":"x"}`},
		{"/v1/completions", `{"model":"demo","rid":["a"],"prompt":"x","\u0072id":"b"}`, `{"model":"demo","prompt":"x"}`},
		{"/v1/chat/completions", `{"model":"demo","rid":"a","messages":[{"role":"user","content":"x"}]}`, `{"model":"demo","messages":[{"role":"user","content":"x"}]}`},
		{"/generate", `{"text":"x","rid":"` + long + `"}`, `{"text":"x"}`},
		{"/v1/embeddings", `{"model":"demo","input":"x","rid":""}`, `{"model":"demo","input":"x"}`},
		{"/vertex_generate", `{"instances":[{"text":"x"}],"parameters":{"rid":"a"},"rid":"b"}`, `{"instances":[{"text":"x"}],"parameters":{}}`},
		{"/v1/responses", `{"model":"demo","input":"x","store":false,"request_id":"r","rid":"a"}`, `{"model":"demo","input":"x","store":false}`},
		{"/v1/responses", `{"model":"demo","input":"x","store":false,"request_id":"` + long + `"}`, "same"},
		{"/v1/completions", `{"model":"demo","prompt":"\"rid\":\"a\"","grid":"a","suffix":"rid"}`, "same"},
		{"/v1/completions", `{"model":"demo","prompt":"x","y":` + deep + `,"rid":"a"}`, ""},
		{"/invocations", strings.Join(strings.Split(`{"rid":"a"}`, ""), "\x00") + "\x00", ""},
		{"/invocations", `{"model":"demo","prompt":"rid","y":"grid"}`, "same"},
	} {
		w := worker("a", 0)
		w.Engine, w.Models = "sglang", nil
		b := newBench(t, "", w)
		d, _ := b.ask(c.path, c.body)
		switch got := string(d.Body); {
		case c.want == "" && (d.Reject == nil || d.Reject.Status != 400), c.want == "same" && (d.Reject != nil || d.Body != nil), len(c.want) > 4 && got != c.want:
			t.Errorf("%s %.80s: got %+v and %s, want %q", c.path, c.body, d.Reject, got, c.want)
		}
		end(&d, 200)
	}
}

// An id that the model does not have ends a stock SGLang. vLLM refuses it by itself.
func TestNoIDsEndAnSGLang(t *testing.T) {
	many := strings.Repeat(`"x":0,`, 2000) // fields that no engine knows
	for _, engines := range [][2]shape.Engine{{shape.SGLang, shape.SGLang}, {shape.VLLM, shape.VLLM}, {shape.VLLM, shape.SGLang}} {
		refuses, engine := engines[1] == shape.SGLang, engines[1] // engines[0] is the model's, this its worker's
		served := servedQwen(t)
		served.Engine = engines[0]
		c := config.Default()
		b, err := New(Options{Config: &c, Models: []*fleet.Model{served}, Metrics: observe.New("test"), Log: zerolog.Nop()})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(b.Close)
		w := worker("a", 0)
		w.Engine = engine.String()
		b.Fleet().SetWorkers([]workers.Worker{w})
		for _, c := range []struct {
			path, fields string
			bad          bool
		}{
			{"/v1/completions", `"prompt":[-1]`, true}, {"/v1/completions", `"prompt":[999999999]`, true}, {"/v1/completions", `"prompt":[[1],[999999999]]`, true},
			{"/v1/completions", `"prompt":[[1],["999999999"]]`, true}, {"/v1/completions", `"pr\u006fmpt":[1e9]`, true}, {"/v1/completions", `"prompt":[151669]`, true},
			{"/v1/completions", `"prompt":"x","prompt":[-1]`, true}, {"/v1/completions", `"prompt":"x","stop_token_ids":[999999999]`, true},
			{"/v1/completions", many + `"prompt":"x","stop_token_ids":[999999999]`, true}, {"/v1/score", many + `"query":"x","items":[[-1]]`, true},
			{"/generate", `"text":"x","sampling_params":{"stop_token_ids":[1],"stop_token_ids":[-1]}`, true},
			{"/generate", `"text":"x","sampling_params":{"stop_token_ids":[-1],"stop_token_ids":[1]}`, false}, {"/v1/completions", many + `"prompt":"x"`, false},
			{"/v1/chat/completions", `"messages":[{"role":"user","content":"x"}],"logprobs":true,"top_logprobs":1000000`, true}, {"/v1/completions", `"prompt":"x","logprobs":1e9`, true},
			{"/v1/completions", `"prompt":"x","logprobs":" 1_000_000"`, true}, {"/generate", `"text":"x","top_logprobs_num":999999999999999999999999999999`, true},
			{"/generate", many + `"text":["x"],"top_logprobs_num":[151670]`, true}, {"/generate", `"text":"x","top_logprobs_num":151669`, false},
			{"/v1/chat/completions", `"messages":[{"role":"user","content":"x"}],"logprobs":true,"top_logprobs":20`, false}, {"/v1/completions", `"prompt":"x","logprobs":true`, false},
			{"/v1/completions", `"prompt":"x","n":5000000`, true}, {"/v1/completions", `"prompt":"x","n":"5000000"`, true}, {"/v1/completions", `"prompt":["x","y"],"n":32769`, true},
			{"/generate", `"text":"x","sampling_params":{"n":65537}`, true}, {"/generate", `"text":"x","n":"nan","sampling_params":{"n":65537}`, true}, {"/generate", `"text":["x","y"],"sampling_params":[{"n":1},{"n":65537}]`, true},
			{"/generate", `"text":["x"` + strings.Repeat(`,"x"`, 999) + `],"input_ids":[1],"sampling_params":{"n":66}`, true},
			{"/generate", `"text":["x"` + strings.Repeat(`,"x"`, 999) + `],"input_ids":[1],"sampling_params":{"n":65}`, false},
			{"/generate", `"input_embeds":[[[0.1]]` + strings.Repeat(`,[[0.1]]`, 999) + `],"sampling_params":{"n":66}`, true},
			{"/generate", `"input_embeds":[[0.1]` + strings.Repeat(`,[0.1]`, 999) + `],"sampling_params":{"n":66}`, false}, // one prompt
			{"/generate", `"text":"x","sampling_params":[{"n":66}` + strings.Repeat(`,{"n":66}`, 999) + `]`, true},
			{"/generate", `"text":"x","lora_path":["x"` + strings.Repeat(`,"x"`, 999) + `],"sampling_params":{"n":66}`, true},
			{"/v1/chat/completions", `"messages":[{"role":"user","content":"x"}` + strings.Repeat(`,{"role":"assistant","content":"x"},{"role":"user","content":"x"}`, 500) + `],"n":128`, false},
			{"/v1/completions", `"prompt":["x","y"],"n":32768`, false}, {"/v1/completions", `"prompt":"x","n":1`, false}, {"/generate", `"text":"x","sampling_params":{"n":65536}`, false},
			{"/v1/completions", `"prompt":[` + strings.Repeat(`1,`, 70000) + `1],"n":2`, false}, {"/v1/completions", `"prompt":[` + strings.Repeat(`"x",`, 70000) + `"x"]`, false},
			{"/v1/completions", `"prompt":[-1],"prompt":"x"`, false}, // Python reads the last of equal keys
			{"/generate", `"input_ids":[-1]`, true}, {"/generate", `"input_ids":["999999999"]`, true}, {"/generate", `"input_ids":[[1],[2],[999999999]]`, true},
			{"/generate", `"text":"x","sampling_params":{"stop_token_ids":[-1]}`, true}, {"/generate", `"text":["x"],"sampling_params":[{"stop_token_ids":[-1]}]`, true},
			{"/v1/chat/completions", `"messages":[{"role":"user","content":"x"}],"input_ids":[999999999]`, true},
			{"/v1/embeddings", `"input":[999999999]`, true}, {"/v1/score", `"query":"x","items":[[999999999]]`, true}, {"/v1/score", `"query":"x","items":["x"],"label_token_ids":[999999999]`, true},
			{"/v1/completions", `"prompt":[1,151668]`, false}, {"/v1/completions", `"prompt":["999999999","-1"]`, false}, {"/v1/completions", `"prompt":[[1],[2,3]]`, false},
			{"/generate", `"input_ids":[1,2],"sampling_params":{"stop_token_ids":[3],"max_new_tokens":4}`, false}, {"/v1/embeddings", `"input":"x"`, false},
			{"/v1/responses", `"input":[{"role":"user","content":"x"}]`, false}, {"/v1/completions", `"prompt":"x","stop_token_ids":null`, false},
			{"/v1/completions", `"prompt":"x","top_k":2147483648`, true}, {"/v1/completions", `"prompt":"x","top_k":"2147483648"`, true}, {"/v1/completions", `"prompt":"x","top_k":2147483647`, false},
			{"/v1/responses", `"input":"x","top_k":2147483648.0`, true}, {"/v1/chat/completions", `"messages":[{"role":"user","content":"x"}],"min_tokens":4294967296`, true},
			{"/generate", `"text":"x","sampling_params":{"top_k":2147483648}`, true}, {"/generate", `"text":["x"],"sampling_params":[{"min_new_tokens":2147483648}]`, true},
			{"/generate", `"text":"x","sampling_params":{"top_k":-1,"min_new_tokens":8}`, false}, {"/v1/completions", `"prompt":"x","top_k":-1,"min_tokens":10`, false},
			{"/v1/completions", `"prompt":[1,"999999999"]`, true}, {"/v1/completions", `"prompt":["1",999999999]`, true}, {"/v1/completions", `"prompt":["999999999",1]`, true},
			{"/v1/completions", `"prompt":[true,"999999999"]`, true}, {"/v1/completions", `"prompt":["999999999",false]`, true}, {"/v1/completions", `"prompt":[null,"999999999"]`, true},
			{"/v1/completions", `"prompt":["a",[999999999]]`, true}, {"/v1/completions", `"prompt":[[[999999999]]]`, true}, {"/v1/completions", `"prompt":[1.0,2]`, true},
			{"/v1/embeddings", `"input":[1,"999999999"]`, true}, {"/v1/score", `"query":["999999999"],"items":["a"]`, true}, {"/v1/score", `"query":[1,2],"items":["a","1"]`, false},
			{"/v1/score", `"query":"x","items":[[1],["999999999"]]`, true}, {"/v1/rerank", `"query":[{"type":"text","text":"x"}],"documents":["x"]`, false},
			{"/v1/embeddings", `"input":["1","2"]`, false}, {"/v1/embeddings", `"input":[{"text":"x"},{"text":"y"}]`, false},
			{"/generate", `"text":"x","token_ids_logprob":[[1],null]`, false}, {"/generate", `"text":"x","token_ids_logprob":[null,["999999999"]]`, true},
		} {
			d := extproc.Await(t.Context(), b.Decide(t.Context(), &extproc.Request{ID: "r", Method: "POST", Path: c.path, Body: []byte(`{"model":"demo",` + c.fields + `}`)}))
			code := "kvlane_token_ids"
			if strings.Contains(c.fields, `logprobs"`) || strings.Contains(c.fields, `logprobs_num"`) {
				code = "kvlane_too_many_logprobs"
			} else if strings.Contains(c.fields, `"n":`) {
				code = "kvlane_too_many_answers"
			} else if strings.Contains(c.fields, `"top_k"`) || strings.Contains(c.fields, `"min_`) {
				code = "kvlane_number_too_large"
			}
			if refused := d.Reject != nil && d.Reject.Details == code && d.Reject.Status == 400; refused != (c.bad && refuses) || !refused && d.Reject != nil {
				t.Errorf("%v, %s with %s: got %+v, want refused %v", engine, c.path, c.fields, d.Reject, c.bad && refuses)
			}
			end(&d, 200)
		}
		// Names that Kvlane does not know, which SGLang serves like its model's, and bodies that Python reads and Kvlane does not.
		w.Models = nil
		b.Fleet().SetWorkers([]workers.Worker{w})
		utf16 := []byte{0xff, 0xfe}
		for _, c := range `{"model":"demo","prompt":[-1]}` {
			utf16 = append(utf16, byte(c), 0)
		}
		for _, c := range []struct {
			body string
			bad  bool
		}{
			{`{"model":"unknown","prompt":[-1]}`, true}, {`{"model":"unknown","prompt":[1]}`, false}, {string(utf16), true},
			{`{"model":"demo","prompt":[-1],"x":` + strings.Repeat("[", 600) + strings.Repeat("]", 600) + `}`, true},
			{"{\"model\":\"demo\",\"prompt\":[-1],\"x\":\"\xed\xa0\x80\"}", true},
		} {
			d := extproc.Await(t.Context(), b.Decide(t.Context(), &extproc.Request{ID: "r", Method: "POST", Path: "/v1/completions", Body: []byte(c.body)}))
			if refused := d.Reject != nil && d.Reject.Status == 400; refused != (c.bad && refuses) || !refused && d.Reject != nil {
				t.Errorf("%v, %.60q: got %+v, want refused %v", engine, c.body, d.Reject, c.bad && refuses)
			}
			if d.Reject != nil && d.Reject.Details == "kvlane_unread_body" && !strings.Contains(string(d.Reject.Body), "because it might end SGLang: ") {
				t.Errorf("%v, %.60q: got %s, want why it has to be read", engine, c.body, d.Reject.Body)
			}
			end(&d, 200)
		}
		// A body of which a part is here only is not looked into: nothing says what the rest is.
		r := &extproc.Request{ID: "r", Method: "POST", Path: "/v1/completions", Body: []byte(`{"model":"demo","prompt":[-1],`), Partial: true}
		d := extproc.Await(t.Context(), b.Decide(t.Context(), r))
		if e := b.decisions.Find("r"); d.Reject != nil || d.Endpoint == "" || d.Body != nil || e.Degraded != degradedPartial {
			t.Errorf("%v, a part of a body: got %+v, degraded %q, want it to pass", engine, d.Reject, e.Degraded)
		}
		end(&d, 200)
	}
}

// The refusal of a body that cannot be read names the one setting for which it has to be.
func TestTheCauseThatABodyHasToBeReadIsNamed(t *testing.T) {
	const hosts, plain = "{\"kv_transfer_params\":\"\xed\xa0\x80\"}", "{\"prompt\":\"\xed\xa0\x80\"}"
	for text, want := range map[string][2]string{ // of these two bodies
		"":                                      {"it might name hosts to an engine", ""},
		"disagg: {trust_client_params: true}\n": {"", ""},
		"disagg: {connector: nixl}\n":           {"it might name hosts to an engine", "it might name hosts to an engine"},
		"limits: {media_urls: [data]}\n":        {"limits.media_urls bounds what engines fetch", "limits.media_urls bounds what engines fetch"},
		"tenants: {salt_header: x-tenant}\n":    {"tenants have caches of their own", "tenants have caches of their own"},
	} {
		b := newBench(t, text, worker("a", 0))
		for i, raw := range []string{hosts, plain} {
			r := b.request("/v1/completions", raw)
			r.Headers = append(r.Headers, extproc.Header{Name: "x-tenant", Value: "t"})
			d := b.Decide(t.Context(), r)
			switch got := d.Reject; {
			case (got != nil) != (want[i] != ""):
				t.Errorf("%q, %q: got %+v, want refused for %q", text, raw, got, want[i])
			case got != nil && (got.Details != "kvlane_unread_body" || !strings.Contains(string(got.Body), "the body has to be read, because "+want[i]+": ")):
				t.Errorf("%q, %q: got %s %s, want the cause %q", text, raw, got.Details, got.Body, want[i])
			}
			end(&d, 200)
		}
	}
}

// Engines repeat salts and ids of sessions in each of their events.
func TestLongNamesReachNoEngine(t *testing.T) {
	b := newBench(t, "", worker("a", 0))
	for _, field := range []string{`"session_id":"%s"`, `"cache_salt":"%s"`, `"extra_key":["a","%s"]`, `"vllm_xargs":{"session_id":"%s"}`, `"session\u005fid":"%s"`,
		`"x":[{"type":"image_url","image_url":{"url":"data:,"},"uuid":"%s"}]`, `"x":[{"uuid":null,"u\u0075id" : "%s"}]`, `"features":{"mm_hashes":{"image":["a","%s"]}}`} {
		for n, refused := range map[int]bool{4000: false, 4095: true, 1 << 20: true} {
			for _, path := range []string{"/v1/completions", "/other"} {
				d, _ := b.ask(path, `{"model":"demo","prompt":"x",`+fmt.Sprintf(field, strings.Repeat("x", n))+`}`)
				if got := d.Reject != nil && d.Reject.Status == 400 && d.Reject.Details == "kvlane_name_too_long"; got != refused {
					t.Errorf("%s, %d bytes in %s: got %+v, want refused %v", path, n, field, d.Reject, refused)
				}
				end(&d, 200)
			}
		}
	}
	for _, field := range []string{`"uuid":1,"x":"%s"`, `"x":["uuid","%s"]`, `"uuids":"%s"`, `"x":[{"uuid":"a"},"%s"]`} {
		d, _ := b.ask("/v1/completions", `{"model":"demo","prompt":"x",`+fmt.Sprintf(field, strings.Repeat("x", 5000))+`}`)
		if d.Reject != nil {
			t.Errorf("%s: got %+v, want no refusal", field, d.Reject)
		}
		end(&d, 200)
	}
}
