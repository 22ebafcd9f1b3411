package feed

import (
	"encoding/binary"
	"slices"
	"strconv"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed/msgpack"
)

// field is a key of a vLLM or SGLang event.
type field uint8

const (
	fIgnored field = iota
	fHashes
	fParent
	fTokens
	fBlockSize
	fLoraID
	fMedium
	fLoraName
	fExtraKeys
	fGroup
	fKind
	fWindow
	fLocality
	fOwnership
	fSalt
	fData
)

// The order of values in an event's array form; later versions only append.
var (
	storedOrder = []field{
		fHashes, fParent, fTokens, fBlockSize, fLoraID, fMedium, fLoraName, fExtraKeys, fGroup, fKind, fWindow, fLocality, fOwnership,
	}
	removedOrder = []field{fHashes, fMedium, fGroup, fLocality, fOwnership}
)

// fieldOf reads a key of an event's map form. It is a switch because a map took a fifth of the time of a small event.
func fieldOf(key []byte) field {
	switch string(key) {
	case "block_hashes":
		return fHashes
	case "parent_block_hash":
		return fParent
	case "token_ids":
		return fTokens
	case "block_size":
		return fBlockSize
	case "lora_id":
		return fLoraID
	case "medium":
		return fMedium
	case "lora_name":
		return fLoraName
	case "extra_keys":
		return fExtraKeys
	case "group_idx":
		return fGroup
	case "kv_cache_spec_kind":
		return fKind
	case "kv_cache_spec_sliding_window":
		return fWindow
	case "locality":
		return fLocality
	case "ownership":
		return fOwnership
	case "cache_salt":
		return fSalt
	case "data":
		return fData
	}
	return fIgnored
}

// blockEvent is a vLLM or SGLang event as published.
type blockEvent struct {
	hashes           []kvindex.EngineHash
	parent           kvindex.EngineHash
	hasParent        bool
	tokens           []uint32
	blockSize        int64
	loraID           string
	medium, loraName []byte
	extraKeys        msgpack.Reader // at the value, if hasExtra
	hasExtra         bool
	group            int32
	kind             []byte
	window           int64
	locality, owner  []byte
	salt             []byte
}

// event decodes one event and appends it to the batch or counts why it was dropped. It returns
// false if the event is malformed; otherwise r is positioned after it.
func (d *Decoder) event(r *msgpack.Reader) bool {
	hashes, tokens, extra, media, events := len(d.hashes), len(d.tokens), len(d.extra), len(d.media), len(d.batch.Events)
	ok := false
	switch r.Kind() {
	case msgpack.Array:
		ok = d.eventArray(r)
	case msgpack.Map:
		ok = d.eventMap(r)
	}
	if !ok || len(d.batch.Events) == events {
		d.hashes, d.tokens, d.extra, d.media = d.hashes[:hashes], d.tokens[:tokens], d.extra[:extra], d.media[:media]
		d.batch.Events = d.batch.Events[:events]
	}
	return ok
}

// eventArray reads [tag, values...].
func (d *Decoder) eventArray(r *msgpack.Reader) bool {
	n, err := r.Array()
	if err != nil || n == 0 {
		return false
	}
	tag, err := r.Bytes()
	if err != nil {
		return false
	}
	var order []field
	switch string(tag) {
	case "BlockStored":
		order = storedOrder
	case "BlockRemoved":
		order = removedOrder
	}
	var e blockEvent
	for i := range n - 1 {
		f := fIgnored
		if i < len(order) {
			f = order[i]
		}
		// SGLang 0.5.18 to 0.5.22 append a map of fields that vLLM lacks in the position of vLLM's adapter name.
		if f == fLoraName && r.Kind() == msgpack.Map {
			if !d.pairs(r, &e, nil) {
				return false
			}
			continue
		}
		if !d.field(r, &e, f) {
			return false
		}
	}
	return d.finish(tag, &e)
}

// eventMap reads {"type": tag, key: value...}. TensorRT-LLM's layout is recognised by its types or by its wrapper.
func (d *Decoder) eventMap(r *msgpack.Reader) bool {
	at := *r
	var e blockEvent
	var tag []byte
	if !d.pairs(r, &e, &tag) {
		return false
	}
	if tag == nil || isTRTType(tag) {
		*r = at
		return d.trtMap(r)
	}
	return d.finish(tag, &e)
}

// pairs reads a map into e, and the value of its key "type" into tag unless tag is nil.
func (d *Decoder) pairs(r *msgpack.Reader, e *blockEvent, tag *[]byte) bool {
	n, err := r.Map()
	if err != nil {
		return false
	}
	wrapped := false
	for range n {
		key, err := r.Bytes()
		if err != nil {
			return false
		}
		if tag != nil && string(key) == "type" {
			if *tag, err = r.Bytes(); err != nil {
				return false
			}
			if isTRTType(*tag) {
				wrapped = true
			}
			continue
		}
		f := fieldOf(key)
		if f == fData || wrapped {
			wrapped = true
			f = fIgnored
		}
		if !d.field(r, e, f) {
			return false
		}
	}
	// A map without a type is not an event, except TensorRT-LLM's wrapper.
	return tag == nil || *tag != nil || wrapped
}

// field reads one value. A nil value means the default for every field.
func (d *Decoder) field(r *msgpack.Reader, e *blockEvent, f field) bool {
	if f == fIgnored || f == fData {
		return r.Skip() == nil
	}
	if r.Nil() {
		return true
	}
	var err error
	switch f {
	case fHashes:
		return d.readHashes(r, e)
	case fParent:
		e.hasParent = true
		e.parent, err = readHash(r)
	case fTokens:
		at, peek := len(d.tokens), *r
		if n, _ := peek.Array(); n > maxTokens-at {
			return false
		}
		d.tokens, err = r.Uint32s(d.tokens)
		e.tokens = d.tokens[at:]
	case fBlockSize:
		e.blockSize, err = r.Int64()
	case fLoraID:
		e.loraID, err = readID(r)
	case fMedium:
		e.medium, err = r.Bytes()
	case fLoraName:
		e.loraName, err = r.Bytes()
	case fExtraKeys:
		e.extraKeys, e.hasExtra = *r, true
		err = r.Skip()
	case fGroup:
		var v int64
		v, err = r.Int64()
		e.group = int32(v)
		if int64(e.group) != v {
			return false
		}
	case fKind:
		e.kind, err = r.Bytes()
	case fWindow:
		e.window, err = r.Int64()
	case fLocality:
		e.locality, err = r.Bytes()
	case fOwnership:
		e.owner, err = r.Bytes()
	case fSalt:
		e.salt, err = r.Bytes()
	}
	return err == nil
}

func (d *Decoder) readHashes(r *msgpack.Reader, e *blockEvent) bool {
	n, err := r.Array()
	at := len(d.hashes)
	if err != nil || n > maxHashes-at {
		return false
	}
	for range n {
		h, err := readHash(r)
		if err != nil {
			return false
		}
		d.hashes = append(d.hashes, h)
	}
	e.hashes = d.hashes[at:]
	return true
}

// readHash reads a block's hash: an integer of either sign, or a digest.
func readHash(r *msgpack.Reader) (kvindex.EngineHash, error) {
	switch r.Kind() {
	case msgpack.Bin, msgpack.Str:
		b, err := r.Bytes()
		return digestHash(b), err
	default:
		v, err := r.Uint64()
		return kvindex.EngineHash(v), err
	}
}

// readID reads a LoRA id, which is a number (vLLM, starting at 1) or a text.
func readID(r *msgpack.Reader) (string, error) {
	switch r.Kind() {
	case msgpack.Str, msgpack.Bin:
		b, err := r.Bytes()
		return string(b), err
	default:
		v, err := r.Int64()
		if err != nil || v <= 0 {
			return "", err
		}
		return strconv.FormatInt(v, 10), nil
	}
}

// finish converts a published event to a kvindex.Event, or counts why it is dropped.
func (d *Decoder) finish(tag []byte, e *blockEvent) bool {
	switch string(tag) {
	case "AllBlocksCleared":
		d.batch.Events = append(d.batch.Events, kvindex.Event{Kind: kvindex.Cleared})
		return true
	case "BlockStored", "BlockRemoved":
	default:
		d.drop(UnknownTag)
		return true
	}
	ev := kvindex.Event{Kind: kvindex.Removed, Group: e.group, Hashes: e.hashes}
	tier, known := tierOf(e.medium)
	ev.Tier = tier
	stored := string(tag) == "BlockStored"
	here := known && local(e.locality) && local(e.owner)
	if stored {
		d.learnGroup(e, here && (len(e.kind) > 0 || tier == kvindex.Device))
	}
	switch {
	case !known:
		d.drop(UnknownMedium)
		return true
	case !here:
		d.drop(NotLocal)
		return true
	case d.otherGroups[e.group]:
		d.drop(OtherGroup)
		return true
	case !stored:
		d.batch.Events = append(d.batch.Events, ev)
		return true
	}
	ev.Kind = kvindex.Stored
	if ev.Window = slidingWindow(e); ev.Window > 0 && e.blockSize >= 0 && e.blockSize <= 1<<20 {
		ev.BlockSize = int(e.blockSize)
		if d.several || !e.fromItsFirst() {
			d.batch.Events = append(d.batch.Events, ev)
			return true
		}
	}
	if why := checkStored(e); why != "" {
		d.drop(why)
		return true
	}
	ev.Parent, ev.HasParent = e.parent, e.hasParent
	ev.Tokens, ev.BlockSize = e.tokens, int(e.blockSize)
	ev.Adapter = d.names.get(e.loraName)
	if ev.Adapter == "" && e.loraID != "" {
		ev.Adapter = "lora-id:" + e.loraID // an old engine: no request uses this name, which keeps the adapter's blocks separate
	}
	ev.Salt = d.names.get(e.salt)
	if e.hasExtra {
		switch why, ok := d.extraKeys(e, &ev); {
		case !ok:
			return false
		case why != "":
			d.drop(why)
			return true
		}
	}
	d.batch.Events = append(d.batch.Events, ev)
	return true
}

// learnGroup records the groups that are neither main attention nor have a window or a recurrent state: removals do not
// carry the kind. own reports that the event describes the engine's groups; a connector's event that moves blocks to
// another tier has neither group nor kind.
func (d *Decoder) learnGroup(e *blockEvent, own bool) {
	if own && !d.several && (e.group != 0 || slidingWindow(e) == 0) {
		if d.several = true; d.lone {
			d.batch.Events = append(d.batch.Events, kvindex.Event{Kind: kvindex.Cleared, Lone: 1})
		}
	}
	if len(e.kind) == 0 {
		return
	}
	if mainAttention(e.kind) || slidingWindow(e) > 0 {
		delete(d.otherGroups, e.group)
	} else if len(d.otherGroups) < 1024 {
		d.otherGroups[e.group] = true
	}
}

// fromItsFirst reports whether an event of a window's group has all blocks, or all but the last, whose tokens it then
// drops: vLLM keeps the blocks that a window needs, up to the last one that ends before a prompt's last token.
func (e *blockEvent) fromItsFirst() bool {
	n := int64(len(e.hashes))
	if int64(len(e.tokens)) == (n+1)*e.blockSize && n*e.blockSize < e.window-1 {
		e.tokens = e.tokens[:n*e.blockSize]
	}
	return len(e.tokens) > 0 && checkStored(e) == ""
}

// checkStored returns why a stored event cannot be used, "" if it can.
func checkStored(e *blockEvent) Reason {
	switch {
	case len(e.hashes) == 0:
		return Placeholder
	case len(e.tokens) == 0:
		// Known blocks that are now on another tier too (offloading); the index finds them by their hashes or refuses them.
		e.blockSize, e.hasExtra = 0, false
		return ""
	case e.blockSize < 0 || e.blockSize > 1<<20 || int64(len(e.tokens)) != e.blockSize*int64(len(e.hashes)):
		return Misaligned
	case e.hasParent && slices.Contains(e.hashes, e.parent):
		return OwnParent
	}
	return ""
}

// extraKeys reads what the engine mixed into each block's hash in addition to tokens: one list
// (or nil) per block of [adapter, multimodal items, salt (first block only), digests of prompt
// embeddings], untagged as vLLM publishes them, or as tagged tuples.
func (d *Decoder) extraKeys(e *blockEvent, ev *kvindex.Event) (Reason, bool) {
	r := e.extraKeys
	n, err := r.Array()
	if err != nil {
		return "", false
	}
	if n != len(e.hashes) {
		// Without one entry per block the keys cannot be assigned to blocks.
		return Misaligned, true
	}
	at, some, media := len(d.extra), false, len(d.media)
	for i := range n {
		var digest uint64
		if !r.Nil() {
			var ok bool
			if digest, ok = d.blockKeys(&r, ev, i, i == 0 && !e.hasParent); !ok {
				return "", false
			}
		}
		some = some || digest != 0
		d.extra = append(d.extra, digest)
	}
	if some {
		ev.Extra = d.extra[at:]
	}
	if media < len(d.media) {
		ev.Media = d.media[media:]
	}
	return "", true
}

// blockKeys reads the keys of the block with this number. Adapter, salt and media are stored in
// ev, all other keys in the digest.
func (d *Decoder) blockKeys(r *msgpack.Reader, ev *kvindex.Event, block int, first bool) (digest uint64, ok bool) {
	n, err := r.Array()
	if err != nil {
		return 0, false
	}
	var salt []byte // the last text of a chain's first block
	for i := range n {
		switch r.Kind() {
		case msgpack.Str:
			s, err := r.Bytes()
			if err != nil {
				return 0, false
			}
			if i == 0 && ev.Adapter != "" && string(s) == ev.Adapter {
				continue
			}
			if !first {
				digest = ExtraDigest(digest, s)
				continue
			}
			if salt != nil {
				digest = ExtraDigest(digest, salt)
			}
			salt = s
		case msgpack.Array:
			name, offset, isMedium := medium(*r)
			tag, value, raw, ok := tuple(r)
			switch {
			case !ok:
				return 0, false
			case isMedium && len(d.media) >= maxHashes:
				return 0, false
			case isMedium && offset < int64(ev.BlockSize):
				// With a negative offset it began in an earlier block, and is part of that block's hash.
				if offset >= 0 {
					d.media = append(d.media, kvindex.Medium{At: block*ev.BlockSize + int(offset), Digest: ExtraDigest(0, name)})
				}
			case string(tag) == "lora":
				if ev.Adapter == "" {
					ev.Adapter = d.names.get(value)
				}
			case string(tag) == "cache_salt":
				ev.Salt = d.names.get(value)
			default:
				digest = ExtraDigest(digest, raw)
			}
		default:
			raw, ok := rawValue(r)
			if !ok {
				return 0, false
			}
			digest = ExtraDigest(digest, raw)
		}
	}
	if salt != nil {
		ev.Salt = d.names.get(salt)
	}
	return digest, true
}

// tuple reads a list and returns its first two texts and its encoded bytes.
func tuple(r *msgpack.Reader) (tag, value, raw []byte, ok bool) {
	in := *r
	raw, ok = rawValue(r)
	if !ok {
		return nil, nil, nil, false
	}
	n, err := in.Array()
	if err != nil {
		return nil, nil, nil, false
	}
	if n >= 2 && in.Kind() == msgpack.Str {
		if tag, err = in.Bytes(); err != nil {
			return nil, nil, nil, false
		}
		if in.Kind() == msgpack.Str {
			if value, err = in.Bytes(); err != nil {
				return nil, nil, nil, false
			}
		} else {
			tag = nil
		}
	}
	return tag, value, raw, true
}

// rawValue skips a value and returns its encoded bytes.
func rawValue(r *msgpack.Reader) ([]byte, bool) {
	from := *r
	if r.Skip() != nil {
		return nil, false
	}
	return from.Raw(r.Offset() - from.Offset()), true
}

// ExtraDigest mixes a key of a block, encoded in MessagePack as the engine publishes it, into the digest of the keys
// before it, 0 for none. ExtraDigest(0, identifier) is the Digest of a kvindex.Medium. The result is never 0. It is
// FNV-1a over the key's length and bytes.
func ExtraDigest(digest uint64, key []byte) uint64 {
	const offset, prime = 14695981039346656037, 1099511628211
	h := digest ^ offset
	var n [4]byte
	binary.LittleEndian.PutUint32(n[:], uint32(len(key)))
	for _, c := range n {
		h = (h ^ uint64(c)) * prime
	}
	for _, c := range key {
		h = (h ^ uint64(c)) * prime
	}
	if h == 0 {
		return 1
	}
	return h
}

// medium reads the identifier of an image, audio or video, and the offset of its first token from the block's first,
// negative if it began in an earlier block. The two come as a pair, or after the tag "mm".
func medium(r msgpack.Reader) (name []byte, offset int64, ok bool) {
	n, err := r.Array()
	if err == nil && n == 3 {
		if tag, _ := r.Bytes(); string(tag) == "mm" {
			n--
		}
	}
	if err != nil || n != 2 || r.Kind() != msgpack.Str {
		return nil, 0, false
	}
	name, err = r.Bytes()
	if err != nil || r.Kind() != msgpack.Uint && r.Kind() != msgpack.Int {
		return nil, 0, false
	}
	offset, err = r.Int64()
	return name, offset, err == nil
}
