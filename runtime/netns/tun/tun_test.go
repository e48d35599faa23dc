package tun_test

import (
	"errors"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/netns/link"
	"github.com/doze-run/doze/runtime/netns/tun"
	"github.com/doze-run/doze/runtime/netns/tun/tuntest"
	"github.com/doze-run/doze/testkit"
)

func TestMain(m *testing.M) { tuntest.Main(m) }

// inNamespace runs f on a thread in a new network namespace.
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

// withDevice calls f in a new network namespace that has the device.
func withDevice(t *testing.T, f func()) {
	t.Helper()
	inNamespace(t, func() {
		fd, err := tun.Make()
		if err != nil {
			t.Error(err)
			return
		}
		defer unix.Close(fd)
		f()
	})
}

// tuns returns this process's descriptors of /dev/net/tun.
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

// A leaked descriptor would keep the device, which exists until its descriptor is closed.
func TestFailedMakeLeaksNoDescriptor(t *testing.T) {
	before := tuns(t)
	inNamespace(t, func() {
		fd, err := tun.Make()
		if err != nil {
			t.Error(err)
			return
		}
		if second, err := tun.Make(); !errors.Is(err, unix.EBUSY) || second != -1 {
			t.Errorf("a second one: %d, %v", second, err)
		}
		if err := unix.Close(fd); err != nil {
			t.Error(err)
		}
	})
	if after := tuns(t); !slices.Equal(before, after) {
		t.Errorf("leaked descriptors %v", after)
	}
}

// A program may open and close connections as fast as it can.
func TestMemoryOfSocketsIsBounded(t *testing.T) {
	withDevice(t, func() {
		for name, want := range map[string][]string{
			"tcp_rmem":           {"4096", "131072", strconv.Itoa(link.MaxReceiveBuffer)},
			"tcp_wmem":           {"4096", "65536", strconv.Itoa(link.MaxSendBuffer)},
			"tcp_max_tw_buckets": {strconv.Itoa(link.MaxTimeWait)},
		} {
			got, err := os.ReadFile("/proc/sys/net/ipv4/" + name)
			if err != nil || !slices.Equal(strings.Fields(string(got)), want) {
				t.Errorf("%s is %s, %v", name, got, err)
			}
		}
	})
}

// Pacing, as in BBR, is for networks that may be congested. These packets stay in memory.
func TestCongestionControlOfTheHostDoesNotPaceASandbox(t *testing.T) {
	withDevice(t, func() {
		socket, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Error(err)
			return
		}
		defer unix.Close(socket)
		got, err := unix.GetsockoptString(socket, unix.IPPROTO_TCP, unix.TCP_CONGESTION)
		if err != nil || got != "reno" {
			t.Errorf("the congestion control is %q, %v", got, err)
		}
	})
}

// A packet that bypasses the node's decision reaches no listener.
func TestListenerAcceptsOnlyPacketsThatTheNodeWroteBack(t *testing.T) {
	withDevice(t, func() {
		listener, err := tun.Listen()
		if err != nil {
			t.Error(err)
			return
		}
		defer unix.Close(listener)
		client, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Error(err)
			return
		}
		defer unix.Close(client)
		// Only a process with CAP_NET_ADMIN in the namespace may set the mark.
		if err := unix.SetsockoptInt(client, unix.SOL_SOCKET, unix.SO_MARK, link.Mark); err != nil {
			t.Error(err)
			return
		}
		if err := unix.Bind(client, &unix.SockaddrInet4{Addr: link.Sandbox.As4()}); err != nil {
			t.Error(err)
			return
		}
		if err := unix.Connect(client, &unix.SockaddrInet4{Port: 443, Addr: [4]byte{203, 0, 113, 9}}); !errors.Is(err, unix.EINPROGRESS) {
			t.Errorf("connect: %v", err)
		}
		events := []unix.PollFd{{Fd: int32(client), Events: unix.POLLOUT}, {Fd: int32(listener), Events: unix.POLLIN}}
		if n, err := testkit.Poll(events, 200*time.Millisecond); n != 0 || err != nil {
			t.Errorf("something was connected: %+v, %v", events, err)
		}
	})
}
