package jinja

type nodeKind uint8

const (
	nodeOutput      nodeKind = iota // list
	nodeData                        // name = text
	nodeName                        // name, ctx
	nodeNSRef                       // name, attr
	nodeConst                       // value
	nodeTuple                       // list, ctx
	nodeList                        // list
	nodeDict                        // list: alternating keys and values
	nodeGetattr                     // a, name
	nodeGetitem                     // a, b
	nodeSlice                       // list of three, nil if omitted
	nodeCall                        // a, args...
	nodeFilter                      // a (nil in blocks), name, args...
	nodeTest                        // a, name, args...
	nodeCond                        // a = test, b = then, c = else or nil
	nodeOr                          // a, b
	nodeAnd                         // a, b
	nodeNot                         // a
	nodeNeg                         // a
	nodePos                         // a
	nodeBinary                      // name = operator, a, b
	nodeConcat                      // list
	nodeCompare                     // a, ops with list
	nodeAssign                      // a = target, b = value
	nodeAssignBlock                 // a = target, b = filter or nil, body
	nodeFor                         // a = target, b = iter, c = test, body, other
	nodeIf                          // a = test, body, list = elifs, other
	nodeMacro                       // name, params, list = defaults, body
	nodeCallBlock                   // a = call, params, list = defaults, body
	nodeFilterBlock                 // a = filter, body
	nodeTemplate                    // body
	nodeBreak
	nodeContinue
	nodeGeneration
)

// nodeCtx is the use of a name or a tuple of names.
type nodeCtx uint8

const (
	ctxLoad nodeCtx = iota
	ctxStore
	ctxParam
)

// node is a node of the syntax tree; the comment next to its kind lists the fields it uses. A
// single struct for all kinds keeps the tree walks short.
type node struct {
	kind    nodeKind
	ctx     nodeCtx
	at      place
	name    string
	attr    string
	value   Value
	a, b, c *node
	list    []*node
	ops     []string
	params  []*node
	call    callArgs
	body    []*node
	other   []*node
}

// callArgs are the arguments of a call, a filter or a test.
type callArgs struct {
	args    []*node
	names   []string // of kwargs
	kwargs  []*node
	dynArgs *node
}

// children calls f for each direct child in the order of Jinja2's fields.
func (n *node) children(f func(*node)) {
	fields := [...][]*node{{n.a, n.b, n.c}, n.params, n.list, n.call.args, n.call.kwargs, {n.call.dynArgs}, n.body, n.other}
	for _, nodes := range fields {
		for _, c := range nodes {
			if c != nil {
				f(c)
			}
		}
	}
}

// reads reports whether n is the value of a variable.
func (n *node) reads(name string) bool {
	return n.kind == nodeName && n.ctx == ctxLoad && n.name == name
}

// levels returns the number of levels from n, which is at level above, down to its lowest descendant.
func (n *node) levels(above int) int {
	if above >= maxTree {
		syntaxErrorf(n.at, "nested too deeply")
	}
	most := 0
	n.children(func(c *node) { most = max(most, c.levels(above+1)) })
	return most + 1
}

// size returns the number of nodes of a statement, without those of its bodies.
func (n *node) size() int {
	bare, size := *n, 1
	bare.body, bare.other = nil, nil
	bare.children(func(c *node) { size += c.size() })
	return size
}

// walk calls f for n and everything below it.
func (n *node) walk(f func(*node)) {
	f(n)
	n.children(func(c *node) { c.walk(f) })
}
