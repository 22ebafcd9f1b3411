// Package media computes what images in prompts become, without decoding pixels: an image's size from its header, the
// name by which vLLM identifies it in block hashes, and the tokens that replace it. All functions are safe for
// concurrent use.
package media

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"unsafe"

	"github.com/segmentio/asm/base64"
)

// Image is what the header of an image says.
type Image struct {
	Width, Height int // in pixels, positive
	// RGB reports whether Pillow opens the image in mode RGB, so that an engine does not convert it.
	RGB bool
}

// ErrImage is returned for data that is not a PNG, JPEG, WebP or GIF image, or whose header is unusual.
var ErrImage = errors.New("not an image that is read here")

// maxSide bounds the width and height of an image in pixels.
const maxSide = 1 << 16

// ReadImage reads the header of an image as Pillow does.
func ReadImage(data []byte) (img Image, err error) {
	ok := false
	switch {
	case bytes.HasPrefix(data, []byte("\x89PNG\r\n\x1a\n")):
		img, ok = readPNG(data)
	case bytes.HasPrefix(data, []byte("\xff\xd8\xff")):
		img, ok = readJPEG(data[2:])
	case bytes.HasPrefix(data, []byte("GIF87a")), bytes.HasPrefix(data, []byte("GIF89a")):
		img, ok = readGIF(data)
	case len(data) >= 30 && string(data[:4]) == "RIFF" && string(data[8:12]) == "WEBP":
		img, ok = readWebP(data[12:])
	}
	if !ok || img.Width < 1 || img.Height < 1 || img.Width > maxSide || img.Height > maxSide {
		return Image{}, ErrImage
	}
	return img, nil
}

func readPNG(data []byte) (Image, bool) {
	const truecolor = 2
	if header := []byte("IHDR"); len(data) < 29 || !bytes.HasPrefix(data[12:], header) || bytes.Contains(data[16:], header) { // a second one would count
		return Image{}, false
	}
	return Image{Width: be32(data[16:]), Height: be32(data[20:]), RGB: data[25] == truecolor}, true
}

// readJPEG looks for the last frame header before the first scan.
func readJPEG(data []byte) (img Image, found bool) {
	for {
		at := bytes.IndexByte(data, 0xff)
		if at < 0 {
			return img, false
		}
		for at < len(data) && data[at] == 0xff {
			at++
		}
		if at+3 > len(data) {
			return img, false
		}
		marker, segment := data[at], data[at+1:]
		if marker == 0 {
			data = segment
			continue
		}
		n := be16(segment)
		switch {
		case marker == 0xda:
			return img, found
		case marker < 0xc0 || marker == 0xc8 || marker >= 0xd0 && marker <= 0xd9 || marker >= 0xf0 && marker != 0xfe, n < 2 || n > len(segment):
			return img, false // without a length, or damaged
		case marker <= 0xcf && marker != 0xc4 && marker != 0xcc:
			if n < 8 || segment[2] != 8 || segment[7] != 1 && segment[7] != 3 && segment[7] != 4 {
				return img, false
			}
			img, found = Image{Height: be16(segment[3:]), Width: be16(segment[5:]), RGB: segment[7] == 3}, true
		}
		data = segment[n:]
	}
}

// readGIF extends the screen to the first frame, as Pillow does. Frames have a palette or are gray.
func readGIF(data []byte) (img Image, ok bool) {
	if len(data) < 13 {
		return img, false
	}
	img = Image{Width: le16(data[6:]), Height: le16(data[8:])}
	flags, rest := data[10], data[13:]
	if flags&0x80 != 0 {
		n := 3 << (flags&7 + 1)
		if len(rest) < n {
			return img, false
		}
		rest = rest[n:]
	}
	for len(rest) > 0 {
		kind := rest[0]
		rest = rest[1:]
		switch kind {
		case ',':
			if len(rest) < 9 {
				return img, false
			}
			img.Width, img.Height = max(img.Width, le16(rest)+le16(rest[4:])), max(img.Height, le16(rest[2:])+le16(rest[6:]))
			return img, true
		case ';':
			return img, false
		case '!':
			if len(rest) < 2 {
				return img, false
			}
			for rest = rest[1:]; ; {
				if len(rest) == 0 || len(rest) <= int(rest[0]) {
					return img, false
				}
				n := int(rest[0])
				rest = rest[n+1:]
				if n == 0 {
					break
				}
			}
		}
	}
	return img, false
}

// readWebP reads the first chunk. data has at least 18 bytes.
func readWebP(data []byte) (img Image, ok bool) {
	body := data[8:]
	switch string(data[:4]) {
	case "VP8 ":
		if string(body[3:6]) != "\x9d\x01\x2a" {
			return img, false
		}
		return Image{Width: le16(body[6:]) & 0x3fff, Height: le16(body[8:]) & 0x3fff, RGB: true}, true
	case "VP8L":
		bits := binary.LittleEndian.Uint32(body[1:])
		return Image{Width: int(bits&0x3fff) + 1, Height: int(bits>>14&0x3fff) + 1, RGB: bits>>28&1 == 0}, body[0] == 0x2f
	case "VP8X":
		const alpha = 0x10
		has, at := bytes.Contains(data, []byte("ALPH")), bytes.Index(data, []byte("VP8L"))
		has = has || at >= 0 && len(data) > at+12 && data[at+12]&alpha != 0
		img = Image{Width: le16(body[4:]) + int(body[6])<<16 + 1, Height: le16(body[7:]) + int(body[9])<<16 + 1, RGB: !has}
		return img, has == (body[0]&alpha != 0)
	}
	return img, false
}

func be16(b []byte) int { return int(binary.BigEndian.Uint16(b)) }
func be32(b []byte) int { return int(binary.BigEndian.Uint32(b)) }
func le16(b []byte) int { return int(binary.LittleEndian.Uint16(b)) }

// MayTurn reports whether an image may have an orientation in its metadata, by which an engine rotates it: width and
// height may then be swapped.
func MayTurn(data []byte) bool {
	return slices.ContainsFunc([]string{"Exif", "eXIf", "EXIF", "Raw profile type", "adobe.xmp", "adobe.com/xap", "XMP "},
		func(mark string) bool { return bytes.Contains(data, []byte(mark)) })
}

// AppendDataURL appends the data of a base64 data: URL to dst. It returns false for any other URL.
func AppendDataURL(dst []byte, url string) ([]byte, bool) {
	head, text, ok := strings.Cut(url, ",")
	if !ok || len(head) < 5 || !strings.EqualFold(head[:5], "data:") || !strings.HasSuffix(head, ";base64") {
		return dst, false
	}
	n := base64.StdEncoding.DecodedLen(len(text))
	at, dst := len(dst), slices.Grow(dst, n)
	n, err := base64.StdEncoding.Decode(dst[at:at+n], unsafe.Slice(unsafe.StringData(text), len(text)))
	if err != nil {
		return dst, false
	}
	return dst[:at+n], true
}
