package store

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// ErrInUse is returned by Open, wrapped with the pid, when another node uses
// the folder.
var ErrInUse = errors.New("another node uses this folder")

const lockName = "node.lock"

// lockDir takes the folder for this process until the file is closed or the
// process ends, however it ends. The file itself stays: removing it would let
// two processes lock two files of the same name.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockName), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening the lock of the store: %w", err)
	}
	if err := takeLock(f, dir); err != nil {
		f.Close()
		return nil, err
	}
	// The pid is for people; a full disk may leave it empty and harms nothing.
	if err := f.Truncate(0); err == nil {
		fmt.Fprintf(f, "%d\n", os.Getpid())
	}
	return f, nil
}

// InUse returns what Open would when another node uses the folder, and nil when
// none does or there is no such folder. It is for those who must know before
// they touch anything else of that node.
func InUse(dir string) error {
	f, err := os.OpenFile(filepath.Join(dir, lockName), os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("opening the lock of the store: %w", err)
	}
	defer f.Close() // gives the lock back
	return takeLock(f, dir)
}

func takeLock(f *os.File, dir string) error {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		pid, _ := io.ReadAll(io.LimitReader(f, 20))
		return fmt.Errorf("%w: %s (pid %s)", ErrInUse, dir, bytes.TrimSpace(pid))
	}
	if err != nil {
		return fmt.Errorf("locking %s: %w", f.Name(), err)
	}
	return nil
}
