package sandboxtest

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/enginetest"
	"github.com/doze-run/doze/runtime/sandbox/freezertest"
	"github.com/doze-run/doze/runtime/sandbox/networktest"
	"github.com/doze-run/doze/runtime/sandbox/uplinktest"
)

func TestFakeEngineConforms(t *testing.T) {
	enginetest.Run(t, func(t *testing.T) enginetest.System {
		e := NewEngine(t)
		const missing = "missing.invalid/image:latest"
		e.RemoveImage(missing)
		return enginetest.System{
			Engine: e, Other: NewEngine(t), Image: "localhost/doze/base:latest", MissingImage: missing,
			Spec: func(t testing.TB, id sandbox.ID) sandbox.ContainerSpec {
				dir, err := os.MkdirTemp("", "doze")
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { os.RemoveAll(dir) })
				return sandbox.ContainerSpec{ID: id, RunDir: dir}
			},
			Crash: func(t testing.TB, c sandbox.Container) { e.Kill(t, c.ID) },
			MakeFile: func(t testing.TB, _ sandbox.Container, dir string) {
				t.Helper()
				if err := errors.Join(os.Mkdir(dir+"/d", 0o700), os.WriteFile(dir+"/d/f", nil, 0o600)); err != nil {
					t.Fatal(err)
				}
			},
			ProcessLimit: func(_ testing.TB, c sandbox.Container) int64 { return e.Limits(c.ID).PIDs },
		}
	})
}

func TestFakeFreezerConforms(t *testing.T) {
	freezertest.Run(t, func(t *testing.T) freezertest.System {
		f := NewFreezer()
		return freezertest.System{Freezer: f, Start: func(_ testing.TB, id sandbox.ID, _ string) freezertest.Counter {
			return startCounter(f, id)
		}}
	})
}

// counter is a process of a fake sandbox: a goroutine that Stop ends.
type counter struct {
	count atomic.Uint64
	stop  chan struct{}
	done  chan struct{}
	once  sync.Once
}

func startCounter(f *Freezer, id sandbox.ID) *counter {
	c := &counter{stop: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(c.done)
		for {
			select {
			case <-c.stop:
				return
			default:
				f.Step(id, func() { c.count.Add(1) })
				runtime.Gosched()
			}
		}
	}()
	return c
}

func (c *counter) Count() uint64 { return c.count.Load() }

func (c *counter) Stop() {
	c.once.Do(func() { close(c.stop) })
	<-c.done
}

func TestFakeUplinkConforms(t *testing.T) {
	uplinktest.Run(t, func(t *testing.T) uplinktest.System {
		u := NewUplink(t)
		return uplinktest.System{
			Uplink:   u,
			Start:    func(testing.TB, sandbox.ID) uplinktest.Box { return &fakeProcess{u, nextPID()} },
			Attached: func(id sandbox.ID, pid int) bool { return u.Attached(id) == pid },
		}
	})
}

// fakeProcess is a sandbox of the uplink suite.
type fakeProcess struct {
	uplink *Uplink
	pid    int
}

func (p *fakeProcess) PID() int { return p.pid }
func (p *fakeProcess) Stop()    { p.uplink.End(p.pid) }

func TestFakeNetworkConforms(t *testing.T) {
	networktest.Run(t, func(t *testing.T) networktest.System {
		n := NewNetwork()
		return networktest.System{Network: n, Start: func(_ testing.TB, id sandbox.ID) networktest.Box {
			b := &fakeBox{id: id, pid: nextPID()}
			b.loopback = n.Add(id, b.pid)
			return b
		}}
	})
}

// fakeBox is a sandbox of the network suite: listeners on the test's loopback.
type fakeBox struct {
	id       sandbox.ID
	pid      int
	loopback *Loopback
	ends     []func()
}

func (b *fakeBox) PID() int { return b.pid }

func (b *fakeBox) Serve(t testing.TB, ip string, port uint16) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b.ends = append(b.ends, func() { l.Close() })
	b.lead(ip, port, l.Addr().(*net.TCPAddr).AddrPort())
	greeting := networktest.Greeting(b.id, ip, port)
	go func() { // ends with the listener
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() { // ends with the connection
				defer conn.Close()
				io.WriteString(conn, greeting)
				io.Copy(conn, bufio.NewReader(conn))
			}()
		}
	}()
}

func (b *fakeBox) lead(ip string, port uint16, to netip.AddrPort) {
	b.loopback.Map(netip.AddrPortFrom(netip.MustParseAddr(ip), port), to)
}

// Stall listens with a backlog of none and fills it.
func (b *fakeBox) Stall(t testing.TB, port uint16) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	b.ends = append(b.ends, func() { unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // a backlog of 0 takes one connection; the second is left unanswered
		filler, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			t.Fatal(err)
		}
		b.ends = append(b.ends, func() { unix.Close(filler) })
		if err := unix.Connect(filler, name); err != nil && err != syscall.EINPROGRESS {
			t.Fatal(fmt.Errorf("fill the backlog: %w", err))
		}
	}
	b.lead("127.0.0.1", port, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(name.(*unix.SockaddrInet4).Port)))
}

func (b *fakeBox) Stop() {
	b.loopback.Close()
	for _, end := range b.ends {
		end()
	}
	b.ends = nil
}
