package kvindex

// Records of the index are stored in chunks of plain words; each chunk is cut into records of
// one size class. The garbage collector sees a few thousand slices without pointers, however
// many blocks there are. A chunk is released to the runtime when its last record is freed.

const (
	chunkWords   = 1 << 15 // 256 KiB
	largestClass = 4096    // words; larger records get a chunk of their own
	noClass      = -1
	noChunk      = -1
	maxSpare     = 4 // empty chunks kept
)

// ref addresses a record: chunk number above, word offset below.
type ref uint64

const refBits = 16

type chunk struct {
	words []uint64
	class int
	// free is 1 + the offset of the first freed record, 0 for none. Freed records are linked through their first word.
	free int
	// next is the offset of the first record that was never used.
	next, used int
	// after and before link the chunks of a class that have room.
	after, before int
	listed        bool
}

type arena struct {
	chunks   []chunk
	unused   []int // numbers of chunks without memory
	spare    [][]uint64
	room     []int // per class: first chunk with room, or noChunk
	reserved int64 // bytes of all chunks, including the empty ones in spare
	used     int64 // bytes of records in use
}

var (
	classSize []int
	classOf   [largestClass + 1]uint8
)

func init() {
	for size := 8; size <= largestClass; size += max(2, size/8) &^ 1 {
		classSize = append(classSize, size)
	}
	classSize[len(classSize)-1] = largestClass
	c := 0
	for n := range classOf {
		if n > classSize[c] {
			c++
		}
		classOf[n] = uint8(c)
	}
}

// roundUp returns the actual size of a record of n words, in words.
func roundUp(n int) int {
	if n <= largestClass {
		return classSize[classOf[n]]
	}
	return (n + 511) &^ 511
}

func (a *arena) words(r ref) []uint64 { return a.chunks[r>>refBits].words[r&(1<<refBits-1):] }

// alloc returns a record of at least n words; its content is undefined.
func (a *arena) alloc(n int) ref {
	if n > largestClass {
		n = roundUp(n)
		id := a.addChunk(make([]uint64, n), noClass)
		a.chunks[id].used = 1
		a.reserved += int64(n) * 8
		a.used += int64(n) * 8
		return ref(id) << refBits
	}
	if a.room == nil {
		a.room = make([]int, len(classSize))
		for i := range a.room {
			a.room[i] = noChunk
		}
	}
	class := int(classOf[n])
	size := classSize[class]
	id := a.room[class]
	if id == noChunk {
		var words []uint64
		if k := len(a.spare); k > 0 {
			words, a.spare = a.spare[k-1], a.spare[:k-1]
		} else {
			words = make([]uint64, chunkWords)
			a.reserved += chunkWords * 8
		}
		id = a.addChunk(words, class)
		a.list(id)
	}
	c := &a.chunks[id]
	var at int
	if c.free != 0 {
		at = c.free - 1
		c.free = int(c.words[at])
	} else {
		at = c.next
		c.next += size
	}
	c.used++
	if c.free == 0 && c.next+size > len(c.words) {
		a.unlist(id)
	}
	a.used += int64(size) * 8
	return ref(id)<<refBits | ref(at)
}

func (a *arena) release(r ref) {
	id, at := int(r>>refBits), int(r&(1<<refBits-1))
	c := &a.chunks[id]
	c.used--
	if c.class == noClass {
		n := int64(len(c.words)) * 8
		a.used -= n
		a.reserved -= n
		a.dropChunk(id)
		return
	}
	a.used -= int64(classSize[c.class]) * 8
	if c.used == 0 {
		if c.listed {
			a.unlist(id)
		}
		if len(a.spare) < maxSpare {
			a.spare = append(a.spare, c.words)
		} else {
			a.reserved -= chunkWords * 8
		}
		a.dropChunk(id)
		return
	}
	c.words[at] = uint64(c.free)
	c.free = at + 1
	if !c.listed {
		a.list(id)
	}
}

// reset drops all records. It keeps one empty chunk, for a nearly empty index that is cleared repeatedly.
func (a *arena) reset() {
	spare := a.spare
	*a = arena{}
	if len(spare) > 0 {
		a.spare, a.reserved = append(a.spare, spare[0]), chunkWords*8
	}
}

func (a *arena) addChunk(words []uint64, class int) int {
	c := chunk{words: words, class: class, after: noChunk, before: noChunk}
	if k := len(a.unused); k > 0 {
		id := a.unused[k-1]
		a.unused = a.unused[:k-1]
		a.chunks[id] = c
		return id
	}
	a.chunks = append(a.chunks, c)
	return len(a.chunks) - 1
}

func (a *arena) dropChunk(id int) {
	a.chunks[id] = chunk{}
	a.unused = append(a.unused, id)
}

func (a *arena) list(id int) {
	c := &a.chunks[id]
	c.listed, c.before, c.after = true, noChunk, a.room[c.class]
	if c.after != noChunk {
		a.chunks[c.after].before = id
	}
	a.room[c.class] = id
}

func (a *arena) unlist(id int) {
	c := &a.chunks[id]
	c.listed = false
	if c.before == noChunk {
		a.room[c.class] = c.after
	} else {
		a.chunks[c.before].after = c.after
	}
	if c.after != noChunk {
		a.chunks[c.after].before = c.before
	}
}
