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
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/backupstest"
	"github.com/doze-run/doze/runtime/sandbox/bucketstest"
	"github.com/doze-run/doze/runtime/sandbox/diskstest"
	"github.com/doze-run/doze/runtime/sandbox/enginetest"
	"github.com/doze-run/doze/runtime/sandbox/freezertest"
	"github.com/doze-run/doze/runtime/sandbox/memorytest"
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

func TestFakeDisksConform(t *testing.T) {
	diskstest.Run(t, func(t *testing.T) diskstest.System {
		return disksOf(NewEngine(t))
	})
}

func disksOf(e *Engine) diskstest.System {
	return diskstest.System{
		Engine: e, Disks: e.Disks(),
		Spec:       func(_ testing.TB, id sandbox.ID) sandbox.ContainerSpec { return sandbox.ContainerSpec{ID: id} },
		Write:      func(_ testing.TB, id sandbox.ID, name, content string) { e.Write(id, name, content) },
		DeleteFile: func(_ testing.TB, id sandbox.ID, name string) { e.DeleteFile(id, name) },
		Files:      func(_ testing.TB, id sandbox.ID) map[string]string { return e.Files(id) },
	}
}

func TestFakeBackupsConform(t *testing.T) {
	backupstest.Run(t, func(t *testing.T) backupstest.System {
		e := NewEngine(t)
		backups := e.Backups()
		return backupstest.System{
			System: disksOf(e), Backups: backups,
			RebuildImage: func(testing.TB) { backups.RebuildImage() },
			MoreBackups:  func(testing.TB) sandbox.Backups { return backups },
		}
	})
}

func TestFakeBucketsConform(t *testing.T) {
	bucketstest.Run(t, func(t *testing.T) bucketstest.System {
		b := NewBuckets()
		return bucketstest.System{
			Buckets: b, Bucket: "data",
			Start: func(t testing.TB) bucketstest.Sandbox {
				id := sandbox.NewID()
				return bucketstest.Sandbox{
					ID: id, PID: 1, Folders: [2]string{t.TempDir(), t.TempDir()},
					Mounted: func(_ testing.TB, path string) bool { _, ok := b.Mounts(id)[path]; return ok },
				}
			},
			EndHelper: func(testing.TB) { b.Lose() },
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
				f.step(id, func() { c.count.Add(1) })
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

func TestFakeMemoryConforms(t *testing.T) {
	memorytest.Run(t, func(*testing.T) sandbox.Memory { return NewMemory() })
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
func (p *fakeProcess) Stop()    { p.uplink.end(p.pid) }

func TestFakeNetworkConforms(t *testing.T) {
	networktest.Run(t, func(t *testing.T) networktest.System {
		var boxes sync.Map
		n := &Network{resolve: func(id sandbox.ID, pid int, port uint16) (netip.AddrPort, error) {
			b, _ := boxes.Load(id)
			return b.(*fakeBox).loopback.find(pid, port)
		}}
		return networktest.System{Network: n, Start: func(_ testing.TB, id sandbox.ID) networktest.Box {
			b := &fakeBox{id: id, loopback: &loopback{pid: nextPID(), addresses: map[netip.AddrPort]netip.AddrPort{}}}
			boxes.Store(id, b)
			return b
		}}
	})
}

// fakeBox is a sandbox of the network suite: listeners on the test's loopback.
type fakeBox struct {
	id       sandbox.ID
	loopback *loopback
	ends     []func()
}

func (b *fakeBox) PID() int { return b.loopback.pid }

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
	b.loopback.lead(netip.AddrPortFrom(netip.MustParseAddr(ip), port), to)
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
	b.loopback.end()
	for _, end := range b.ends {
		end()
	}
	b.ends = nil
}

// loopback is the loopback of one sandbox: it maps addresses of the sandbox to addresses
// of the test.
type loopback struct {
	pid int

	mu        sync.Mutex
	addresses map[netip.AddrPort]netip.AddrPort
	closed    bool
}

// lead maps an address of the sandbox to one of the test.
func (l *loopback) lead(from, to netip.AddrPort) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.addresses[from] = to
}

// end ends the sandbox's processes.
func (l *loopback) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
}

// find returns the test's address of a port, IPv4 first.
func (l *loopback) find(pid int, port uint16) (netip.AddrPort, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || pid != l.pid {
		return netip.AddrPort{}, fmt.Errorf("there is no process %d", pid)
	}
	for _, ip := range []string{"127.0.0.1", "127.0.0.2", "::1"} {
		if to, ok := l.addresses[netip.AddrPortFrom(netip.MustParseAddr(ip), port)]; ok {
			return to, nil
		}
	}
	return netip.AddrPort{}, fmt.Errorf("port %d: %w", port, syscall.ECONNREFUSED)
}

// step does a piece of work in a sandbox, which takes a microsecond of its CPU
// time. It reports false, and does nothing, while the sandbox is frozen or unknown.
func (f *Freezer) step(id sandbox.ID, work func()) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := f.cgroups[id]
	if c == nil || c.frozen {
		return false
	}
	work()
	c.cpu += time.Microsecond
	return true
}

// end ends a process, to which nothing can be attached any more.
func (u *Uplink) end(pid int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.ended[pid] = true
}
