// Package models contains the tokenizer files that are embedded in the binary.
package models

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
)

//go:embed qwen3
var builtin embed.FS

// Builtin is the prefix of the names of embedded tokenizers.
const Builtin = "builtin:"

// ErrUnknown is returned by Open if no tokenizer has the name.
var ErrUnknown = errors.New("no such tokenizer")

// Open returns the files of a tokenizer: a directory, or an embedded one such as "builtin:qwen3".
func Open(name string) (fs.FS, error) {
	if b, ok := strings.CutPrefix(name, Builtin); ok {
		if st, err := fs.Stat(builtin, b); err != nil || !st.IsDir() {
			return nil, fmt.Errorf("%w: builtin has only qwen3, not %q", ErrUnknown, b)
		}
		return fs.Sub(builtin, b)
	}
	st, err := os.Stat(name)
	if err != nil {
		return nil, fmt.Errorf("tokenizer: %w", err)
	}
	if !st.IsDir() {
		return nil, fmt.Errorf("%w: %s is not a folder", ErrUnknown, name)
	}
	return regular{os.DirFS(name)}, nil
}

// regular opens regular files and folders only, because opening a FIFO would block.
type regular struct{ fs.FS }

// Open implements fs.FS.
func (r regular) Open(name string) (fs.File, error) {
	if st, err := fs.Stat(r.FS, name); err == nil && !st.Mode().IsRegular() && !st.IsDir() {
		return nil, &fs.PathError{Op: "open", Path: name, Err: errors.New("not a regular file")}
	}
	return r.FS.Open(name)
}
