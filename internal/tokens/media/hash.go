package media

import (
	"encoding/binary"
	"encoding/hex"

	"github.com/zeebo/blake3"
)

// Tags of values in vLLM's hash input. A length, as a 64-bit integer, follows each tag and precedes each text.
const (
	tagSequence = 1
	tagMapping  = 2
	tagLeaf     = 3
)

// VLLMIdentifier is the name of a chat's image in vLLM 0.32's block hashes: a digest of the original bytes, of the
// conversion to RGB if needed, and of the model's name or path as given to vLLM. It holds for the default hash (BLAKE3)
// and without media_io_kwargs and mm_processor_kwargs.
func VLLMIdentifier(data []byte, img Image, model string) string {
	h := blake3.New()
	head := framed(leaf(framed(make([]byte, 0, 256), "image")), "image")
	if img.RGB {
		head = leaf(head)
	} else {
		head = length(append(head, tagMapping), 2)
		head = length(append(framed(head, "io_config"), tagMapping), 2)
		head = framed(leaf(framed(head, "image_mode")), "RGB")
		head = length(append(framed(head, "rgba_background_color"), tagSequence), 3)
		for range 3 {
			head = length(length(leaf(head), 8), 255) // a 64-bit integer
		}
		head = leaf(framed(head, "data"))
	}
	head = length(head, len(data))
	_, _ = h.Write(head)
	_, _ = h.Write(data)
	_, _ = h.Write(framed(leaf(framed(head[:0], "model_id")), model))
	return hex.EncodeToString(h.Sum(head[:0]))
}

func length(b []byte, n int) []byte { return binary.LittleEndian.AppendUint64(b, uint64(n)) }

func framed(b []byte, text string) []byte { return append(length(b, len(text)), text...) }

func leaf(b []byte) []byte { return append(b, tagLeaf) }
