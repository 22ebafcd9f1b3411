package jinja

import "maps"

// This file resolves which variable a name refers to. Jinja2 does that at compile time: every scope (template, loop
// body, macro...) has its own variables, which are loaded when the scope is entered. The rules are those of
// jinja2.idtracking; scopes become slots of the frame of their function.

// funcScope is one function of the compiled template: the template itself, a macro or a call
// block. slots is the number of values in its frames.
type funcScope struct {
	parent *funcScope
	slots  int
}

// ident is a variable.
type ident struct {
	fn   *funcScope
	slot int
}

type loadKind uint8

const (
	loadParam     loadKind = iota // set by the code that enters the scope
	loadResolve                   // looked up in the context
	loadAlias                     // copied from an outer scope
	loadUndefined                 // empty until it is set
)

type load struct {
	kind  loadKind
	name  string // of loadResolve
	outer *ident // of loadAlias
}

type symbols struct {
	parent *symbols
	fn     *funcScope
	// idents is shared by the copies for the branches of an if.
	idents map[string]*ident
	refs   map[string]*ident
	loads  map[*ident]load
	order  *[]*ident
	stores map[string]bool
}

func newSymbols(parent *symbols, fn *funcScope) *symbols {
	return &symbols{
		parent: parent, fn: fn, order: new([]*ident),
		idents: map[string]*ident{}, refs: map[string]*ident{}, loads: map[*ident]load{}, stores: map[string]bool{},
	}
}

func (s *symbols) define(name string, l load) *ident {
	id := s.idents[name]
	if id == nil {
		id = &ident{fn: s.fn, slot: s.fn.slots}
		s.fn.slots++
		s.idents[name] = id
		*s.order = append(*s.order, id)
	}
	s.refs[name] = id
	s.loads[id] = l
	return id
}

func (s *symbols) find(name string) *ident {
	for ; s != nil; s = s.parent {
		if id := s.refs[name]; id != nil {
			return id
		}
	}
	return nil
}

func (s *symbols) store(name string) {
	s.stores[name] = true
	if s.refs[name] != nil {
		return
	}
	if outer := s.parent.find(name); outer != nil {
		s.define(name, load{kind: loadAlias, outer: outer})
		return
	}
	s.define(name, load{kind: loadUndefined})
}

func (s *symbols) param(name string) *ident {
	s.stores[name] = true
	return s.define(name, load{kind: loadParam})
}

func (s *symbols) load(name string) {
	if s.find(name) == nil {
		s.define(name, load{kind: loadResolve, name: name})
	}
}

func (s *symbols) branch(body []*node) *symbols {
	c := *s
	c.refs = maps.Clone(s.refs)
	c.loads = maps.Clone(s.loads)
	c.stores = maps.Clone(s.stores)
	for _, n := range body {
		c.visit(n, false)
	}
	return &c
}

// join merges the branches of an if: a variable that only some of them store falls back to the outer variable or to the context.
func (s *symbols) join(branches ...*symbols) {
	before := maps.Clone(s.stores)
	for _, b := range branches {
		maps.Copy(s.refs, b.refs)
		maps.Copy(s.loads, b.loads)
		maps.Copy(s.stores, b.stores)
	}
	for name := range s.stores {
		if before[name] {
			continue
		}
		l := load{kind: loadResolve, name: name}
		if outer := s.parent.find(name); outer != nil {
			l = load{kind: loadAlias, outer: outer}
		}
		s.loads[s.find(name)] = l
	}
}

// visit records what n loads and stores in this scope; it stops where an inner scope starts.
func (s *symbols) visit(n *node, asParam bool) {
	if n == nil {
		return
	}
	switch n.kind {
	case nodeName:
		switch {
		case asParam || n.ctx == ctxParam:
			s.param(n.name)
		case n.ctx == ctxStore:
			s.store(n.name)
		default:
			s.load(n.name)
		}
	case nodeNSRef:
		s.load(n.name)
	case nodeIf:
		s.visit(n.a, asParam)
		s.join(s.branch(n.body), s.branch(n.list), s.branch(n.other))
	case nodeMacro:
		s.store(n.name)
	case nodeAssign:
		s.visit(n.b, asParam)
		s.visit(n.a, asParam)
	case nodeFor:
		s.visit(n.b, asParam)
	case nodeCallBlock, nodeFilterBlock, nodeAssignBlock:
		s.visit(n.a, asParam)
	case nodeTemplate, nodeGeneration:
	default:
		n.children(func(c *node) { s.visit(c, asParam) })
	}
}

func (s *symbols) visitAll(nodes []*node) {
	for _, n := range nodes {
		s.visit(n, false)
	}
}

// undeclared returns those of names that the nodes load without having stored them.
func undeclared(nodes []*node, names ...string) map[string]bool {
	open, found := setOf(names...), map[string]bool{}
	var visit func(n *node)
	visit = func(n *node) {
		if n.kind == nodeName {
			if n.ctx == ctxLoad && open[n.name] {
				found[n.name] = true
			} else {
				delete(open, n.name)
			}
		}
		n.children(visit)
	}
	for _, n := range nodes {
		visit(n)
	}
	return found
}
