package tokenizer

import (
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
	b, err := readLimited(fsys, name)
	if !errors.Is(err, fs.ErrNotExist) {
		return b, err
	}
	if b, err = readGzip(fsys, name+".gz"); errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return b, err
}

func readLimited(fsys fs.FS, name string) ([]byte, error) {
	f, err := fsys.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	size := int64(0)
	if info, err := f.Stat(); err == nil {
		size = info.Size()
	}
	return readAll(f, name, size)
}

func readGzip(fsys fs.FS, name string) ([]byte, error) {
	f, err := fsys.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	size := int64(0)
	if info, err := f.Stat(); err == nil {
		size = info.Size() * usualRatio
	}
	return readAll(z, name, size)
}

// readAll reads at most maxFile bytes; size is a hint.
func readAll(r io.Reader, name string, size int64) ([]byte, error) {
	b := make([]byte, 0, min(size, maxFile)+512)
	for {
		if len(b) == cap(b) {
			b = append(b, 0)[:len(b)]
		}
		n, err := r.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		if len(b) > maxFile {
			return nil, fmt.Errorf("read %s: more than %d bytes", name, maxFile)
		}
		if errors.Is(err, io.EOF) {
			return b, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", name, err)
		}
	}
}
