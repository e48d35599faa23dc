//go:build mounts

package power

import (
	"errors"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/doze-run/doze/runtime/backup/s3test"
	"github.com/doze-run/doze/testkit"
)

// pause lets no request of the node to the object store begin until resume is called. The object store is on another machine: it does
// not lose power, but what the node did after the loss did not happen.
func pause(s *s3test.Server) (resume func()) {
	var paused sync.RWMutex
	paused.Lock()
	s.Fail(func(*http.Request) s3test.Fault {
		paused.RLock()
		defer paused.RUnlock()
		return s3test.Fault{}
	})
	return func() {
		s.Fail(nil)
		paused.Unlock()
	}
}

// objectStore has the contents of the files of an object store by their paths. Folders have none.
type objectStore map[string][]byte

func copyStore(t *testing.T, folder string) objectStore {
	t.Helper()
	store := objectStore{}
	err := filepath.WalkDir(folder, func(path string, e fs.DirEntry, err error) error {
		name, rerr := filepath.Rel(folder, path)
		switch {
		case errors.Is(err, fs.ErrNotExist): // by a request in progress
			return nil
		case err != nil || rerr != nil:
			return errors.Join(err, rerr)
		case e.IsDir():
			store[name] = nil
			return nil
		}
		content, err := os.ReadFile(path)
		if err == nil {
			store[name] = append([]byte{}, content...)
		} else if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
		return err
	})
	testkit.NoError(t, "copy the object store", err)
	return store
}

// restore replaces the files of the object store.
func (o objectStore) restore(t *testing.T, folder string) {
	t.Helper()
	list, err := os.ReadDir(folder)
	testkit.NoError(t, "empty the object store", err)
	for _, e := range list {
		testkit.NoError(t, "empty the object store", os.RemoveAll(filepath.Join(folder, e.Name())))
	}
	for name, content := range o {
		path := filepath.Join(folder, name)
		if content == nil {
			testkit.NoError(t, "restore the object store", os.MkdirAll(path, 0o755))
			continue
		}
		testkit.NoError(t, "restore the object store", os.MkdirAll(filepath.Dir(path), 0o755))
		testkit.NoError(t, "restore the object store", os.WriteFile(path, content, 0o644))
	}
}
