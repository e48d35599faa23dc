package stack

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/nettest"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/quota"
	"github.com/doze-run/doze/runtime/netns/link"
	"github.com/doze-run/doze/testkit"
)

// handler is a Handler made of a test's functions.
type handler struct {
	tcp func(ctx context.Context, f *Flow)
	dns func(ctx context.Context, server netip.Addr, query []byte) []byte
}

func (h handler) TCP(ctx context.Context, f *Flow) {
	if h.tcp != nil {
		h.tcp(ctx, f)
	}
}

func (h handler) DNS(ctx context.Context, server netip.Addr, query []byte) []byte {
	if h.dns != nil {
		return h.dns(ctx, server, query)
	}
	return nil
}

// complete sets the callbacks that are nil.
func complete(cfg Config) Config {
	if cfg.Exceeded == nil {
		cfg.Exceeded = func(Exceeded) {}
	}
	if cfg.Refused == nil {
		cfg.Refused = func(netip.AddrPort) {}
	}
	if cfg.Sent == nil {
		cfg.Sent = func() {}
	}
	if cfg.Arriving == nil {
		cfg.Arriving = func(context.Context) error { return nil }
	}
	cfg.Log = slog.New(slog.DiscardHandler)
	return cfg
}

func start(t testing.TB, cfg Config) (*Stack, *kernel) {
	t.Helper()
	k, device, listener := newKernel(t)
	cfg.Device, cfg.Listener = device, listener
	s, err := New(complete(cfg))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s, k
}

// accepted returns a handler that accepts each connection, and the channel that delivers
// them. They stay open until the test ends.
func accepted(t testing.TB) (handler, <-chan *Conn) {
	conns := make(chan *Conn)
	over := make(chan struct{})
	t.Cleanup(func() { close(over) }) // runs before the stack's cleanup, which waits
	return handler{tcp: func(ctx context.Context, f *Flow) {
		conn, err := f.Accept()
		if err != nil {
			t.Error(err)
			return
		}
		select {
		case conns <- conn:
		case <-ctx.Done():
			return
		}
		select {
		case <-over:
		case <-ctx.Done():
		}
	}}, conns
}

const somewhere = "198.18.7.9:443"

// pair returns both ends of a connection.
func pair(t testing.TB, k *kernel, conns <-chan *Conn) (client *net.TCPConn, server *Conn) {
	t.Helper()
	conn, err := k.dial("tcp", somewhere)
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.SetDeadline(time.Now().Add(testkit.Patience))
	t.Cleanup(func() { conn.Close() })
	return conn.(*net.TCPConn), <-conns
}

// awaitNoConnections waits until the slots of all connections are released.
func awaitNoConnections(t testing.TB, s *Stack) {
	t.Helper()
	testkit.Eventually(t, "no connections", func() bool { return s.connections() == 0 })
}

func (s *Stack) connections() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return int(s.flows.Used())
}

func TestConnIsANetConn(t *testing.T) {
	nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
		h, conns := accepted(t)
		k, device, listener := newKernel(t)
		s, err := New(complete(Config{Device: device, Listener: listener, Handler: h}))
		if err != nil {
			return nil, nil, nil, err
		}
		c2, err = k.dial("tcp", somewhere)
		if err != nil {
			return nil, nil, nil, err
		}
		return <-conns, c2, func() { _ = s.Close(); _ = c2.Close() }, nil
	})
}

func TestFlowHasTheDialedDestination(t *testing.T) {
	seen := make(chan netip.AddrPort, 1)
	_, k := start(t, Config{Handler: handler{tcp: func(_ context.Context, flow *Flow) { seen <- flow.Destination() }}})
	if _, err := k.dial("tcp", "203.0.113.9:22"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a flow that was left undecided: %v", err)
	}
	if to := <-seen; to != netip.MustParseAddrPort("203.0.113.9:22") {
		t.Errorf("to %s", to)
	}
}

func TestRefusedFlowIsResetImmediately(t *testing.T) {
	released := make(chan struct{})
	_, k := start(t, Config{Handler: handler{tcp: func(_ context.Context, f *Flow) {
		f.Refuse()
		if _, err := f.Accept(); !errors.Is(err, errDecided) {
			t.Errorf("accepting it after that: %v", err)
		}
		<-released // the reset does not wait for the handler
	}}})
	_, err := k.dial("tcp", somewhere)
	close(released)
	if !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("got %v", err)
	}
}

// Both halves are closed, in both orders, after more data than any buffer holds.
func TestBytesArriveAndHalvesCloseSeparately(t *testing.T) {
	sent := make([]byte, 40<<20)
	_, _ = rand.Read(sent)
	for _, c := range []struct {
		name string
		to   func(t *testing.T, client, server net.Conn) (from, into net.Conn)
	}{
		{"out", func(_ *testing.T, client, server net.Conn) (net.Conn, net.Conn) { return client, server }},
		{"in", func(_ *testing.T, client, server net.Conn) (net.Conn, net.Conn) { return server, client }},
	} {
		t.Run(c.name, func(t *testing.T) {
			h, conns := accepted(t)
			_, k := start(t, Config{Handler: h})
			client, server := pair(t, k, conns)
			from, into := c.to(t, client, server)
			failed := make(chan error, 1)
			go func() { // ends with the connection
				_, err := from.Write(sent)
				failed <- errors.Join(err, from.(interface{ CloseWrite() error }).CloseWrite())
			}()
			got, err := io.ReadAll(into)
			if err = errors.Join(err, <-failed); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, sent) {
				t.Fatal("something else arrived")
			}
			if _, err := io.WriteString(into, "and back"); err != nil {
				t.Fatal(err)
			}
			if err := into.Close(); err != nil {
				t.Fatal(err)
			}
			if back, err := io.ReadAll(from); err != nil || string(back) != "and back" {
				t.Fatalf("the other half: %q, %v", back, err)
			}
		})
	}
}

func TestCloseDeliversWrittenBytes(t *testing.T) {
	h, conns := accepted(t)
	s, k := start(t, Config{Handler: h})
	client, server := pair(t, k, conns)
	sent := bytes.Repeat([]byte("0123456789abcdef"), 10<<10) // fits in the send buffer
	if _, err := server.Write(sent); err != nil {
		t.Fatal(err)
	}
	if err := server.Close(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(client); err != nil || !bytes.Equal(got, sent) {
		t.Fatalf("%d bytes of %d, %v", len(got), len(sent), err)
	}
	client.Close()
	awaitNoConnections(t, s)
}

func TestAbortResets(t *testing.T) {
	h, conns := accepted(t)
	s, k := start(t, Config{Handler: h})
	client, server := pair(t, k, conns)
	server.Abort()
	if _, err := client.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the sandbox sees %v", err)
	}
	if _, err := server.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
		t.Errorf("writing after it: %v", err)
	}
	awaitNoConnections(t, s)
}

func TestResetBySandboxIsReported(t *testing.T) {
	h, conns := accepted(t)
	_, k := start(t, Config{Handler: h})
	client, server := pair(t, k, conns)
	_ = client.SetLinger(0)
	client.Close()
	if _, err := server.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("got %v", err)
	}
}

func TestCloseResetsConnectionsAndWaitsForHandlers(t *testing.T) {
	ended := make(chan struct{})
	began := make(chan struct{})
	s, k := start(t, Config{Handler: handler{tcp: func(ctx context.Context, f *Flow) {
		conn, err := f.Accept()
		if err != nil {
			t.Error(err)
			return
		}
		close(began)
		_, err = conn.Read(make([]byte, 1))
		if err == nil || ctx.Err() == nil {
			t.Errorf("its read ended by %v, its context by %v", err, ctx.Err())
		}
		close(ended)
	}}})
	client, err := k.dial("tcp", somewhere)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	<-began
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-ended:
	default:
		t.Error("Close did not wait for the handler")
	}
	if _, err := client.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the sandbox sees %v", err)
	}
}

func TestPanicOfTheHandlerEndsOnlyItsFlow(t *testing.T) {
	h, conns := accepted(t)
	_, k := start(t, Config{Handler: handler{
		tcp: func(ctx context.Context, f *Flow) {
			if f.Destination().Port() == 1 {
				panic("on purpose")
			}
			h.tcp(ctx, f)
		},
	}})
	if _, err := k.dial("tcp", "198.18.7.9:1"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("got %v", err)
	}
	pair(t, k, conns)
}

func TestConnectionsBeyondALimitAreResetAndReported(t *testing.T) {
	for _, c := range []struct {
		name   string
		limits Limits
		all    *quota.Pool
		decide bool
		want   Exceeded
	}{
		{"attempts", Limits{Attempts: 2}, nil, false, Attempts},
		{"connections", Limits{Connections: 2}, nil, true, Connections},
		{"connections of all", Limits{}, quota.New(2), true, AllConnections},
	} {
		t.Run(c.name, func(t *testing.T) {
			reported := make(chan Exceeded, 10)
			proceed := make(chan struct{})
			arrived := make(chan struct{})
			var of atomic.Pointer[Stack]
			s, k := start(t, Config{Limits: c.limits, Connections: c.all,
				Exceeded: func(what Exceeded) {
					of.Load().connections() // acquires the lock: a slow log blocks no connection
					reported <- what
				},
				Handler: handler{tcp: func(ctx context.Context, f *Flow) {
					of.Store(f.stack)
					if c.decide {
						if _, err := f.Accept(); err != nil {
							t.Error(err)
						}
					}
					arrived <- struct{}{}
					<-proceed
				}}})
			var dials sync.WaitGroup
			for range 2 {
				// Dialing an undecided flow blocks the thread: each attempt has a socket of its own.
				fd := k.connect(t, somewhere)
				dials.Go(func() { <-proceed; unix.Close(fd) })
				<-arrived
			}
			for range 3 {
				if _, err := k.dial("tcp", somewhere); !errors.Is(err, syscall.ECONNREFUSED) {
					t.Errorf("one more: %v", err)
				}
			}
			if len(reported) != 1 || <-reported != c.want {
				t.Errorf("%d reports, want one: %s", len(reported), c.want)
			}
			close(proceed)
			dials.Wait()
			awaitNoConnections(t, s)
			if s.wide.Used() != 0 || c.all != nil && c.all.Used() != 0 {
				t.Errorf("%d wide connections are left", s.wide.Used())
			}
		})
	}
}

// connect starts to connect a socket in the namespace and does not wait.
func (k *kernel) connect(t testing.TB, address string) (fd int) {
	t.Helper()
	to := netip.MustParseAddrPort(address)
	err := k.In(func() (err error) {
		if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		if err = unix.Connect(fd, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}); errors.Is(err, unix.EINPROGRESS) {
			err = nil
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

// The memory of buffers is bounded by the number of connections that may have large ones.
func TestNumberOfWideConnectionsIsBounded(t *testing.T) {
	for name, cfg := range map[string]Config{
		"of one sandbox": {Limits: Limits{Wide: 1}},
		"of all":         {Wide: quota.New(1)},
	} {
		t.Run(name, func(t *testing.T) { testOneGrows(t, cfg) })
	}
}

func testOneGrows(t *testing.T, cfg Config) {
	h, conns := accepted(t)
	cfg.Handler = h
	_, k := start(t, cfg)
	for n := range 2 {
		client, server := pair(t, k, conns)
		if wide := n == 0; server.wide != wide {
			t.Errorf("connection %d: wide is %v", n, server.wide)
		}
		const much = 16 << 20
		go func() { // ends with the connection
			_, _ = io.CopyN(client, client, much)
			_ = client.CloseWrite()
		}()
		filled := make(chan struct{})
		go func() { // ends with the connection
			defer close(filled)
			_, _ = server.Write(make([]byte, much))
		}()
		if _, err := io.Copy(io.Discard, server); err != nil {
			t.Fatal(err)
		}
		<-filled
		receive, send := bufferSizes(t, server.tcp)
		t.Logf("receive buffer %d KiB, send buffer %d KiB", receive>>10, send>>10)
		if n > 0 && (receive > 2*narrowBuffer || send > 2*narrowBuffer) {
			t.Error("they grew")
		}
		if receive > link.MaxReceiveBuffer || send > link.MaxSendBuffer {
			t.Error("they grew beyond what the namespace allows")
		}
		if n == 0 && receive <= 2*narrowBuffer && send <= 2*narrowBuffer {
			t.Error("they did not grow")
		}
	}
}

func bufferSizes(t *testing.T, conn *net.TCPConn) (receive, send int) {
	t.Helper()
	raw, err := conn.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	err = raw.Control(func(fd uintptr) {
		var failed [2]error
		receive, failed[0] = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF)
		send, failed[1] = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF)
		err = errors.Join(failed[:]...)
	})
	if err != nil {
		t.Fatal(err)
	}
	return receive, send
}

func TestBlockingDeviceIsRefused(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[1])
	if s, err := New(Config{Device: os.NewFile(uintptr(fds[0]), "blocking"), Handler: handler{}}); err == nil {
		_ = s.Close()
		t.Error("New accepted it")
	}
}

func TestListenerIsServedOnlyWhileActive(t *testing.T) {
	h, conns := accepted(t)
	s, k := start(t, Config{Handler: h, Limits: Limits{Idle: 10 * time.Millisecond}})
	serving := func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.active
	}
	if serving() {
		t.Error("before the first packet the listener is served")
	}
	for range 3 {
		client, server := pair(t, k, conns)
		if !serving() {
			t.Error("with a connection the listener is not served")
		}
		client.Close()
		server.Close()
		testkit.Eventually(t, "the listener is not served while idle", func() bool { return !serving() })
	}
}

func TestNameQueriesGetTheHandlersResponse(t *testing.T) {
	_, k := start(t, Config{Handler: handler{dns: func(_ context.Context, server netip.Addr, query []byte) []byte {
		if string(query) == "no response" {
			return nil
		}
		return append([]byte("response of "+server.String()+" to "), query...)
	}}})
	for _, server := range []string{link.Gateway.String(), link.SecondServer.String()} {
		conn, err := k.dial("udp", net.JoinHostPort(server, "53"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(testkit.Patience))
		for _, query := range []string{"no response", "a", "example.com", string(make([]byte, maxQuery))} {
			if _, err := conn.Write([]byte(query)); err != nil {
				t.Fatal(err)
			}
		}
		// The replies come in any order, and one query is too long.
		got := map[string]bool{}
		for range 2 {
			b := make([]byte, 2000)
			n, err := conn.Read(b)
			if err != nil {
				t.Fatal(err)
			}
			got[string(b[:n])] = true
		}
		if !got["response of "+server+" to a"] || !got["response of "+server+" to example.com"] {
			t.Errorf("got %v", got)
		}
	}
}

func TestOtherUDPIsRefusedImmediately(t *testing.T) {
	_, k := start(t, Config{Handler: handler{}})
	for _, to := range []string{"198.18.7.9:443", "198.18.0.1:443", "198.18.0.53:443", "8.8.8.8:53"} {
		conn, err := k.dial("udp", to)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(testkit.Patience))
		if _, err := conn.Write([]byte("QUIC")); err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%s: %v", to, err)
		}
	}
}

func TestPingGetsAReply(t *testing.T) {
	_, k := start(t, Config{Handler: handler{}})
	for _, to := range []string{link.Gateway.String(), "198.18.7.9"} {
		conn, err := k.dial("ip4:icmp", to)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(testkit.Patience))
		echo := append([]byte{8, 0, 0, 0, 1, 2, 0, 7}, "sixteen bytes..."...)
		var sum uint32
		for i := 0; i < len(echo); i += 2 {
			sum += uint32(echo[i])<<8 | uint32(echo[i+1])
		}
		sum = sum>>16 + sum&0xffff
		echo[2], echo[3] = byte(^sum>>8), byte(^sum)
		if _, err := conn.Write(echo); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 100)
		n, err := conn.Read(b)
		if err != nil {
			t.Fatal(err)
		}
		const ip = 20 // the reply includes the IP header
		if b[ip] != 0 || !bytes.Equal(b[ip+4:n], echo[4:]) {
			t.Errorf("%s replies %x", to, b[:n])
		}
	}
}

func TestIPv6IsUnreachable(t *testing.T) {
	_, k := start(t, Config{Handler: handler{}})
	conn, err := k.dial("tcp6", "[2001:db8::1]:443")
	if err == nil {
		conn.Close()
		t.Fatal("it connects")
	}
	if !errors.Is(err, syscall.ENETUNREACH) && !errors.Is(err, syscall.EADDRNOTAVAIL) {
		t.Errorf("%v, want an immediate failure", err)
	}
}

func TestConcurrentConnections(t *testing.T) {
	s, k := start(t, Config{Handler: handler{tcp: func(_ context.Context, f *Flow) {
		if conn, err := f.Accept(); err == nil {
			_, _ = io.Copy(conn, conn)
			_ = conn.CloseWrite()
		}
	}}})
	var all sync.WaitGroup
	for n := range 200 {
		conn, err := k.dial("tcp", somewhere)
		if err != nil {
			t.Fatal(err)
		}
		all.Go(func() {
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(testkit.Patience))
			want := bytes.Repeat(fmt.Append(nil, n, " "), 10_000)
			go func() { // ends with the connection
				_, _ = conn.Write(want)
				_ = conn.(*net.TCPConn).CloseWrite()
			}()
			if got, err := io.ReadAll(conn); err != nil || !bytes.Equal(got, want) {
				t.Errorf("connection %d: %d bytes of %d, %v", n, len(got), len(want), err)
			}
		})
	}
	all.Wait()
	awaitNoConnections(t, s)
}

// The sandbox must not mistake the bytes that a node sent before it was killed for all of them.
func TestKilledNodeResetsItsConnections(t *testing.T) {
	h, conns := accepted(t)
	_, k := start(t, Config{Handler: h})
	client, server := pair(t, k, conns)
	if _, err := io.WriteString(server, "the first half"); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 100)
	if _, err := client.Read(b); err != nil {
		t.Fatal(err)
	}
	if err := server.tcp.Close(); err != nil { // as the kernel does when a process ends
		t.Fatal(err)
	}
	if _, err := client.Read(b); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("got %v", err)
	}
}

// Bytes that do not fit in the sandbox's buffers wait, because the sandbox may sleep. The
// connection counts until they are delivered.
func TestBytesAreDeliveredAfterClose(t *testing.T) {
	h, conns := accepted(t)
	s, k := start(t, Config{Handler: h})
	client, server := pair(t, k, conns)
	var sent []byte
	for writable(t, server.tcp) { // until the buffers of both sides are full
		piece := bytes.Repeat([]byte("0123456789abcdef"), 1<<8)
		_ = server.SetWriteDeadline(time.Now().Add(time.Millisecond))
		n, err := server.Write(piece)
		sent = append(sent, piece[:n]...)
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal(err)
		}
	}
	if err := server.Close(); err != nil {
		t.Fatal(err)
	}
	if n := s.connections(); n != 1 {
		t.Errorf("%d connections count while it waits", n)
	}
	if got, err := io.ReadAll(client); err != nil || !bytes.Equal(got, sent) {
		t.Fatalf("%d bytes of %d, %v", len(got), len(sent), err)
	}
	client.Close()
	awaitNoConnections(t, s)
}

// The kernel retransmits the first packet in the meantime.
func TestConnectionWaitsForItsHandler(t *testing.T) {
	proceed := make(chan struct{})
	h, conns := accepted(t)
	_, k := start(t, Config{Handler: handler{tcp: func(ctx context.Context, f *Flow) {
		<-proceed
		h.tcp(ctx, f)
	}}})
	fd := k.connect(t, somewhere)
	defer unix.Close(fd)
	events := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
	if n, err := testkit.Poll(events, 2500*time.Millisecond); n != 0 || err != nil { // longer than the first retransmission timeout
		t.Errorf("it looks connected: %d, %v", n, err)
	}
	close(proceed)
	server := <-conns
	if n, err := testkit.Poll(events, testkit.Patience); n != 1 || err != nil || events[0].Revents&unix.POLLERR != 0 {
		t.Fatalf("it is not connected: %d, %v, %x", n, err, events[0].Revents)
	}
	if _, err := unix.Write(fd, []byte("x")); err != nil {
		t.Fatal(err)
	}
	if n, err := server.Read(make([]byte, 2)); n != 1 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
}

// A connection whose client left while the Handler decided is not accepted.
func TestAcceptFailsIfTheSandboxGaveUp(t *testing.T) {
	began, proceed, ended := make(chan struct{}), make(chan struct{}), make(chan error)
	s, k := start(t, Config{Handler: handler{tcp: func(ctx context.Context, f *Flow) {
		close(began)
		<-proceed
		_, err := f.Accept()
		ended <- err
	}}})
	fd := k.connect(t, somewhere)
	<-began
	unix.Close(fd)
	close(proceed)
	if err := <-ended; !errors.Is(err, syscall.ECONNABORTED) {
		t.Errorf("got %v", err)
	}
	awaitNoConnections(t, s)
}
