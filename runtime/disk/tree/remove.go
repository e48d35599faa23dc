package tree

import (
	"crypto/rand"
	"fmt"

	"golang.org/x/sys/unix"
)

const (
	// removeLevels is how many levels of a tree Remove opens at the same time. A sandbox may
	// nest more folders than a process may open.
	removeLevels = 100
	// removeNames is about how many names of a folder are read together.
	removeNames = 10_000
)

// Remove removes the folder name in the folder parent with all below it, however deep: it moves
// deep folders to parent first.
func Remove(parent, name string) error {
	fd, err := openFolder(unix.AT_FDCWD, parent)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for left := []string{name}; len(left) > 0; {
		last := len(left) - 1
		next := left[last]
		left = left[:last]
		err := remove(fd, next, removeLevels, func(folder int, inner string) error {
			moved := name + "-" + rand.Text()
			left = append(left, moved)
			return unix.Renameat(folder, inner, fd, moved)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// refuseDeeper is for trees that have at most maxDepth levels.
func refuseDeeper(int, string) error { return ErrTooDeep }

// remove removes an entry of the folder parent with all below it. It opens that many levels, and
// calls deeper for the folders below, which removes them from their parents.
func remove(parent int, name string, levels int, deeper func(parent int, name string) error) error {
	err := unix.Unlinkat(parent, name, 0)
	switch {
	case err == nil || err == unix.ENOENT:
		return nil
	case err == unix.EISDIR && levels == 0:
		err = deeper(parent, name)
	case err == unix.EISDIR:
		return removeFolder(parent, name, levels, deeper)
	}
	if err != nil {
		return fmt.Errorf("remove %q: %w", name, err)
	}
	return nil
}

func removeFolder(parent int, name string, levels int, deeper func(parent int, name string) error) error {
	fd, err := openFolder(parent, name)
	if err != nil {
		return fmt.Errorf("remove %q: %w", name, err)
	}
	defer unix.Close(fd)
	for {
		names, err := readNames(fd, removeNames)
		if err == nil && len(names) == 0 {
			err = unix.Unlinkat(parent, name, unix.AT_REMOVEDIR)
		}
		if err != nil {
			return fmt.Errorf("remove %q: %w", name, err)
		}
		if len(names) == 0 {
			return nil
		}
		for _, inner := range names {
			if err := remove(fd, inner, levels-1, deeper); err != nil {
				return err
			}
		}
	}
}
