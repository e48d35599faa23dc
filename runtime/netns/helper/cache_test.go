package helper

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

func newBox(t *testing.T) *box {
	t.Helper()
	open := func() int {
		fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		return fd
	}
	return &box{pidfd: open(), netns: open()}
}

func isOpen(b *box) bool {
	_, err := unix.FcntlInt(uintptr(b.netns), unix.F_GETFD, 0)
	return err == nil
}

func TestCacheKeepsWhatWasUsedLast(t *testing.T) {
	c := newCache(2)
	a, b, d := newBox(t), newBox(t), newBox(t)
	c.put(boxKey{"a", 1}, a)
	c.put(boxKey{"b", 1}, b)
	if c.get(boxKey{"a", 1}) != a {
		t.Fatal("a is not there")
	}
	c.put(boxKey{"d", 1}, d)
	if c.get(boxKey{"b", 1}) != nil || isOpen(b) {
		t.Error("b was used longest ago and is still there")
	}
	if c.get(boxKey{"a", 1}) != a || c.get(boxKey{"d", 1}) != d || !isOpen(a) || !isOpen(d) {
		t.Error("a or d is gone")
	}
	if c.get(boxKey{"a", 2}) != nil {
		t.Error("a's box was found under another process")
	}
	c.forget("a")
	c.forget("d")
	c.forget("d")
	if isOpen(a) || isOpen(d) || len(c.byKey) != 0 || c.order.Len() != 0 {
		t.Error("something was kept")
	}
}

func TestInCgroup(t *testing.T) {
	for _, c := range []struct {
		file, want string
		in         bool
	}{
		{"0::/doze/sandboxes/abc\n", "/doze/sandboxes/abc", true},
		{"0::/doze/sandboxes/abc/libpod-1/container\n", "/doze/sandboxes/abc", true},
		{"9:name=systemd:/\n0::/doze/sandboxes/abc/x\n", "/doze/sandboxes/abc", true},
		{"0::/doze/sandboxes/abcd\n", "/doze/sandboxes/abc", false},
		{"0::/doze/node\n", "/doze/sandboxes/abc", false},
		{"9:name=systemd:/doze/sandboxes/abc\n0::/\n", "/doze/sandboxes/abc", false},
		{"0::/../doze/sandboxes/abc\n", "/doze/sandboxes/abc", false},
		{"", "/doze/sandboxes/abc", false},
	} {
		if got := inCgroup([]byte(c.file), c.want); got != c.in {
			t.Errorf("%q in %s: %v", c.file, c.want, got)
		}
	}
}

func TestAliveTellsTheLivingFromTheDead(t *testing.T) {
	pidfd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pidfd)
	if !pidfdAlive(pidfd) {
		t.Error("this process is said to be dead")
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
	if pidfdAlive(fd) {
		t.Error("an ended process is said to live")
	}
}
