package engines

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os/exec"
	"slices"
	"strconv"
	"strings"
)

// oddBodies is how many bodies of bodies.py are put to each endpoint.
const oddBodies = 200

// oddAPIs are bodies.py's APIs and the endpoints that show how the engine interprets them.
var oddAPIs = map[*kind]map[string]string{
	vllm: {"chat": "/v1/chat/completions/render", "completions": "/v1/completions/render", "messages": "/v1/messages/render",
		"responses": "/v1/responses/render", "tokenize": "/tokenize"},
	sglang: {"tokenize": "/v1/tokenize", "count_tokens": "/v1/messages/count_tokens"},
}

// refusals compares what `kvlane render` refuses, and its ids, with the engine: for bodies that are valid, nearly valid and
// hostile.
func (b *bed) refusals() {
	for api, path := range oddAPIs[b.kind] {
		out, err := exec.Command("python3", "bodies.py", api, "e2e", strconv.Itoa(oddBodies)).Output()
		if err != nil {
			b.t.Fatal(err)
		}
		bodies := bytes.Split(bytes.TrimSuffix(out, []byte("\n")), []byte("\n"))
		ours := b.run(bodies, "render", "--tokenizer", qwen3, "--engine", b.name, "--path", path, "--tokens", "--tool-parser",
			"--trust-request-templates="+strconv.FormatBool(b.kind == vllm), "--max-model-len", strconv.Itoa(contextOf))
		equal, refused, unjudged, taken := 0, 0, 0, 0
		for i, body := range bodies {
			switch b.compareOdd(path, body, ours[i]) {
			case "equal":
				equal++
			case "refused":
				refused++
			case "not judged":
				unjudged++
			case "engine alone":
				taken++
			}
		}
		b.t.Logf("%-30s %d bodies: %d with equal ids, %d refused by both, %d by the engine alone, %d not judged", path, len(bodies), equal, refused,
			taken, unjudged)
	}
}

// compareOdd returns the outcome of a body, and reports a difference.
func (b *bed) compareOdd(path string, body, line []byte) string {
	b.t.Helper()
	var ours struct {
		IDs     []uint32 `json:"ids"`
		Error   string   `json:"error"`
		Partial string   `json:"partial"`
	}
	if err := json.Unmarshal(line, &ours); err != nil {
		b.t.Fatal(err)
	}
	status, answer := b.ask(http.MethodPost, path, body)
	if status == 0 { // a busy machine
		status, answer = b.ask(http.MethodPost, path, body)
	}
	served, isRender := strings.CutSuffix(path, "/render")
	switch {
	case status == http.StatusNotFound, bytes.Contains(answer, []byte("body.model")), bytes.Contains(answer, []byte(`"model: Field required`)),
		bytes.Contains(answer, []byte("the render endpoint")),
		bytes.Contains(answer, []byte("stateless render endpoint")), status == http.StatusOK && ours.Partial != "":
		return "not judged" // which model, what only that endpoint refuses, what only the engine knows
	case status != http.StatusOK && ours.Error != "":
		return "refused"
	case status != http.StatusOK: // for its fields' types or values, which Kvlane does not check
		return "engine alone"
	case status == http.StatusOK && ours.Error != "" && isRender:
		if status, _ = b.ask(http.MethodPost, served, body); status != http.StatusOK {
			return "refused" // when it is served
		}
	}
	var theirs struct {
		Tokens   json.RawMessage `json:"tokens"`
		TokenIDs []uint32        `json:"token_ids"`
		Count    int             `json:"input_tokens"`
	}
	if list, ok := bytes.CutPrefix(answer, []byte("[")); ok {
		answer = list
	}
	if err := json.NewDecoder(bytes.NewReader(answer)).Decode(&theirs); ours.Error != "" || err != nil {
		b.t.Errorf("%s: the engine's status %d %.300s, ours %s\n%s", path, status, answer, line, body)
		return ""
	}
	if ids := append(firstIDs(theirs.Tokens), theirs.TokenIDs...); !slices.Equal(ids, ours.IDs) && (theirs.Count == 0 || theirs.Count != len(ours.IDs)) {
		b.t.Errorf("%s: the engine's ids %v, ours %v\n%s", path, ids, ours.IDs, body)
		return ""
	}
	return "equal"
}

// firstIDs are the ids of a prompt, or of the first one of a batch.
func firstIDs(raw json.RawMessage) (ids []uint32) {
	var batch [][]uint32
	if json.Unmarshal(raw, &batch) == nil && len(batch) > 0 {
		return batch[0]
	}
	if json.Unmarshal(raw, &ids) != nil {
		return nil
	}
	return ids
}
