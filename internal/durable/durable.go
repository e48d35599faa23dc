// Package durable writes files that are complete whenever they have their name.
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
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
