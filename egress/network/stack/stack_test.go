package stack

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/nettest"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/quota"
	"github.com/doze-run/doze/runtime/netns/link"
)

// patience is the timeout of each wait for an event. It does not measure speed.
const patience = 30 * time.Second

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

func start(t testing.TB, cfg Config) (*Stack, *kernel) {
	t.Helper()
	k, device, listener := newKernel(t)
	cfg.Device, cfg.Listener = device, listener
	s, err := New(cfg)
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
	_ = conn.SetDeadline(time.Now().Add(patience))
	t.Cleanup(func() { conn.Close() })
	return conn.(*net.TCPConn), <-conns
}

func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for limit := time.Now().Add(patience); !holds(); time.Sleep(time.Millisecond) { // between checks
		if time.Now().After(limit) {
			t.Fatalf("%s: not within %v", what, patience)
		}
	}
}

func (s *Stack) connections() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return int(s.flows.Used())
}

func TestAConnIsANetConn(t *testing.T) {
	nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
		h, conns := accepted(t)
		k, device, listener := newKernel(t)
		s, err := New(Config{Device: device, Listener: listener, Handler: h})
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

func TestAFlowKnowsItsEnds(t *testing.T) {
	var f struct{ from, to netip.AddrPort }
	seen := make(chan struct{})
	_, k := start(t, Config{Handler: handler{tcp: func(_ context.Context, flow *Flow) {
		f.from, f.to = flow.Source(), flow.Destination()
		close(seen)
	}}})
	if _, err := k.dial("tcp", "203.0.113.9:22"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a flow that was left undecided: %v", err)
	}
	<-seen
	if f.to != netip.MustParseAddrPort("203.0.113.9:22") || f.from.Addr() != link.Sandbox {
		t.Errorf("from %s to %s", f.from, f.to)
	}
}

func TestARefusedFlowIsRefusedAtOnce(t *testing.T) {
	released := make(chan struct{})
	_, k := start(t, Config{Handler: handler{tcp: func(_ context.Context, f *Flow) {
		f.Refuse()
		if _, err := f.Accept(); !errors.Is(err, ErrDecided) {
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
func TestWhatIsSentArrivesAndHalvesCloseOneByOne(t *testing.T) {
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

func TestCloseLosesNothing(t *testing.T) {
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
	eventually(t, "its room is free again", func() bool { return s.connections() == 0 })
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
	eventually(t, "its room is free again", func() bool { return s.connections() == 0 })
}

func TestAResetBySandboxIsSeen(t *testing.T) {
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

func TestAPanicOfTheHandlerEndsOnlyItsFlow(t *testing.T) {
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

func TestWhatIsOverALimitIsResetAndTold(t *testing.T) {
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
			told := make(chan Exceeded, 10)
			proceed := make(chan struct{})
			arrived := make(chan struct{})
			var of atomic.Pointer[Stack]
			s, k := start(t, Config{Limits: c.limits, Connections: c.all,
				Exceeded: func(what Exceeded) {
					of.Load().connections() // acquires the lock: a slow log blocks no connection
					told <- what
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
			if len(told) != 1 || <-told != c.want {
				t.Errorf("told of %d things, wanted one: %s", len(told), c.want)
			}
			close(proceed)
			dials.Wait()
			eventually(t, "there is room again", func() bool { return s.connections() == 0 })
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
func TestOnlySomeConnectionsHaveBuffersThatGrow(t *testing.T) {
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

func TestADeviceThatBlocksIsRefused(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[1])
	if s, err := New(Config{Device: os.NewFile(uintptr(fds[0]), "blocking"), Handler: handler{}}); err == nil {
		_ = s.Close()
		t.Error("it is taken")
	}
}

func TestTheListenerIsServedOnlyWhileItIsOfUse(t *testing.T) {
	h, conns := accepted(t)
	_, k := start(t, Config{Handler: h, Limits: Limits{Idle: 10 * time.Millisecond}})
	serving := func() bool {
		all := make([]byte, 1<<20)
		return strings.Contains(string(all[:runtime.Stack(all, true)]), "(*Stack).accept(")
	}
	if serving() {
		t.Error("it was before a packet came")
	}
	for range 3 {
		client, server := pair(t, k, conns)
		if !serving() {
			t.Error("there is a connection and it is not")
		}
		client.Close()
		server.Close()
		eventually(t, "it is not any more", func() bool { return !serving() })
	}
}

func TestNameQueriesAreAnswered(t *testing.T) {
	_, k := start(t, Config{Handler: handler{dns: func(_ context.Context, server netip.Addr, query []byte) []byte {
		if string(query) == "be silent" {
			return nil
		}
		return append([]byte("answer of "+server.String()+" to "), query...)
	}}})
	for _, server := range []string{link.Gateway.String(), link.SecondServer.String()} {
		conn, err := k.dial("udp", net.JoinHostPort(server, "53"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(patience))
		for _, query := range []string{"be silent", "a", "example.com", string(make([]byte, maxQuery))} {
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
		if !got["answer of "+server+" to a"] || !got["answer of "+server+" to example.com"] {
			t.Errorf("got %v", got)
		}
	}
}

func TestOtherUDPIsRefusedAtOnce(t *testing.T) {
	_, k := start(t, Config{Handler: handler{}})
	for _, to := range []string{"198.18.7.9:443", "198.18.0.1:443", "198.18.0.53:443", "8.8.8.8:53"} {
		conn, err := k.dial("udp", to)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(patience))
		if _, err := conn.Write([]byte("QUIC")); err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%s: %v", to, err)
		}
	}
}

func TestPingIsAnswered(t *testing.T) {
	_, k := start(t, Config{Handler: handler{}})
	for _, to := range []string{link.Gateway.String(), "198.18.7.9"} {
		conn, err := k.dial("ip4:icmp", to)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(patience))
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
			t.Errorf("%s answers %x", to, b[:n])
		}
	}
}

func TestThereIsNoIPv6(t *testing.T) {
	_, k := start(t, Config{Handler: handler{}})
	conn, err := k.dial("tcp6", "[2001:db8::1]:443")
	if err == nil {
		conn.Close()
		t.Fatal("it connects")
	}
	if !errors.Is(err, syscall.ENETUNREACH) && !errors.Is(err, syscall.EADDRNOTAVAIL) {
		t.Errorf("%v takes time to find out", err)
	}
}

func TestManyConnectionsAtOnce(t *testing.T) {
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
			_ = conn.SetDeadline(time.Now().Add(patience))
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
	eventually(t, "their room is free again", func() bool { return s.connections() == 0 })
}

// The sandbox must not mistake the bytes that a node sent before it was killed for all of them.
func TestAKilledNodeResetsItsConnections(t *testing.T) {
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
func TestWhatIsClosedIsDeliveredLater(t *testing.T) {
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
	eventually(t, "its room is free again", func() bool { return s.connections() == 0 })
}

// The kernel retransmits the first packet in the meantime.
func TestAConnectionWaitsForItsHandler(t *testing.T) {
	proceed := make(chan struct{})
	h, conns := accepted(t)
	_, k := start(t, Config{Handler: handler{tcp: func(ctx context.Context, f *Flow) {
		<-proceed
		h.tcp(ctx, f)
	}}})
	fd := k.connect(t, somewhere)
	defer unix.Close(fd)
	events := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
	if n, err := unix.Poll(events, 2500); n != 0 || err != nil { // longer than the first retransmission timeout
		t.Errorf("it looks connected: %d, %v", n, err)
	}
	close(proceed)
	server := <-conns
	if n, err := unix.Poll(events, int(patience.Milliseconds())); n != 1 || err != nil || events[0].Revents&unix.POLLERR != 0 {
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
func TestASandboxThatGaveUpIsNotAccepted(t *testing.T) {
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
	eventually(t, "its room is free again", func() bool { return s.connections() == 0 })
}
