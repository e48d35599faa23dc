package wakeproxy

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"syscall"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

// subject is an implementation of Sandboxes with one running sandbox, and the
// operations that change its state from outside.
type subject struct {
	Sandboxes
	id     sandbox.ID
	port   uint16
	listen func() (end func()) // starts the server on port
	sleep  func(t *testing.T)
	stop   func(t *testing.T)
	// block makes the next cold wake hang until release; blocked waits for that wake.
	block   func() (release func())
	blocked func(t *testing.T)
	gone    func(t *testing.T) // destroys the sandbox
}

func fakeSubject(t *testing.T) *subject {
	f := newFakeNode(t, "", sandbox.Port{})
	waking := make(chan struct{})
	return &subject{
		Sandboxes: f, id: testID, port: 3000,
		listen: func() func() {
			server := httptest.NewServer(http.HandlerFunc(hello))
			f.serve(server.Listener.Addr().String())
			return func() { f.serve(""); server.Close() }
		},
		sleep:   func(*testing.T) { f.sleep(sandbox.WakeWarm, nil) },
		stop:    func(*testing.T) { f.sleep(sandbox.WakeCold, nil) },
		block:   func() func() { f.sleep(sandbox.WakeCold, waking); return func() { close(waking) } },
		blocked: func(t *testing.T) { testkit.Eventually(t, "a wake has begun", f.begun.Load) },
		gone:    func(*testing.T) { f.set(func(f *fakeNode) { f.sb.ID = "another00000" }) },
	}
}

func managerSubject(t *testing.T) *subject {
	node := sandboxtest.Open(t, nil)
	m := node.Manager
	sb, _, err := m.Create(t.Context(), sandbox.CreateRequest{Owner: "test", Name: "subject"})
	if err != nil {
		t.Fatal(err)
	}
	// The port's number stays reserved by a bound socket that does not listen.
	reserved, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Close(reserved) })
	if err := errors.Join(
		syscall.SetsockoptInt(reserved, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1),
		syscall.Bind(reserved, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}),
	); err != nil {
		t.Fatal(err)
	}
	name, err := syscall.Getsockname(reserved)
	if err != nil {
		t.Fatal(err)
	}
	address := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: name.(*syscall.SockaddrInet4).Port}
	changed := func(t *testing.T, change func(context.Context, sandbox.ID) (sandbox.Sandbox, error)) {
		t.Helper()
		if _, err := change(t.Context(), sb.ID); err != nil {
			t.Fatal(err)
		}
	}
	return &subject{
		Sandboxes: Of(m), id: sb.ID, port: uint16(address.Port),
		listen: func() func() {
			listener, err := net.ListenTCP("tcp", address)
			if err != nil {
				t.Fatal(err)
			}
			server := &http.Server{Handler: http.HandlerFunc(hello)}
			go server.Serve(listener) // ended by Close
			return func() { server.Close() }
		},
		sleep:   func(t *testing.T) { changed(t, m.Sleep) },
		stop:    func(t *testing.T) { changed(t, m.Stop) },
		block:   func() func() { return node.Engine.Block("start") },
		blocked: func(t *testing.T) { node.Engine.AwaitBlocked(t, "start") },
		gone: func(t *testing.T) {
			if err := m.Destroy(t.Context(), sb.ID); err != nil {
				t.Fatal(err)
			}
		},
	}
}

// The suite holds the tests' Sandboxes to the behavior of a Manager.
func TestSandboxesConform(t *testing.T) {
	for name, open := range map[string]func(*testing.T) *subject{"fake": fakeSubject, "manager": managerSubject} {
		t.Run(name, func(t *testing.T) {
			t.Run("a running sandbox gives leases without a wake", func(t *testing.T) { leasesOfRunning(t, open(t)) })
			t.Run("dial", func(t *testing.T) { dials(t, open(t)) })
			t.Run("asleep", func(t *testing.T) { wakesFromSleep(t, open(t)) })
			t.Run("stopped", func(t *testing.T) { wakesFromStop(t, open(t)) })
			t.Run("a wake outlives its request and is joined", func(t *testing.T) { wakeIsShared(t, open(t)) })
			t.Run("unknown", func(t *testing.T) { unknownSandbox(t, open(t)) })
		})
	}
}

func (s *subject) state(t *testing.T, want sandbox.State) sandbox.Sandbox {
	t.Helper()
	sb, ok := s.ByID(s.id)
	if !ok || sb.State != want {
		t.Fatalf("ByID: state %q, known %v; want %s", sb.State, ok, want)
	}
	return sb
}

func mustLease(t *testing.T, lease Lease, err error, wake sandbox.WakeKind) Lease {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(lease.Release)
	if got := lease.Wake().Kind; got != wake {
		t.Errorf("the lease reports wake %q, want %q", got, wake)
	}
	if sb := lease.Sandbox(); sb.State != sandbox.StateRunning {
		t.Errorf("the sandbox of the lease is %s", sb.State)
	}
	return lease
}

func refusesLeases(t *testing.T, want error, results ...error) {
	t.Helper()
	for i, err := range results {
		if !errors.Is(err, want) {
			t.Errorf("call %d: %v, want %v", i, err, want)
		}
	}
}

func leasesOfRunning(t *testing.T, s *subject) {
	s.state(t, sandbox.StateRunning)
	lease, err := s.AcquireRunning(s.id)
	mustLease(t, lease, err, sandbox.WakeNone).Release()
	lease.Release() // a second call has no effect
	lease, err = s.Acquire(t.Context(), s.id, sandbox.CausePreview)
	mustLease(t, lease, err, sandbox.WakeNone)
	lease, err = s.Rouse(t.Context(), s.id, sandbox.CausePreview)
	mustLease(t, lease, err, sandbox.WakeNone)
}

func dials(t *testing.T, s *subject) {
	lease, err := s.AcquireRunning(s.id)
	mustLease(t, lease, err, sandbox.WakeNone)
	if _, err := lease.Dial(t.Context(), s.port); !errors.Is(err, syscall.ECONNREFUSED) || s.Listens(t.Context(), s.id, s.port) {
		t.Errorf("without a server: %v", err)
	}
	defer s.listen()()
	if !s.Listens(t.Context(), s.id, s.port) {
		t.Error("Listens does not find the server")
	}
	conn, err := lease.Dial(t.Context(), s.port)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	lease.Release() // the connection outlives it
	if _, err := io.WriteString(conn, "GET / HTTP/1.0\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(conn); err != nil || len(got) == 0 {
		t.Errorf("the server sent %q, %v", got, err)
	}
}

func wakesFromSleep(t *testing.T, s *subject) {
	before := s.state(t, sandbox.StateRunning)
	for _, acquire := range []func(context.Context, sandbox.ID, sandbox.Cause) (Lease, error){s.Acquire, s.Rouse} {
		s.sleep(t)
		s.state(t, sandbox.StateAsleep)
		_, err := s.AcquireRunning(s.id)
		refusesLeases(t, sandbox.ErrNotRunning, err)
		if s.Listens(t.Context(), s.id, s.port) {
			t.Error("a port of a sandbox that is asleep listens")
		}
		s.state(t, sandbox.StateAsleep)
		lease, err := acquire(t.Context(), s.id, sandbox.CausePreview)
		mustLease(t, lease, err, sandbox.WakeWarm).Release()
		if sb := s.state(t, sandbox.StateRunning); !sb.StartedAt.Equal(before.StartedAt) || !sb.StateSince.After(before.StateSince) {
			t.Errorf("after a warm wake: started %s, was %s; state since %s, was %s", sb.StartedAt, before.StartedAt, sb.StateSince, before.StateSince)
		}
	}
}

func wakesFromStop(t *testing.T, s *subject) {
	before := s.state(t, sandbox.StateRunning)
	s.stop(t)
	s.state(t, sandbox.StateStopped)
	_, err := s.AcquireRunning(s.id)
	_, rouse := s.Rouse(t.Context(), s.id, sandbox.CausePreview)
	refusesLeases(t, sandbox.ErrNotRunning, err, rouse)
	s.state(t, sandbox.StateStopped)
	lease, err := s.Acquire(t.Context(), s.id, sandbox.CausePreview)
	mustLease(t, lease, err, sandbox.WakeCold)
	if sb := s.state(t, sandbox.StateRunning); !sb.StartedAt.After(before.StartedAt) {
		t.Errorf("after a cold wake: started %s, was %s", sb.StartedAt, before.StartedAt)
	}
}

func wakeIsShared(t *testing.T, s *subject) {
	s.stop(t)
	release := s.block()
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() { _, err := s.Acquire(ctx, s.id, sandbox.CausePreview); left <- err }()
	s.blocked(t)
	leave()
	refusesLeases(t, context.Canceled, testkit.Receive(t, "the end of the request", left))
	joined := make(chan error, 1)
	go func() {
		lease, err := s.Rouse(t.Context(), s.id, sandbox.CausePreview)
		if err == nil {
			lease.Release()
		}
		joined <- err
	}()
	release()
	if err := testkit.Receive(t, "the end of the wake", joined); err != nil {
		t.Error(err)
	}
	s.state(t, sandbox.StateRunning)
}

func unknownSandbox(t *testing.T, s *subject) {
	s.gone(t)
	if _, ok := s.ByID(s.id); ok {
		t.Error("ByID finds a sandbox that was destroyed")
	}
	_, running := s.AcquireRunning(s.id)
	_, acquire := s.Acquire(t.Context(), s.id, sandbox.CausePreview)
	_, rouse := s.Rouse(t.Context(), s.id, sandbox.CausePreview)
	refusesLeases(t, sandbox.ErrNotFound, running, acquire, rouse)
	if s.Listens(t.Context(), s.id, s.port) {
		t.Error("a port of it listens")
	}
}
