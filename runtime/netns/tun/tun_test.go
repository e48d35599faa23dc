package tun

import (
	"errors"
	"os"
	"runtime"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/netns/tun/tuntest"
)

func TestMain(m *testing.M) { tuntest.Main(m) }

// inNamespace runs f on a thread in a network namespace of its own.
func inNamespace(t *testing.T, f func()) {
	t.Helper()
	failed := make(chan error)
	go func() { // its thread ends with it
		runtime.LockOSThread()
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			f()
		}
		failed <- err
	}()
	if err := <-failed; err != nil {
		t.Fatal(err)
	}
}

// tuns are the descriptors that this process has of /dev/net/tun.
func tuns(t *testing.T) (open []string) {
	t.Helper()
	const fds = "/proc/self/fd/"
	list, err := os.ReadDir(fds)
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range list {
		if target, _ := os.Readlink(fds + fd.Name()); target == "/dev/net/tun" {
			open = append(open, fd.Name())
		}
	}
	return open
}

// What a failure left open would hold the device for ever: it ends with its descriptor.
func TestADeviceThatIsNotMadeLeavesNoDescriptor(t *testing.T) {
	before := tuns(t)
	inNamespace(t, func() {
		fd, err := Make()
		if err != nil {
			t.Error(err)
			return
		}
		if second, err := Make(); !errors.Is(err, unix.EBUSY) || second != -1 {
			t.Errorf("a second one: %d, %v", second, err)
		}
		if err := unix.Close(fd); err != nil {
			t.Error(err)
		}
	})
	if after := tuns(t); !slices.Equal(before, after) {
		t.Errorf("descriptors %v are left", after)
	}
}
