package config

import (
	"bytes"
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"os"
	"strings"
)

// maxFile bounds files in bytes: the parser of configurations takes seconds for a MiB.
const maxFile = 4 << 20

// ReadFile is os.ReadFile for settings, templates, secrets and certificates. It refuses files longer than maxFile, and opens
// only regular files and pipes of the shell, because opening a FIFO would block.
func ReadFile(file string) ([]byte, error) {
	if st, err := os.Stat(file); err == nil && !st.Mode().IsRegular() && file != "/dev/stdin" && !strings.HasPrefix(file, "/dev/fd/") {
		return nil, fmt.Errorf("%s is not a regular file", file)
	}
	in, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	text, err := io.ReadAll(io.LimitReader(in, maxFile+1))
	if len(text) > maxFile {
		return nil, fmt.Errorf("%s has more than %d bytes", file, maxFile)
	}
	return text, err
}

// KeyPair is tls.LoadX509KeyPair with ReadFile.
func KeyPair(certFile, keyFile string) (tls.Certificate, error) {
	certificate, certErr := ReadFile(certFile)
	key, keyErr := ReadFile(keyFile)
	pair, err := tls.X509KeyPair(certificate, key)
	return pair, cmp.Or(certErr, keyErr, err)
}

// Authorities reads the certificates of a PEM file.
func Authorities(file string) (*x509.CertPool, error) {
	text, err := ReadFile(file)
	pool := x509.NewCertPool()
	if err == nil && !pool.AppendCertsFromPEM(text) {
		err = fmt.Errorf("no certificate in %s", file)
	}
	return pool, err
}

// FileWatch detects changes of a file. New content counts once it was read twice in a row, because a file that is being
// written may be incomplete. After a failure any content is new.
type FileWatch struct {
	file        string
	failing     bool // the last read failed
	last, taken []byte
}

// WatchFile returns a watch of a file whose content is known to the caller.
func WatchFile(file string, text []byte) *FileWatch {
	return &FileWatch{file: file, last: text, taken: text}
}

// Changed reads the file, and reports whether its content is new and complete. The first failure in a row is the error; the
// others count as unchanged.
func (w *FileWatch) Changed() (text []byte, changed bool, err error) {
	text, err = ReadFile(w.file)
	if before := w.failing; err != nil {
		if w.failing, w.taken = true, nil; before {
			err = nil
		}
		return nil, false, err
	}
	w.failing = false
	same := bytes.Equal(text, w.last)
	w.last = text
	if !same || w.taken != nil && bytes.Equal(text, w.taken) {
		return nil, false, nil
	}
	w.taken = text
	return text, true, nil
}
