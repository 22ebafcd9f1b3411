package tokenizer

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
)

// maxFile bounds a file after decompression. The largest tokenizer.json of a
// known model is about 33 MB.
const maxFile = 256 << 20

// usualRatio is how much smaller gzip makes a tokenizer.json, about.
const usualRatio = 7

// readFile reads name or name.gz; nil without error if there is neither.
func readFile(fsys fs.FS, name string) ([]byte, error) {
	b, err := readOne(fsys, name, false)
	if errors.Is(err, fs.ErrNotExist) {
		b, err = readOne(fsys, name+".gz", true)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return b, err
}

func readOne(fsys fs.FS, name string, zipped bool) ([]byte, error) {
	f, err := fsys.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	size := info.Size()
	in := io.Reader(f)
	if zipped {
		if in, err = gzip.NewReader(f); err != nil {
			return nil, fmt.Errorf("read %s: %w", name, err)
		}
		size *= usualRatio
	}
	var out bytes.Buffer
	out.Grow(int(min(size, maxFile)) + bytes.MinRead)
	if _, err := out.ReadFrom(io.LimitReader(in, maxFile+1)); err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	if out.Len() > maxFile {
		return nil, fmt.Errorf("read %s: more than %d bytes", name, maxFile)
	}
	return out.Bytes(), nil
}
