package wakeproxy

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"sync"
	"testing"

	"golang.org/x/net/http2"

	"github.com/doze-run/doze/runtime/sandbox"
)

// closing signals that net/http has closed a connection.
type closing struct {
	net.Conn
	closed chan struct{}
	once   sync.Once
}

func (c *closing) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

// A server of HTTP/2 sends SETTINGS immediately, which net/http may read before it has
// sent the request.
func TestSettingsBeforeTheRequestMayBeHTTP2(t *testing.T) {
	ours, theirs := net.Pipe()
	defer theirs.Close()
	conn := &closing{Conn: ours, closed: make(chan struct{})}
	transport := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
		go http2.NewFramer(theirs, theirs).WriteSettings() // ends with the pipe
		return conn, nil
	}}
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { <-conn.closed }})
	req, err := http.NewRequestWithContext(ctx, "GET", "http://sandbox/", nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := transport.RoundTrip(req); err == nil || !maybeHTTP2(err) {
		t.Errorf("got %v", err)
	}
}

// RFC 9113, section 4.2: a peer sends no frame above 16,384 bytes unless the SETTINGS
// allow it. The length that a frame announces is the memory that reading it takes.
func TestProbeRefusesLargeFrames(t *testing.T) {
	for settings, ok := range map[int]bool{1: true, 16384 / 6: true, 16384/6 + 1: false} {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer listener.Close()
		go func() {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			defer conn.Close()
			all := make([]http2.Setting, settings)
			for i := range all {
				all[i] = http2.Setting{ID: http2.SettingID(0x1000 + i), Val: 1}
			}
			http2.NewFramer(conn, conn).WriteSettings(all...)
			io.Copy(io.Discard, conn) // ends when the probe does
		}()
		x, ctx := probing(t, listener.Addr().String())
		if got := x.foundH2C(ctx, io.EOF); got != ok {
			t.Errorf("SETTINGS of %d bytes: %v, want %v", 6*settings, got, ok)
		}
	}
}

// probing is an exchange with a server at an address, with the context of its request.
func probing(t *testing.T, address string) (*exchange, context.Context) {
	t.Helper()
	f := newFront(t, newFakeNode(t, address, sandbox.Port{}), Options{})
	lease, err := f.node.AcquireRunning(testID)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(lease.Release)
	x := &exchange{proxy: f.proxy, id: testID, port: sandbox.Port{Port: 3000}, lease: lease}
	return x, context.WithValue(t.Context(), exchangeKey{}, x)
}

// A visitor that leaves and a server that restarts do not decide the protocol.
func TestInconclusiveProbeIsRepeated(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	x, ctx := probing(t, address)

	leaving, leave := context.WithCancel(ctx)
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		io.ReadFull(conn, make([]byte, len(http2.ClientPreface)))
		leave()
		io.Copy(io.Discard, conn)
	}()
	if x.foundH2C(leaving, io.EOF) {
		t.Error("found without a response")
	}

	hungUp := make(chan struct{})
	go func() {
		defer close(hungUp)
		if conn, err := listener.Accept(); err == nil {
			conn.Close()
		}
	}()
	if x.foundH2C(ctx, io.EOF) {
		t.Error("found at a server that hangs up")
	}
	listener.Close()
	<-hungUp
	if x.foundH2C(ctx, io.EOF) {
		t.Error("found where nothing listens")
	}

	if listener, err = net.Listen("tcp", address); err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		http2.NewFramer(conn, conn).WriteSettings()
		io.Copy(io.Discard, conn)
	}()
	if !x.foundH2C(ctx, io.EOF) {
		t.Error("not found at a server of HTTP/2")
	}
}
