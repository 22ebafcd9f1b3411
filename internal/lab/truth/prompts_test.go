package truth

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Own recordings: an answer that is equal, a refusal that is recognised, and one of each
// that is not.
var own = strings.Join([]string{
	`{"template":null,"case":0,"label":"same","body":{"messages":[{"role":"user","content":"Hello, world"}]},` +
		`"render":{"status":200,"ids":[151644,872,198,9707,11,1879,151645,198,151644,77091,198],"other":{"sampling_params":{"max_tokens":1013}}},` +
		`"tokenize":{"status":200,"ids":[151644,872,198,9707,11,1879,151645,198,151644,77091,198]}}`,
	`{"template":"own.jinja","case":1,"label":"template","body":{"messages":[{"role":"user","content":"Hello"}]},"render":{"status":200,"ids":[9707]}}`,
	`{"template":null,"case":2,"label":"refused","body":{"messages":[{"role":"user","content":5}]},"render":{"status":400,"error":"no"}}`,
	`{"template":null,"case":3,"label":"another id","body":{"messages":[{"role":"user","content":"Hello, world"}]},` +
		`"render":{"status":200,"ids":[151644,872,198,9707,11,1880,151645,198,151644,77091,198]}}`,
	`{"template":null,"case":4,"label":"not refused","body":{"messages":[{"role":"user","content":"x"}]},"render":{"status":400,"error":"no"}}`,
	`{"template":null,"case":5,"label":"refused by us","body":{"messages":[{"role":"user","content":5}]},"render":{"status":200,"ids":[1]}}`,
}, "\n")

var ownTimeline = strings.Join([]string{
	`{"kind":"meta","engine":"vllm","flags":"--max-model-len 1024"}`,
	`{"kind":"http","t_sent":1,"t":2,"n":1,"label":"usage","method":"POST","path":"/v1/completions","body":"{\"prompt\":\"Hello, world\"}","status":200,` +
		`"resp":{"usage":{"prompt_tokens":3}}}`,
	`{"kind":"http","t_sent":1,"t":2,"n":2,"label":"stream","method":"POST","path":"/v1/completions","body":"{\"prompt\":\"Hello, world\",\"stream\":true}","status":200,` +
		`"sse":[[0.1,"data: {\"usage\":{\"prompt_tokens\":4}}"],[0.2,""]]}`,
	`{"kind":"http","t_sent":1,"t":2,"n":3,"label":"ids","method":"POST","path":"/v1/completions","body":"{\"prompt\":\"Hello, world\"}","status":200,` +
		`"resp":{"choices":[{"prompt_token_ids":[9707,11,1879]}]}}`,
	`{"kind":"http","t_sent":1,"t":2,"n":4,"label":"not JSON","method":"POST","path":"/v1/completions","body":"{","status":400,"resp":{}}`,
	`{"kind":"http","t_sent":1,"t":2,"n":5,"label":"other","method":"POST","path":"/reset_prefix_cache","body":"","status":200}`,
}, "\n")

func TestEachDifferenceIsReported(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string][]byte{
		"chat_vllm_qwen3_own.jsonl.gz": packed(t, own), "vllm_00_own.jsonl.gz": packed(t, ownTimeline), "own.jinja": []byte("{{ messages[0].content }}"),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var out strings.Builder
	differ, err := run(&out, dir, models, dir)
	if err != nil || !differ {
		t.Fatalf("differ %v, %v, want true and no error", differ, err)
	}
	for _, line := range []string{"case 3 (another id)", "token 5 differs", "case 4 (not refused)", "case 5 (refused by us)",
		"2 (stream) /v1/completions: 3 ids, the engine counted 4", "total: 2 recordings, 10 requests, 5 answers with the same ids, 2 refused as the engine does, 4 differ\n"} {
		if !strings.Contains(out.String(), line) {
			t.Errorf("got\n%s\nwant a line with %q", &out, line)
		}
	}
}
