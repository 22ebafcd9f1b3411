// Package jinja renders chat templates exactly as Python's Jinja2 3.1.6 does in
// the environment that transformers gives it: an immutable sandbox with
// trim_blocks, lstrip_blocks, loop controls, the generation tag, tojson without
// HTML escapes, raise_exception and strftime_now.
//
//	tpl, err := jinja.Compile(source)
//	body, err := jinja.ParseJSON(request)
//	vars, _ := body.AsDict()
//	prompt, err := tpl.Render(nil, vars, jinja.Env{Now: time.Now()})
//
// A template is compiled once to closures over slots (symbols.go decides which
// variable a name means, by the rules of jinja2.idtracking) and may then be
// rendered by many goroutines. Values are ordered and typed as in Python
// (value.go, dict.go), with Python's arithmetic, comparison, repr and formats.
// Where Python raises, Render returns an *Error of the same class.
//
// Templates are not trusted: nesting, steps, memory and output are bounded
// (Env), and a fault of the engine becomes an error.
//
// Known differences, all of them outside of what chat templates do:
//   - the text of functions, generators and iterators (Python prints an address)
//     is an error, as are lipsum, random, pprint, urlize, wordwrap, encode,
//     translate and set operators on dict views;
//   - a slice of a constant that has none, such as 1[2:], is an error; Jinja2
//     folds it to an Undefined when it compiles;
//   - extends, include and import fail when they are reached (the engines have
//     no loader), and autoescape true is refused;
//   - powers of floats may differ in the last digit (another pow than C's);
//   - letters and cases follow the Unicode version of Go's tables, and strftime
//     the C locale.
package jinja
