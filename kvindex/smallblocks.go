package kvindex

// Engines whose block is smaller than the index's (SGLang: pages of 1 or 16 tokens) are indexed
// by whole index blocks: a block is held on a tier when all of its pages are. The pages of such
// a target are kept in a separate tree; an index block has the name of its last page.

// pages are the engine blocks of one slot.
type pages struct {
	byName map[uint64]uint32
	nodes  []page // number 0 is never used
	free   uint32 // first free node, linked through parent
	units  map[unit]uint32
}

// page is an engine block smaller than the index's. Invariant: it is in the tree while it is held or has children.
//
// A page is linked on a tier if it is held there and is in its parent's list. When a page leaves a tier, all that are linked
// below it in its index block are unlinked, until they are stored again. So each stored page is visited at most once when
// others before it are stored, and once when they are removed. The first page of an index block is in no list.
type page struct {
	name     uint64
	before   Hash   // of the index block before the page's
	own      Hash   // of the index block that the page completes
	content  uint64 // sum over the tokens of the index block so far, without tail
	tail     [4]uint32
	fill     int32 // tokens of the index block so far, including the page's
	parent   uint32
	children uint32           // their number
	tiers    uint8            // bit per tier that holds the page
	holders  [NumTiers]uint16 // groups that hold the page, per tier
	final    bool             // the page completes its index block
	lists    [NumTiers]pageList
}

// pageList is the first child that is linked on a tier, and the neighbours in the list of the page's parent.
type pageList struct{ first, next, prev uint32 }

// pageBytes is the accounted size of a page, measured with Go's maps.
const pageBytes = 240

func (x *Index) storePages(s Slot, e *Event) error {
	st := &x.slots[s]
	if st.pages == nil {
		st.pages = &pages{byName: map[uint64]uint32{}, nodes: make([]page, 1), units: map[unit]uint32{}}
	}
	var parent uint32
	seed := Hash(0)
	if e.HasParent {
		parent = st.pages.byName[nonzero(e.Parent)]
		if parent == 0 || st.pages.nodes[parent].tiers == 0 {
			return ErrUnknownParent
		}
	} else {
		seed = x.seedOf(st, e.Adapter, e.Salt)
	}
	media := e.Media
	for i, h := range e.Hashes {
		extra := uint64(0)
		if len(e.Extra) != 0 {
			extra = e.Extra[i]
		}
		from, to, n := i*e.BlockSize, (i+1)*e.BlockSize, 0
		for n < len(media) && media[n].At < to {
			n++
		}
		next := x.extend(st.pages.nodes[parent], parent == 0, seed, e.Tokens[from:to], extra, media[:n], from)
		media = media[n:]
		next.name, next.parent = nonzero(h), parent
		id := st.pages.byName[next.name]
		if id == 0 {
			id = st.pages.add(next)
		} else if !st.pages.nodes[id].same(&next) {
			return ErrHashConflict
		}
		if err := x.holdPage(s, id, e.Tier, e.Group); err != nil {
			st.pages.prune(id)
			return err
		}
		x.counters.stored++
		parent = id
	}
	return nil
}

// extend returns the page that these tokens form after a parent. media are those
// that begin in the page; from is the position of the page's first token, counted like Medium.At.
func (x *Index) extend(parent page, root bool, seed Hash, tokens []uint32, extra uint64, media []Medium, from int) page {
	p := parent
	p.children, p.tiers, p.final = 0, 0, false
	p.holders, p.lists = [NumTiers]uint16{}, [NumTiers]pageList{}
	if root {
		p = page{before: seed}
	} else if parent.final {
		p = page{before: parent.own}
	}
	p.content, _ = x.hasher.withMedia(p.content, media, from, from+len(tokens), int(p.fill))
	for _, t := range tokens {
		p.tail[p.fill%4] = t
		p.fill++
		if p.fill%4 == 0 {
			p.content += x.hasher.quad(p.tail, int(p.fill/2)-2)
			p.tail = [4]uint32{}
		}
	}
	if extra != 0 {
		p.content = x.hasher.withExtra(p.content, extra+uint64(p.fill)*x.hasher.extraMul)
	}
	if int(p.fill) == x.cfg.BlockSize {
		c := p.content
		if p.fill%4 != 0 {
			c += x.hasher.quad(p.tail, int(p.fill/4)*2)
		}
		p.own, p.final = x.hasher.chain(p.before, c), true
	}
	return p
}

// same reports whether two pages have the same position and content.
func (p *page) same(q *page) bool {
	return p.parent == q.parent && p.before == q.before && p.content == q.content && p.tail == q.tail && p.fill == q.fill
}

func (p *pages) add(n page) uint32 {
	id := p.free
	if id != 0 {
		p.free = p.nodes[id].parent
	} else {
		id = uint32(len(p.nodes))
		p.nodes = append(p.nodes, page{})
	}
	p.nodes[n.parent].children++
	p.nodes[id] = n
	p.byName[n.name] = id
	return id
}

// prune removes a page that is neither held nor a parent from the tree, and then its parent likewise.
func (p *pages) prune(id uint32) {
	for id != 0 && p.nodes[id].tiers == 0 && p.nodes[id].children == 0 {
		n := p.nodes[id]
		p.nodes[n.parent].children--
		delete(p.byName, n.name)
		p.nodes[id] = page{parent: p.free}
		p.free = id
		id = n.parent
	}
}

// begins reports whether a page is the first of its index block.
func (p *pages) begins(id uint32) bool {
	parent := p.nodes[id].parent
	return parent == 0 || p.nodes[parent].final
}

// linked is also true for the first page of an index block, if the tier holds it.
func (p *pages) linked(id uint32, t Tier) bool {
	n := &p.nodes[id]
	if p.begins(id) {
		return n.tiers&(1<<t) != 0
	}
	return n.lists[t].prev != 0 || p.nodes[n.parent].lists[t].first == id
}

func (p *pages) link(id uint32, t Tier) {
	if p.begins(id) {
		return
	}
	n := &p.nodes[id]
	first := &p.nodes[n.parent].lists[t].first
	if n.lists[t].next = *first; *first != 0 {
		p.nodes[*first].lists[t].prev = id
	}
	*first = id
}

func (p *pages) unlink(id uint32, t Tier) {
	if p.begins(id) || !p.linked(id, t) {
		return
	}
	n := &p.nodes[id]
	l := &n.lists[t]
	if l.prev != 0 {
		p.nodes[l.prev].lists[t].next = l.next
	} else {
		p.nodes[n.parent].lists[t].first = l.next
	}
	if l.next != 0 {
		p.nodes[l.next].lists[t].prev = l.prev
	}
	l.next, l.prev = 0, 0
}

// holdPage adds one holding of a page, and the index blocks that it completes.
func (x *Index) holdPage(s Slot, id uint32, t Tier, group int32) error {
	st := &x.slots[s]
	p := st.pages
	n := &p.nodes[id]
	if !p.linked(id, t) {
		before := n.tiers
		n.tiers |= 1 << t
		p.link(id, t)
		if p.reached(id, t) {
			if err := x.holdCompleted(s, id, t); err != nil {
				x.loseCompleted(s, id, t)
				n.tiers = before
				return err
			}
		}
	}
	u := unit{n.name, group, t}
	if p.units[u] == 0 {
		n.holders[t]++
	}
	p.units[u]++
	return nil
}

// reached reports whether a linked page and all before it in its index block are linked.
func (p *pages) reached(id uint32, t Tier) bool {
	for !p.begins(id) {
		if id = p.nodes[id].parent; !p.linked(id, t) {
			return false
		}
	}
	return true
}

// holdCompleted holds every index block that page id, which is reached, completes on a tier. A block whose
// predecessor the slot does not hold is left out until it is stored again.
func (x *Index) holdCompleted(s Slot, id uint32, t Tier) error {
	st := &x.slots[s]
	p := st.pages
	n := p.nodes[id]
	if !n.final {
		for c := n.lists[t].first; c != 0; c = p.nodes[c].lists[t].next {
			if err := x.holdCompleted(s, c, t); err != nil {
				return err
			}
		}
		return nil
	}
	if was, ok := x.resolve(s, n.name); ok && x.seg(was.segment()).holds(s, t, was.offset()) {
		return nil
	}
	var at link
	before := n.parent
	for before != 0 && !p.nodes[before].final {
		before = p.nodes[before].parent
	}
	if before != 0 {
		var ok bool
		if at, ok = x.linkOf(s, p.nodes[before].name); !ok {
			return nil
		}
	}
	stored := x.counters.stored
	name, own := [1]EngineHash{EngineHash(n.name)}, [1]uint64{uint64(n.own)}
	err := x.storeChain(s, t, st.group, at, name[:], own[:])
	x.counters.stored = stored
	return err
}

func (x *Index) removePage(s Slot, name uint64, t Tier, group int32) bool {
	st := &x.slots[s]
	p := st.pages
	id := p.byName[name]
	u := unit{name, group, t}
	k := p.units[u]
	if id == 0 || k == 0 {
		return false
	}
	if k > 1 {
		p.units[u] = k - 1
		return true
	}
	delete(p.units, u)
	if p.nodes[id].holders[t]--; p.nodes[id].holders[t] > 0 {
		return true
	}
	x.loseCompleted(s, id, t)
	p.nodes[id].tiers &^= 1 << t
	p.prune(id)
	return true
}

// loseCompleted removes from the slot, on one tier, every index block that contains part of the page, and unlinks the
// page and those below it in its index block.
func (x *Index) loseCompleted(s Slot, id uint32, t Tier) {
	st := &x.slots[s]
	p := st.pages
	for at := id; ; {
		n := &p.nodes[at]
		if n.lists[t].first != 0 {
			at = n.lists[t].first
			continue
		}
		if n.final {
			x.gate.shut()
			x.removeOne(s, t, st.group, n.name)
			x.gate.open()
		}
		p.unlink(at, t)
		if at == id {
			return
		}
		at = n.parent
	}
}

// storePagePlaceholders adds a further tier to known pages.
func (x *Index) storePagePlaceholders(s Slot, e *Event) error {
	st := &x.slots[s]
	var err error
	for _, h := range e.Hashes {
		id := uint32(0)
		if st.pages != nil {
			id = st.pages.byName[nonzero(h)]
		}
		if id == 0 || st.pages.nodes[id].tiers == 0 {
			err = ErrPlaceholder
			continue
		}
		if held := x.holdPage(s, id, e.Tier, e.Group); held != nil {
			return held
		}
		x.counters.stored++
	}
	return err
}
