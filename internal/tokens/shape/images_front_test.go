package shape_test

import (
	"encoding/base64"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/shape"
)

// tinyChat is a tokenizer of single bytes and the tokens of images, with a family's files and a chat template.
func tinyChat(t *testing.T, config, processor, template string) *shape.Model {
	t.Helper()
	files := fstest.MapFS{"config.json": {Data: []byte(config)}, "preprocessor_config.json": {Data: []byte(processor)}}
	files["tokenizer.json"] = &fstest.MapFile{Data: byteTokenizer("<image>", "<img>", "<IMG_CONTEXT>", "</img>")}
	if strings.Contains(config, "InternVLChatModel") { // it has no token for an image
		files["tokenizer.json"] = &fstest.MapFile{Data: byteTokenizer("<unused>", "<img>", "<IMG_CONTEXT>", "</img>")}
	}
	m, err := shape.Load(files, shape.Options{ChatTemplate: template})
	if err != nil {
		t.Fatal(err)
	}
	m.SetEngineModel("/m")
	return m
}

// With a template that gets a message's content as one text, vLLM writes the images before the texts; InternVL's mark of an
// image is text and not a token.
func TestImagesBeforeTheTexts(t *testing.T) {
	png := "data:image/png;base64," + base64.StdEncoding.EncodeToString([]byte("\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR\x00\x00\x00\x38\x00\x00\x00\x38\x08\x02\x00\x00\x00....."))
	const plain = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
	const parts = "{% for m in messages %}[{% for p in m.content %}{% if p.type == 'image' %}<image>!{% else %}{{ p.text }}{% endif %}{% endfor %}]{% endfor %}"
	const ocr, chat = `{"architectures":["DeepseekOCRForCausalLM"],"vision_config":{}}`, `{"architectures":["InternVLChatModel"],"downsample_ratio":0.5,"min_dynamic_patch":1,
		"max_dynamic_patch":12,"vision_config":{"image_size":56,"patch_size":14}}`
	const vl2 = `{"architectures":["DeepseekVLV2ForCausalLM"],"vision_config":{}}`
	image, text := `{"type":"image_url","image_url":{"url":"`+png+`"}}`, func(s string) string { return `{"type":"text","text":"` + s + `"}` }
	grid, framed := strings.Repeat("<image>", 273), "<img>"+strings.Repeat("<IMG_CONTEXT>", 4)+"</img>"
	two := strings.Repeat("<image>", 13)
	for name, c := range map[string]struct{ config, template, content, want string }{
		"before the text":     {ocr, plain, text("a") + "," + image + "," + text("b"), "[" + grid + "\na\nb]"},
		"two":                 {ocr, plain, text("a") + "," + image + "," + image, "[" + grid + "\n" + grid + "\na]"},
		"alone":               {ocr, plain, image, "[" + grid + "]"},
		"a URL first":         {ocr, plain, `{"type":"image_url","image_url":{"url":"http://127.0.0.1:1/x"}},` + text("a"), "[…"},
		"a token and a URL":   {vl2, parts, text("a<image>") + `,{"type":"image_url","image_url":{"url":"http://127.0.0.1:1/x"}}`, "[a…"},
		"a mark and a URL":    {chat, parts, text("a<image>b") + `,{"type":"image_url","image_url":{"url":"http://127.0.0.1:1/x"}}`, "[a…"},
		"its token in a text": {ocr, plain, text("<image>") + "," + image, "…"},
		"a URL behind":        {ocr, plain, text("a") + "," + image + `,{"type":"image_url","image_url":{"url":"http://127.0.0.1:1/x"}}`, "[" + grid + "…"},
		"InternVL":            {chat, plain, text("a") + "," + image, "[" + framed + "\na]"},
		"InternVL, parts":     {chat, parts, text("a") + "," + image + "," + text("b"), "[a" + framed + "!b]"},
		"its mark in a text":  {chat, parts, text("a<image>") + "," + image, "[a…"},
		"DeepSeek-VL2":        {vl2, plain, image + "," + image, "[" + two + "\n" + two + "]"},
		"three":               {vl2, plain, image + "," + image + "," + image, "[…"}, // which are not cut into tiles
		"two, and a URL":      {vl2, plain, image + "," + image + `,{"type":"image_url","image_url":{"url":"http://127.0.0.1:1/x"}}`, "[…"},
	} {
		m := tinyChat(t, c.config, `{"candidate_resolutions":[[56,56]],"patch_size":14,"downsample_ratio":2}`, c.template)
		req, err := body.Parse(body.Chat, []byte(`{"messages":[{"role":"user","content":[`+c.content+`]}]}`))
		if err != nil {
			t.Fatal(err)
		}
		res, err := m.Prompt(req, shape.VLLM)
		got := ""
		for _, id := range res.IDs {
			s, _ := m.Tokenizer().Token(id)
			got += strings.NewReplacer("Ċ", "\n").Replace(s)
		}
		if want, cut := strings.CutSuffix(c.want, "…"); err != nil || cut != (res.Partial != "") || cut && !strings.HasPrefix(want, got) || !cut && got != want ||
			len(res.Media) != strings.Count(got, grid)+strings.Count(got, framed)+strings.Count(got, "<image>")/13*map[bool]int{c.config == vl2: 1}[true] {
			t.Errorf("%s: got %.90q, %d images, cut %q, %v, want %.90q", name, got, len(res.Media), res.Partial, err, c.want)
		}
	}
}
