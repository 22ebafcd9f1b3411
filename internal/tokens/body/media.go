package body

import "bytes"

// What a value may hold that engines fetch.
type fetched uint8

const (
	nothing   fetched = iota // but members may have something
	ofObjects                // the url of an object
	ofTexts                  // that, or a text
	never                    // nor do members
)

// mediaFields are the members from which engines fetch images, audio and video: those of content parts, SGLang's of
// /generate and embeddings, Anthropic's source, and the reference voices of vLLM-Omni's /v1/audio/speech.
var mediaFields = map[string]fetched{
	"image_url": ofTexts, "video_url": ofTexts, "audio_url": ofTexts, "image_data": ofTexts, "video_data": ofTexts, "audio_data": ofTexts, "image": ofTexts, "video": ofTexts,
	"audio": ofTexts, "images": ofTexts, "videos": ofTexts, "audios": ofTexts, "file_url": ofTexts, "source": ofObjects, "content_parts": ofObjects,
	"ref_audio": ofTexts, "ref_audio_2": ofTexts, "audio_path": ofTexts,
}

// plainFields are top-level fields that hold neither a prompt nor media that are processed, but may have members with such names.
var plainFields = map[string]bool{"tools": true, "features": true, "functions": true, "response_format": true, "structured_outputs": true, "guided_json": true, "text": true, "metadata": true}

// argumentsDepth is the depth from which input holds the arguments of a tool: that of content parts.
const argumentsDepth = 5

// EachMediaURL calls each with the texts, as written, that an engine might take for the URL of an image, audio or video, wherever
// in the body they are, but for data: URLs without escapes before the colon. Of equal keys every one counts.
func (r *Request) EachMediaURL(each func(text []byte)) {
	s := scanner{b: r.Body}
	var outer []fetched
	in, next := nothing, nothing // of the innermost list or object, and of the value that follows
	for i := 0; i < len(s.b); i++ {
		switch s.b[i] {
		case '{', '[':
			outer, in = append(outer, in), next
		case '}', ']':
			in, outer = outer[len(outer)-1], outer[:len(outer)-1]
		case ',':
			next = in
		case '"':
			end := s.str(i)
			text := s.b[i:end]
			i = end - 1
			if colon := s.space(end); colon < len(s.b) && s.b[colon] == ':' {
				next = in.member(text, len(outer))
			} else if next == ofTexts && !bytes.HasPrefix(text, []byte(`"data:`)) {
				each(text)
			}
		}
	}
}

// member returns what the member with this key, of an object at this depth, may hold.
func (f fetched) member(key []byte, depth int) fetched {
	var room [roomForKey]byte
	name, _ := textWithin(len(room), room[:0], key)
	switch {
	case f == never, depth == 1 && plainFields[string(name)], depth >= argumentsDepth && string(name) == "input":
		return never
	case f != nothing && string(name) == "url":
		return ofTexts
	}
	return mediaFields[string(name)]
}
