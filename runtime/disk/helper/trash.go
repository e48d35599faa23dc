package helper

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/disk/tree"
)

// trash deletes folders in the background. The zero value is ready.
type trash struct {
	emptyings sync.WaitGroup
	emptying  sync.Mutex // held during an emptying
	filling   sync.Mutex // held while a folder is discarded, and while the discarded folders are listed
}

// discarded is the folder of the files that are deleted.
func (d *Disks) discarded() string { return filepath.Join(d.config.Folder, "discarded") }

// discard deletes a folder. The folder may not exist.
func (d *Disks) discard(path string) error {
	err := d.moveToTrash(path, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// empty replaces the files of a layer by none. An interrupted removal may have removed them.
func (d *Disks) empty(layer string) error {
	err := d.moveToTrash(d.files(layer), unix.RENAME_EXCHANGE)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// moveToTrash discards a folder. With RENAME_EXCHANGE an empty one takes its place.
func (d *Disks) moveToTrash(path string, flags uint) error {
	d.trash.filling.Lock()
	defer d.trash.filling.Unlock()
	empty, err := os.MkdirTemp(d.discarded(), "")
	if err != nil {
		return err
	}
	d.trash.emptyings.Go(d.emptyTrash)
	return unix.Renameat2(unix.AT_FDCWD, path, unix.AT_FDCWD, empty, flags)
}

// emptyTrash deletes the discarded folders.
func (d *Disks) emptyTrash() {
	d.trash.emptying.Lock()
	defer d.trash.emptying.Unlock()
	d.trash.filling.Lock() // else the list may have a folder that is about to take a layer's place
	entries, err := os.ReadDir(d.discarded())
	d.trash.filling.Unlock()
	for _, e := range entries {
		err = errors.Join(err, tree.Remove(d.discarded(), e.Name()))
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "delete discarded files: %v\n", err)
	}
}
