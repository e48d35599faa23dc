package helper

import (
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kopia/kopia/snapshot"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/backup/wire"
	"github.com/doze-run/doze/runtime/disk/tree"
	"github.com/doze-run/doze/runtime/gitignore"
)

const (
	gitFolder  = ".git"
	ignoreFile = ".gitignore"
	// maxMatching limits the time for matching the names of a disk against patterns, separately for each pass, the capture, the scan
	// and the upload. Matching a name against 100 patterns takes 10 µs.
	maxMatching = 10 * time.Minute
	// maxPatterns limits the patterns of all .gitignore files that apply to one folder. Large repositories have 500.
	maxPatterns = 2000
)

// selection is the part of a disk that a backup contains.
type selection struct {
	excludes  gitignore.Patterns // relative to the root
	gitignore bool
	matching  atomic.Int64 // time spent, in nanoseconds
}

// ignoreRules are the patterns of a .gitignore file.
type ignoreRules struct {
	folder   string
	patterns gitignore.Patterns
}

// selected is a folder of a disk, with only the entries of a selection. Its methods are safe for concurrent use until it is
// closed.
type selected struct {
	*tree.Folder
	of   *selection
	path string // without the slash at the beginning; empty: the root
	// paths are the selected paths in a folder that contains them. nil: the whole folder is selected.
	paths tree.Paths
	// partial: the backup has paths, with the files of the image.
	partial bool
	// ignores are the .gitignore files of the work tree that contains the folder, outermost first. worktree means that
	// there is such a work tree. Neither applies in the folder .git.
	ignores  []ignoreRules
	worktree bool
}

// openSelected opens the root of the disk of a request. The caller closes it.
func openSelected(request wire.Request) (*selected, error) {
	of := &selection{gitignore: request.Gitignore}
	for _, line := range request.Excludes {
		p, err := gitignore.Parse(line)
		if err != nil {
			return nil, fmt.Errorf("pattern %q %w", line, err)
		}
		of.excludes = append(of.excludes, p)
	}
	f := &selected{of: of}
	var err error
	if len(request.Paths) == 0 {
		f.Folder, err = tree.OpenLayers(request.Layers, request.Below)
	} else {
		f.paths, f.partial = tree.NewPaths(request.Paths), true
		f.Folder, err = tree.OpenMerged(request.Layers, request.Below, request.Shift)
	}
	if err != nil {
		return nil, err
	}
	if err := f.readIgnores(); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// Opaque reports whether the folder hides the image's folder.
func (f *selected) Opaque() bool { return !f.partial && f.Folder.Opaque() }

// opaque reports whether a folder in f hides what a restore finds at its path.
func (f *selected) opaque(e *tree.Entry) bool {
	if f.partial {
		return e.Kind() == unix.S_IFDIR && f.paths != nil && len(f.paths[e.Name]) == 0
	}
	return e.Opaque()
}

// Entries returns the selected entries of the folder, sorted by name.
func (f *selected) Entries() ([]*tree.Entry, error) {
	if f.paths != nil {
		return f.named()
	}
	entries, err := f.Folder.Entries()
	if err != nil || !f.filters() {
		return entries, err
	}
	chosen := entries[:0]
	for _, e := range entries {
		start := time.Now()
		if !f.ignored(e) {
			chosen = append(chosen, e)
		}
		if f.of.matching.Add(int64(time.Since(start))) > int64(maxMatching) {
			return nil, unsupported("/"+f.path, fmt.Sprintf("cannot be backed up: the patterns of excludes and of .gitignore files take more than %s; use fewer or simpler ones", maxMatching))
		}
	}
	return chosen, nil
}

// named returns the entries of a folder that contains selected paths.
func (f *selected) named() ([]*tree.Entry, error) {
	entries, err := f.Named(f.paths, "/"+f.path)
	if missing, ok := errors.AsType[*tree.PathError](err); ok {
		return nil, &wire.Error{Code: wire.NoPath, Message: missing.Error()}
	}
	return entries, err
}

// filters reports whether patterns apply to the entries of the folder.
func (f *selected) filters() bool { return len(f.of.excludes) > 0 || len(f.ignores) > 0 }

// ignored reports whether patterns ignore an entry. The excludes decide before the .gitignore files. A deletion is ignored
// like a folder, because the deleted entry may have been one.
func (f *selected) ignored(e *tree.Entry) bool {
	at, folder := path.Join(f.path, e.Name), e.Kind() == unix.S_IFDIR || e.Whiteout()
	if ignored, matched := f.of.excludes.Match(at, folder); matched {
		return ignored
	}
	if e.Name == gitFolder {
		return false
	}
	for _, rules := range slices.Backward(f.ignores) {
		relative := at
		if rules.folder != "" {
			relative = at[len(rules.folder)+1:]
		}
		if ignored, matched := rules.patterns.Match(relative, folder); matched {
			return ignored
		}
	}
	return false
}

// extents returns the extents of a file, and whether it has holes.
func (f *selected) extents(e *tree.Entry) (extents []tree.Extent, holes bool, err error) {
	file, err := f.Open(e)
	if err != nil {
		return nil, false, err
	}
	defer file.Close()
	return f.extentsOf(file, &e.Stat)
}

// extentsOf returns the extents of an open file of the folder, and whether it has holes.
func (f *selected) extentsOf(file *os.File, st *unix.Stat_t) (extents []tree.Extent, holes bool, err error) {
	if st.Blocks*512 >= st.Size {
		return nil, false, nil
	}
	extents, holes, err = tree.Extents(file, st.Size)
	if err == nil && !holes && st.Size-st.Blocks*512 > maxZeros {
		return nil, false, unsupported("/"+path.Join(f.path, file.Name()), "cannot be backed up: it has too many holes")
	}
	return extents, holes, err
}

// upload writes the content of a file without its holes, and sets the size and object id of its entry.
func (f *selected) upload(u *uploader, e *tree.Entry, entry *snapshot.DirEntry) error {
	file, err := f.Open(e)
	if err != nil {
		return err
	}
	defer file.Close()
	s, err := u.file(f, file, &e.Stat)
	if err != nil {
		return fmt.Errorf("back up %q: %w", e.Name, err)
	}
	entry.FileSize, entry.ObjectID = s.length, s.object
	return nil
}

// inner opens a folder in f. The caller closes it.
func (f *selected) inner(e *tree.Entry) (source, error) { return f.open(e) }

// open opens a folder in f. The caller closes it.
func (f *selected) open(e *tree.Entry) (*selected, error) {
	opened, err := f.Folder.Folder(e)
	if err != nil {
		return nil, err
	}
	inner := &selected{Folder: opened, of: f.of, path: path.Join(f.path, e.Name), partial: f.partial, ignores: f.ignores, worktree: f.worktree}
	if paths := f.paths[e.Name]; len(paths) > 0 {
		inner.paths = paths
	}
	if f.worktree && e.Name == gitFolder {
		inner.ignores, inner.worktree = nil, false
		return inner, nil
	}
	if err := inner.readIgnores(); err != nil {
		inner.Close()
		return nil, err
	}
	return inner, nil
}

// readIgnores reads the .gitignore file of a folder in a work tree of git. A folder with an entry .git begins a work tree,
// to which the files of an outer one do not apply.
func (f *selected) readIgnores() error {
	if !f.of.gitignore {
		return nil
	}
	_, begins, err := f.Visible(gitFolder)
	if err != nil {
		return err
	}
	if begins {
		f.ignores, f.worktree = nil, true
	}
	if !f.worktree {
		return nil
	}
	content, err := f.ReadFile(ignoreFile, gitignore.MaxFile)
	if err != nil {
		return err
	}
	patterns := gitignore.ParseFile(content)
	if len(patterns) == 0 {
		return nil
	}
	total := len(patterns)
	for _, rules := range f.ignores {
		total += len(rules.patterns)
	}
	if total > maxPatterns {
		return unsupported("/"+f.path, fmt.Sprintf("cannot be backed up: more than %d patterns of .gitignore files apply to it", maxPatterns))
	}
	f.ignores = append(slices.Clip(f.ignores), ignoreRules{f.path, patterns})
	return nil
}
