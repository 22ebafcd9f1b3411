package jinja

import (
	"cmp"
	"slices"
	"time"
	"unsafe"
)

// Env is the environment of a rendering; its variables are separate. The zero value is usable:
// the zero time and the default limits.
type Env struct {
	// Now is the time that strftime_now reports. Its location is the engine's time zone.
	Now time.Time
	// MaxOutput bounds the rendered text in bytes; 0 means 64 MiB.
	MaxOutput int
	// MaxSteps bounds loop iterations, calls and other work; 0 means 20 million.
	MaxSteps int
	// MaxMemory bounds the bytes of all intermediate values; 0 means 1 GiB.
	MaxMemory int
	// Stop ends the rendering, with an error of class Stopped, once it is closed; nil means never.
	Stop <-chan struct{}
}

// Defaults of Env.
const (
	defaultMaxOutput = 64 << 20
	defaultMaxSteps  = 20_000_000
	defaultMaxMemory = 1 << 30
	maxCalls         = 200 // nested macro calls
)

// RequestEnv returns the bounds for rendering a template that a client supplied; size is the length of its request in
// bytes. A rendering allocates at most four times MaxMemory in total, and takes tens of milliseconds of CPU time in
// addition to a share proportional to size. They suffice for a conversation of 10 MB with the tests' templates.
func RequestEnv(size int) Env {
	size = min(max(size, 0), 1<<30)
	return Env{MaxMemory: 32<<20 + 8*size, MaxOutput: 8<<20 + 2*size, MaxSteps: 1<<20 + 2*size}
}

// Template is a compiled template. It is immutable and safe for concurrent use.
type Template struct {
	root  *node
	body  stmt
	slots *funcScope
	names []string
}

// Compile parses and compiles a template. The error is an *Error of class TemplateSyntaxError or
// TemplateAssertionError, or Unsupported for a template that Python may render and this engine does not.
func Compile(source string) (t *Template, err error) {
	defer rescue(&err)
	root := parse(source)
	checkSubset(root)
	return compileTree(root), nil
}

// Render appends the template's output for the variables in ctx to dst. The error is an *Error
// whose class is the Python exception or one of the engine's own; dst is then returned unchanged.
func (t *Template) Render(dst []byte, ctx *Dict, env Env) (out []byte, err error) {
	m := &machine{
		ctx: ctx, now: env.Now,
		out: dst, base: len(dst),
		maxOutput: cmp.Or(env.MaxOutput, defaultMaxOutput),
		steps:     cmp.Or(env.MaxSteps, defaultMaxSteps),
		memory:    cmp.Or(env.MaxMemory, defaultMaxMemory),
		stop:      env.Stop,
	}
	if m.stop != nil {
		m.steps, m.later = 0, m.steps
	}
	defer func() {
		if err != nil {
			out = dst
		}
	}()
	defer rescue(&err)
	if m.ctx == nil {
		m.ctx = new(Dict)
	}
	m.names = make([]Value, len(t.names))
	for i, name := range t.names {
		m.names[i] = m.fromContext(name)
	}
	t.body(m.newFrame(t.slots, nil))
	return m.out, nil
}

// UndeclaredVariables returns the sorted names that the template looks up in
// its context, as jinja2.meta.find_undeclared_variables does.
func (t *Template) UndeclaredVariables() []string {
	out := slices.DeleteFunc(slices.Clone(t.names), func(name string) bool { return pythonGlobals[name] })
	slices.Sort(out)
	return out
}

// valueSize is the size of a Value in a list, in bytes.
const valueSize = int(unsafe.Sizeof(Value{}))

// dictEntry is the approximate cost of another dict entry, in bytes: the entry, its place in the index, and the growth of both.
const dictEntry = 8 * valueSize
