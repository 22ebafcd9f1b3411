package shape_test

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/encoders"
	"github.com/kvlane/kvlane/internal/tokens/shape"
)

// A family is a row of docs/models.md: models that an engine does not render by a chat template.
type family struct {
	name         string
	modelType    string   // of config.json, "" if it does not matter
	architecture string   // of config.json
	files        []string // others that decide
	vllm, sglang string   // how chats are treated
	recorded     []string // recordings of vLLM's and SGLang's chats below testdata, for those that are exact
}

const (
	exact    = "exact"
	template = "by its chat template"
	fallback = template + "; by load if the folder has none" // vLLM has one of its own then
	byLoad   = "by load: its encoder is missing"
	unserved = "not served"

	noTemplate = "by load: it has no chat template"
)

var families = []family{
	{"gpt-oss", "gpt_oss", "GptOssForCausalLM", nil, exact, template, []string{"encoders/harmony"}},
	{"DeepSeek-V3.2", "deepseek_v32", "DeepseekV32ForCausalLM", nil, exact, exact, []string{"encoders/deepseek_v32", "bodies/sglang_dsv32_conversations"}},
	{"DeepSeek-V4, text", "deepseek_v4", "DeepseekV4ForCausalLM", nil, exact, byLoad, []string{"encoders/deepseek_v4"}},
	{"DeepSeek-V4 with images", "deepseek_v4", "DeepseekV4ForConditionalGeneration", nil, exact + " up to the first image", unserved, []string{"encoders/deepseek_v4"}},
	{"DeepSeek-V4.1", "deepseek_v41", "DeepseekV41ForCausalLM", nil, exact + " up to the first image", byLoad, []string{"encoders/deepseek_v41"}},
	{"Kimi K3", "kimi_k3", "KimiK3ForConditionalGeneration", nil, byLoad, byLoad, nil},
	{"Kimi K3, text", "kimi_k3", "KimiK3LinearForCausalLM", nil, unserved, byLoad, nil},
	{"Kimi-Audio", "kimi_audio", "MoonshotKimiaForCausalLM", nil, byLoad, unserved, nil},
	{"Inkling, text", "inkling", "InklingForCausalLM", nil, exact, unserved, []string{"encoders/inkling"}},
	{"Inkling", "inkling", "InklingForConditionalGeneration", nil, exact + " up to the first medium", byLoad, []string{"encoders/inkling"}},
	{"Mistral in its own format", "mistral", "MistralForCausalLM", []string{"tekken.json", "consolidated.safetensors"}, exact + " up to the first medium", template, []string{"encoders/mistral_v3", "encoders/mistral_tekken_v13"}},
	{"Mistral in Hugging Face's format", "mistral", "MistralForCausalLM", []string{"tekken.json"}, template, template, nil},
	{"Cohere", "cohere2", "Cohere2ForCausalLM", nil, template, template, nil},
	{"DeepSeek-OCR", "deepseek-ocr", "DeepseekOCRForCausalLM", nil, fallback, byLoad, nil},
	{"DeepSeek-VL2", "deepseek_vl_v2", "DeepseekVL2ForCausalLM", nil, unserved, byLoad, nil},
	{"InternVL", "internvl_chat", "InternVLChatModel", nil, template, byLoad, nil},
	{"Janus", "multi_modality", "MultiModalityCausalLM", nil, unserved, byLoad, nil},
	{"MiniCPM-o", "minicpmo", "MiniCPMO", nil, template, byLoad, nil},
	{"MiniCPM-V up to 4.5", "minicpmv", "MiniCPMV", nil, fallback, byLoad, nil},
	{"MOSS-VL", "moss_vl", "MossVLForConditionalGeneration", nil, unserved, byLoad, nil},
	{"PaddleOCR-VL", "paddleocr_vl", "PaddleOCRVLForConditionalGeneration", nil, template, byLoad, nil},
	{"Phi-4-multimodal", "phi4mm", "Phi4MMForCausalLM", nil, template, byLoad, nil},
	{"Unlimited-OCR", "unlimited-ocr", "UnlimitedOCRForCausalLM", nil, fallback, byLoad, nil},
	{"Whisper", "whisper", "WhisperForConditionalGeneration", nil, template, byLoad, nil},
	{"Kimi K2", "kimi_k2", "DeepseekV3ForCausalLM", nil, template, template, nil},
}

// A mode is how an engine makes prompts of chats: a name of vLLM's registries of renderers and tokenizers, or of what SGLang
// encodes in code. testdata/modes.txt lists those of the installed engines.
type mode struct {
	registry, name string
	when           string // the engine uses it
	treated        string
}

var modes = []mode{
	{"vLLM", "hf", "all other models", "by its chat template"},
	{"vLLM", "mistral", "Mistral's own format", "exact up to the first medium"},
	{"vLLM", "deepseek_v32", "DeepSeek-V3.2", "exact"},
	{"vLLM", "deepseek_v4", "DeepSeek-V4", "exact up to the first image"},
	{"vLLM", "deepseek_v41", "DeepSeek-V4.1", "exact up to the first image"},
	{"vLLM", "inkling", "Inkling", "exact up to the first medium"},
	{"vLLM", "kimi_k3", "Kimi K3", "by load: the encoder is code of the model's folder"},
	{"vLLM", "kimi_audio", "Kimi-Audio", "by load: the tokenizer is code of vLLM's, and the folder has no chat template"},
	{"vLLM", "cohere", "only if the flag says so", "by load: it renders with a library that vLLM does not bring"},
	{"vLLM", "terratorch", "models of satellite images", "by load: they take images only"},
	{"SGLang", "dsv32", "DeepSeek-V3 and V3.2 without a template", "exact"},
	{"SGLang", "dsv4", "DeepSeek-V4", "by load: a library of its makers renders it, which is not followed"},
	{"SGLang", "dsv41", "DeepSeek-V4.1", "by load: so"},
	{"SGLang", "kimi_k3", "Kimi K3", "by load: the encoder is code of the model's folder"},
	{"SGLang", "inkling", "Inkling", "by load: a library of its makers renders it, which is not followed"},
}

// registries are the lists of testdata/modes.txt, with the engine under which modes has their names.
var registries = map[string]string{"vllm-renderer": "vLLM", "vllm-tokenizer": "vLLM", "sglang-encoding": "SGLang"}

// TestModes: docs/models.md lists the modes, each name of the engines' registries is a mode, and what an engine chooses by
// architecture or model type is a family.
func TestModes(t *testing.T) {
	t.Parallel()
	table := "| engine | mode | used for | chats |\n|---|---|---|---|\n"
	for _, m := range modes {
		table += fmt.Sprintf("| %s | `%s` | %s | %s |\n", m.registry, m.name, m.when, m.treated)
	}
	comparePage(t, "TestModes", table)
	list, err := os.ReadFile("testdata/modes.txt")
	if err != nil {
		t.Fatal(err)
	}
	for _, problem := range unlisted(string(list), page(t)) {
		t.Error(problem)
	}
	for _, line := range []string{"vllm-renderer new", "vllm-default inkling NewForCausalLM", "vllm-default new InklingForCausalLM", "sglang-encoding hf", "sglang-conversation new x", "vllm-fallback new", "new x"} {
		if unlisted(line, page(t)) == nil {
			t.Errorf("%s: got no problem, want one", line)
		}
	}
}

// unlisted returns what the tables, or the page, lack of a list of architectures.py.
func unlisted(list, page string) (problems []string) {
	for line := range strings.Lines(list) {
		f := strings.Fields(line)
		hasMode := func(registry, name string) bool {
			return slices.ContainsFunc(modes, func(m mode) bool { return m.registry == registry && m.name == name })
		}
		var known bool
		switch f[0] {
		case "vllm-default":
			known = hasMode("vLLM", f[1]) && (f[2] == f[1] || slices.ContainsFunc(families, func(of family) bool { return of.architecture == f[2] && !strings.HasPrefix(of.vllm, template) }))
		case "vllm-fallback":
			known = strings.Contains(page, "`"+f[1]+"`")
		case "vllm-unread": // the rules are vllmCacheRules; a place that is not listed is one to read
			known = true
		case "sglang-conversation":
			known = slices.ContainsFunc(families, func(of family) bool { return of.modelType == f[1] && of.sglang == byLoad })
		default:
			known = hasMode(registries[f[0]], f[1])
		}
		if !known {
			problems = append(problems, "no table has "+strings.TrimSpace(line))
		}
	}
	return problems
}

// TestRegistriesLive compares the lists with the registries of the engines in KVLANE_ENGINES.
func TestRegistriesLive(t *testing.T) {
	t.Parallel()
	folder := os.Getenv("KVLANE_ENGINES")
	if folder == "" {
		t.Skip("KVLANE_ENGINES names no folder of engines")
	}
	var packages []string
	for _, name := range []string{"vllm", "sglang"} {
		found, err := filepath.Glob(filepath.Join(folder, name, "lib/python*/site-packages", name))
		if err != nil || len(found) != 1 {
			t.Fatalf("got packages %v of %s, %v, want one", found, name, err)
		}
		packages = append(packages, found[0])
	}
	for file, further := range map[string][]string{"architectures.txt": nil, "modes.txt": {"modes"}} {
		list := exec.Command("python3", slices.Concat([]string{"../../../e2e/engines/architectures.py"}, packages, further)...)
		list.Stderr = os.Stderr
		got, err := list.Output()
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		recorded, err := os.ReadFile(filepath.Join("testdata", file))
		if err != nil {
			t.Fatal(err)
		}
		installed, ours := strings.Split(string(got), "\n"), strings.Split(string(recorded), "\n")
		for _, line := range installed {
			if !slices.Contains(ours, line) {
				t.Errorf("testdata/%s lacks %s", file, line)
			}
		}
		for _, line := range ours {
			if !slices.Contains(installed, line) {
				t.Errorf("testdata/%s has %s, the engines do not", file, line)
			}
		}
		t.Logf("%s: %d lines compared", file, len(ours)-1)
	}
}

var (
	updatePage = flag.Bool("update", false, "write the tables of docs/models.md")
	pageLock   sync.Mutex
)

// page returns docs/models.md.
func page(t *testing.T) string {
	t.Helper()
	pageLock.Lock()
	defer pageLock.Unlock()
	text, err := os.ReadFile("../../../docs/models.md")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// comparePage compares the part of docs/models.md that a test writes with -update.
func comparePage(t *testing.T, test, want string) {
	t.Helper()
	pageLock.Lock()
	defer pageLock.Unlock()
	const file, end = "../../../docs/models.md", "<!-- end -->\n"
	begin := "<!-- begin: written by " + test + " -update -->\n"
	page, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := strings.Cut(string(page), begin)
	was, after, ended := strings.Cut(rest, end)
	switch {
	case !found || !ended:
		t.Fatalf("%s has no place for what %s writes", file, test)
	case *updatePage:
		if err := os.WriteFile(file, []byte(before+begin+want+end+after), 0o600); err != nil {
			t.Fatal(err)
		}
	case was != want:
		t.Errorf("docs/models.md differs: run go test ./internal/tokens/shape -run %s -update\ngot %s\nwant %s", test, was, want)
	}
}

// TestFamilies: docs/models.md lists the families, each is treated as it says, and where the ids are exact there is a recording.
func TestFamilies(t *testing.T) {
	t.Parallel()
	table := "| family | architecture | vLLM | SGLang |\n|---|---|---|---|\n"
	for _, f := range families {
		table += fmt.Sprintf("| %s | `%s` | %s | %s |\n", f.name, f.architecture, f.vllm, f.sglang)
	}
	comparePage(t, "TestFamilies", table)
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			for engine, treated := range map[string]string{"encoders/": f.vllm, "bodies/sglang_": f.sglang} { // folders that tests play as a whole
				known := slices.ContainsFunc(f.recorded, func(name string) bool { return strings.HasPrefix(name, engine) })
				if known != strings.HasPrefix(treated, exact) {
					t.Errorf("%s: got recordings %q of %s", treated, f.recorded, engine)
				}
			}
			for _, name := range f.recorded {
				if _, err := os.Stat("testdata/" + name + ".jsonl.gz"); err != nil {
					t.Error(err)
				}
			}
			vllm, sglang := treatments(t, f)
			if f.vllm == unserved {
				vllm = f.vllm
			}
			if f.sglang == unserved {
				sglang = f.sglang
			}
			if f.vllm == fallback {
				if bare, _ := treatments(t, family{modelType: f.modelType, architecture: f.architecture}); bare != noTemplate {
					t.Errorf("without a template: got %q, want %q", bare, noTemplate)
				}
			}
			if !strings.HasPrefix(f.vllm, vllm) || !strings.HasPrefix(f.sglang, sglang) {
				t.Errorf("got %q and %q, want %q and %q", vllm, sglang, f.vllm, f.sglang)
			}
		})
	}
}

// treatments returns how vLLM's and SGLang's chats of a family are treated.
func treatments(t *testing.T, f family) (vllm, sglang string) {
	t.Helper()
	files := fstest.MapFS{
		"tokenizer.json": {Data: byteTokenizer(slices.Concat(inklingTokens, []string{"<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|channel|>"})...)},
		"config.json":    {Data: fmt.Appendf(nil, `{"model_type": %q, "architectures": [%q], "vision_config": {}}`, f.modelType, f.architecture)},
	}
	for _, name := range f.files {
		files[name] = &fstest.MapFile{Data: tekkenOf(t, "v13", bytesVocabulary())}
	}
	if f.sglang == template || strings.HasPrefix(f.vllm, template) {
		files["chat_template.jinja"] = &fstest.MapFile{Data: []byte("{{ messages[0].content }}")}
	}
	m, err := shape.Load(files, shape.Options{})
	if err != nil {
		t.Fatal(err)
	}
	of := func(engine shape.Engine) string {
		req, err := body.Parse(body.Chat, []byte(`{"messages": [{"role": "user", "content": "a"}]}`))
		if err != nil {
			t.Fatal(err)
		}
		res, err := m.RenderPrompt(req, engine)
		switch {
		case errors.Is(err, encoders.ErrMissing):
			return byLoad
		case errors.Is(err, shape.ErrNoTemplate):
			return noTemplate
		case err != nil:
			t.Fatal(err)
		case res.Text == "a":
			return template
		}
		return exact
	}
	return of(shape.VLLM), of(shape.SGLang)
}

// TestSGLangRewrites: what SGLang changes in code for MiniMax-M3 has no ids, and a low effort is an argument of Nemotron 3's template.
func TestSGLangRewrites(t *testing.T) {
	t.Parallel()
	const template = "{{ low_effort }}{{ truncate_history_thinking }}{{ messages|length }}"
	two := `,{"role":"assistant","tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}},{"id":"b","type":"function","function":{"name":"f","arguments":"{}"}}]},` +
		`{"role":"tool","tool_call_id":"b","content":"x"}`
	for _, c := range []struct {
		model, more, rest, want string // want: the text, "" if there is none
	}{
		{"minimax_m3_vl", "", "", "1"},
		{"minimax_m3_vl", two, "", "3"},
		{"minimax_m3_vl", two + `,{"role":"tool","tool_call_id":"a","content":"x"}`, "", ""},
		{"minimax_m3_vl", "", `,"reasoning_effort":"none"`, ""},
		{"minimax_m3_vl", "", `,"thinking":{"type":"disabled"}`, ""},
		{"minimax_m3_vl", "", `,"chat_template_kwargs":{"reasoning_effort":"none"}`, ""},
		{"nemotron_h", two + `,{"role":"tool","tool_call_id":"a","content":"x"}`, "", "4"},
		{"nemotron_h", "", `,"reasoning_effort":"high"`, "1"},
		{"nemotron_h", "", `,"reasoning_effort":"low"`, "True1"},
		{"nemotron_h", "", `,"reasoning_effort":"low","chat_template_kwargs":{"low_effort":0}`, "01"},
	} {
		m, err := shape.Load(fstest.MapFS{"tokenizer.json": {Data: byteTokenizer()}, "config.json": {Data: fmt.Appendf(nil, `{"model_type": %q}`, c.model)},
			"chat_template.jinja": {Data: []byte(template)}}, shape.Options{})
		if err != nil {
			t.Fatal(err)
		}
		req, err := body.Parse(body.Chat, []byte(`{"messages":[{"role":"user","content":"a"}`+c.more+`]`+c.rest+`}`))
		if err != nil {
			t.Fatal(err)
		}
		res, err := m.RenderPrompt(req, shape.SGLang)
		if c.want == "" && !errors.Is(err, encoders.ErrMissing) || c.want != "" && (err != nil || res.Text != c.want) {
			t.Errorf("%s%s%s: got %q, error %v, want %q", c.model, c.more, c.rest, res.Text, err, c.want)
		}
	}
}

// TestSGLangRendersInCode: chats of GLM-5.3 have no ids with SGLang, which does not render its template; those of the models
// before it, of other engines, and with a template of the request have.
func TestSGLangRendersInCode(t *testing.T) {
	t.Parallel()
	const template = "{#[gMASK]<sop> Reasoning Effort: <tool_call><arg_key><arg_value>#}{{ messages|length }}"
	for name, c := range map[string]struct {
		architecture, template, rest string
		engine                       shape.Engine
		missing                      bool
	}{
		"GLM-5.3":                {"GlmMoeDsaForCausalLM", template, "", shape.SGLang, true},
		"GLM-5.3-Flash":          {"Glm5NextForConditionalGeneration", template, "", shape.SGLang, true},
		"GLM-5":                  {"GlmMoeDsaForCausalLM", template + "{#enable_thinking#}", "", shape.SGLang, false},
		"GLM-4":                  {"Glm4MoeForCausalLM", template, "", shape.SGLang, false},
		"vLLM":                   {"GlmMoeDsaForCausalLM", template, "", shape.VLLM, false},
		"the request's template": {"GlmMoeDsaForCausalLM", template, `,"chat_template_kwargs":{"chat_template":"{#[gMASK]<sop> Reasoning Effort: <arg_key>#}1"}`, shape.SGLang, false},
	} {
		m, err := shape.Load(fstest.MapFS{"tokenizer.json": {Data: byteTokenizer()}, "config.json": {Data: fmt.Appendf(nil, `{"architectures": [%q]}`, c.architecture)},
			"chat_template.jinja": {Data: []byte(c.template)}}, shape.Options{TrustTemplates: true})
		if err != nil {
			t.Fatal(err)
		}
		req, err := body.Parse(body.Chat, []byte(`{"messages":[{"role":"user","content":"a"}]`+c.rest+`}`))
		if err != nil {
			t.Fatal(err)
		}
		res, err := m.RenderPrompt(req, c.engine)
		if c.missing && !errors.Is(err, encoders.ErrMissing) || !c.missing && (err != nil || res.Text != "1") {
			t.Errorf("%s: got %q, error %v, want no ids: %v", name, res.Text, err, c.missing)
		}
	}
}

// TestCallsOfOtherRoles: vLLM keeps what a message that is not an assistant's has as tool_calls, invalid or not, and its encoder of
// gpt-oss reads names of tools from there. So a chat with invalid ones has no ids; those of an assistant are refused.
func TestCallsOfOtherRoles(t *testing.T) {
	t.Parallel()
	m := encoderModel(t, "harmony")
	for _, c := range []struct {
		role, calls  string
		missing, bad bool
	}{
		{"user", `[{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}]`, false, false},
		{"user", `[{"id":"c","type":"function","function":{"name":{"a":1},"arguments":"{}"}}]`, true, false},
		{"developer", `[null]`, true, false},
		{"assistant", `[{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}]`, false, false},
		{"assistant", `[{"id":"c","type":"function","function":{"name":{"a":1},"arguments":"{}"}}]`, false, true},
	} {
		req, err := body.Parse(body.Chat, []byte(`{"messages":[{"role":"user","content":"a"},{"role":"`+c.role+`","content":"b","tool_calls":`+c.calls+`}]}`))
		if err != nil {
			t.Fatal(err)
		}
		_, err = m.Prompt(req, shape.VLLM)
		_, refused := errors.AsType[*shape.Refusal](err)
		if missing := errors.Is(err, encoders.ErrMissing); missing != c.missing || refused != c.bad || err != nil && !missing && !refused {
			t.Errorf("%s %s: got error %v, want not followed %v, refused %v", c.role, c.calls, err, c.missing, c.bad)
		}
	}
}

// groups are the lists of docs/models.md, by what architectures.py says of vLLM and SGLang.
var groups = [...]struct{ kinds, title string }{
	{"text yes", "Text, both engines"}, {"text -", "Text, vLLM"}, {"media yes", "Media, both engines"}, {"media -", "Media, vLLM"}, {"- yes", "SGLang"},
	{"pooling pooling", "Pooling, both engines"}, {"pooling -", "Pooling, vLLM"}, {"- pooling", "Pooling, SGLang"},
}

// TestArchitectures: all architectures that the engines register for generation, but for those of families, are rendered by a
// template, and docs/models.md lists them and those that pool. e2e/engines/architectures.py lists those of the installed engines.
func TestArchitectures(t *testing.T) {
	t.Parallel()
	list, err := os.ReadFile("testdata/architectures.txt")
	if err != nil {
		t.Fatal(err)
	}
	names, kinds := map[string][]string{}, map[string][]string{}
	for line := range strings.Lines(string(list)) {
		f := strings.Fields(line)
		kinds[f[0]] = f[1:]
		if slices.ContainsFunc(families, func(of family) bool { return of.architecture == f[0] && (of.vllm != template || of.sglang != template) }) {
			continue
		}
		if f[1] != "pooling" && f[2] != "pooling" && f[1] != "other" && f[2] != "other" { // else the folder's tokenizer decides, or nothing is served
			vllm, sglang := treatments(t, family{architecture: f[0], sglang: template})
			if f[1] != "-" && vllm != template || f[2] != "-" && sglang != template {
				t.Errorf("%s: got %q with vLLM and %q with SGLang, want a template or a row of families", f[0], vllm, sglang)
			}
		}
		names[f[1]+" "+f[2]] = append(names[f[1]+" "+f[2]], "`"+f[0]+"`")
	}
	var out strings.Builder
	for _, g := range groups {
		line := fmt.Sprintf("**%s** (%d):", g.title, len(names[g.kinds]))
		for i, name := range names[g.kinds] {
			if i > 0 {
				line += ","
			}
			if len(line)+len(name) > 115 {
				out.WriteString(line + "\n")
				line = name
			} else {
				line += " " + name
			}
		}
		out.WriteString(line + "\n\n")
	}
	comparePage(t, "TestArchitectures", out.String())
	for _, problem := range unnamed(string(list), page(t)) {
		t.Error(problem)
	}
	for line, want := range map[string]bool{"NewForCausalLM text -": true, "NewForCausalLM - yes": true, "NewModel - pooling": true, "LlamaForCausalLM text pooling": true,
		"NewMTP other -": false, "NewMTP text other": true, "LlamaForCausalLM text yes": false} {
		if got := unnamed(line, page(t)); (got != nil) != want {
			t.Errorf("%s: got problems %v, want them: %v", line, got, want)
		}
	}
	for _, f := range families {
		sglang := f.architecture
		if sglang == "DeepseekV41ForCausalLM" { // it takes that for V4's (srt/configs/deepseek_v41.py)
			sglang = "DeepseekV4ForCausalLM"
		}
		if k := kinds[f.architecture]; len(k) != 2 || (k[0] == "-") != (f.vllm == unserved) || (kinds[sglang][1] == "-") != (f.sglang == unserved) {
			t.Errorf("%s: got %q and %q, registered as %q", f.name, f.vllm, f.sglang, k)
		}
	}
}

// unnamed returns what the page lacks of the list of architectures: names of models, and kinds that have no list on it.
func unnamed(list, page string) (problems []string) {
	for line := range strings.Lines(list) {
		f := strings.Fields(line)
		kinds := f[1] + " " + f[2]
		switch {
		case strings.ReplaceAll(kinds, "other", "-") == "- -": // drafts, encoders and wrappers
		case !strings.Contains(page, "`"+f[0]+"`"):
			problems = append(problems, "docs/models.md lacks "+f[0])
		case !slices.ContainsFunc(groups[:], func(g struct{ kinds, title string }) bool { return g.kinds == kinds }):
			problems = append(problems, "docs/models.md has no list for "+strings.TrimSpace(line))
		}
	}
	return problems
}

// byteTokenizer returns a tokenizer.json with a token for each byte, and these added tokens.
func byteTokenizer(added ...string) []byte {
	vocab, next := map[string]int{}, rune(256)
	for b := range rune(256) {
		c := b
		if b < '!' || b > '~' && b < 0xa1 || b == 0xad {
			c = next
			next++
		}
		vocab[string(c)] = int(b)
	}
	tokens := []map[string]any{}
	for i, content := range added {
		tokens = append(tokens, map[string]any{"id": 256 + i, "content": content, "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false})
	}
	raw, err := json.Marshal(map[string]any{
		"added_tokens": tokens, "model": map[string]any{"type": "BPE", "vocab": vocab, "merges": []string{}},
		"pre_tokenizer": map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
	})
	if err != nil {
		panic(err)
	}
	return raw
}
