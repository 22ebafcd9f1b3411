package media

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"strings"
)

// Family computes the tokens that replace an image, for the models of one family. It is immutable.
type Family struct {
	// Token is the id that stands for an image in a prompt before the engine's processor runs.
	Token uint32
	// Mark is the placeholder of an image in the output of templates that iterate over content parts, which the engine
	// replaces by Text, the token's text; "" if the template writes Text itself.
	Mark, Text string
	// Front is the placeholder of an image that the engine puts before a message's text if the template does not
	// iterate over parts, "" if unknown.
	Front string
	// Most is the maximum number of images in a prompt for which the tokens are known, 0 if any number is.
	Most int
	// Oriented reports that an image and its transpose have different tokens.
	Oriented bool

	// layout appends the tokens of an image. It returns false if the engine refuses the image.
	layout func(dst []uint32, width, height int) ([]uint32, bool)
	// lines[n] is the token of n line feeds, for a family whose engine puts two line feeds before and after an image and
	// then joins adjacent ones into one token. last is then the token before those after the image.
	lines [5]uint32
	last  uint32
}

// ErrUnknown is returned for models whose images are not supported.
var ErrUnknown = errors.New("how the model's images become tokens is not known")

// modelConfig is the part of config.json that is read.
type modelConfig struct {
	Architectures []string `json:"architectures"`
	Type          string   `json:"model_type"`
	ImageToken    *uint32  `json:"image_token_id"`
	ImageIndex    *uint32  `json:"image_token_index"`
	MediaToken    *uint32  `json:"media_placeholder_token_id"`
	Merge         int      `json:"spatial_merge_size"`
	Vision        struct {
		Patch   side    `json:"patch_size"`
		Size    side    `json:"image_size"`
		Shuffle float64 `json:"pixel_shuffle_ratio"`
	} `json:"vision_config"`

	MinTiles   int     `json:"min_dynamic_patch"`
	MaxTiles   int     `json:"max_dynamic_patch"`
	Dynamic    bool    `json:"dynamic_image_size"`
	Thumbnail  bool    `json:"use_thumbnail"`
	Downsample float64 `json:"downsample_ratio"`
}

// side is a number of pixels, 0 for lists of them.
type side int

func (s *side) UnmarshalJSON(raw []byte) error {
	if json.Unmarshal(raw, (*int)(s)) != nil {
		*s = 0
	}
	return nil
}

// processorConfig is the part of preprocessor_config.json that is read.
type processorConfig struct {
	Type   string `json:"image_processor_type"`
	Resize *bool  `json:"do_resize"`
	Size   *struct {
		Shortest int `json:"shortest_edge"`
		Longest  int `json:"longest_edge"`
		Height   int `json:"height"`
		Width    int `json:"width"`
	} `json:"size"`
	MinPixels int `json:"min_pixels"`
	MaxPixels int `json:"max_pixels"`
	Patch     int `json:"patch_size"`
	Merge     int `json:"merge_size"`

	Sequence    int   `json:"image_seq_length"`
	PanAndScan  *bool `json:"do_pan_and_scan"`
	MaxPatches  int   `json:"max_patches"`
	MaxCanvas   bool  `json:"resize_to_max_canvas"`
	MergeKernel []int `json:"merge_kernel_size"`
	TokenLimit  int   `json:"in_token_limit"`

	MinPatches  int      `json:"min_patches"`
	Resolutions [][2]int `json:"candidate_resolutions"`
	Downsample  int      `json:"downsample_ratio"`
}

// families maps architectures to the functions that read the folder's files.
var families = map[string]func(m *modelConfig, p *processorConfig, id func(token string) (uint32, bool)) (*Family, error){
	"Qwen2VLForConditionalGeneration":    qwen,
	"Qwen2_5_VLForConditionalGeneration": qwen,
	"Qwen3VLForConditionalGeneration":    qwen,
	"Qwen3VLMoeForConditionalGeneration": qwen,
	"Qwen3_5ForConditionalGeneration":    qwen,
	"Qwen3_5MoeForConditionalGeneration": qwen,
	"Glm4vForConditionalGeneration":      glm,
	"Glm4vMoeForConditionalGeneration":   glm,
	"GlmOcrForConditionalGeneration":     glm,
	"Mistral3ForConditionalGeneration":   mistral3,
	"Gemma3ForConditionalGeneration":     gemma3,
	"Llama4ForConditionalGeneration":     llama4,
	"KimiVLForConditionalGeneration":     kimiVL,
	"InternVLForConditionalGeneration":   internVL,
	"InternS1ForConditionalGeneration":   internVL,
	"InternVLChatModel":                  internVLChat,
	"DeepseekOCRForCausalLM":             deepseekOCR,
	"DeepseekVLV2ForCausalLM":            deepseekVL2,
}

// needNoProcessor are the architectures whose image tokens depend on config.json alone, so an unreadable processor
// configuration does not matter.
var needNoProcessor = map[string]bool{"InternVLChatModel": true, "DeepseekOCRForCausalLM": true}

// Load reads the model's config.json and its processor's configuration. id returns the id of a special token. The error
// is ErrUnknown if the model has no images or its family is not followed.
func Load(fsys fs.FS, id func(token string) (uint32, bool)) (*Family, error) {
	var m modelConfig
	if err := readJSON(fsys, "config.json", &m); err != nil {
		return nil, err
	}
	if len(m.Architectures) == 0 && m.Type == "deepseek_vl_v2" { // vLLM's default for it
		m.Architectures = []string{"DeepseekVLV2ForCausalLM"}
	}
	if len(m.Architectures) == 0 || families[m.Architectures[0]] == nil {
		return nil, ErrUnknown
	}
	p := &processorConfig{}
	var whole struct {
		Image    *processorConfig `json:"image_processor"`
		Sequence int              `json:"image_seq_length"`
	}
	// transformers prefers the nested form.
	err := readJSON(fsys, "processor_config.json", &whole)
	if whole.Image != nil {
		p = whole.Image
	} else if found := err == nil; found || errors.Is(err, fs.ErrNotExist) {
		if err = readJSON(fsys, "preprocessor_config.json", p); found && errors.Is(err, fs.ErrNotExist) {
			err = readJSON(fsys, "processor_config.json", p)
		}
	}
	if err != nil && !needNoProcessor[m.Architectures[0]] {
		return nil, err
	}
	if p.Sequence == 0 {
		p.Sequence = whole.Sequence
	}
	if p.Resize != nil && !*p.Resize {
		return nil, ErrUnknown
	}
	return families[m.Architectures[0]](&m, p, id)
}

func readJSON(fsys fs.FS, name string, to any) error {
	raw, err := fs.ReadFile(fsys, name)
	if err == nil {
		err = json.Unmarshal(raw, to)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// Append appends the tokens of an image and returns the index of the first one. mayTurn reports that the engine may
// rotate the image by its EXIF data first. ok is false if the tokens are not known.
func (f *Family) Append(dst []uint32, img Image, mayTurn bool) (out []uint32, at int, ok bool) {
	at = len(dst)
	if f.Oriented && mayTurn && img.Width != img.Height {
		return dst, at, false
	}
	if f.lines[2] != 0 {
		joined := uint32(0)
		if at > 0 {
			joined = map[uint32]uint32{f.lines[1]: f.lines[3], f.lines[2]: f.lines[4]}[dst[at-1]]
		}
		if joined != 0 {
			at--
			dst = append(dst[:at], joined)
		} else {
			dst = append(dst, f.lines[2])
		}
	}
	out, ok = f.layout(dst, img.Width, img.Height)
	return out, at, ok
}

// Next appends a token of the text after an image, joining line feeds as Append does. image reports that another image
// follows directly. It returns false if the engine refuses the prompt.
func (f *Family) Next(dst []uint32, id uint32, image bool) ([]uint32, bool) {
	if n := len(dst); f.last != 0 && n > 1 && dst[n-2] == f.last && dst[n-1] == f.lines[2] {
		switch {
		case id == f.lines[2]:
			dst[n-1] = f.lines[4]
			return dst, true
		case id == f.lines[1] && !image:
			return dst, false
		}
	}
	return append(dst, id), true
}

// run is the layout of a run of a token.
func run(token uint32, size func(width, height int) (columns, rows int)) func([]uint32, int, int) ([]uint32, bool) {
	return func(dst []uint32, width, height int) ([]uint32, bool) {
		columns, rows := size(width, height)
		if columns < 1 || rows < 1 || columns*rows > maxTokens {
			return dst, false
		}
		return repeated(dst, token, columns*rows), true
	}
}

func repeated(dst []uint32, token uint32, n int) []uint32 {
	for range n {
		dst = append(dst, token)
	}
	return dst
}

// maxTokens bounds the tokens of an image.
const maxTokens = 1 << 17

// pixels are the bounds of a resized image and the size of a token's square.
type pixels struct {
	least, most float64
	patch       int // side of a patch
	merge       int // patches per side of a token
}

// pixelsOf reads the bounds that transformers' processors of Qwen and GLM use.
func (p *processorConfig) pixelsOf(standard pixels) (pixels, error) {
	out := standard
	if p.Size != nil {
		out.least, out.most = float64(p.Size.Shortest), float64(p.Size.Longest)
	}
	if p.MinPixels > 0 {
		out.least = float64(p.MinPixels)
	}
	if p.MaxPixels > 0 {
		out.most = float64(p.MaxPixels)
	}
	if p.Patch > 0 {
		out.patch = p.Patch
	}
	if p.Merge > 0 {
		out.merge = p.Merge
	}
	if out.least <= 0 || out.most <= 0 {
		return out, ErrUnknown
	}
	return out, nil
}

func qwen(m *modelConfig, p *processorConfig, id func(string) (uint32, bool)) (*Family, error) {
	if !strings.HasPrefix(p.Type, "Qwen2VLImageProcessor") && !strings.HasPrefix(p.Type, "Qwen3VLImageProcessor") {
		return nil, ErrUnknown
	}
	f, err := grid(m, "<|image_pad|>", id)
	if err != nil {
		return nil, err
	}
	b, err := p.pixelsOf(pixels{56 * 56, 28 * 28 * 1280, 14, 2})
	f.layout = run(f.Token, b.resized)
	return f, err
}

func glm(m *modelConfig, p *processorConfig, id func(string) (uint32, bool)) (*Family, error) {
	if !strings.HasPrefix(p.Type, "Glm4vImageProcessor") && !strings.HasPrefix(p.Type, "Glm46VImageProcessor") {
		return nil, ErrUnknown
	}
	f, err := grid(m, "<|image|>", id)
	if err != nil {
		return nil, err
	}
	b, err := p.pixelsOf(pixels{112 * 112, 28 * 28 * 15000, 14, 2})
	// An image counts as two frames.
	b.least, b.most = b.least/2, b.most/2
	f.layout = run(f.Token, func(width, height int) (int, int) {
		if side := b.patch * b.merge; width < side || height < side {
			scale := max(float64(side)/float64(height), float64(side)/float64(width))
			width, height = int(float64(width)*scale), int(float64(height)*scale)
		}
		return b.resized(width, height)
	})
	return f, err
}

// grid is a family whose images are a run of one token.
func grid(m *modelConfig, token string, id func(string) (uint32, bool)) (*Family, error) {
	found, ok := id(token)
	if !ok || m.ImageToken != nil && *m.ImageToken != found {
		return nil, ErrUnknown
	}
	return &Family{Token: found}, nil
}

// resized is transformers' smart_resize, in tokens.
func (b pixels) resized(width, height int) (columns, rows int) {
	w, h, side := float64(width), float64(height), float64(b.patch*b.merge)
	if min(w, h) < 1 || max(w, h)/min(w, h) > 200 {
		return 0, 0
	}
	c, r := math.RoundToEven(w/side), math.RoundToEven(h/side)
	switch area := c * r * side * side; {
	case area > b.most:
		beta := math.Sqrt(w * h / b.most)
		c, r = max(1, math.Floor(w/beta/side)), max(1, math.Floor(h/beta/side))
	case area < b.least:
		beta := math.Sqrt(b.least / (w * h))
		c, r = math.Ceil(w*beta/side), math.Ceil(h*beta/side)
	}
	return int(c), int(r)
}

func mistral3(m *modelConfig, p *processorConfig, id func(string) (uint32, bool)) (*Family, error) {
	breaks, ok := id("[IMG_BREAK]")
	ends, ok2 := id("[IMG_END]")
	side := int(m.Vision.Patch) * m.Merge
	if !strings.HasPrefix(p.Type, "PixtralImageProcessor") || !ok || !ok2 || m.ImageIndex == nil || p.Size == nil || p.Size.Longest < 1 || side < 1 {
		return nil, ErrUnknown
	}
	longest, token := float64(p.Size.Longest), *m.ImageIndex
	return &Family{Token: token, Oriented: true, layout: func(dst []uint32, width, height int) ([]uint32, bool) {
		if ratio := max(float64(width)/longest, float64(height)/longest); ratio > 1 {
			width, height = int(float64(width)/ratio), int(float64(height)/ratio)
		}
		columns, rows := (width+side-1)/side, (height+side-1)/side
		if columns < 1 || rows < 1 || columns*rows > maxTokens {
			return dst, false
		}
		for range rows {
			dst = append(repeated(dst, token, columns), breaks)
		}
		dst[len(dst)-1] = ends
		return dst, true
	}}, nil
}

// tokensOf returns the ids of tokens, ErrUnknown if one is missing.
func tokensOf(id func(string) (uint32, bool), names ...string) ([]uint32, error) {
	out := make([]uint32, len(names))
	for i, name := range names {
		var ok bool
		if out[i], ok = id(name); !ok {
			return nil, ErrUnknown
		}
	}
	return out, nil
}

func gemma3(_ *modelConfig, p *processorConfig, id func(string) (uint32, bool)) (*Family, error) {
	t, err := tokensOf(id, "<start_of_image>", "<image_soft_token>", "<end_of_image>", "\n", "\n\n", "\n\n\n", "\n\n\n\n")
	if err != nil || !strings.HasPrefix(p.Type, "Gemma3ImageProcessor") || p.PanAndScan != nil && *p.PanAndScan || p.Sequence > maxTokens {
		return nil, ErrUnknown
	}
	return &Family{Token: t[0], last: t[2], lines: [5]uint32{1: t[3], 2: t[4], 3: t[5], 4: t[6]}, layout: func(dst []uint32, _, _ int) ([]uint32, bool) {
		dst = repeated(append(dst, t[0]), t[1], cmp.Or(p.Sequence, 256))
		return append(dst, t[2], t[4]), true
	}}, nil
}

func llama4(m *modelConfig, p *processorConfig, id func(string) (uint32, bool)) (*Family, error) {
	t, err := tokensOf(id, "<|image|>", "<|image_start|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>", "<|image_end|>")
	v, size, most := m.Vision, int(m.Vision.Size), cmp.Or(p.MaxPatches, 16)
	if err != nil || !strings.HasPrefix(p.Type, "Llama4ImageProcessor") || size < 1 || v.Patch < 1 || v.Shuffle <= 0 || most < 1 || most > 64 {
		return nil, ErrUnknown
	}
	side, merged := size/int(v.Patch), math.RoundToEven(1/(v.Shuffle*v.Shuffle)) // patches of a side, and in a token
	if side > maxSide || merged < 1 || merged > float64(side*side) || side*side/int(merged)*(most+1) > maxTokens {
		return nil, ErrUnknown
	}
	patches := side * side / int(merged)
	return &Family{Token: t[0], Oriented: true, layout: func(dst []uint32, width, height int) ([]uint32, bool) {
		columns, rows := canvas(width, height, size, most, p.MaxCanvas)
		dst = append(dst, t[1])
		for range rows {
			for x := range columns {
				if rows*columns > 1 {
					if dst = repeated(dst, t[2], patches); x < columns-1 {
						dst = append(dst, t[3])
					}
				}
			}
			if rows*columns > 1 {
				dst = append(dst, t[4])
			}
		}
		return append(repeated(append(dst, t[0]), t[2], patches), t[5]), true
	}}, nil
}

// canvas is transformers' get_best_fit of Llama 4, in tiles. Its scale factors are float32.
func canvas(width, height, tile, most int, largest bool) (columns, rows int) {
	var best float32
	for c := 1; c <= most; c++ {
		for r := 1; c*r <= most; r++ {
			scale := min(float32(c*tile)/float32(width), float32(r*tile)/float32(height))
			better := scale > best // the least that enlarges, else the greatest
			if best >= 1 && !largest {
				better = scale >= 1 && scale < best
			}
			if better || scale == best && c*r < columns*rows {
				best, columns, rows = scale, c, r
			}
		}
	}
	return columns, rows
}

func kimiVL(m *modelConfig, p *processorConfig, _ func(string) (uint32, bool)) (*Family, error) {
	if !strings.HasPrefix(p.Type, "KimiVLImageProcessor") || m.MediaToken == nil || p.Patch < 1 || p.TokenLimit < 1 || len(p.MergeKernel) != 2 || min(p.MergeKernel[0], p.MergeKernel[1]) < 1 {
		return nil, ErrUnknown
	}
	return &Family{Token: *m.MediaToken, Oriented: p.MergeKernel[0] != p.MergeKernel[1], layout: run(*m.MediaToken, func(width, height int) (int, int) {
		if n := (width / p.Patch) * (height / p.Patch); n > p.TokenLimit {
			scale := math.Sqrt(float64(p.TokenLimit) / float64(n))
			width, height = int(float64(width)*scale), int(float64(height)*scale)
		}
		w, h := p.MergeKernel[1]*p.Patch, p.MergeKernel[0]*p.Patch
		return (width + w - 1) / w, (height + h - 1) / h
	})}, nil
}

// delimitedRun is a family that replaces an image by a run of one token between <img> and </img>: sequence tokens for each
// of its tiles.
func delimitedRun(id func(string) (uint32, bool), sequence int, tiles func(width, height int) int) (*Family, error) {
	t, err := tokensOf(id, "<img>", "<IMG_CONTEXT>", "</img>")
	if err != nil || sequence < 1 || sequence > maxTokens {
		return nil, ErrUnknown
	}
	return &Family{Token: t[1], Oriented: true, layout: func(dst []uint32, width, height int) ([]uint32, bool) {
		n := sequence * tiles(width, height)
		if n > maxTokens {
			return dst, false
		}
		return append(repeated(append(dst, t[0]), t[1], n), t[2]), true
	}}, nil
}

// withThumbnail adds the tile with the whole image, which exists if there are several tiles.
func withThumbnail(tiles int) int {
	if tiles > 1 {
		tiles++
	}
	return tiles
}

func internVL(_ *modelConfig, p *processorConfig, id func(string) (uint32, bool)) (*Family, error) {
	least, most := cmp.Or(p.MinPatches, 1), cmp.Or(p.MaxPatches, 12)
	if !strings.HasPrefix(p.Type, "GotOcr2ImageProcessor") || p.Size == nil || p.Size.Height < 1 || p.Size.Height > maxSide || p.Size.Height != p.Size.Width || min(least, most) < 1 || most > 64 {
		return nil, ErrUnknown
	}
	return delimitedRun(id, cmp.Or(p.Sequence, 256), func(width, height int) int {
		if most == 1 {
			return 1
		}
		columns, rows := nearestRatio(width, height, p.Size.Height, least, most)
		return withThumbnail(columns * rows)
	})
}

func internVLChat(m *modelConfig, _ *processorConfig, id func(string) (uint32, bool)) (*Family, error) {
	size := int(m.Vision.Size)
	if size < 1 || size > maxSide || m.Vision.Patch < 1 || m.Downsample <= 0 || m.Downsample > 1 || m.MinTiles < 1 || m.MaxTiles < 1 || m.MaxTiles > 64 {
		return nil, ErrUnknown
	}
	grid := float64(size / int(m.Vision.Patch))
	f, err := delimitedRun(id, int(grid*grid*(m.Downsample*m.Downsample)), func(width, height int) int {
		if !m.Dynamic {
			return 1
		}
		columns, rows := nearestRatio(width, height, size, m.MinTiles, m.MaxTiles)
		if !m.Thumbnail {
			return columns * rows
		}
		return withThumbnail(columns * rows)
	})
	if err == nil {
		f.Mark, f.Text, f.Front = "<image>", "<IMG_CONTEXT>", "<image>"
	}
	return f, err
}

// nearestRatio returns the grid of least to most tiles whose aspect ratio is nearest to the image's. Among grids with
// the same ratio it chooses the largest one with less than twice the image's area.
func nearestRatio(width, height, tile, least, most int) (columns, rows int) {
	ratio, best := float64(width)/float64(height), math.Inf(1)
	columns, rows = 1, 1
	for n := least; n <= most; n++ {
		for c := 1; c <= n; c++ {
			if n%c != 0 {
				continue
			}
			off := math.Abs(ratio - float64(c)/float64(n/c))
			if off < best || off == best && 2*width*height > tile*tile*n {
				best, columns, rows = off, c, n/c
			}
		}
	}
	return columns, rows
}

// deepseekGrid returns the number of tokens of an image: those of the whole image (whole x whole), those of its tiles
// (each side x side), one at the end of each row, and one between image and tiles. All have one id, so they are one row.
func deepseekGrid(whole, side, columns, rows int) (int, int) {
	n := whole*(whole+1) + 1
	if columns*rows > 0 {
		n += rows * side * (columns*side + 1)
	}
	return n, 1
}

func deepseekOCR(m *modelConfig, _ *processorConfig, id func(string) (uint32, bool)) (*Family, error) {
	f, err := grid(m, "<image>", id)
	if err != nil {
		return nil, err
	}
	const tile = 640
	f.Front, f.Oriented = "<image>", true
	f.layout = run(f.Token, func(width, height int) (int, int) {
		if max(width, height) <= tile {
			return deepseekGrid(16, 10, 0, 0)
		}
		columns, rows := nearestRatio(width, height, tile, 2, 6)
		return deepseekGrid(16, 10, columns, rows)
	})
	return f, nil
}

func deepseekVL2(m *modelConfig, p *processorConfig, id func(string) (uint32, bool)) (*Family, error) {
	f, err := grid(m, "<image>", id)
	if err != nil || len(p.Resolutions) == 0 || p.Resolutions[0][0] < 1 || p.Patch < 1 || p.Downsample < 1 {
		return nil, ErrUnknown
	}
	tile := p.Resolutions[0][0]
	side := (tile/p.Patch + p.Downsample - 1) / p.Downsample
	f.Front, f.Oriented, f.Most = "<image>", true, 2 // three are not cut into tiles
	f.layout = run(f.Token, func(width, height int) (int, int) {
		var fit [2]int
		most, waste := 0, math.MaxInt
		for _, r := range p.Resolutions {
			scale := min(float64(r[0])/float64(width), float64(r[1])/float64(height))
			used := min(int(float64(width)*scale)*int(float64(height)*scale), width*height)
			if used > most || used == most && r[0]*r[1]-used < waste {
				most, waste, fit = used, r[0]*r[1]-used, r
			}
		}
		return deepseekGrid(side, side, fit[0]/tile, fit[1]/tile)
	})
	return f, nil
}
