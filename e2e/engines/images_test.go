package engines

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"image"
	"image/color"
	"image/gif"
	"image/jpeg"
	"image/png"
	"math/rand/v2"
	"testing"
)

// TestImages plays conversations with images on a vision model with random weights.
func TestImages(t *testing.T) {
	k := *vllm
	k.model, k.blocks = "qwen2_vl", 160
	b := newBed(t, &k)
	b.images()
	b.alike()
}

// picture makes an image of a size as a data: URL: PNG with and without colors, JPEG or GIF.
func picture(t *testing.T, r *rand.Rand, kind, width, height int) string {
	t.Helper()
	area := image.Rect(0, 0, width, height)
	shade := color.RGBA{uint8(r.Uint32()), uint8(r.Uint32()), uint8(r.Uint32()), 255}
	colored, gray := image.NewRGBA(area), image.NewGray(area)
	for range 40 {
		x, y := r.IntN(width), r.IntN(height)
		colored.Set(x, y, shade)
		gray.Set(x, y, shade)
	}
	if kind == 1 { // with transparent pixels, so that its mode is RGBA
		colored.Set(0, 0, color.RGBA{})
	} else {
		for i := 3; i < len(colored.Pix); i += 4 {
			colored.Pix[i] = 255
		}
	}
	var out bytes.Buffer
	var err error
	form := "png"
	switch kind {
	case 0, 1:
		err = png.Encode(&out, colored)
	case 2:
		err = png.Encode(&out, gray)
	case 3:
		form, err = "jpeg", jpeg.Encode(&out, colored, nil)
	default:
		form, err = "gif", gif.Encode(&out, colored, nil)
	}
	if err != nil {
		t.Fatal(err)
	}
	return "data:image/" + form + ";base64," + base64.StdEncoding.EncodeToString(out.Bytes())
}

// webps are WebP images of one color: lossy, lossless, with an alpha channel, and animated.
var webps = []string{
	"UklGRkgAAABXRUJQVlA4IDwAAADwAwCdASpaAD0AP5nM4mo5Mi4ooWgDIDMJaQAACzIkSJEiRIkSJEfQAP7Xlf90sIbrX/0NGnmQAAAAAAA=",
	"UklGRiQAAABXRUJQVlA4TBcAAAAvSkAgAAdQraIUuf9hABLC//1SRP9TiQA=",
	"UklGRnQAAABXRUJQVlA4WAoAAAAQAAAAPwAAYAAAQUxQSBAAAAABB1C8iAgACeH/fSWi/6kBVlA4ID4AAAAwBACdASpAAGEAP5nM4mo5Mi4ooSgDIDMJaQAACLUSt" +
		"WrVq1atWrVq00AA/teV/3Swhutf/Q0aeZAAAAAAAA==",
	"UklGRgABAABXRUJQVlA4WAoAAAACAAAAUgAARQAAQU5JTQYAAAAAAAAAAABBTk1GdgAAAAAAAAAAAFIAAEUAACgAAAJWUDggXgAAANAFAJ0BKlMARgA+bTaZSaQj" +
		"IqEhKACADYlpBigH7/idAfgAB/+IqiAZF+lfmkhSEloVMM1++MAA/u8pR//9CT8TZ4mz4RX//Xnc52c+O73x3h2XpcHpcHpMpoQAAABBTk1GVgAAAAAAAAAA" +
		"AFIAAEUAACgAAABWUDggPgAAADQEAJ0BKlMARgAuTTabTYAABMS0gxQAAR/r69v/v0EA9DNoZtDNoZtCuAD+/MvF5J1fCxV33Iu8Bv2hQAAA",
}

// images sends conversations in which images come again, in another order and in other sizes: the engine reports as many
// cached tokens as Kvlane predicts, and some of them lie behind images.
func (b *bed) images() {
	b.until("the engine's model is known", func() bool { return b.metric("kvlane_token_checks_total") > 0 })
	r := rand.New(rand.NewPCG(3, 4))
	var pool []m
	for n := range 14 {
		part := m{"type": "image_url", "image_url": m{"url": picture(b.t, r, n%5, 20+r.IntN(200), 20+r.IntN(200))}}
		if n%7 == 6 {
			part["uuid"] = fmt.Sprintf("picture-%d", n)
		}
		pool = append(pool, part)
	}
	for _, webp := range webps {
		pool = append(pool, m{"type": "image_url", "image_url": m{"url": "data:image/webp;base64," + webp}})
	}
	// The same picture in two sizes, as clients that resize send it.
	for _, width := range []int{130, 260} {
		pool = append(pool, m{"type": "image_url", "image_url": m{"url": picture(b.t, rand.New(rand.NewPCG(5, 6)), 0, width, width/2)}})
	}
	chats := [][]m{}
	behind := 0
	for n := range 60 {
		var messages []m
		switch {
		case n%6 == 0 || len(chats) == 0: // a new one
			messages = []m{system(fmt.Sprintf("Reader %d. %s", n%12, rules))}
		default: // another turn of one, or another question after its beginning
			old := chats[r.IntN(len(chats))]
			messages = append(messages, old[:1+r.IntN(min(3, len(old)))]...)
		}
		parts := []m{}
		for range 1 + r.IntN(3) {
			if r.IntN(2) == 0 {
				parts = append(parts, m{"type": "text", "text": prose(fmt.Sprint(r.IntN(4)), 3+r.IntN(30))})
			}
			parts = append(parts, pool[r.IntN(len(pool))])
		}
		messages = append(messages, m{"role": "user", "content": parts})
		if n%4 == 3 {
			messages = append(messages, assistant("Yes."), user(prose("q", 12)))
		}
		first := b.predicted(fmt.Sprintf("chat %d", n), "/v1/chat/completions", limited(messages))
		again := b.predicted(fmt.Sprintf("chat %d again", n), "/v1/chat/completions", limited(messages))
		if want := (again.prompt - 1) / b.block * b.block; again.cached != want {
			b.t.Errorf("chat %d again: got %d of %d tokens cached, want %d", n, again.cached, again.prompt, want)
		}
		behind += first.cached
		chats = append(chats, messages)
	}
	if behind == 0 {
		b.t.Error("no new chat found an earlier one in the cache")
	}
}

// alike sends images of one size in one place: a match ends before an image with other pixels or another name, and goes through
// the one that was there before.
func (b *bed) alike() {
	r := rand.New(rand.NewPCG(7, 8))
	one, other := picture(b.t, r, 0, 84, 112), picture(b.t, r, 0, 84, 112)
	text := prose("alike", 90)
	ask := func(what, url, uuid string) answer {
		part := m{"type": "image_url", "image_url": m{"url": url}}
		if uuid != "" {
			part["uuid"] = uuid
		}
		return b.predicted(what, "/v1/chat/completions", limited([]m{system(rules), {"role": "user", "content": []m{{"type": "text", "text": text}, part,
			{"type": "text", "text": prose("then", 70)}}}}))
	}
	plain := b.predicted("without an image", "/v1/chat/completions", limited([]m{system(rules), user(text)}))
	const end = 5 // the message's end, and the beginning of the answer
	before := (plain.prompt - end + 1) / b.block * b.block
	for _, c := range []struct {
		what, url, uuid string
		through         bool
	}{
		{"an image", one, "", false}, {"the image again", one, "", true},
		{"other pixels", other, "", false}, {"the first again", one, "", true}, {"the other again", other, "", true},
		{"the first with a name", one, "a", false}, {"with another name", one, "b", false}, {"the first name again", one, "a", true},
		{"the first without a name", one, "", true},
	} {
		a, want := ask(c.what, c.url, c.uuid), before
		if c.through {
			want = (a.prompt - 1) / b.block * b.block
		}
		if a.cached != want || a.matched != want || want <= before && c.through {
			b.t.Errorf("%s: got %d tokens matched and %d cached, want %d; %d precede the image", c.what, a.matched, a.cached, want, before)
		}
	}
}

func limited(messages []m) m {
	body := chat(messages...)
	body["max_tokens"] = 2
	return body
}
