package enginesim

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"testing"
)

func TestSidecar(t *testing.T) {
	x := startPair(t, Options{})
	s, err := StartSidecar(x.d.Addr(), x.p.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	post := func(body m, header ...string) (int, string) {
		t.Helper()
		raw, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+s.Addr()+"/v1/completions", bytes.NewReader(raw))
		if err != nil {
			t.Fatal(err)
		}
		for i := 0; i+1 < len(header); i += 2 {
			req.Header.Add(header[i], header[i+1])
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(text)
	}
	status, text := post(x.body(m{"min_tokens": 2}), "x-prefiller-host-port", x.p.Addr(), "x-request-id", "one")
	x.received(t, &answer{status: status, raw: []byte(text)})
	if status, text = post(x.body(m{"prompt": words("Other", 22), "stream": true}), "x-request-id", "two"); status != http.StatusOK || len(x.p.Stats().Requests) != 1 {
		t.Errorf("without the header: %d %s", status, text)
	}
	for name, header := range map[string][]string{
		"another engine": {"x-prefiller-host-port", x.d.Addr(), "x-request-id", "three"},
		"two engines":    {"x-prefiller-host-port", x.p.Addr(), "x-prefiller-host-port", x.p.Addr(), "x-request-id", "four"},
		"no request id":  {"x-prefiller-host-port", x.p.Addr()},
	} {
		if status, text = post(x.body(nil), header...); status != http.StatusForbidden && status != http.StatusBadRequest {
			t.Errorf("%s: %d %s", name, status, text)
		}
	}
	if status, text = post(x.body(m{"model": "nobody"}), "x-prefiller-host-port", x.p.Addr(), "x-request-id", "five"); status == http.StatusOK {
		t.Errorf("what prefill refuses: %d %s", status, text)
	}
	if c := s.Counts(); c["split"] != 1 || c["passed"] != 1 || len(c) != 5 {
		t.Errorf("%v", c)
	}
}
