package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
)

// Changes come in groups: an editor writes a file in several steps, and a checkout
// writes many. A group ends when nothing has changed for quietFor, or after changesFor.
const (
	quietFor   = 100 * time.Millisecond
	changesFor = 2 * time.Second
)

// maxFolders are watched at most: systems have 8,000 of a user or fewer.
const maxFolders = 1000

// maxNamed is how many changed files are named.
const maxNamed = 3

// folderWatch watches a folder with all below it.
type folderWatch struct {
	root   string
	output string // the file that is made from the others
	notify *fsnotify.Watcher
}

// watchFolder begins to watch a folder, both with absolute paths.
func watchFolder(root, output string) (*folderWatch, error) {
	notify, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, fmt.Errorf("watch %s: %w", root, err)
	}
	w := &folderWatch{root, output, notify}
	if err := w.follow(root); err != nil {
		w.close()
		return nil, err
	}
	return w, nil
}

func (w *folderWatch) close() { _ = w.notify.Close() }

// follow watches a folder and the folders below it. It ignores paths that are not folders
// or do not exist.
func (w *folderWatch) follow(path string) error {
	err := filepath.WalkDir(path, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist) && path != w.root:
			return nil
		case err != nil:
			return err
		case !entry.IsDir():
			return nil
		case path != w.root && isTemporary(path):
			return filepath.SkipDir
		case len(w.notify.WatchList()) >= maxFolders:
			return fmt.Errorf("more than %d folders", maxFolders)
		}
		if err := w.notify.Add(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("watch %s: %w", path, err)
	}
	return nil
}

// next waits for a group of changes and returns the names of some files that have
// changed, relative to the folder. Changes since the last call count.
func (w *folderWatch) next(ctx context.Context) (changed []string, err error) {
	var quiet, limit <-chan time.Time
	for {
		var name string
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-quiet:
			return changed, nil
		case <-limit:
			return changed, nil
		case event := <-w.notify.Events:
			if !w.concerns(event) {
				continue
			}
			if event.Name == w.root {
				if event.Has(fsnotify.Remove | fsnotify.Rename) {
					return nil, fmt.Errorf("%s was removed", w.root)
				}
				continue
			}
			if event.Has(fsnotify.Create) {
				if err := w.follow(event.Name); err != nil {
					return nil, err
				}
			}
			if name, err = filepath.Rel(w.root, event.Name); err != nil {
				return nil, err
			}
		case err := <-w.notify.Errors:
			if !errors.Is(err, fsnotify.ErrEventOverflow) {
				return nil, fmt.Errorf("watch %s: %w", w.root, err)
			}
			// Events were lost, maybe of new folders.
			if err := w.follow(w.root); err != nil {
				return nil, err
			}
			name = "many files"
		}
		if len(changed) < maxNamed && !slices.Contains(changed, name) {
			changed = append(changed, name)
		}
		quiet = time.After(quietFor)
		if limit == nil {
			limit = time.After(changesFor)
		}
	}
}

// concerns reports whether an event is about something that a build can depend on.
func (w *folderWatch) concerns(event fsnotify.Event) bool {
	switch {
	case event.Op == fsnotify.Chmod:
		return false
	case event.Name == w.root:
		return true
	case strings.HasPrefix(event.Name, w.output): // also the compiler's temporary file next to it
		return false
	}
	return !isTemporary(event.Name)
}

// isTemporary reports whether a path is one of hidden files and folders, or one of an
// editor's backup and swap files.
func isTemporary(path string) bool { return temporaryName.MatchString(filepath.Base(path)) }

// temporaryName: with 4913 Vim finds out whether it can write to a folder.
var temporaryName = regexp.MustCompile(`^[.#]|~$|\.(swp|tmp|bak)$|\.tmp\.|___$|^4913$`)
