package shape

import (
	"bufio"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/conv"
	"github.com/kvlane/kvlane/internal/tokens/media"
)

const (
	imagePad     = 151655
	pictureRules = `{"image_processor_type":"Qwen2VLImageProcessor","min_pixels":3136,"max_pixels":200704}`
	pictureModel = `{"architectures":["Qwen2VLForConditionalGeneration"],"vision_config":{},"image_token_id":151655}`
	// pictureChat is the template of the recorded engine.
	pictureChat = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}" +
		"{% for p in m.content %}{% if p.type == 'image' or 'image' in p %}<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in p %}" +
		"{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

// pictured is Qwen3's tokenizer in the folder of a vision model.
func pictured(tb testing.TB, options Options) *Model {
	tb.Helper()
	files := fstest.MapFS{"config.json": {Data: []byte(pictureModel)}, "preprocessor_config.json": {Data: []byte(pictureRules)}}
	dir := os.DirFS("../models/qwen3")
	for _, pattern := range []string{"tokenizer*"} {
		names, err := fs.Glob(dir, pattern)
		if err != nil {
			tb.Fatal(err)
		}
		for _, name := range names {
			data, err := fs.ReadFile(dir, name)
			if err != nil {
				tb.Fatal(err)
			}
			files[name] = &fstest.MapFile{Data: data}
		}
	}
	options.ChatTemplate = pictureChat
	m, err := Load(files, options)
	if err != nil {
		tb.Fatal(err)
	}
	return m
}

func promptOf(tb testing.TB, m *Model, raw []byte) (Result, error) {
	tb.Helper()
	req, err := body.Parse(body.Chat, raw)
	if err != nil {
		tb.Fatal(err)
	}
	return m.Prompt(req, VLLM)
}

// The chats and their ids are those of a stock vLLM 0.32 with a tiny Qwen2-VL.
func TestChatsWithImagesHaveTheIDsOfTheEngine(t *testing.T) {
	m := pictured(t, Options{MaxModelLen: 2048})
	m.SetEngineModel("/m")
	f, err := os.Open("testdata/images.jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(z)
	lines.Buffer(nil, 1<<22)
	whole, withImages := 0, 0
	for n := 0; lines.Scan(); n++ {
		var r struct {
			Body   json.RawMessage
			Status int
			IDs    []uint32
		}
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			t.Fatal(err)
		}
		if r.Status != 200 {
			continue // the processor refuses an image
		}
		got, err := promptOf(t, m, r.Body)
		if err != nil {
			t.Errorf("chat %d: %v", n, err)
			continue
		}
		if got.Partial == "" {
			whole++
			withImages += len(got.Media)
			if !slices.Equal(got.IDs, r.IDs) {
				t.Errorf("chat %d: got %d ids, want the engine's %d", n, len(got.IDs), len(r.IDs))
			}
		} else if len(got.IDs) > len(r.IDs) || !slices.Equal(got.IDs, r.IDs[:len(got.IDs)]) {
			t.Errorf("chat %d (%s): got ids that the engine's do not begin with", n, got.Partial)
		}
		for _, medium := range got.Media {
			if got.IDs[medium.At] != imagePad || got.IDs[medium.At-1] == imagePad {
				t.Errorf("chat %d: got an image at %d, where none begins", n, medium.At)
			}
		}
	}
	if whole < 30 || withImages < 60 {
		t.Errorf("got %d whole prompts with %d images, want at least 30 and 60", whole, withImages)
	}
}

// tinyPNG is the start of a PNG image of a size, which is all that is read.
func tinyPNG(width, height byte) string {
	return "data:image/png;base64," + base64.StdEncoding.EncodeToString([]byte("\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR\x00\x00\x00"+string([]byte{width})+"\x00\x00\x00"+string([]byte{height})+"\x08\x02\x00\x00\x00....."))
}

func TestImagesThatAreNotKnownCutThePrompt(t *testing.T) {
	m := pictured(t, Options{})
	part := func(more string) string {
		return `{"type":"image_url","image_url":{"url":"` + tinyPNG(56, 56) + `"}` + more + `}`
	}
	chat := func(parts, more string) []byte {
		return []byte(`{"messages":[{"role":"user","content":[` + parts + `,{"type":"text","text":"and so on"}]}]` + more + `}`)
	}
	if res, err := promptOf(t, m, chat(part(""), "")); err != nil || res.Partial == "" || res.Media != nil {
		t.Errorf("engine's model unknown: got %+v, %v, want a cut prompt", res, err)
	}
	m.SetEngineModel("/m")
	whole, err := promptOf(t, m, chat(part(""), ""))
	if err != nil || whole.Partial != "" || len(whole.Media) != 1 || len(whole.Media[0].Identifier) != 64 {
		t.Fatalf("got %+v, %v, want one image", whole, err)
	}
	if named, err := promptOf(t, m, chat(part(`,"uuid":"mine"`), "")); err != nil || len(named.Media) != 1 || named.Media[0] != (conv.Medium{At: whole.Media[0].At, Identifier: "mine"}) {
		t.Errorf("got %+v, %v, want the client's name at the same place", named.Media, err)
	}
	for what, raw := range map[string][]byte{
		"a URL":                 chat(part("")+`,{"type":"image_url","image_url":{"url":"http://127.0.0.1:1/x.png"}}`, ""),
		"a URL between images":  chat(part("")+`,{"type":"image_url","image_url":{"url":"http://127.0.0.1:1/x.png"}},`+part(""), ""),
		"no image":              chat(part("")+`,{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}`, ""),
		"a video":               chat(part("")+`,{"type":"video_url","video_url":{"url":"`+tinyPNG(56, 56)+`"}}`, ""),
		"a member of a part":    chat(part("")+","+part(`,"more":1`), ""),
		"an image that is long": chat(part("")+`,{"type":"image_url","image_url":{"url":"`+tinyPNG(1, 250)+`"}}`, ""),
	} {
		res, err := promptOf(t, m, raw)
		if err != nil || res.Partial == "" || len(res.Media) != 1 || len(res.IDs) < whole.Media[0].At+4 || !slices.Equal(res.IDs[:whole.Media[0].At+4], whole.IDs[:whole.Media[0].At+4]) {
			t.Errorf("%s behind an image: got %d ids, %d images, %q, %v, want the prompt up to there", what, len(res.IDs), len(res.Media), res.Partial, err)
		}
	}
	for what, raw := range map[string][]byte{
		"arguments of the processor": chat(part(""), `,"mm_processor_kwargs":{"max_pixels":9999}`),
		"arguments of the reader":    chat(part(""), `,"media_io_kwargs":{"image":{}}`),
		"the token in the text":      chat(part("")+`,{"type":"text","text":"<|image_pad|>"}`, ""),
	} {
		res, err := promptOf(t, m, raw)
		if err != nil || res.Partial == "" || res.Media != nil || !slices.Equal(res.IDs, whole.IDs[:len(res.IDs)]) {
			t.Errorf("%s: got %d ids, %d images, %q, %v, want the prompt up to the first image", what, len(res.IDs), len(res.Media), res.Partial, err)
		}
	}
	// A prompt that is cut at its first image, and truncated: its head, if that is kept; where its tail begins is not known.
	up := len(whole.IDs[:whole.Media[0].At])
	for raw, want := range map[string]int{`"truncate_prompt_tokens":5`: 0, `"truncate_prompt_tokens":-1`: 0, `"truncate_prompt_tokens":2,"truncation_side":"right"`: 2,
		`"truncate_prompt_tokens":500,"truncation_side":"right"`: up} {
		res, err := promptOf(t, m, chat(part(""), ","+raw))
		if err != nil || res.Partial == "" || res.Media != nil || len(res.IDs) != want || !slices.Equal(res.IDs, whole.IDs[:want]) {
			t.Errorf("%s: got ids %v, %d images, %q, %v, want the first %d", raw, res.IDs, len(res.Media), res.Partial, err, want)
		}
	}
}

// A long list of small images ends where the engine's context does.
func TestManyImagesAreBounded(t *testing.T) {
	part := `{"type":"image_url","image_url":{"url":"` + tinyPNG(56, 56) + `"}}`
	raw := []byte(`{"messages":[{"role":"user","content":[` + strings.Repeat(part+",", 2000) + part + `]}]}`)
	m := pictured(t, Options{MaxModelLen: 1000})
	m.SetEngineModel("/m")
	if res, err := promptOf(t, m, raw); err == nil || len(res.IDs) > 1100 {
		t.Errorf("got %d ids, %v, want a refusal near the engine's context", len(res.IDs), err)
	}
}

// The memory for the ids of images grows neither with tokens of images that the client wrote nor beyond the engine's context.
func TestIDsOfImagesAreAllocatedForKnownImages(t *testing.T) {
	const n, context = 1 << 12, 1000
	m := pictured(t, Options{MaxModelLen: context})
	small := image{Image: media.Image{Width: 56, Height: 56}, identifier: "a"}
	for _, c := range []struct{ images, marks, media int }{{1, n, 0}, {1, 1, 1}, {n, n, context / 4}} {
		res, p := &Result{IDs: slices.Repeat([]uint32{imagePad}, c.marks)}, &plan{images: &images{family: m.family, list: slices.Repeat([]image{small}, c.images)}}
		m.placeImages(res, p)
		if got, most := cap(res.IDs), 2*(c.marks+context); got > most || len(res.Media) < c.media {
			t.Errorf("%d images, %d tokens of images: got room for %d ids, %d images, want at most %d and at least %d", c.images, c.marks, got, len(res.Media), most, c.media)
		}
	}
}

// A new model of the engine gives images other identifiers, also for a body that was seen before.
func TestIdentifiersFollowTheEnginesModel(t *testing.T) {
	m, c := pictured(t, Options{}), conv.New(1<<20)
	raw := []byte(`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"` + tinyPNG(56, 56) + `"}}]}]}`)
	seen := map[string]bool{}
	for i, name := range []string{"/a", "/a", "/a", "/b"} {
		m.SetEngineModel(name)
		var turn conv.Turn
		if err := c.Parse(&turn, body.Chat, raw); err != nil {
			t.Fatal(err)
		}
		res, err := m.PromptInto(t.Context(), nil, &turn, VLLM)
		if err != nil || len(res.Media) != 1 {
			t.Fatalf("time %d: got %+v, %v, want one image", i, res.Media, err)
		}
		seen[res.Media[0].Identifier] = true
	}
	if len(seen) != 2 {
		t.Errorf("got %d identifiers, want one for each of two models", len(seen))
	}
}

// BenchmarkChatWithImage is a chat with an image of 1 MB from its bytes to its ids; cpu-ms/op is processor time.
func BenchmarkChatWithImage(b *testing.B) {
	data := []byte("\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR\x00\x00\x04\x00\x00\x00\x04\x00\x08\x02\x00\x00\x00")
	for x := uint32(1); len(data) < 1<<20; x = x*1664525 + 1013904223 {
		data = append(data, byte(x>>24))
	}
	raw := []byte(`{"messages":[{"role":"user","content":[{"type":"text","text":"What is it?"},{"type":"image_url","image_url":{"url":"data:image/png;base64,` +
		base64.StdEncoding.EncodeToString(data) + `"}}]}]}`)
	for _, follow := range []bool{true, false} {
		b.Run(map[bool]string{true: "followed", false: "cut"}[follow], func(b *testing.B) {
			m, c := pictured(b, Options{}), conv.New(64<<20)
			if follow {
				m.SetEngineModel("/m")
			}
			var turn conv.Turn
			before := processorTime(b)
			for i := 0; b.Loop(); i++ {
				for at, n := len(raw)-40, i; n > 0; at, n = at-1, n/26 {
					raw[at] = 'A' + byte(n%26) // another image each time
				}
				if err := c.Parse(&turn, body.Chat, raw); err != nil {
					b.Fatal(err)
				}
				if res, err := m.PromptInto(b.Context(), nil, &turn, VLLM); err != nil || (len(res.Media) == 1) != follow {
					b.Fatal(res.Media, err)
				}
			}
			b.ReportMetric(float64(processorTime(b)-before)/1e6/float64(b.N), "cpu-ms/op")
		})
	}
}

// processorTime returns what the process has used, in nanoseconds.
func processorTime(b *testing.B) int64 {
	b.Helper()
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		b.Fatal(err)
	}
	return used.Utime.Nano() + used.Stime.Nano()
}
