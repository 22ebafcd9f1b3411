package shape

import (
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/conv"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
	"github.com/kvlane/kvlane/internal/tokens/media"
)

// image is an image of a chat.
type image struct {
	media.Image

	turned     bool   // its orientation tag may exchange width and height
	identifier string // what vLLM identifies it by (vllm/multimodal/hasher.py, processing/inputs.py)
}

// SetEngineModel sets the value of the engines' --model, which is part of the hashes of images. Without it, prompts are matched
// up to their first image. It is safe for concurrent use.
func (m *Model) SetEngineModel(model string) { m.served.Store(&model) }

// imagesOf returns an empty list for the images of a request, nil if their tokens cannot be computed.
func (m *Model) imagesOf(in input) *images {
	served := m.served.Load()
	if m.family == nil || served == nil || *served == "" || in.API != body.Chat || given(in.Get("mm_processor_kwargs")) || given(in.Get("media_io_kwargs")) {
		return nil
	}
	return &images{family: m.family, served: *served}
}

// images holds a plan's images before the first medium whose tokens are unknown.
type images struct {
	family *media.Family
	served string // vLLM's --model
	list   []image
}

// front is the text that represents an image before a message's texts, "" if unknown.
func (i *images) front() string {
	if i == nil {
		return ""
	}
	return i.family.Front
}

func (i *images) count() int {
	if i == nil {
		return 0
	}
	return len(i.list)
}

// add adds the image of a content part. It returns false if the image is not inline, or the part or the image has a form that
// is not implemented here.
func (i *images) add(v jinja.Value) bool {
	part, _ := v.AsDict()
	if kind := textAt(part, "type"); i == nil || kind != "" && kind != "image_url" && kind != "input_image" {
		return false
	}
	url, inline := member(part, "image_url").AsString()
	if !inline {
		url = textAt(dictAt(part, "image_url"), "url")
	}
	identifier, named, ok := textOf(part, "uuid")
	plain := true
	part.Range(func(k, _ jinja.Value) bool {
		key, _ := k.AsString()
		plain = key == "type" || key == "image_url" || key == "uuid" // others are visible to the template
		return plain
	})
	if !plain || !ok || named && identifier == "" {
		return false
	}
	buf, _ := buffers.Get().(*[]byte)
	defer release(buf)
	data, ok := media.AppendDataURL((*buf)[:0], url)
	*buf = data[:0]
	if !ok {
		return false
	}
	img, err := media.ReadImage(data)
	if err != nil {
		return false
	}
	if identifier = strings.Clone(identifier); !named { // it outlives the message
		identifier = media.VLLMIdentifier(data, img, i.served)
	}
	i.list = append(i.list, image{img, i.family.Oriented && media.MayTurn(data), identifier})
	return true
}

// maxExpanded bounds the ids of a prompt with images if the engine's context length is not known.
const maxExpanded = 1 << 20

// placeImages replaces the placeholder token of each image with the tokens of vLLM's processor. The ids end before an
// image whose tokens are unknown.
func (m *Model) placeImages(res *Result, p *plan) {
	f, ids := p.images.family, res.IDs
	marks := 0
	for _, id := range ids {
		if id == f.Token {
			marks++
		}
	}
	limit := maxExpanded
	if n := m.MaxModelLen(); n > 0 {
		limit = n
	}
	known := p.images.list
	if marks != len(known) || p.keep != 0 || f.Most > 0 && (p.isCut() || len(known) > f.Most) {
		known = nil // the text contains the token too, or the prompt is truncated
	}
	out := make([]uint32, 0, len(ids)+min(256*len(known), limit))
	for i, id := range ids {
		at, ok := 0, false
		if id != f.Token {
			if out, ok = f.Next(out, id, i+1 < len(ids) && ids[i+1] == f.Token); ok {
				continue
			}
		} else if len(known) > 0 && len(out) <= limit {
			out, at, ok = f.Append(out, known[0].Image, known[0].turned)
		}
		if !ok {
			res.Partial = "the tokens of an image are not known"
			break
		}
		res.Media = append(res.Media, conv.Medium{At: at, Identifier: known[0].identifier})
		known = known[1:]
	}
	res.IDs = out
}
