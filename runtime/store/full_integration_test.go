//go:build integration

package store

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/sandbox"
)

// inSmallDisk runs the test in a child process with its own user and mount namespace, in
// which it mounts a small tmpfs: ENOSPC is real, and a SIGBUS ends only the child.
func inSmallDisk(t *testing.T, megabytes int, run func(t *testing.T, dir string)) {
	if os.Getenv(smallDiskEnv) != "" {
		dir := t.TempDir()
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%dm,mode=0700", megabytes)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
		run(t, dir)
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.count=1")
	cmd.Env = append(os.Environ(), smallDiskEnv+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// filler fills the disk in steps, as a sandbox might.
type filler struct {
	t    *testing.T
	file *os.File
}

func newFiller(t *testing.T, dir string) *filler {
	f, err := os.Create(filepath.Join(dir, "filler"))
	if err != nil {
		t.Fatal(err)
	}
	return &filler{t, f}
}

// write returns false when the disk is full to the last page.
func (f *filler) write(bytes int) bool {
	for bytes > 0 {
		n, err := f.file.Write(make([]byte, min(bytes, 1<<20)))
		bytes -= n
		if errors.Is(err, unix.ENOSPC) {
			return false
		}
		if err != nil {
			f.t.Fatal(err)
		}
	}
	return true
}

func (f *filler) remove() {
	f.file.Close()
	if err := os.Remove(f.file.Name()); err != nil {
		f.t.Fatal(err)
	}
}

func TestStoreRecoversWhenAFullDiskHasSpaceAgain(t *testing.T) {
	inSmallDisk(t, 96, func(t *testing.T, dir string) {
		s := openAt(t, filepath.Join(dir, "store"), small)
		fill := newFiller(t, dir)
		acknowledged, refused := 0, 0
		for n, space := 0, true; space || refused < 100; n++ {
			space = fill.write(256 << 10)
			err := s.PutSandbox(t.Context(), testRecord(n))
			switch {
			case err == nil && refused == 0:
				acknowledged++
			case err == nil:
				t.Fatalf("record %d was accepted after one was refused", n)
			case errors.Is(err, sandbox.ErrStoreFull):
				refused++
			default:
				t.Fatal(err)
			}
			if err := s.AppendEvents(t.Context(), testEvents(n, 1, 1)); err != nil && !errors.Is(err, sandbox.ErrStoreFull) {
				t.Fatal(err)
			}
		}
		if acknowledged == 0 {
			t.Fatal("no record was accepted before the disk was full")
		}
		if got := allRecords(t, s); len(got) != acknowledged {
			t.Fatalf("%d records are readable, %d were acknowledged", len(got), acknowledged)
		}
		// Deletes, which free the disk, must work on a full one.
		for n := range 10 {
			if err := s.DeleteSandbox(t.Context(), testID(n)); err != nil {
				t.Fatalf("delete on a full disk: %v", err)
			}
		}
		fill.remove()
		for n := range 3000 {
			if err := s.PutSandbox(t.Context(), testRecord(10_000+n)); err != nil {
				t.Fatalf("with space again: %v", err)
			}
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		got := allRecords(t, openAt(t, filepath.Join(dir, "store"), small))
		if want := acknowledged - 10 + 3000; len(got) != want {
			t.Fatalf("%d records after another open, want %d", len(got), want)
		}
	})
}

func TestCloseOnAFullDiskLosesNothing(t *testing.T) {
	inSmallDisk(t, 96, func(t *testing.T, dir string) {
		store := filepath.Join(dir, "store")
		s := openAt(t, store, small)
		for n := range 200 {
			if err := s.PutSandbox(t.Context(), testRecord(n)); err != nil {
				t.Fatal(err)
			}
		}
		fill := newFiller(t, dir)
		for fill.write(1 << 20) {
		}
		if err := s.Close(); !errors.Is(err, sandbox.ErrStoreFull) {
			t.Fatalf("got %v, want ErrStoreFull", err)
		}
		if _, err := open(store, "", nil, small); !errors.Is(err, sandbox.ErrStoreFull) {
			t.Fatalf("open on a full disk: got %v, want ErrStoreFull", err)
		}
		fill.remove()
		if _, err := open(store, "", nil, small); !errors.Is(err, ErrInUse) {
			t.Fatalf("open while a store that could not close has the lock: got %v, want ErrInUse", err)
		}
		// A copy of the files takes the role of another process.
		copied := filepath.Join(dir, "copy")
		if err := os.CopyFS(copied, os.DirFS(store)); err != nil {
			t.Fatal(err)
		}
		if got := allRecords(t, openAt(t, copied, small)); len(got) != 200 {
			t.Fatalf("%d records after another open, want 200", len(got))
		}
	})
}
