// Package models holds the tokenizer files that are part of the binary.
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

// Builtin is the prefix of names of files that are part of the binary.
const Builtin = "builtin:"

// ErrUnknown says that a name is none of a tokenizer.
var ErrUnknown = errors.New("no such tokenizer")

// Open returns the files of a tokenizer: a folder, or "builtin:qwen3".
func Open(name string) (fs.FS, error) {
	if b, ok := strings.CutPrefix(name, Builtin); ok {
		if st, err := fs.Stat(builtin, b); err != nil || !st.IsDir() {
			return nil, fmt.Errorf("%w: builtin has no %q: there is qwen3", ErrUnknown, b)
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
	return os.DirFS(name), nil
}
