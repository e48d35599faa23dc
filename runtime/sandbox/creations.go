package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/doze-run/doze/internal/durable"
)

// creations notes the creations under way, by an empty file for each, in a folder that
// belongs to the containers. A record in StateStarting alone does not prove that its
// sandbox was never acknowledged: in an older copy of the store it may have been since.
type creations struct{ dir string }

// open creates the folder, which a loss of power does not remove. The Engine's folder that contains its parent exists.
func (c creations) open() error {
	err := os.MkdirAll(c.dir, 0o700)
	for _, dir := range []string{filepath.Dir(c.dir), filepath.Dir(filepath.Dir(c.dir))} {
		if err == nil { // also if it existed: the node may have died before
			err = durable.Sync(dir)
		}
	}
	if err != nil {
		return fmt.Errorf("create the folder for notes of creations: %w", err)
	}
	return nil
}

// add notes a creation before anything is made.
func (c creations) add(id ID) error {
	err := os.WriteFile(filepath.Join(c.dir, string(id)), nil, 0o600)
	if err == nil {
		err = durable.Sync(c.dir)
	}
	if err != nil {
		return fmt.Errorf("note the creation: %w", err)
	}
	return nil
}

// remove notes that a creation is over, before it is acknowledged. Idempotent.
func (c creations) remove(id ID) error {
	if err := removeFile(filepath.Join(c.dir, string(id))); err != nil {
		return fmt.Errorf("note the end of the creation: %w", err)
	}
	return nil
}

// removeFile is os.Remove, but idempotent.
func removeFile(path string) error {
	if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// pending reports whether a creation has begun and is not over.
func (c creations) pending(id ID) bool {
	_, err := os.Lstat(filepath.Join(c.dir, string(id)))
	return err == nil
}

// retain removes the notes of all but these.
func (c creations) retain(wanted func(ID) bool) error {
	files, err := os.ReadDir(c.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, file := range files {
		if id := ID(file.Name()); !wanted(id) {
			err = errors.Join(err, c.remove(id))
		}
	}
	return err
}
