package helper

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/doze-run/doze/runtime/disk/wire"
)

// newDisks returns the service with folders of a test and no storage.
func newDisks(t *testing.T) *Disks {
	t.Helper()
	d := &Disks{config: wire.Config{Folder: t.TempDir()}}
	if err := os.Mkdir(d.discarded(), 0o700); err != nil {
		t.Fatal(err)
	}
	layers, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	d.layers = layers
	t.Cleanup(func() {
		d.trash.emptyings.Wait()
		layers.Close()
	})
	return d
}

// The trash is emptied while other folders are discarded.
func TestManyDisksAreDiscardedAtTheSameTime(t *testing.T) {
	d := newDisks(t)
	var workers sync.WaitGroup
	for worker := range 8 {
		workers.Go(func() {
			for i := range 200 {
				layer := fmt.Sprint(worker, "-", i)
				files := filepath.Join(d.layers.Name(), layer, "diff")
				if err := os.MkdirAll(filepath.Join(files, "a/b"), 0o700); err != nil {
					t.Error(err)
					return
				}
				if err := d.empty(layer); err != nil {
					t.Errorf("empty %s: %v", layer, err)
					return
				}
				if left, err := os.ReadDir(files); err != nil || len(left) > 0 {
					t.Errorf("%s has %v, %v", layer, left, err)
				}
			}
		})
	}
	workers.Wait()
	d.trash.emptyings.Wait()
	if left, err := os.ReadDir(d.discarded()); err != nil || len(left) > 0 {
		t.Errorf("%d folders are left, %v", len(left), err)
	}
}

func TestDiscardDeletesAFolderThatMayNotExist(t *testing.T) {
	d := newDisks(t)
	path := filepath.Join(t.TempDir(), "staging")
	if err := os.MkdirAll(filepath.Join(path, "a"), 0o700); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := d.discard(path); err != nil {
			t.Error(err)
		}
	}
	d.trash.emptyings.Wait()
	for _, gone := range []string{path, filepath.Join(d.discarded(), "*")} {
		if left, err := filepath.Glob(gone); err != nil || len(left) > 0 {
			t.Errorf("left: %v, %v", left, err)
		}
	}
}
