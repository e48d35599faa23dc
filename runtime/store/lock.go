package store

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

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

const (
	// dyingWait is how long a lock may outlive the process that took it: the kernel
	// ends a killed process thread by thread, and one that it forked just then has the
	// lock until its exec.
	dyingWait = 5 * time.Second
	dyingPoll = 5 * time.Millisecond
)

func takeLock(f *os.File, dir string) error {
	b, err := io.ReadAll(io.LimitReader(f, 20))
	if err != nil {
		return fmt.Errorf("read the lock of the store: %w", err)
	}
	pid := string(bytes.TrimSpace(b))
	deadline := time.Now().Add(dyingWait)
	for {
		err := Lock(f, dir)
		if !errors.Is(err, ErrInUse) {
			return err
		}
		if !dying(pid) || time.Now().After(deadline) {
			return fmt.Errorf("%w (pid %s)", err, pid)
		}
		time.Sleep(dyingPoll)
	}
}

// Lock takes a lock on the file until it is closed or the process ends. ErrInUse
// (wrapped, with name) when another process has it.
func Lock(f *os.File, name string) error {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return fmt.Errorf("%w: %s", ErrInUse, name)
	}
	if err != nil {
		return fmt.Errorf("locking %s: %w", f.Name(), err)
	}
	return nil
}

// dying says whether the process has ended or was sent SIGKILL, or is unknown.
func dying(pid string) bool {
	status, err := os.ReadFile("/proc/" + pid + "/status")
	if pid == "" || err != nil {
		return true
	}
	for line := range strings.Lines(string(status)) {
		key, value, _ := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		switch key {
		case "State":
			if strings.HasPrefix(value, "Z") || strings.HasPrefix(value, "X") {
				return true
			}
		case "SigPnd", "ShdPnd":
			pending, err := strconv.ParseUint(value, 16, 64)
			if err == nil && pending&(1<<(unix.SIGKILL-1)) != 0 {
				return true
			}
		}
	}
	return false
}
