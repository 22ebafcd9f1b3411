package config

import "reflect"

// Problems is what a configuration would be told of w if it stood in workers.static: for
// workers that something else describes, such as pods. Paths are those within the worker,
// e.g. "events.endpoint". Its address is made regular, as a configuration's is.
func (w *Worker) Problems() []Problem {
	var d decoder
	bad := func(path, format string, args ...any) {
		if len(path) > 0 && path[0] == '.' {
			path = path[1:]
		}
		d.problemf(path, format, args...)
	}
	bounded(bad, "", reflect.ValueOf(w).Elem())
	if len(d.problems) > 0 {
		return d.problems // the sums below need numbers within bounds
	}
	w.validate("", bad)
	return d.problems
}

// bounded looks at the fields of a struct by their jsonschema tags, which a configuration
// is held to while it is read.
func bounded(bad report, path string, v reflect.Value) {
	for f, field := range v.Fields() {
		at, rules := path+"."+f.Tag.Get("yaml"), f.Tag.Get("jsonschema")
		switch field.Kind() {
		case reflect.Struct:
			bounded(bad, at, field)
		case reflect.Int:
			bounds(bad, at, float64(field.Int()), rules)
		case reflect.Float64:
			bounds(bad, at, field.Float(), rules)
		case reflect.String:
			oneOf(bad, at, field.String(), rules)
		}
	}
}
