package jinja

import "time"

// Env is what a rendering gets beside its variables. The zero value is usable:
// the zero time and the default limits.
type Env struct {
	// Now is what strftime_now sees. Its location is the engine's time zone.
	Now time.Time
	// MaxOutput bounds the rendered text in bytes; 0 means 64 MiB.
	MaxOutput int
	// MaxSteps bounds loop rounds, calls and other work; 0 means 20 million.
	MaxSteps int
	// MaxMemory bounds the bytes of all intermediate values; 0 means 1 GiB.
	MaxMemory int
	// MaxDepth bounds nested macro calls and recursive loops; 0 means 200.
	MaxDepth int
}

// Template is a compiled template. It is immutable and safe for concurrent use.
type Template struct {
	source string
}

// Compile reads a template; the error is an *Error with the class
// TemplateSyntaxError or TemplateAssertionError.
func Compile(source string) (*Template, error) {
	return &Template{source: source}, nil
}

// Render appends the text of the template with these variables to dst. The
// error is an *Error named after the Python exception; dst is then returned as it was.
func (t *Template) Render(dst []byte, ctx *Dict, env Env) ([]byte, error) {
	return dst, newError("TemplateSyntaxError", "not compiled")
}

// ContentFormat is the content format that vLLM detects in the template:
// "openai" if it walks over the parts of a message's content, else "string".
func (t *Template) ContentFormat() string { return "string" }

// UndeclaredVariables returns the sorted names that the template looks up in
// its context, as jinja2.meta.find_undeclared_variables does.
func (t *Template) UndeclaredVariables() []string { return nil }

type (
	machine     struct{}
	arguments   struct{}
	macroObject struct{}
)
