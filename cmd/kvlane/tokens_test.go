package main

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/models"
	"github.com/kvlane/kvlane/internal/tokens/shape"
)

func TestTokensCheckTellsWhatDiffers(t *testing.T) {
	files, err := models.Open("builtin:qwen3")
	if err != nil {
		t.Fatal(err)
	}
	m, err := shape.Load(files, shape.Options{})
	if err != nil {
		t.Fatal(err)
	}
	var wrong atomic.Bool
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/models" {
			_, _ = io.WriteString(w, `{"data":[{"id":"base"}]}`)
			return
		}
		raw, _ := io.ReadAll(r.Body)
		req, err := body.Parse(body.Tokenize, raw)
		if err != nil || !strings.Contains(string(raw), `"base"`) {
			http.Error(w, "no such model", http.StatusBadGateway)
			return
		}
		res, err := m.Prompt(req, shape.VLLM)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		ids := append([]uint32(nil), res.IDs...)
		if wrong.Load() {
			ids[0]++
		}
		_, _ = fmt.Fprintf(w, `{"tokens":%s}`, body.AppendIDList(nil, ids))
	}))
	defer http.DefaultClient.CloseIdleConnections()
	defer engine.Close()

	args := []string{"tokens-check", "--tokenizer", "builtin:qwen3", "--engine", engine.URL}
	if code, out, errs := kvlane("", args...); code != 0 || !strings.Contains(out, " prompts compared, 0 differ") || !strings.Contains(out, "same ") {
		t.Errorf("code %d\n%s%s", code, out, errs)
	}
	wrong.Store(true)
	if code, out, errs := kvlane("", args...); code != 1 || !strings.Contains(out, "differs ") || !strings.Contains(errs, "prompts with other ids: ") {
		t.Errorf("code %d\n%s%s", code, out, errs)
	}
	if code, _, errs := kvlane("", append(args, "--model", "other")...); code != 1 || !strings.Contains(errs, "could not be compared") {
		t.Errorf("code %d: %s", code, errs)
	}
	if code, _, errs := kvlane("", append(args, "--kind", "x")...); code != 2 || !strings.Contains(errs, "unknown engine") {
		t.Errorf("code %d: %s", code, errs)
	}
}

func TestTokensCheckNeedsAModel(t *testing.T) {
	small, answer, status := smallTokenizer(t), "", http.StatusOK
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		_, _ = io.WriteString(w, answer)
	}))
	defer engine.Close()
	for _, c := range []struct {
		status       int
		answer, want string
	}{
		{200, `{"data":[]}`, "GET /v1/models: no list of models (name one with --model)"},
		{200, `no json`, "(name one with --model)"},
		{404, `{}`, "GET /v1/models: no list of models (name one with --model)"},
		{503, `{}`, "/v1/models: status 503\n"},
	} {
		answer, status = c.answer, c.status
		code, _, errs := kvlane("", "tokens-check", "--tokenizer", small, "--engine", engine.URL+"/")
		if code != 1 || !strings.Contains(errs, c.want) {
			t.Errorf("%d %s: code %d: %s", c.status, c.answer, code, errs)
		}
	}
}
