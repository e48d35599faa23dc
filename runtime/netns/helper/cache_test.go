package helper

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

func newNamespace(t *testing.T) *namespace {
	t.Helper()
	open := func() int {
		fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		return fd
	}
	return &namespace{pidfd: open(), netns: open()}
}

func isOpen(b *namespace) bool {
	_, err := unix.FcntlInt(uintptr(b.netns), unix.F_GETFD, 0)
	return err == nil
}

func TestCacheEvictsTheLeastRecentlyUsed(t *testing.T) {
	c := &cache{max: 2}
	a, b, d := newNamespace(t), newNamespace(t), newNamespace(t)
	c.put(namespaceKey{"a", 1}, a)
	c.put(namespaceKey{"b", 1}, b)
	if c.get(namespaceKey{"a", 1}) != a {
		t.Fatal("a is missing")
	}
	c.put(namespaceKey{"d", 1}, d)
	if c.get(namespaceKey{"b", 1}) != nil || isOpen(b) {
		t.Error("b was used least recently and was not evicted")
	}
	if c.get(namespaceKey{"a", 1}) != a || c.get(namespaceKey{"d", 1}) != d || !isOpen(a) || !isOpen(d) {
		t.Error("a or d was evicted")
	}
	if c.get(namespaceKey{"a", 2}) != nil {
		t.Error("a's namespace was found under another pid")
	}
	c.forget("a")
	c.forget("d")
	c.forget("d")
	if isOpen(a) || isOpen(d) || len(c.entries) != 0 {
		t.Error("a namespace is still open or cached")
	}
}

func TestPidfdAliveReportsTheEndOfAProcess(t *testing.T) {
	pidfd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pidfd)
	if !(&namespace{pidfd: pidfd}).alive() {
		t.Error("this process is reported as ended")
	}
	dead, err := os.StartProcess("/bin/true", []string{"true"}, &os.ProcAttr{})
	if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.PidfdOpen(dead.Pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if _, err := dead.Wait(); err != nil {
		t.Fatal(err)
	}
	if (&namespace{pidfd: fd}).alive() {
		t.Error("an ended process is reported as running")
	}
}
