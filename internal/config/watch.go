package config

import (
	"bytes"
	"io"
	"os"
)

// maxFile bounds a configuration and a workers file in bytes: the parser takes seconds for a MiB.
const maxFile = 4 << 20

// ReadFile is os.ReadFile for a file that this package parses. Of a longer one it returns enough for it to be refused.
func ReadFile(file string) ([]byte, error) {
	in, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	return io.ReadAll(io.LimitReader(in, maxFile+1))
}

// FileWatch notices that a file has changed. A content counts once it was read twice in a
// row: a file that is just being written may be incomplete.
type FileWatch struct {
	// Missing reports that the last read failed.
	Missing bool

	file        string
	last, taken []byte
}

// WatchFile returns a watch of a file whose content is known to the caller.
func WatchFile(file string, text []byte) *FileWatch {
	return &FileWatch{file: file, last: text, taken: text}
}

// Changed reads the file, and reports whether its content is new and complete. A file that
// cannot be read counts as unchanged; the first failure in a row is the error.
func (w *FileWatch) Changed() (text []byte, changed bool, err error) {
	text, err = ReadFile(w.file)
	if before := w.Missing; err != nil {
		if w.Missing = true; before {
			err = nil
		}
		return nil, false, err
	}
	w.Missing = false
	same := bytes.Equal(text, w.last)
	w.last = text
	if !same || bytes.Equal(text, w.taken) {
		return nil, false, nil
	}
	w.taken = text
	return text, true, nil
}
