package body

import "bytes"

// Usage is an engine's token accounting of a request, in tokens; -1 means not reported.
type Usage struct {
	Prompt     int64 // whole prompt including the cached part, whatever the API's own convention
	Completion int64
	Cached     int64 // part of Prompt that came from the KV cache
}

// UsageScanner extracts the usage from a response, JSON or server-sent events, that may be split into chunks anywhere.
// It looks only where an engine writes usage, never into generated text, and buffers less than 1 KB for any response
// size. The last value of a stream counts. It is not safe for concurrent use.
type UsageScanner struct {
	sse     bool
	line    lineState
	matched int // bytes of "data:" seen in the line
	json    jsonWalk
	fields  [numCounts]int64
	seen    [numCounts]bool
}

// NewUsageScanner returns a scanner; sse means that the response is text/event-stream.
func NewUsageScanner(sse bool) *UsageScanner { return &UsageScanner{sse: sse} }

// Write scans the next bytes of the response. It never fails.
func (u *UsageScanner) Write(chunk []byte) (int, error) {
	if !u.sse {
		u.json.walk(chunk, u)
		return len(chunk), nil
	}
	for rest := chunk; len(rest) > 0; {
		rest = u.event(rest)
	}
	return len(chunk), nil
}

type lineState uint8

const (
	lineStart lineState = iota // in the field's name
	lineData                   // in the value of data:
	lineOther                  // in a line to ignore
)

// event consumes the part of rest that belongs to the current line state and returns the remainder.
func (u *UsageScanner) event(rest []byte) []byte {
	const name = "data:"
	if u.line == lineStart {
		for i, c := range rest {
			if c == '\n' || c == '\r' {
				if u.matched == 0 && c == '\n' { // a blank line ends the event
					u.json.reset()
				}
				if c == '\n' {
					u.matched = 0
				}
				continue
			}
			if u.matched < len(name) && c == name[u.matched] {
				if u.matched++; u.matched == len(name) {
					u.line = lineData
					return rest[i+1:]
				}
				continue
			}
			u.line = lineOther
			return rest[i:]
		}
		return nil
	}
	part, after, ended := bytes.Cut(rest, []byte{'\n'})
	if u.line == lineData {
		u.json.walk(part, u)
	}
	if ended {
		u.line, u.matched = lineStart, 0
	}
	return after
}

// Usage returns the usage found so far, with the same meaning for every API: Anthropic's input_tokens exclude cached
// and cache-creation tokens, which are added here. ok is false if no usage was found.
func (u *UsageScanner) Usage() (found Usage, ok bool) {
	get := func(c count) int64 {
		if u.seen[c] {
			ok = true
			return u.fields[c]
		}
		return -1
	}
	found = Usage{Prompt: get(countPrompt), Completion: get(countCompletion), Cached: get(countCached)}
	if found.Prompt < 0 {
		found.Prompt = get(countInput)
	}
	if found.Completion < 0 {
		found.Completion = get(countOutput)
	}
	if read := get(countCacheRead); read >= 0 {
		found.Cached = read
		found.Prompt = max(found.Prompt, 0) + read
	}
	if created := get(countCacheCreated); created > 0 {
		found.Prompt = max(found.Prompt, 0) + created
	}
	return found, ok
}

// count identifies a number that engines report.
type count uint8

const (
	countPrompt count = iota
	countCompletion
	countCached
	countInput
	countOutput
	countCacheRead
	countCacheCreated
	numCounts
)

// level is the position of an object in the response.
type level uint8

const (
	levelOther   level = iota
	levelRoot          // the response itself, or an element of a batch response
	levelWrap          // message, response
	levelUsage         // usage, meta_info
	levelDetails       // *_tokens_details
)

// levelKeys maps, for each level, a key to the level of its value.
var levelKeys = map[level]map[string]level{
	levelRoot:  {"usage": levelUsage, "meta_info": levelUsage, "message": levelWrap, "response": levelWrap},
	levelWrap:  {"usage": levelUsage},
	levelUsage: {"prompt_tokens_details": levelDetails, "input_tokens_details": levelDetails},
}

var countKeys = map[level]map[string]count{
	levelUsage: {"prompt_tokens": countPrompt, "completion_tokens": countCompletion, "cached_tokens": countCached,
		"input_tokens": countInput, "output_tokens": countOutput, "cache_read_input_tokens": countCacheRead,
		"cache_creation_input_tokens": countCacheCreated},
	levelDetails: {"cached_tokens": countCached},
}

const (
	walkDepth = 64 // deeper levels are counted, but not stored
	walkKey   = 32 // longer keys are ignored
)

// jsonWalk tracks the structure of a JSON text byte by byte. It does not validate.
type jsonWalk struct {
	depth    int
	levels   [walkDepth]level
	inArray  [walkDepth]bool
	key      [walkKey]byte
	keyLen   int
	inString bool
	escaped  bool
	isKey    bool // the current or next string is a key
	inNumber bool
	number   int64
	noCount  bool // the number is negative, not whole, or too large

	// watch makes walk stop after the opening and closing bracket of each usage object.
	// usageDepth is the depth of the open one, 0 if none is open.
	watch      bool
	usageDepth int
}

func (w *jsonWalk) reset() { *w = jsonWalk{watch: w.watch} }

func (w *jsonWalk) at() level {
	switch {
	case w.depth == 0:
		return levelOther
	case w.depth > walkDepth:
		return levelOther
	default:
		return w.levels[w.depth-1]
	}
}

// walk consumes chunk until watch stops it and returns the number of bytes consumed.
func (w *jsonWalk) walk(chunk []byte, u *UsageScanner) int {
	for i := 0; i < len(chunk); i++ {
		c := chunk[i]
		if w.inString {
			if !w.escaped && !w.isKey {
				var high uint64
				if i = run(chunk, i, &high); i == len(chunk) {
					return i
				}
				c = chunk[i]
			}
			w.text(c)
			continue
		}
		if w.inNumber {
			switch {
			case c-'0' < 10 && w.number < 1<<52:
				w.number = w.number*10 + int64(c-'0')
				continue
			case c-'0' < 10, c == '.', c == '+', c == '-', c|0x20 == 'e':
				w.noCount = true
				continue
			}
			w.inNumber = false
			if !w.noCount {
				w.report(u)
			}
		}
		w.structure(c)
		if w.watch && w.crossed(c) {
			return i + 1
		}
	}
	return len(chunk)
}

// crossed reports whether c, which was just consumed, opened or closed a usage object.
func (w *jsonWalk) crossed(c byte) bool {
	switch {
	case c == '{' && w.usageDepth == 0 && w.at() == levelUsage:
		w.usageDepth = w.depth
		return true
	case c == '}' && w.usageDepth != 0 && w.depth < w.usageDepth:
		w.usageDepth = 0
		return true
	}
	return false
}

func (w *jsonWalk) text(c byte) {
	switch {
	case w.escaped:
		w.escaped = false
		w.keyLen = walkKey + 1 // an escaped key never matches
	case c == '\\':
		w.escaped = true
	case c == '"':
		w.inString = false
	case w.isKey && w.keyLen < walkKey:
		w.key[w.keyLen] = c
		w.keyLen++
	case w.isKey:
		w.keyLen = walkKey + 1
	}
}

func (w *jsonWalk) structure(c byte) {
	switch c {
	case '"':
		w.inString = true
		if w.isKey {
			w.keyLen = 0
		}
	case '{', '[':
		w.open(c == '[')
	case '}', ']':
		if w.depth > 0 {
			w.depth--
		}
		w.isKey = false
	case ',':
		w.isKey = w.depth > 0 && w.depth <= walkDepth && !w.inArray[w.depth-1]
	case ':':
		w.isKey = false
	case '-':
		w.inNumber, w.noCount, w.number = true, true, 0
	case '0', '1', '2', '3', '4', '5', '6', '7', '8', '9':
		w.inNumber, w.noCount, w.number = true, false, int64(c-'0')
	}
}

func (w *jsonWalk) open(array bool) {
	next := levelOther
	switch {
	case w.depth == 0:
		next = levelRoot
	case w.depth <= walkDepth && w.inArray[w.depth-1]:
		if w.depth == 1 {
			next = levelRoot // an element of a batch response
		}
	case w.keyLen <= walkKey:
		next = levelKeys[w.at()][string(w.key[:w.keyLen])]
	}
	if w.depth++; w.depth <= walkDepth {
		w.levels[w.depth-1] = next
		w.inArray[w.depth-1] = array
	}
	w.isKey = !array
}

// report records a complete number. The last key read belongs to it only directly inside an object.
func (w *jsonWalk) report(u *UsageScanner) {
	if w.depth == 0 || w.depth > walkDepth || w.inArray[w.depth-1] || w.keyLen > walkKey {
		return
	}
	if c, ok := countKeys[w.at()][string(w.key[:w.keyLen])]; ok {
		u.fields[c], u.seen[c] = w.number, true
	}
}

// LooksLikeSSE tells server-sent events from JSON by the first bytes.
func LooksLikeSSE(chunk []byte) bool {
	for _, c := range chunk {
		switch c {
		case ' ', '\n', '\r', '\t':
		default:
			return c != '{' && c != '['
		}
	}
	return false
}
