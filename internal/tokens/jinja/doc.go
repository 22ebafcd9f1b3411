// Package jinja renders chat templates exactly as Python's Jinja2 3.1.6 does in the environment that transformers gives
// it: an immutable sandbox with trim_blocks, lstrip_blocks, loop controls, the generation tag, tojson without HTML
// escapes, raise_exception and strftime_now.
//
//	tpl, err := jinja.Compile(source)
//	body, err := jinja.ParseJSON(request)
//	vars, _ := body.AsDict()
//	prompt, err := tpl.Render(nil, vars, jinja.Env{Now: time.Now()})
//
// A template is compiled once to closures over slots (symbols.go resolves names by the rules of jinja2.idtracking) and
// may then be rendered by many goroutines. Where Python raises, Render returns an *Error of the same class.
//
// The engine implements what the chat templates of testdata and of KVLANE_SHARED use (TestSharedGoldens), what others are known
// to use, such as title (OpenChat 3.5), capitalize (SmolVLM) and int (variants of Seed-OSS), and closely related features
// that cost little. Compile rejects everything else with an *Error of class Unsupported that names the construct, line
// and column (subset.go); Render does so for what depends on values.
//
//   - Tags: for (with if and else, not recursive), if, set (values and blocks),
//     macro, call (MiniCPM3), filter (firefunction), break, continue, generation, raw.
//   - Operators: + - * / // % ~ == != < <= > >= in, not in, is, and, or, not,
//     if-else, slices, calls with *list. Ints have 64 bits in arithmetic.
//   - repeats text; % does not format.
//   - Filters: capitalize, count, d, default, dictsort, first, indent, int, items,
//     join, last, length, list, lower, map, max, min, reject, rejectattr, replace,
//     reverse, safe, select, selectattr, sort, string, title, tojson, trim,
//     unique, upper; format of a literal with %s alone (vLLM's pythonic tools).
//   - Tests: boolean, callable, defined, even, false, float, in, integer, iterable,
//     mapping, none, number, odd, sequence, string, true, undefined, and the
//     names of the comparisons (eq, equalto, gt ...).
//   - Methods of str: capitalize, endswith, join, lower, lstrip, removeprefix,
//     removesuffix, replace, rstrip, split, splitlines, startswith, strip, title,
//     upper; format of a literal with {} alone (Hunyuan 3). Of dict: get, items,
//     keys, values. Methods that change a value raise SecurityError, as in Python.
//   - The variable loop: first, index, index0, last, length, nextitem, previtem,
//     revindex, revindex0.
//   - Globals: dict, namespace, raise_exception, range, strftime_now.
//
// Templates are not trusted: nesting, steps, memory and output are bounded (Env), and a bug in the engine becomes an error.
//
// Known difference: a slice of a constant that does not support slicing, such as 1[2:], is an error; Jinja2 folds it to
// an Undefined at compile time. Letters and cases follow the Unicode version of Go's tables, and strftime the C locale.
package jinja
