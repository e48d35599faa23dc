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

// ErrInUse is returned by Open, wrapped with the pid, if another node uses the folder.
var ErrInUse = errors.New("another node uses this folder")

const lockName = "node.lock"

// lockDir locks the folder for this process until the returned file is closed or the
// process ends, in whatever way. The lock file is never removed: two processes could then
// lock two files of the same name.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockName), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the lock of the store: %w", err)
	}
	if err := acquireLock(f, dir); err != nil {
		f.Close()
		return nil, err
	}
	// The pid is for error messages. On a full disk it may be missing, which is harmless.
	if err := f.Truncate(0); err == nil {
		fmt.Fprintf(f, "%d\n", os.Getpid())
	}
	return f, nil
}

// InUse returns ErrInUse (wrapped, with the pid) if another node uses the folder, and nil
// if none does or the folder does not exist. Callers use it before they change other files
// of that node.
func InUse(dir string) error {
	f, err := os.OpenFile(filepath.Join(dir, lockName), os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open the lock of the store: %w", err)
	}
	defer f.Close() // releases the lock
	return acquireLock(f, dir)
}

const (
	// dyingWait is how long a lock may outlive the process that acquired it: the kernel
	// ends a killed process thread by thread, and a child that it forked just before
	// has the lock until its exec.
	dyingWait = 5 * time.Second
	dyingPoll = 5 * time.Millisecond
)

func acquireLock(f *os.File, dir string) error {
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

// Lock locks the file until it is closed or the process ends. It does not wait: if another
// process has the lock, it returns ErrInUse, wrapped with name.
func Lock(f *os.File, name string) error {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return fmt.Errorf("%w: %s", ErrInUse, name)
	}
	if err != nil {
		return fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return nil
}

// dying reports whether the process has ended, was sent SIGKILL, or is unknown.
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
