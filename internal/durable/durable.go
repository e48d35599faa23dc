// Package durable writes files that are complete whenever they have their name, and syncs names.
package durable

import (
	"errors"
	"os"
	"path/filepath"
)

// Write stores data in a new file with mode 0600. When it is complete and on the disk,
// place names it: os.Rename replaces a file of that name, os.Link does not.
func Write(path string, data []byte, place func(temporary, path string) error) error {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, ".new-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // fails after a rename
	_, err = f.Write(data)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := place(f.Name(), path); err != nil {
		return err
	}
	return Sync(dir)
}

// Sync writes a file, or the names in a folder, to the disk.
func Sync(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
