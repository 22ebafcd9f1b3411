package bpe

import (
	"strings"
	"unicode/utf8"
)

// pipeline runs the stages of tokenizer.json in sequence, as the library does. Tokenizers with
// common stages use the faster splitter and spaceModel instead.
type pipeline struct {
	normalizers []normalizeStage
	splitters   []splitStage
	// finish appends the ids of one word in the form that the last stage produced.
	finish func(enc *encoder, dst []uint32, word piece) []uint32
	// bytes reports that the last stage is ByteLevel and the model byte-level. Words are then passed
	// to the model as bytes instead of as GPT-2's printable substitutes.
	bytes bool
}

// normalizeStage is a normalizer.
type normalizeStage func(enc *encoder, s string) string

// splitStage is a pre-tokenizer: it calls next for each part of a piece.
type splitStage func(enc *encoder, p piece, next func(piece))

// piece is a part of a text between added tokens; first: it is the start of the text.
type piece struct {
	text  string
	first bool
}

// matcher finds the matches that a stage splits at: it returns the next match that starts at or after i.
type matcher func(enc *encoder, s string, i int) (from, to int, ok bool)

func (p *pipeline) normalized(enc *encoder, s string) string {
	for _, stage := range p.normalizers {
		if s == "" || enc.watch.stopped || enc.match.exceeded() {
			break
		}
		s = stage(enc, s)
	}
	return s
}

// encode appends the ids of a piece of normalized text.
func (p *pipeline) encode(enc *encoder, dst []uint32, text piece) []uint32 {
	var run func(k int, q piece)
	run = func(k int, q piece) {
		switch {
		case q.text == "":
		case k == len(p.splitters):
			if !enc.watch.over(len(q.text)) {
				dst = p.finish(enc, dst, q)
			}
		default:
			p.splitters[k](enc, q, func(r piece) { run(k+1, r) })
		}
	}
	run(0, text)
	return dst
}

// pipelined is betweenAdded for a tokenizer with a pipeline. base is the offset of s in the whole text.
func (enc *encoder) pipelined(dst []uint32, s string, base int) []uint32 {
	p := enc.t.pipe
	find := search{set: enc.t.normal, s: p.normalized(enc, s), wanted: &enc.watch}
	encode := func(dst []uint32, s string, first bool) []uint32 { return p.encode(enc, dst, piece{s, first}) }
	return enc.around(dst, &find, encode, base == 0, nil)
}

// behavior defines how the matches that a text is split at are joined to the rest.
type behavior uint8

const (
	behaveIsolated behavior = iota
	behaveRemoved
	behaveMergedWithPrevious
	behaveMergedWithNext
	behaveContiguous
)

var behaviors = map[string]behavior{
	"Isolated": behaveIsolated, "Removed": behaveRemoved, "MergedWithPrevious": behaveMergedWithPrevious,
	"MergedWithNext": behaveMergedWithNext, "Contiguous": behaveContiguous,
}

// split returns a stage that splits at matches. With invert the text between them counts as the matches.
func split(find matcher, how behavior, invert bool) splitStage {
	return func(enc *encoder, p piece, next func(piece)) {
		g := gather{p: p, how: how, next: next}
		at := 0
		for at < len(p.text) {
			from, to, ok := find(enc, p.text, at)
			if !ok || enc.watch.over(to-at) {
				break
			}
			g.add(at, from, invert)
			g.add(from, to, !invert)
			at = to
		}
		g.add(at, len(p.text), invert)
		g.flush()
	}
}

// gather joins matches and the ranges between them according to a behavior.
type gather struct {
	p    piece
	how  behavior
	next func(piece)

	from, to int // not yet passed to next
	match    bool
}

// add appends the next range.
func (g *gather) add(from, to int, match bool) {
	if from == to {
		return
	}
	joined := false
	if g.from < g.to {
		switch g.how {
		case behaveContiguous:
			joined = match == g.match
		case behaveMergedWithPrevious:
			joined = match && !g.match
		case behaveMergedWithNext:
			joined = g.match && !match
		default:
		}
	}
	if !joined {
		g.flush()
		g.from = from
	}
	g.to, g.match = to, match
	if g.how == behaveRemoved && match {
		g.from = to
	}
}

func (g *gather) flush() {
	if g.from < g.to {
		g.next(piece{g.p.text[g.from:g.to], g.p.first && g.from == 0})
		g.from = g.to
	}
}

// literalMatches matches a string.
func literalMatches(s string) matcher {
	return func(_ *encoder, text string, i int) (int, int, bool) {
		k := strings.Index(text[i:], s)
		return i + k, i + k + len(s), k >= 0
	}
}

// regexMatches matches a pattern.
func regexMatches(re *regex) matcher {
	return func(enc *encoder, text string, i int) (from, to int, ok bool) {
		for ; i < len(text); i += lookEvery {
			if from, to, ok = enc.match.find(re, text, i, lookEvery); ok || enc.watch.over(lookEvery) {
				break
			}
		}
		return from, to, ok
	}
}

// classMatches matches single code points of a generated class.
func classMatches(name string) matcher { return charMatches(namedSet(name).hasAt) }

// charMatches matches single code points; has reports whether there is one at i, and its size.
func charMatches(has func(text string, i int) (bool, int)) matcher {
	return func(enc *encoder, text string, i int) (int, int, bool) {
		for i < len(text) {
			in, n := has(text, i)
			if in {
				return i, i + n, true
			}
			if enc.watch.over(n) {
				break
			}
			i += n
		}
		return i, i, false
	}
}

// normalizeStages are the normalizers by type.
var normalizeStages = map[string]func(c component) (normalizeStage, error){
	"NFC":  func(component) (normalizeStage, error) { return nfc, nil },
	"NFKC": func(component) (normalizeStage, error) { return nfkc, nil },
	"Precompiled": func(c component) (normalizeStage, error) {
		if len(c.Charsmap) == 0 {
			return func(_ *encoder, s string) string { return s }, nil
		}
		m, err := newCharsmap(c.Charsmap)
		if err != nil {
			return nil, err
		}
		return m.normalize, nil
	},
	"Strip": func(c component) (normalizeStage, error) {
		return func(_ *encoder, s string) string {
			if c.StripLeft {
				s = s[blanksAt(s):]
			}
			if c.StripRight {
				s = s[:len(s)-blanksBefore(s)]
			}
			return s
		}, nil
	},
	"Prepend": func(c component) (normalizeStage, error) {
		return func(enc *encoder, s string) string {
			enc.match.work -= len(c.Prepend)
			return c.Prepend + s
		}, nil
	},
	"Replace": func(c component) (normalizeStage, error) {
		find, err := patternMatches(c)
		return func(enc *encoder, s string) string {
			var out strings.Builder
			at := 0
			for at < len(s) {
				from, to, ok := find(enc, s, at)
				if !ok || enc.watch.over(to-at) || enc.match.exceeded() {
					break
				}
				enc.match.work -= len(c.Content) // several of a hostile file would multiply a text
				out.WriteString(s[at:from])
				out.WriteString(c.Content)
				at = to
			}
			if at == 0 {
				return s
			}
			out.WriteString(s[at:])
			return out.String()
		}, err
	},
}

// patternMatches returns the matcher of a component's pattern.
func patternMatches(c component) (matcher, error) {
	switch {
	case c.Pattern.String != nil && *c.Pattern.String != "":
		return literalMatches(*c.Pattern.String), nil
	case c.Pattern.Regex != nil && *c.Pattern.Regex == " {2,}":
		return func(_ *encoder, s string, i int) (int, int, bool) {
			from := strings.Index(s[i:], "  ")
			if from < 0 {
				return i, i, false
			}
			to := i + from
			for to < len(s) && s[to] == ' ' {
				to++
			}
			return i + from, to, true
		}, nil
	case c.Pattern.Regex != nil:
		re, err := compileRegex(*c.Pattern.Regex)
		if err != nil {
			return nil, err
		}
		return regexMatches(re), nil
	}
	return nil, unsupported("%s without a pattern", c.Type)
}

// blanksAt returns the length of the white space at the start of s.
func blanksAt(s string) int { return (&search{s: s}).spaceAfter(0) }

// blanksBefore returns the length of the white space at the end of s.
func blanksBefore(s string) int { return len(s) - (&search{s: s}).spaceBefore(len(s)) }

// splitStages are the pre-tokenizers by type.
var splitStages = map[string]func(c component) (splitStage, error){
	"Split": func(c component) (splitStage, error) {
		find, err := patternMatches(c)
		if err != nil {
			return nil, err
		}
		how, ok := behaviors[c.Behavior]
		if !ok {
			return nil, unsupported("Split with behavior %q", c.Behavior)
		}
		return split(find, how, c.Invert), nil
	},
	"Digits": func(c component) (splitStage, error) {
		if c.Individual {
			return split(classMatches("Digit"), behaveIsolated, false), nil
		}
		return split(classMatches("Digit"), behaveContiguous, false), nil
	},
	"Punctuation": func(c component) (splitStage, error) {
		how, ok := behaviors[c.Behavior]
		if !ok && c.Behavior != "" {
			return nil, unsupported("Punctuation with behavior %q", c.Behavior)
		}
		return split(classMatches("Punct"), how, false), nil
	},
	"ByteLevel": func(c component) (splitStage, error) { return byteLevelStage(c, byteLevelString), nil },
	"Metaspace": metaspaceStage,
	"WhitespaceSplit": func(component) (splitStage, error) {
		blank := charMatches(func(s string, i int) (bool, int) {
			c, n := classAt(s, i)
			return c&clsWS != 0, n
		})
		return split(blank, behaveRemoved, false), nil
	},
}

// byteLevelStage splits by GPT-2's pattern; write encodes the bytes of a word in the byte alphabet.
func byteLevelStage(c component, write func(word []byte) string) splitStage {
	prefix := c.AddPrefixSpace == nil || *c.AddPrefixSpace
	words := c.UseRegex == nil || *c.UseRegex
	return func(enc *encoder, p piece, next func(piece)) {
		if prefix && !strings.HasPrefix(p.text, " ") {
			p.text = " " + p.text
		}
		if !words {
			next(piece{write(bytesOf(p.text)), p.first})
			return
		}
		var ends [64]uint32
		for at := 0; at < len(p.text) && !enc.watch.stopped; {
			n, after := gpt2Split{}.split(p.text, at, ends[:])
			for _, e := range ends[:n] {
				next(piece{write(bytesOf(p.text[at:e])), p.first && at == 0})
				at = int(e)
			}
			at = after
		}
	}
}

// metaspaceStage replaces spaces by U+2581 and splits before each.
func metaspaceStage(c component) (splitStage, error) {
	mark := c.Replacement
	if utf8.RuneCountInString(mark) != 1 {
		return nil, unsupported("Metaspace with replacement %q", mark)
	}
	scheme, err := c.prependScheme()
	if err != nil {
		return nil, err
	}
	parts := func(_ *encoder, p piece, next func(piece)) { next(p) }
	if c.Split == nil || *c.Split {
		parts = split(literalMatches(mark), behaveMergedWithNext, false)
	}
	return func(enc *encoder, p piece, next func(piece)) {
		p.text = strings.ReplaceAll(p.text, " ", mark)
		if !strings.HasPrefix(p.text, mark) && (scheme == "always" || scheme == "first" && p.first) {
			p.text = mark + p.text
		}
		parts(enc, p, next)
	}, nil
}

// prependScheme returns Metaspace's prepend_scheme, also from the spelling of older files.
func (c component) prependScheme() (string, error) {
	scheme := c.PrependScheme
	if scheme == "" {
		scheme = "always"
	}
	if c.AddPrefixSpace != nil && !*c.AddPrefixSpace && scheme != "never" {
		return "", unsupported("Metaspace with add_prefix_space false and prepend_scheme %s", scheme) // as the library does
	}
	if scheme != "always" && scheme != "first" && scheme != "never" {
		return "", unsupported("Metaspace with prepend_scheme %q", scheme)
	}
	return scheme, nil
}

// newPipeline builds the stages of the normalizers and pre-tokenizers. With bytes the last one is
// ByteLevel of a byte-level model.
func newPipeline(norm, pre []component, bytes bool) (*pipeline, error) {
	p := &pipeline{bytes: bytes}
	var err error
	if p.normalizers, err = stagesOf("normalizer", normalizeStages, norm); err != nil {
		return nil, err
	}
	if p.splitters, err = stagesOf("pre-tokenizer", splitStages, pre); err != nil {
		return nil, err
	}
	if bytes {
		last := len(pre) - 1
		p.splitters[last] = byteLevelStage(pre[last], stringOf)
		p.finish = (*encoder).oneWord
	}
	return p, nil
}

// oneWord appends the ids of a word.
func (enc *encoder) oneWord(dst []uint32, word piece) []uint32 {
	enc.ends[0] = uint32(len(word.text))
	return enc.lookup(dst, bytesOf(word.text), 0, enc.ends[:1], false)
}

// stagesOf builds a stage for each component.
func stagesOf[S any](what string, kinds map[string]func(component) (S, error), components []component) (stages []S, err error) {
	for _, c := range components {
		make, ok := kinds[c.Type]
		if !ok {
			return nil, unsupported("%s %s", what, c.Type)
		}
		stage, err := make(c)
		if err != nil {
			return nil, err
		}
		stages = append(stages, stage)
	}
	return stages, nil
}
