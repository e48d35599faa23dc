// Package networktest is the conformance suite of sandbox.Network.
package networktest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// System is a Network with sandboxes to reach.
type System struct {
	Network sandbox.Network
	// Start starts a sandbox that has loopback only. The suite calls its Stop.
	Start func(t testing.TB, id sandbox.ID) Box
}

// Box is a sandbox with servers in it.
type Box interface {
	// PID is its first process.
	PID() int
	// Serve listens on an address of the sandbox's loopback, "127.0.0.1" or
	// "::1". Each connection gets Greeting and then back what it sends.
	Serve(t testing.TB, ip string, port uint16)
	// Stall listens on 127.0.0.1, accepts nothing, and has its backlog full.
	Stall(t testing.TB, port uint16)
	// Stop ends all its processes and waits for their end. Idempotent.
	Stop()
}

// Greeting is the line that a Box's servers begin with.
func Greeting(id sandbox.ID, ip string, port uint16) string {
	return fmt.Sprintf("%s %s %d\n", id, ip, port)
}

// Run runs the suite. Each test opens a System of its own, which ends by
// t.Cleanup.
func Run(t *testing.T, open func(t *testing.T) System) {
	for _, c := range []struct {
		name string
		test func(*suite)
	}{
		{"ReachesAnIPv4Listener", reaches("127.0.0.1")},
		{"ReachesAListenerOnIPv6Only", reaches("::1")},
		{"ReachesAListenerOnAnotherLoopbackAddressOnly", reaches("127.0.0.2")},
		{"PrefersIPv4", prefersIPv4},
		{"PortWithoutAListenerIsRefused", refused},
		{"DialToAFullBacklogEndsWithItsDeadline", backlog},
		{"DialEndsWithItsContext", endedContext},
		{"DialToAnEndedProcessIsAnError", gone},
		{"SandboxesWithTheSamePortDoNotMix", doNotMix},
		{"DialIsSafeForConcurrentUse", many},
		{"ForgottenSandboxIsReachedAgain", forget},
		{"DescriptorsAreClosed", descriptors},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.test(&suite{T: t, ctx: testkit.Context(t), System: open(t)})
		})
	}
}

type suite struct {
	*testing.T
	System
	ctx context.Context
}

type box struct {
	Box
	id sandbox.ID
}

// box starts a sandbox.
func (s *suite) box() box {
	s.Helper()
	id := sandbox.NewID()
	b := box{s.Start(s, id), id}
	s.Cleanup(func() {
		s.Network.Forget(id)
		b.Stop()
	})
	return b
}

// dialError returns the error of a dial that must fail.
func (s *suite) dialError(ctx context.Context, b box, pid int, port uint16) error {
	conn, err := s.Network.Dial(ctx, b.id, pid, port)
	if err == nil {
		conn.Close()
		s.Errorf("the dial to port %d of process %d succeeded", port, pid)
	}
	return err
}

// mustCheck is check, and ends the test after an error.
func (s *suite) mustCheck(b box, ip string, port uint16) {
	s.Helper()
	testkit.NoError(s, "use the server", s.check(b, ip, port))
}

// check dials and talks with the server that listens on ip.
func (s *suite) check(b box, ip string, port uint16) error {
	conn, err := s.Network.Dial(s.ctx, b.id, b.PID(), port)
	if err != nil {
		return err
	}
	defer conn.Close()
	return s.talk(conn, Greeting(b.id, ip, port))
}

// talk expects the greeting and an echo, and that the server closes its side after the
// client.
func (s *suite) talk(conn net.Conn, greeting string) error {
	if deadline, ok := s.ctx.Deadline(); ok {
		_ = conn.SetDeadline(deadline)
	}
	in := bufio.NewReader(conn)
	got, err := in.ReadString('\n')
	if err != nil {
		return fmt.Errorf("read the greeting: %w", err)
	}
	if got != greeting {
		return fmt.Errorf("got the greeting %q, want %q", got, greeting)
	}
	const line = "knock knock\n"
	if _, err := io.WriteString(conn, line); err != nil {
		return err
	}
	if got, err = in.ReadString('\n'); err != nil || got != line {
		return fmt.Errorf("the echo is %q, %v", got, err)
	}
	half, ok := conn.(interface{ CloseWrite() error })
	if !ok {
		return fmt.Errorf("a %T has no CloseWrite", conn)
	}
	if err := half.CloseWrite(); err != nil {
		return err
	}
	if rest, err := io.ReadAll(in); err != nil || len(rest) > 0 {
		return fmt.Errorf("after the echo came %q, %v", rest, err)
	}
	return nil
}

func reaches(ip string) func(*suite) {
	return func(s *suite) {
		b := s.box()
		b.Serve(s, ip, 3000)
		for range 3 {
			s.mustCheck(b, ip, 3000)
		}
	}
}

func prefersIPv4(s *suite) {
	b := s.box()
	b.Serve(s, "::1", 3000)
	b.Serve(s, "127.0.0.1", 3000)
	s.mustCheck(b, "127.0.0.1", 3000)
}

func refused(s *suite) {
	b := s.box()
	testkit.ErrorIs(s, "Dial", s.dialError(s.ctx, b, b.PID(), 3000), syscall.ECONNREFUSED)
	// A server that starts later is found.
	b.Serve(s, "127.0.0.1", 3000)
	s.mustCheck(b, "127.0.0.1", 3000)
}

func backlog(s *suite) {
	b := s.box()
	b.Stall(s, 3000)
	ctx, cancel := context.WithTimeout(s.ctx, 200*time.Millisecond)
	defer cancel()
	testkit.ErrorIs(s, "Dial", s.dialError(ctx, b, b.PID(), 3000), context.DeadlineExceeded)
	if s.ctx.Err() != nil {
		s.Fatal("the dial did not end with its deadline")
	}
}

func endedContext(s *suite) {
	b := s.box()
	b.Stall(s, 3000)
	ctx, cancel := context.WithCancel(s.ctx)
	ended := make(chan error, 1)
	go func() { ended <- s.dialError(ctx, b, b.PID(), 3000) }() // ends with ctx
	cancel()
	testkit.ErrorIs(s, "Dial", testkit.Receive(s, "the end of the dial", ended), context.Canceled)
}

func gone(s *suite) {
	b := s.box()
	b.Serve(s, "127.0.0.1", 3000)
	s.mustCheck(b, "127.0.0.1", 3000)
	pid := b.PID()
	b.Stop()
	for _, pid := range []int{pid, 0, -1, 1 << 29} {
		if err := s.dialError(s.ctx, b, pid, 3000); errors.Is(err, syscall.ECONNREFUSED) {
			s.Fatalf("process %d is gone, which is not a refusal: %v", pid, err)
		}
	}
}

func doNotMix(s *suite) {
	a, b := s.box(), s.box()
	a.Serve(s, "127.0.0.1", 3000)
	b.Serve(s, "127.0.0.1", 3000)
	a.Serve(s, "127.0.0.1", 4000)
	var wg sync.WaitGroup
	for range 4 {
		for _, box := range []box{a, b} {
			wg.Go(func() {
				for range 25 {
					if err := s.check(box, "127.0.0.1", 3000); err != nil {
						s.Errorf("%s: %v", box.id, err)
						return
					}
				}
			})
		}
	}
	wg.Wait()
	testkit.ErrorIs(s, "Dial to a port of the other sandbox", s.dialError(s.ctx, b, b.PID(), 4000), syscall.ECONNREFUSED)
}

func many(s *suite) {
	const dials = 200
	b := s.box()
	b.Serve(s, "127.0.0.1", 3000)
	var wg sync.WaitGroup
	for n := range dials {
		wg.Go(func() {
			if err := s.check(b, "127.0.0.1", 3000); err != nil {
				s.Errorf("dial %d: %v", n, err)
			}
		})
	}
	wg.Wait()
}

func forget(s *suite) {
	b := s.box()
	b.Serve(s, "127.0.0.1", 3000)
	for range 3 {
		s.mustCheck(b, "127.0.0.1", 3000)
		s.Network.Forget(b.id)
		s.Network.Forget(b.id)
	}
	s.Network.Forget("unknown00000")
}

func descriptors(s *suite) {
	b := s.box()
	b.Serve(s, "127.0.0.1", 3000)
	b.Serve(s, "::1", 3001)
	b.Stall(s, 3003)
	all := func() {
		for port, ip := range map[uint16]string{3000: "127.0.0.1", 3001: "::1"} {
			s.mustCheck(b, ip, port)
		}
		testkit.ErrorIs(s, "Dial", s.dialError(s.ctx, b, b.PID(), 3002), syscall.ECONNREFUSED)
		ctx, cancel := context.WithTimeout(s.ctx, time.Millisecond)
		defer cancel()
		_ = s.dialError(ctx, b, b.PID(), 3003) // its backlog is full
	}
	all() // opens the descriptors that stay open
	before := Descriptors(s)
	for range 50 {
		all()
	}
	AwaitDescriptors(s, before) // an abandoned connection is closed a moment later
}

// Descriptors lists the open file descriptors of this process.
func Descriptors(t testing.TB) []string {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	var list []string
	for _, entry := range entries {
		target, err := os.Readlink("/proc/self/fd/" + entry.Name())
		if err == nil { // not the one of this listing
			list = append(list, entry.Name()+" "+target)
		}
	}
	return list
}

// AwaitDescriptors waits until this process has no more descriptors open than before.
func AwaitDescriptors(t testing.TB, before []string) {
	t.Helper()
	testkit.Eventually(t, fmt.Sprintf("at most %d descriptors are open", len(before)),
		func() bool { return len(Descriptors(t)) <= len(before) },
		func() string { return strings.Join(Descriptors(t), "\n") })
}
