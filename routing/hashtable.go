package routing

// none is "no entry" in tables and lists of entries.
const none = ^uint32(0)

// table maps hashes to entry numbers by open addressing: 8 bytes a place and no pointers, which keeps it cheap for the
// garbage collector. Callers compare the entries themselves, so entries of equal hashes may be in it. Invariant: no
// place between an entry's home and its own place is free.
type table struct {
	places []place
	size   int
}

type place struct{ hash, entry uint32 }

func (t *table) home(hash uint32) int { return int(hash) & (len(t.places) - 1) }

// first returns the place where a search for hash begins; next the following one.
// A search ends at a place whose entry is none.
func (t *table) first(hash uint32) int {
	if len(t.places) == 0 {
		t.grow()
	}
	return t.home(hash)
}

func (t *table) next(at int) int { return (at + 1) & (len(t.places) - 1) }

func (t *table) insert(hash, entry uint32) {
	if (t.size+1)*4 > len(t.places)*3 {
		t.grow()
	}
	at := t.home(hash)
	for t.places[at].entry != none {
		at = t.next(at)
	}
	t.places[at] = place{hash, entry}
	t.size++
}

// removeAt frees a place and moves later entries up to keep the invariant.
func (t *table) removeAt(at int) {
	t.size--
	hole := at
	for i := t.next(at); t.places[i].entry != none; i = t.next(i) {
		home := t.home(t.places[i].hash)
		// Entry i may fill the hole unless its home lies cyclically in (hole, i].
		if (i-home)&(len(t.places)-1) >= (i-hole)&(len(t.places)-1) {
			t.places[hole] = t.places[i]
			hole = i
		}
	}
	t.places[hole] = place{entry: none}
}

func (t *table) grow() {
	old := t.places
	t.places = make([]place, max(16, 2*len(old)))
	for i := range t.places {
		t.places[i].entry = none
	}
	t.size = 0
	for _, p := range old {
		if p.entry != none {
			t.insert(p.hash, p.entry)
		}
	}
}
