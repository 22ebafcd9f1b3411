package replay

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// checkOutput returns an error if a file cannot be written, before the minutes that a run
// takes. It creates no file and leaves an existing one unchanged.
func checkOutput(flag, path string) error {
	if path == "" {
		return nil
	}
	info, err := os.Stat(path)
	switch {
	case err == nil && info.IsDir():
		return fmt.Errorf("--%s %s: is a folder, not a file", flag, path)
	case err == nil && !info.Mode().IsRegular():
		return nil // a pipe or device: opening it may have an effect
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("--%s: %w", flag, err)
	}
	if folder, err := os.Stat(filepath.Dir(path)); err != nil || !folder.IsDir() {
		return fmt.Errorf("--%s %s: %s: no such folder", flag, path, filepath.Dir(path))
	}
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o644) //nolint:gosec // as os.Create, under the user's umask
	if err != nil {
		return fmt.Errorf("--%s: %w", flag, err)
	}
	if err := file.Close(); err != nil {
		return fmt.Errorf("--%s: %w", flag, err)
	}
	if info == nil {
		return os.Remove(path)
	}
	return nil
}
