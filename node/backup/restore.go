package backup

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/doze-run/doze/node"
	"github.com/doze-run/doze/runtime/store"
)

// ErrNotEmpty is returned by Restore for a home with other data.
var ErrNotEmpty = errors.New("the folder has data of a node")

// stageName is the folder in the home in which a restore is prepared.
const stageName = ".restore"

// Restore restores a backup to the home of a node, which does not run. The home has no store.
// It may have files of the backup if they are the same, such as a sealing key that the backup
// does not contain.
//
// Restore verifies the backup before it changes anything. The home has no store until
// everything else is in place, and a node does not start on it before: a restore that was
// interrupted is repeated.
//
// Errors: ErrNotEmpty, store.ErrInUse (both wrapped), and the errors of Check.
func Restore(backup io.ReadSeeker, home string) (Contents, error) {
	return restore(backup, home, func(string) {})
}

// restore calls reached before each step.
func restore(backup io.ReadSeeker, home string, reached func(step string)) (Contents, error) {
	reached("check")
	contents, err := Check(backup)
	if err != nil {
		return Contents{}, err
	}
	if err := store.InUse(node.StoreDir(home)); err != nil {
		return Contents{}, fmt.Errorf("%w; stop the node first", err)
	}
	if err := checkHome(home, contents.Node); err != nil {
		return Contents{}, err
	}
	if _, err := backup.Seek(0, io.SeekStart); err != nil {
		return Contents{}, err
	}
	reached("stage")
	s := stage{home: home, dir: filepath.Join(home, stageName), node: contents.Node}
	defer os.RemoveAll(s.dir)
	if err := s.fill(backup); err != nil {
		return Contents{}, err
	}
	reached("install")
	if err := s.install(reached); err != nil {
		return Contents{}, err
	}
	reached("end")
	return contents, nil
}

// checkHome returns an error if the home has a store, or belongs to another node.
func checkHome(home, id string) error {
	empty, err := store.Empty(node.StoreDir(home))
	if err != nil {
		return err
	}
	have, err := node.ReadNodeID(home)
	if err != nil {
		return err
	}
	const remedy = "restore into an empty folder, or move its data away"
	switch {
	case !empty:
		return fmt.Errorf("%w: %s exists; %s", ErrNotEmpty, node.StoreDir(home), remedy)
	case have != "" && have != id:
		return fmt.Errorf("%w: %s belongs to node %s, the backup to node %s; %s", ErrNotEmpty, home, have, id, remedy)
	}
	return nil
}

// stage is a folder with the restored data, on the file system of the home.
type stage struct {
	home, dir, node string
	files           []string // their names
}

// fill reads the backup into the folder.
func (s *stage) fill(backup io.Reader) error {
	if err := os.MkdirAll(s.home, 0o700); err != nil {
		return err
	}
	if err := os.RemoveAll(s.dir); err != nil { // of an earlier restore
		return err
	}
	if err := os.Mkdir(s.dir, 0o700); err != nil {
		return err
	}
	return store.Create(filepath.Join(s.dir, "store"), s.node, func(put func(key, value []byte) error) error {
		_, err := read(backup, visitor{entry: put, file: s.write})
		return err
	})
}

func (s *stage) path(name string) string {
	return filepath.Join(s.dir, "files", filepath.FromSlash(name))
}

func (s *stage) target(name string) string { return filepath.Join(s.home, filepath.FromSlash(name)) }

// write writes a file of the backup.
func (s *stage) write(name string, size int64, content io.Reader) error {
	file := s.path(name)
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.CopyN(f, content, size)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	s.files = append(s.files, name)
	return nil
}

// install moves everything to its place, the store last.
func (s *stage) install(reached func(step string)) error {
	missing, err := s.missing()
	if err != nil {
		return err
	}
	reached("node id")
	// Without a store, a node with this id does not start.
	if err := node.WriteNodeID(s.home, s.node); err != nil {
		return err
	}
	folders := []string{s.home}
	for _, name := range missing {
		reached("file " + name)
		target := s.target(name)
		if err := os.MkdirAll(filepath.Dir(target), 0o700); err != nil {
			return err
		}
		if err := os.Link(s.path(name), target); err != nil { // replaces nothing
			return err
		}
		for dir := filepath.Dir(target); dir != s.home; dir = filepath.Dir(dir) {
			folders = append(folders, dir)
		}
	}
	if err := syncFolders(folders); err != nil {
		return err
	}
	reached("store")
	target := node.StoreDir(s.home)
	if err := store.RemoveEmpty(target); err != nil {
		return err
	}
	if err := os.Rename(filepath.Join(s.dir, "store"), target); err != nil {
		return err
	}
	return syncFolders([]string{s.home})
}

// missing returns the names of the files that the home lacks. Another content of an existing
// file is ErrNotEmpty (wrapped).
func (s *stage) missing() (names []string, err error) {
	for _, name := range s.files {
		have, err := os.ReadFile(s.target(name))
		if errors.Is(err, fs.ErrNotExist) {
			names = append(names, name)
			continue
		}
		if err != nil {
			return nil, err
		}
		want, err := os.ReadFile(s.path(name))
		if err != nil {
			return nil, err
		}
		if !bytes.Equal(have, want) {
			return nil, fmt.Errorf("%w: %s differs from the file in the backup; restore into an empty folder, or move it away", ErrNotEmpty, s.target(name))
		}
	}
	return names, nil
}

func syncFolders(folders []string) error {
	slices.Sort(folders)
	for _, folder := range slices.Compact(folders) {
		f, err := os.Open(folder)
		if err != nil {
			return err
		}
		if err := errors.Join(f.Sync(), f.Close()); err != nil {
			return err
		}
	}
	return nil
}
