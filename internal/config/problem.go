package config

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Problem is an error or a warning about a file.
type Problem struct {
	// File, Line and Column are the place; Line is 0 if it is not known.
	File   string `json:"file"`
	Line   int    `json:"line,omitempty"`
	Column int    `json:"column,omitempty"`
	// Path is the dotted key, e.g. "workers.static[0].address".
	Path string `json:"key,omitempty"`
	// Message explains what is wrong and what to do.
	Message string `json:"message"`
}

func (p Problem) String() string {
	var b strings.Builder
	if b.WriteString(p.File); p.Line > 0 {
		fmt.Fprintf(&b, ":%d:%d", p.Line, p.Column)
	}
	for _, part := range []string{p.Path, p.Message} {
		if b.Len() > 0 && part != "" {
			b.WriteString(": ")
		}
		b.WriteString(part)
	}
	return b.String()
}

// ProblemsError holds all problems of a file, sorted by position.
type ProblemsError []Problem

func (p ProblemsError) Error() string {
	lines := make([]string, len(p))
	for i := range p {
		lines[i] = p[i].String()
	}
	return strings.Join(lines, "\n")
}

// Place adds file and position to the problems of a ProblemsError that were found after the
// file was read. It reads the file again. Other errors are returned unchanged.
func Place(file string, err error) error {
	text, unread := ReadFile(file)
	problems, ok := errors.AsType[ProblemsError](err)
	if unread != nil || !ok {
		return err
	}
	return problems.At(file, text)
}

// At is Place for a file that was read already.
func (p ProblemsError) At(file string, text []byte) ProblemsError {
	c := Default()
	d, invalid := decodeFile(file, text, &c)
	if invalid != nil {
		return p
	}
	placed := slices.Clone(p)
	for i, p := range placed {
		if p.File == "" {
			placed[i] = d.problem(p.Path, p.Message)
		}
	}
	return placed
}

// report records a problem or a warning at a dotted path.
type report func(path, format string, args ...any)

// wrong is a row of a table of mistakes: the text to report at a path if the condition holds.
type wrong struct {
	made       bool
	path, text string
}

// each reports the rows whose condition holds.
func (r report) each(rows []wrong) {
	for _, w := range rows {
		if w.made {
			r(w.path, "%s", w.text)
		}
	}
}

// under is r for paths within another one.
func (r report) under(parent string) report {
	return func(path, format string, args ...any) { r(join(parent, path), format, args...) }
}

// places maps the paths of a file to their positions.
type places struct {
	file string
	at   map[string]place
}

type place struct{ line, column int }

// problem returns a Problem at the position of path, or of its nearest parent that is in the file.
func (ps *places) problem(path, message string) Problem {
	p := Problem{File: ps.file, Path: path, Message: message}
	for at := path; ; at = at[:strings.LastIndexAny(at, ".[")] {
		if found, ok := ps.at[at]; ok {
			p.Line, p.Column = found.line, found.column
		} else if strings.ContainsAny(at, ".[") {
			continue
		}
		return p
	}
}

// reporter returns a report that appends to list and keeps it sorted by position.
func (ps *places) reporter(list *ProblemsError) report {
	return func(path, format string, args ...any) {
		p := ps.problem(path, fmt.Sprintf(format, args...))
		at := len(*list)
		for at > 0 && (*list)[at-1].Line > p.Line {
			at--
		}
		*list = slices.Insert(*list, at, p)
	}
}

func join(path, key string) string {
	if path == "" || key == "" || key[0] == '[' {
		return path + key
	}
	return path + "." + key
}
