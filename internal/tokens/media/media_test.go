package media

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"errors"
	"flag"
	"image"
	_ "image/jpeg"
	_ "image/png"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

// rows reads recorded lines, which testdata/golden.py made with vLLM 0.32 and transformers.
func rows[T any](tb testing.TB, name string) (out []T) {
	tb.Helper()
	f, err := os.Open("testdata/" + name)
	if err != nil {
		tb.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		tb.Fatal(err)
	}
	lines := bufio.NewScanner(z)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var row T
		if err := json.Unmarshal(lines.Bytes(), &row); err != nil {
			tb.Fatal(err)
		}
		out = append(out, row)
	}
	if lines.Err() != nil || len(out) < 100 {
		tb.Fatalf("got %d rows of %s, %v, want at least 100", len(out), name, lines.Err())
	}
	return out
}

type recorded struct {
	Data          []byte `json:"data"`
	Width, Height int
	RGB           bool
	Model, Hash   string
}

func TestImagesAreReadAndNamedAsByVLLM(t *testing.T) {
	for i, r := range rows[recorded](t, "images.jsonl.gz") {
		img, err := ReadImage(r.Data)
		turned := MayTurn(r.Data) && img.Width == r.Height && img.Height == r.Width
		if err != nil || img.RGB != r.RGB || !turned && (img.Width != r.Width || img.Height != r.Height) {
			t.Errorf("image %d (%.16q): got %+v, %v, want %dx%d, RGB %v", i, r.Data, img, err, r.Width, r.Height, r.RGB)
		}
		if got := VLLMIdentifier(r.Data, img, r.Model); got != r.Hash {
			t.Errorf("image %d (%.16q): got identifier %s, want %s", i, r.Data, got, r.Hash)
		}
		if other := VLLMIdentifier(r.Data, img, r.Model+"x"); other == r.Hash {
			t.Errorf("image %d: got the identifier of another model", i)
		}
	}
}

func TestDamagedHeadersAreRefused(t *testing.T) {
	for name, data := range map[string]string{
		"nothing":             "",
		"text":                "hello",
		"PNG without IHDR":    "\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIDAT" + strings.Repeat("\x01", 30),
		"empty PNG":           "\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR" + strings.Repeat("\x00", 30),
		"huge PNG":            "\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR\x7f\xff\xff\xff\x00\x00\x00\x01" + strings.Repeat("\x02", 30),
		"PNG of two sizes":    "\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR\x00\x00\x00\x17\x00\x00\x00\x29\x08\x02\x00\x00\x00abcd\x00\x00\x00\x0dIHDR\x00\x00\x00\x09\x00\x00\x00\x09\x08\x02\x00\x00\x00abcd",
		"WebP without alpha":  "RIFF\x00\x00\x00\x00WEBPVP8X\x0a\x00\x00\x00\x10\x00\x00\x00\x0f\x00\x00\x0f\x00\x00VP8L\x08\x00\x00\x00\x2f\x0f\xc0\x03\x00abc",
		"WebP's alpha hidden": "RIFF\x00\x00\x00\x00WEBPVP8X\x0a\x00\x00\x00\x00\x00\x00\x00\x0f\x00\x00\x0f\x00\x00ALPH\x01\x00\x00\x00abVP8 ",
		"JPEG without frame":  "\xff\xd8\xff\xe0\x00\x04ab\xff\xda\x00\x04ab",
		"JPEG's long segment": "\xff\xd8\xff\xe0\xff\xffab",
		"JPEG of 12 bits":     "\xff\xd8\xff\xc0\x00\x0b\x0c\x00\x10\x00\x10\x03\x01\x11\x00\xff\xda\x00\x04ab",
		"GIF without frame":   "GIF89a\x01\x00\x01\x00\x00\x00\x00;",
		"WebP of no kind":     "RIFF\x00\x00\x00\x00WEBPABCD" + strings.Repeat("\x00", 20),
	} {
		if img, err := ReadImage([]byte(data)); !errors.Is(err, ErrImage) {
			t.Errorf("%s: got %+v, %v, want ErrImage", name, img, err)
		}
	}
}

func TestDataURLs(t *testing.T) {
	for url, want := range map[string]string{
		"data:image/png;base64,aGVsbG8=": "hello", "DATA:;base64,aGk=": "hi", "data:a;b=c;base64,": "",
	} {
		if got, ok := AppendDataURL([]byte("x"), url); !ok || string(got) != "x"+want {
			t.Errorf("%s: got %q, %v, want x%s", url, got, ok, want)
		}
	}
	for _, url := range []string{"", "data:", "data:image/png,abc", "data:image/png;base64,a", "data:;base64,aGk", "data:;base64,a-_=", "http://a/b;base64,aGk=", "data:;BASE64,aGk="} {
		if got, ok := AppendDataURL(nil, url); ok {
			t.Errorf("%s: got %q, want a refusal", url, got)
		}
	}
}

// setup is a model's configuration by the names in counts.jsonl.gz.
var setup = map[string][2]string{
	"qwen2":          {`"Qwen2VLForConditionalGeneration"],"image_token_id":7`, `{"image_processor_type":"Qwen2VLImageProcessor","min_pixels":3136,"max_pixels":12845056}`},
	"qwen2_small":    {`"Qwen2_5_VLForConditionalGeneration"]`, `{"image_processor_type":"Qwen2VLImageProcessorFast","size":{"shortest_edge":3136,"longest_edge":200704}}`},
	"qwen3":          {`"Qwen3VLMoeForConditionalGeneration"]`, `{"image_processor_type":"Qwen2VLImageProcessorFast","size":{"shortest_edge":65536,"longest_edge":16777216},"patch_size":16}`},
	"glm":            {`"Glm4vForConditionalGeneration"]`, `{"image_processor_type":"Glm4vImageProcessor","size":{"shortest_edge":12544,"longest_edge":9633792}}`},
	"glm_small":      {`"Glm4vMoeForConditionalGeneration"]`, `{"image_processor_type":"Glm46VImageProcessor","size":{"shortest_edge":12544,"longest_edge":501760}}`},
	"mistral3":       {`"Mistral3ForConditionalGeneration"],"image_token_index":7,"spatial_merge_size":2,"vision_config":{"patch_size":14}`, `{"image_processor_type":"PixtralImageProcessor","size":{"longest_edge":1540}}`},
	"mistral3_small": {`"Mistral3ForConditionalGeneration"],"image_token_index":7,"spatial_merge_size":2,"vision_config":{"patch_size":14}`, `{"image_processor_type":"PixtralImageProcessor","size":{"longest_edge":336}}`},
}

func ids(token string) (uint32, bool) {
	id, ok := map[string]uint32{"<|image_pad|>": 7, "<|image|>": 7, "[IMG_BREAK]": 8, "[IMG_END]": 9, "<start_of_image>": 7, "<image_soft_token>": 8,
		"<end_of_image>": 9, "\n": 1, "\n\n": 2, "\n\n\n": 3, "\n\n\n\n": 4, "<|image_start|>": 8, "<|patch|>": 9, "<|tile_x_separator|>": 11, "<|tile_y_separator|>": 12,
		"<|image_end|>": 10, "<img>": 8, "<IMG_CONTEXT>": 7, "</img>": 9, "<image>": 7}[token]
	return id, ok
}

func load(config, processor string) (*Family, error) {
	return Load(fstest.MapFS{"config.json": {Data: []byte(`{"architectures":[` + config + `}`)}, "preprocessor_config.json": {Data: []byte(processor)}}, ids)
}

func TestTheTokensAreThoseOfTheProcessors(t *testing.T) {
	counts := rows[map[string]json.RawMessage](t, "counts.jsonl.gz")
	for name, files := range setup {
		f, err := load(files[0], files[1])
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		known := 0
		for _, row := range counts {
			var w, h, n int
			var grid [2]int
			_, _ = json.Unmarshal(row["width"], &w), json.Unmarshal(row["height"], &h)
			got, _, ok := f.Append(nil, Image{Width: w, Height: h}, false)
			if strings.HasPrefix(name, "mistral") {
				_ = json.Unmarshal(row[name], &grid)
				want := make([]uint32, 0, 64)
				for range grid[1] {
					for range grid[0] {
						want = append(want, 7)
					}
					want = append(want, 8)
				}
				if grid[0] > 0 && grid[1] > 0 {
					want[len(want)-1] = 9
					known++
				} else {
					want = nil
				}
				if n = len(want); ok && string(toBytes(got)) != string(toBytes(want)) {
					t.Errorf("%s: %dx%d: got other tokens than %d columns and %d rows", name, w, h, grid[0], grid[1])
				}
			} else if _ = json.Unmarshal(row[name], &n); n > 0 {
				known++
			}
			if ok != (n > 0) || ok && len(got) != n {
				t.Errorf("%s: %dx%d: got %d tokens, %v, want %d", name, w, h, len(got), ok, n)
			}
		}
		if known < 1000 {
			t.Errorf("%s: got %d sizes that the processor accepts, want at least 1000", name, known)
		}
	}
}

func toBytes(ids []uint32) (b []byte) {
	for _, id := range ids {
		b = append(b, byte(id))
	}
	return b
}

func TestTurnedImagesAndUnknownModels(t *testing.T) {
	mistral, err := load(setup["mistral3"][0], setup["mistral3"][1])
	if err != nil {
		t.Fatal(err)
	}
	if _, _, ok := mistral.Append(nil, Image{Width: 50, Height: 60}, true); ok {
		t.Error("got tokens for an image whose sides may be exchanged, want none")
	}
	if _, _, ok := mistral.Append(nil, Image{Width: 60, Height: 60}, true); !ok {
		t.Error("got no tokens for a square")
	}
	for config, processor := range map[string]string{
		`"Qwen3ForCausalLM"]`:                   `{}`,
		`]`:                                     `{}`,
		`"Qwen2VLForConditionalGeneration"]`:    `{"image_processor_type":"OtherProcessor"}`,
		`"Qwen3VLForConditionalGeneration"]`:    `{"image_processor_type":"Qwen2VLImageProcessor","size":{"shortest_edge":1}}`,
		`"Qwen2_5_VLForConditionalGeneration"]`: `{"image_processor_type":"Qwen2VLImageProcessor","do_resize":false}`,
		`"Qwen2VLForConditionalGeneration"],"image_token_id":6`:                                                                                             `{"image_processor_type":"Qwen2VLImageProcessor"}`,
		`"Glm4vForConditionalGeneration"],"image_token_id":6`:                                                                                               `{"image_processor_type":"Glm4vImageProcessor"}`,
		`"Mistral3ForConditionalGeneration"],"image_token_index":7`:                                                                                         `{"image_processor_type":"PixtralImageProcessor"}`,
		`"Llama4ForConditionalGeneration"],"vision_config":{"image_size":336,"patch_size":14,"pixel_shuffle_ratio":2}`:                                      `{"image_processor_type":"Llama4ImageProcessor"}`,
		`"Llama4ForConditionalGeneration"],"vision_config":{"image_size":336,"patch_size":14,"pixel_shuffle_ratio":1e-200}`:                                 `{"image_processor_type":"Llama4ImageProcessor"}`,
		`"Llama4ForConditionalGeneration"],"vision_config":{"image_size":4294967296,"patch_size":1,"pixel_shuffle_ratio":1}`:                                `{"image_processor_type":"Llama4ImageProcessor"}`,
		`"InternVLChatModel"],"downsample_ratio":0.5,"vision_config":{"image_size":[448,448],"patch_size":14},"min_dynamic_patch":1,"max_dynamic_patch":12`: `{}`,
		internChat: `{}`,
		internChat + `,"min_dynamic_patch":1,"max_dynamic_patch":4096`: `{}`,
		`"InternVLForConditionalGeneration"],"a":0`:                    `{"image_processor_type":"GotOcr2ImageProcessor","size":{"height":4294967296,"width":4294967296}}`,
		`"InternVLForConditionalGeneration"]`:                          `{"image_processor_type":"GotOcr2ImageProcessor","size":{"height":448,"width":224}}`,
		`"InternS1ForConditionalGeneration"]`:                          `{"image_processor_type":"OtherProcessor","size":{"height":448,"width":448}}`,
		`"DeepseekVLV2ForCausalLM"]`:                                   `{"patch_size":14,"downsample_ratio":2}`,
		`"DeepseekOCRForCausalLM"],"image_token_id":6`:                 `{}`,
	} {
		if f, err := load(config, processor); !errors.Is(err, ErrUnknown) {
			t.Errorf("%s %s: got %+v, %v, want ErrUnknown", config, processor, f, err)
		}
	}
}

func FuzzImages(f *testing.F) {
	for i, r := range rows[recorded](f, "images.jsonl.gz") {
		if i < 26 {
			f.Add(r.Data)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		img, err := ReadImage(data)
		if (err == nil) != (img.Width > 0 && img.Height > 0) || img.Width > maxSide || img.Height > maxSide {
			t.Errorf("got %+v, %v", img, err)
		}
		// Go's decoders of PNG and JPEG read the same sizes where both read one.
		if c, kind, other := image.DecodeConfig(bytes.NewReader(data)); err == nil && other == nil && (c.Width != img.Width || c.Height != img.Height) {
			t.Errorf("got %+v, want the %s's size %dx%d", img, kind, c.Width, c.Height)
		}
		url := "data:image/png;base64," + base64.StdEncoding.EncodeToString(data)
		if got, ok := AppendDataURL(nil, url); !ok || string(got) != string(data) {
			t.Errorf("%s: got %q, %v, want the data", url, got, ok)
		}
	})
}

// A photograph of 1 MB costs its decoding and its hash.
func BenchmarkImage(b *testing.B) {
	data := append([]byte(nil), rows[recorded](b, "images.jsonl.gz")[10].Data...)
	for x := uint32(1); len(data) < 1<<20; x = x*1664525 + 1013904223 {
		data = append(data, byte(x>>24))
	}
	url := "data:image/jpeg;base64," + base64.StdEncoding.EncodeToString(data)
	buf := make([]byte, 0, len(url))
	b.SetBytes(int64(len(url)))
	for b.Loop() {
		got, ok := AppendDataURL(buf[:0], url)
		img, err := ReadImage(got)
		if !ok || err != nil {
			b.Fatal(ok, err)
		}
		VLLMIdentifier(got, img, "model")
	}
}

// later are families whose tokens tiles.jsonl.gz has.
var later = map[string][2]string{
	"llama4":         {`"Llama4ForConditionalGeneration"],"vision_config":{"image_size":336,"patch_size":14,"pixel_shuffle_ratio":0.5}`, `{"image_processor_type":"Llama4ImageProcessorFast","max_patches":16}`},
	"llama4_5":       {`"Llama4ForConditionalGeneration"],"vision_config":{"image_size":336,"patch_size":28,"pixel_shuffle_ratio":0.5}`, `{"image_processor_type":"Llama4ImageProcessor","max_patches":5}`},
	"llama4_largest": {`"Llama4ForConditionalGeneration"],"vision_config":{"image_size":336,"patch_size":168,"pixel_shuffle_ratio":0.5}`, `{"image_processor_type":"Llama4ImageProcessor","resize_to_max_canvas":true}`},
	"kimi_vl":        {`"KimiVLForConditionalGeneration"],"media_placeholder_token_id":7`, `{"image_processor_type":"KimiVLImageProcessor","patch_size":14,"merge_kernel_size":[2,2],"in_token_limit":4096}`},
	"kimi_vl_small":  {`"KimiVLForConditionalGeneration"],"media_placeholder_token_id":7`, `{"image_processor_type":"KimiVLImageProcessor","patch_size":14,"merge_kernel_size":[2,2],"in_token_limit":256}`},
}

func TestTilesAreThoseOfTheProcessors(t *testing.T) {
	patches := map[string]int{"llama4": 144, "llama4_5": 36, "llama4_largest": 1}
	for name, files := range later {
		f, err := load(files[0], files[1])
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for _, row := range rows[map[string]json.RawMessage](t, "tiles.jsonl.gz") {
			var w, h, n int
			var tiles [2]int
			_, _ = json.Unmarshal(row["width"], &w), json.Unmarshal(row["height"], &h)
			if each := patches[name]; each == 0 {
				_ = json.Unmarshal(row[name], &n)
			} else if _ = json.Unmarshal(row[name], &tiles); tiles[0]*tiles[1] == 1 {
				n = each + 3
			} else { // rows of tiles with separators, an end for each row, and the whole image
				n = tiles[0]*(tiles[1]*(each+1)) + each + 3
			}
			got, at, ok := f.Append([]uint32{1, 2}, Image{Width: w, Height: h}, false)
			if !ok || at != 2 || len(got)-2 != n {
				t.Errorf("%s: %dx%d: got %d tokens at %d, %v, want %d", name, w, h, len(got)-2, at, ok, n)
			}
			columns := 0 // of the first row
			for _, id := range got {
				if columns += int(id) / 11 * (12 - int(id)); id == 12 {
					break
				}
			}
			if patches[name] > 0 && tiles[0]*tiles[1] > 1 && columns != tiles[1]-1 {
				t.Errorf("%s: %dx%d: got %d separators in the first row, want %d", name, w, h, columns, tiles[1]-1)
			}
		}
	}
}

// cropped are families whose tokens crops.jsonl.gz has.
var cropped = map[string][2]string{
	"internvl":        {`"InternVLForConditionalGeneration"],"vision_config":{"image_size":[448,448],"patch_size":[14,14]}`, `{"image_processor_type":"GotOcr2ImageProcessorFast","size":{"height":448,"width":448},"max_patches":12}`},
	"internvl_chat":   {internChat + `,"min_dynamic_patch":1,"max_dynamic_patch":12,"dynamic_image_size":true,"use_thumbnail":true`, `{"size":448,"do_resize":true}`},
	"internvl_chat_6": {internChat + `,"min_dynamic_patch":2,"max_dynamic_patch":6,"dynamic_image_size":true`, `{}`},
	"internvl_chat_1": {internChat + `,"min_dynamic_patch":1,"max_dynamic_patch":12,"use_thumbnail":true`, `{}`},
	"deepseek_ocr":    {`"DeepseekOCRForCausalLM"]`, `{}`},
	"deepseek_vl2": {`"DeepseekVLV2ForCausalLM"]`, `{"patch_size":14,"downsample_ratio":2,"candidate_resolutions":[[384,384],[384,768],[768,384],[384,1152],[1152,384],[384,1536],[1536,384],
		[768,768],[384,1920],[1920,384],[384,2304],[2304,384],[768,1152],[1152,768],[384,2688],[2688,384],[384,3072],[3072,384],[768,1536],[1536,768],[384,3456],[3456,384],[1152,1152]]}`},
}

const internChat = `"InternVLChatModel"],"downsample_ratio":0.5,"vision_config":{"image_size":448,"patch_size":14}`

func TestCropsAreThoseOfTheProcessors(t *testing.T) {
	for name, files := range cropped {
		f, err := load(files[0], files[1])
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		sizes := map[int]bool{}
		for _, row := range rows[map[string]int](t, "crops.jsonl.gz") {
			got, at, ok := f.Append([]uint32{1, 2}, Image{Width: row["width"], Height: row["height"]}, false)
			if !ok || at != 2 || len(got)-2 != row[name] {
				t.Errorf("%s: %dx%d: got %d tokens at %d, %v, want %d", name, row["width"], row["height"], len(got)-2, at, ok, row[name])
			}
			if ends := got[2] == 8 && got[len(got)-1] == 9; ends != strings.HasPrefix(name, "internvl") || got[len(got)/2] != f.Token {
				t.Errorf("%s: got %d ... %d ... %d", name, got[2], got[len(got)/2], got[len(got)-1])
			}
			sizes[len(got)] = true
		}
		if (len(sizes) > 3) == (name == "internvl_chat_1") {
			t.Errorf("%s: got %d different numbers of tokens", name, len(sizes))
		}
		if _, _, ok := f.Append(nil, Image{Width: 50, Height: 60}, true); ok {
			t.Errorf("%s: got tokens for an image whose sides may be exchanged, want none", name)
		}
	}
}

// others are architectures whose tokens families.jsonl.gz has: the files of the model hub.
var others = map[string][2]string{
	"Qwen3VLForConditionalGeneration":    {`"Qwen3VLForConditionalGeneration"],"image_token_id":7`, qwen3Processor},
	"Qwen3VLMoeForConditionalGeneration": {`"Qwen3VLMoeForConditionalGeneration"],"image_token_id":7`, qwen3Processor},
	"Qwen3_5ForConditionalGeneration":    {`"Qwen3_5ForConditionalGeneration"],"image_token_id":7`, qwen3Processor},
	"Qwen3_5MoeForConditionalGeneration": {`"Qwen3_5MoeForConditionalGeneration"],"image_token_id":7`, qwen3Processor},
	"GlmOcrForConditionalGeneration":     {`"GlmOcrForConditionalGeneration"]`, `{"image_processor_type":"Glm46VImageProcessor","size":{"shortest_edge":12544,"longest_edge":9633792}}`},
	"InternS1ForConditionalGeneration":   {`"InternS1ForConditionalGeneration"]`, gotProcessor},
	"InternVLForConditionalGeneration":   {`"InternVLForConditionalGeneration"]`, gotProcessor},
}

const (
	qwen3Processor = `{"image_processor_type":"Qwen2VLImageProcessorFast","size":{"shortest_edge":65536,"longest_edge":16777216},"patch_size":16,"merge_size":2}`
	gotProcessor   = `{"image_processor_type":"GotOcr2ImageProcessorFast","size":{"height":448,"width":448},"min_patches":1,"max_patches":12,"crop_to_patches":true}`
)

func TestTheTokensOfArchitecturesAreThoseOfTheProcessors(t *testing.T) {
	for name, files := range others {
		f, err := load(files[0], files[1])
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		known := 0
		for _, row := range rows[map[string]int](t, "families.jsonl.gz") {
			got, _, ok := f.Append(nil, Image{Width: row["width"], Height: row["height"]}, false)
			if want := row[name]; ok != (want > 0) || ok && len(got) != want {
				t.Errorf("%s: %dx%d: got %d tokens, %v, want %d", name, row["width"], row["height"], len(got), ok, want)
			} else if ok {
				known++
			}
		}
		if known < 500 {
			t.Errorf("%s: got %d sizes that the processor accepts, want at least 500", name, known)
		}
	}
}

// imageFamilies are the rows of docs/models.md.
var imageFamilies = []struct {
	name          string
	architectures []string
	tokens        string
}{
	{"Qwen2-VL", []string{"Qwen2VLForConditionalGeneration"}, "one for each square of the resized image"},
	{"Qwen2.5-VL", []string{"Qwen2_5_VLForConditionalGeneration"}, "the same"},
	{"Qwen3-VL", []string{"Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"}, "the same"},
	{"Qwen3.5", []string{"Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"}, "the same"},
	{"GLM-4.1V, 4.5V, 4.6V", []string{"Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration"}, "so, other bounds"},
	{"GLM-OCR", []string{"GlmOcrForConditionalGeneration"}, "as GLM-4V"},
	{"Kimi-VL", []string{"KimiVLForConditionalGeneration"}, "one for each square, no more than a limit"},
	{"Llama 4", []string{"Llama4ForConditionalGeneration"}, "tiles with separators, and the whole image"},
	{"Gemma 3", []string{"Gemma3ForConditionalGeneration"}, "256 between line feeds, which are joined with those of the text"},
	{"Mistral-Small-3.1, Hugging Face's format", []string{"Mistral3ForConditionalGeneration"}, "rows with breaks"},
	{"InternVL", []string{"InternVLChatModel"}, "256 (as configured) for each tile, and for the whole image"},
	{"InternVL, Hugging Face's", []string{"InternVLForConditionalGeneration"}, "the same"},
	{"InternS1", []string{"InternS1ForConditionalGeneration"}, "the same"},
	{"DeepSeek-OCR", []string{"DeepseekOCRForCausalLM"}, "the whole image, and tiles"},
	{"DeepSeek-VL2", []string{"DeepseekVLV2ForCausalLM"}, "the same; up to two images"},
}

var updatePage = flag.Bool("update", false, "write the table of docs/models.md")

// TestImageFamilies: docs/models.md lists the architectures that Load knows, and each was compared.
func TestImageFamilies(t *testing.T) {
	compared := map[string]bool{"Gemma3ForConditionalGeneration": true} // by its prompts
	for _, files := range []map[string][2]string{setup, later, cropped, others} {
		for _, f := range files {
			compared[strings.Split(f[0], `"`)[1]] = true
		}
	}
	listed := map[string]bool{}
	table := "| family | architectures | tokens of an image |\n|---|---|---|\n"
	for _, f := range imageFamilies {
		for _, name := range f.architectures {
			if families[name] == nil || listed[name] {
				t.Errorf("%s: got it listed, want those of families, each once", name)
			}
			listed[name] = true
		}
		table += "| " + f.name + " | `" + strings.Join(f.architectures, "`, `") + "` | " + f.tokens + " |\n"
	}
	for name := range families {
		if !listed[name] || !compared[name] {
			t.Errorf("%s: got a row %v and a comparison %v, want both", name, listed[name], compared[name])
		}
	}
	const file, begin, end = "../../../docs/models.md", "<!-- begin: written by TestImageFamilies -update -->\n", "<!-- end -->\n"
	page, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := strings.Cut(string(page), begin)
	was, after, ended := strings.Cut(rest, end)
	switch {
	case !found || !ended:
		t.Fatal("docs/models.md has no place for the table")
	case *updatePage:
		if err := os.WriteFile(file, []byte(before+begin+table+end+after), 0o600); err != nil {
			t.Fatal(err)
		}
	case was != table:
		t.Errorf("docs/models.md differs: run go test ./internal/tokens/media -run TestImageFamilies -update\ngot %s\nwant %s", was, table)
	}
}

func TestGemmasLinesAreJoinedAsByVLLM(t *testing.T) {
	f, err := load(`"Gemma3ForConditionalGeneration"]`, `{"image_processor_type":"Gemma3ImageProcessor","image_seq_length":2}`)
	if err != nil {
		t.Fatal(err)
	}
	refused := 0
	for _, row := range rows[struct {
		Prompt, IDs []uint32
		At          []int
	}](t, "gemma.jsonl.gz") {
		var got []uint32
		var starts []int
		ok := true
		for i, id := range row.Prompt {
			if id == f.Token {
				var at int
				got, at, ok = f.Append(got, Image{Width: 9, Height: 9}, false)
				starts = append(starts, at)
			} else if got, ok = f.Next(got, id, i+1 < len(row.Prompt) && row.Prompt[i+1] == f.Token); !ok {
				break
			}
		}
		switch {
		case row.At == nil && slices.Contains(row.Prompt, f.Token):
			if refused++; ok {
				t.Errorf("%v: got ids, want none as vLLM finds no image", row.Prompt)
			}
		case !ok || !slices.Equal(got, row.IDs) || len(row.At) > 0 && !slices.Equal(starts, row.At):
			t.Errorf("%v: got %v with images at %v, %v, want %v at %v", row.Prompt, got, starts, ok, row.IDs, row.At)
		}
	}
	if refused < 100 {
		t.Errorf("got %d prompts without a place for an image, want at least 100", refused)
	}
}
