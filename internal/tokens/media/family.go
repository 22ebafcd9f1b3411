package media

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"strings"
)

// Family is what an engine puts in the place of a model's images.
type Family struct {
	// Token is the id that stands for an image in a prompt before the engine's processor runs.
	Token uint32

	// turns reports that the tokens depend on which side is the width.
	turns bool
	// size returns the columns and rows of tokens, 0 if the engine refuses the image.
	size func(width, height int) (columns, rows int)
	// A row of more than one ends with breaks, the last one with ends, if marked.
	marked       bool
	breaks, ends uint32
}

// ErrUnknown is returned for models whose images are not followed.
var ErrUnknown = errors.New("how the model's images become tokens is not known")

// modelConfig is the part of config.json that is read.
type modelConfig struct {
	Architectures []string `json:"architectures"`
	ImageToken    *uint32  `json:"image_token_id"`
	ImageIndex    *uint32  `json:"image_token_index"`
	Merge         int      `json:"spatial_merge_size"`
	Vision        struct {
		Patch int `json:"patch_size"`
	} `json:"vision_config"`
}

// processorConfig is the part of preprocessor_config.json that is read.
type processorConfig struct {
	Type   string `json:"image_processor_type"`
	Resize *bool  `json:"do_resize"`
	Size   *struct {
		Shortest int `json:"shortest_edge"`
		Longest  int `json:"longest_edge"`
	} `json:"size"`
	MinPixels int `json:"min_pixels"`
	MaxPixels int `json:"max_pixels"`
	Patch     int `json:"patch_size"`
	Merge     int `json:"merge_size"`
}

// families are the architectures by which the folder's files are read.
var families = map[string]func(m *modelConfig, p *processorConfig, id func(token string) (uint32, bool)) (*Family, error){
	"Qwen2VLForConditionalGeneration":    qwen,
	"Qwen2_5_VLForConditionalGeneration": qwen,
	"Qwen3VLForConditionalGeneration":    qwen,
	"Qwen3VLMoeForConditionalGeneration": qwen,
	"Qwen3_5ForConditionalGeneration":    qwen,
	"Qwen3_5MoeForConditionalGeneration": qwen,
	"Glm4vForConditionalGeneration":      glm,
	"Glm4vMoeForConditionalGeneration":   glm,
	"Mistral3ForConditionalGeneration":   mistral3,
}

// Load reads the model's config.json and its processor's configuration. id returns the id of a special token. The error
// is ErrUnknown if the model has no images or its family is not followed.
func Load(fsys fs.FS, id func(token string) (uint32, bool)) (*Family, error) {
	var m modelConfig
	if err := readJSON(fsys, "config.json", &m); err != nil {
		return nil, err
	}
	if len(m.Architectures) == 0 || families[m.Architectures[0]] == nil {
		return nil, ErrUnknown
	}
	p := &processorConfig{}
	var whole struct {
		Image *processorConfig `json:"image_processor"`
	}
	// transformers prefers the nested form.
	err := readJSON(fsys, "processor_config.json", &whole)
	if whole.Image != nil {
		p = whole.Image
	} else if err == nil || errors.Is(err, fs.ErrNotExist) {
		err = readJSON(fsys, "preprocessor_config.json", p)
	}
	if err != nil {
		return nil, err
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

// Append appends the tokens of an image to dst. turned reports that the image may be turned before. It returns false if
// they are not known.
func (f *Family) Append(dst []uint32, img Image, turned bool) ([]uint32, bool) {
	columns, rows := f.size(img.Width, img.Height)
	if columns < 1 || rows < 1 || columns*rows > maxTokens || f.turns && turned && img.Width != img.Height {
		return dst, false
	}
	if !f.marked {
		columns, rows = columns*rows, 1
	}
	for range rows {
		for range columns {
			dst = append(dst, f.Token)
		}
		if f.marked {
			dst = append(dst, f.breaks)
		}
	}
	if f.marked {
		dst[len(dst)-1] = f.ends
	}
	return dst, true
}

// Turns reports whether the tokens depend on the image's orientation.
func (f *Family) Turns() bool { return f.turns }

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
	f.size = b.resized
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
	f.size = func(width, height int) (int, int) {
		if side := b.patch * b.merge; width < side || height < side {
			scale := max(float64(side)/float64(height), float64(side)/float64(width))
			width, height = int(float64(width)*scale), int(float64(height)*scale)
		}
		return b.resized(width, height)
	}
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
	side := m.Vision.Patch * m.Merge
	if !strings.HasPrefix(p.Type, "PixtralImageProcessor") || !ok || !ok2 || m.ImageIndex == nil || p.Size == nil || p.Size.Longest < 1 || side < 1 {
		return nil, ErrUnknown
	}
	longest := float64(p.Size.Longest)
	return &Family{Token: *m.ImageIndex, turns: true, marked: true, breaks: breaks, ends: ends, size: func(width, height int) (int, int) {
		if ratio := max(float64(width)/longest, float64(height)/longest); ratio > 1 {
			width, height = int(float64(width)/ratio), int(float64(height)/ratio)
		}
		return (width + side - 1) / side, (height + side - 1) / side
	}}, nil
}
