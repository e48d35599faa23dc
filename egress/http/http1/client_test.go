package http1

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/textproto"
	"net/url"
	"strings"
	"testing"
)

// testConn is a client connection to a server that a test implements.
type testConn struct {
	*Conn
	reusable chan bool // receives the result of each exchange that has ended
}

// dial connects to a server. serve implements it; the connection ends when serve returns.
func dial(t *testing.T, serve func(conn net.Conn, r *bufio.Reader)) *testConn {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	raw, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer conn.Close()
		serve(conn, bufio.NewReader(conn))
	}()
	t.Cleanup(func() {
		raw.Close()
		conn.Close()
		<-ended
	})
	return &testConn{NewConn(raw, raw, 8<<10), make(chan bool, 8)}
}

func newRequest(ctx context.Context, method, path string, body io.Reader, length int64) *http.Request {
	r := &http.Request{Method: method, URL: &url.URL{Path: path}, Host: "a.example", Header: http.Header{}, ContentLength: length}
	if body != nil {
		r.Body = io.NopCloser(body)
	}
	return r.WithContext(ctx)
}

func (d *testConn) send(r *http.Request) (*http.Response, error) {
	return d.RoundTrip(r, func(int, textproto.MIMEHeader) error { return nil }, func(reusable bool) { d.reusable <- reusable })
}

// read sends a request and returns the body of its response.
func (d *testConn) read(r *http.Request) (string, error) {
	res, err := d.send(r)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	return string(body), err
}

// expect reads a request, fails the test unless it is want, and sends a response.
func expect(t *testing.T, conn net.Conn, r *bufio.Reader, want, response string) {
	t.Helper()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(r, got); err != nil || string(got) != want {
		t.Errorf("the server reads %.200q, %v, want %.200q", got, err, want)
	}
	io.WriteString(conn, response)
}

const ok = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

func TestRequestsOnTheWire(t *testing.T) {
	d := dial(t, func(conn net.Conn, r *bufio.Reader) {
		expect(t, conn, r, "GET /a%20b HTTP/1.1\r\nHost: a.example\r\nA: 1\r\nB: 2\r\nB: 3\r\n\r\n", ok)
		expect(t, conn, r, "POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 0\r\n\r\n", ok)
		expect(t, conn, r, "POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 4\r\n\r\nbody", ok)
		expect(t, conn, r, "PUT / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\nTrailer: X\r\n\r\n4\r\nbody\r\n0\r\nX: y\r\n\r\n", ok)
		expect(t, conn, r, "PUT / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n8000\r\n"+strings.Repeat("x", 32<<10)+"\r\n1\r\nx\r\n0\r\n\r\n", ok)
	})
	ctx := t.Context()
	first := newRequest(ctx, "GET", "/a b", nil, 0)
	first.Header = http.Header{"B": {"2", " 3\t"}, "A": {"1"}, "User-Agent": nil}
	trailing := newRequest(ctx, "PUT", "/", strings.NewReader("body"), 4)
	trailing.Trailer = http.Header{"X": {"y"}}
	for _, r := range []*http.Request{
		first,
		newRequest(ctx, "POST", "/", nil, 0),
		newRequest(ctx, "POST", "/", strings.NewReader("body"), 4),
		trailing,
		newRequest(ctx, "PUT", "/", strings.NewReader(strings.Repeat("x", 32<<10+1)), -1),
	} {
		if body, err := d.read(r); body != "ok" || err != nil {
			t.Errorf("%s: %q, %v", r.Method, body, err)
		}
		if !<-d.reusable {
			t.Fatalf("%s: the connection ends", r.Method)
		}
	}
}

// A request that would inject another one, or a part of one, is not sent.
func TestInvalidRequests(t *testing.T) {
	for name, change := range map[string]func(r *http.Request){
		"value":  func(r *http.Request) { r.Header.Set("X", "a\r\nY: b") },
		"name":   func(r *http.Request) { r.Header["X: y\r\nZ"] = []string{"a"} },
		"target": func(r *http.Request) { r.URL.Opaque = "/ HTTP/1.1\r\nX: y" },
		"host":   func(r *http.Request) { r.Host = "a\r\nX: y" },
		"short":  func(r *http.Request) { r.Body, r.ContentLength = io.NopCloser(strings.NewReader("x")), 2 },
		"long":   func(r *http.Request) { r.Body, r.ContentLength = io.NopCloser(strings.NewReader("xyz")), 2 },
	} {
		sent := make(chan string, 1)
		d := dial(t, func(_ net.Conn, r *bufio.Reader) {
			all, _ := io.ReadAll(r)
			sent <- string(all)
		})
		r := newRequest(t.Context(), "GET", "/", nil, 0)
		change(r)
		if _, err := d.send(r); err == nil || <-d.reusable {
			t.Errorf("%s: %v", name, err)
		}
		if all := <-sent; strings.Contains(all, "X: ") || strings.Contains(all, "xy") {
			t.Errorf("%s: the server reads %q", name, all)
		}
	}
}

func TestInvalidResponses(t *testing.T) {
	for name, response := range map[string]string{
		"nothing":           "",
		"no HTTP":           "SSH-2.0\r\n",
		"half a head":       "HTTP/1.1 200 OK\r\nX",
		"a large head":      "HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 16<<10) + "\r\n\r\n",
		"many heads":        strings.Repeat("HTTP/1.1 103 Early\r\n\r\n", 1000) + ok,
		"two lengths":       "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nok",
		"a short body":      "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok",
		"a broken chunk":    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok-",
		"an unknown coding": "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nok",
	} {
		d := dial(t, func(conn net.Conn, r *bufio.Reader) {
			http.ReadRequest(r)
			io.WriteString(conn, response)
		})
		if body, err := d.read(newRequest(t.Context(), "GET", "/", nil, 0)); err == nil || errors.Is(err, ErrStale) || <-d.reusable {
			t.Errorf("%s: %q, %v", name, body, err)
		}
	}
}

// A connection is reused only if the next response cannot belong to another request.
func TestConnectionReuse(t *testing.T) {
	for name, c := range map[string]struct {
		response string
		want     bool
	}{
		"of a length":   {ok, true},
		"chunked":       {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", true},
		"with more":     {ok + ok, false},
		"that ends":     {"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok", false},
		"until the end": {"HTTP/1.1 200 OK\r\n\r\nok", false},
		"of HTTP/1.0":   {"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", false},
	} {
		d := dial(t, func(conn net.Conn, r *bufio.Reader) {
			http.ReadRequest(r)
			io.WriteString(conn, c.response)
		})
		if body, err := d.read(newRequest(t.Context(), "GET", "/", nil, 0)); body != "ok" || err != nil {
			t.Errorf("%s: %q, %v", name, body, err)
		}
		if got := <-d.reusable; got != c.want {
			t.Errorf("%s: reusable %v", name, got)
		}
	}
}

func TestUnusableConnectionIsDropped(t *testing.T) {
	for name, after := range map[string]string{"closed": "", "unsolicited": ok} {
		sent := make(chan struct{})
		d := dial(t, func(conn net.Conn, r *bufio.Reader) {
			http.ReadRequest(r)
			io.WriteString(conn, ok)
			<-sent
			io.WriteString(conn, after)
			conn.(*net.TCPConn).CloseWrite()
			io.Copy(io.Discard, conn)
		})
		if _, err := d.read(newRequest(t.Context(), "GET", "/", nil, 0)); err != nil || !<-d.reusable || !d.alive() {
			t.Errorf("%s: before: %v", name, err)
		}
		close(sent)
		if _, err := d.r.Peek(1); after == "" && err != io.EOF || d.alive() {
			t.Errorf("%s: alive; %v", name, err)
		}
	}
}

// Data after a response in the same TLS record is unsolicited, too.
func TestConnectionWithBufferedTLSDataIsDropped(t *testing.T) {
	const size = 12 << 10                // large enough that the rest is read past the buffer
	server := httptest.NewTLSServer(nil) // for its certificate
	defer server.Close()
	for _, more := range []string{"", ok} {
		d := dial(t, func(raw net.Conn, _ *bufio.Reader) {
			conn := tls.Server(raw, &tls.Config{Certificates: server.TLS.Certificates, DynamicRecordSizingDisabled: true})
			if _, err := http.ReadRequest(bufio.NewReader(conn)); err != nil {
				t.Error(err)
			}
			io.WriteString(conn, fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s%s", size, strings.Repeat("x", size), more))
			io.Copy(io.Discard, conn)
		})
		conn := tls.Client(d.raw, &tls.Config{InsecureSkipVerify: true})
		d.Conn = NewConn(conn, d.raw, 8<<10)
		res, err := d.send(newRequest(t.Context(), "GET", "/", nil, 0))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{res.Body}, make([]byte, 2*size)); err != nil {
			t.Error(err)
		}
		if got := <-d.reusable && d.alive(); got != (more == "") {
			t.Errorf("with %q: alive %v", more, got)
		}
	}
}

// A server that closes an idle connection has not seen the request that follows.
func TestStaleConnection(t *testing.T) {
	d := dial(t, func(conn net.Conn, r *bufio.Reader) {
		http.ReadRequest(r)
		io.WriteString(conn, ok)
		http.ReadRequest(r)
	})
	if _, err := d.read(newRequest(t.Context(), "GET", "/", nil, 0)); err != nil {
		t.Fatal(err)
	}
	if _, err := d.send(newRequest(t.Context(), "GET", "/", nil, 0)); !errors.Is(err, ErrStale) {
		t.Errorf("got %v", err)
	}
}

func TestResponseBeforeTheEndOfTheBody(t *testing.T) {
	for _, responded := range []bool{true, false} {
		more, uploaded := io.Pipe()
		d := dial(t, func(conn net.Conn, r *bufio.Reader) {
			expect(t, conn, r, "POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n", ok)
			io.Copy(io.Discard, r)
		})
		go io.WriteString(uploaded, "a")
		res, err := d.send(newRequest(t.Context(), "POST", "/", more, -1))
		if err != nil {
			t.Fatal(err)
		}
		if responded { // sends the rest, and then reads the response
			io.WriteString(uploaded, "b")
			uploaded.Close()
		}
		if body, err := io.ReadAll(res.Body); string(body) != "ok" || err != nil {
			t.Errorf("%q, %v", body, err)
		}
		if <-d.reusable != responded {
			t.Errorf("the upload ended: %v; reusable: %v", responded, !responded)
		}
		uploaded.Close()
	}
}

func TestBrokenBodyEndsTheRequest(t *testing.T) {
	d := dial(t, func(_ net.Conn, r *bufio.Reader) { io.Copy(io.Discard, r) })
	more, uploaded := io.Pipe()
	broken := errors.New("broken")
	go func() {
		io.WriteString(uploaded, "a")
		uploaded.CloseWithError(broken)
	}()
	if _, err := d.send(newRequest(t.Context(), "POST", "/", more, -1)); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
}

func TestCanceledRequest(t *testing.T) {
	for _, response := range []string{"", "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok"} {
		ctx, cancel := context.WithCancel(t.Context())
		arrived := make(chan struct{})
		d := dial(t, func(conn net.Conn, r *bufio.Reader) {
			http.ReadRequest(r)
			io.WriteString(conn, response)
			close(arrived)
			io.Copy(io.Discard, r)
		})
		go func() {
			<-arrived
			cancel()
		}()
		if _, err := d.read(newRequest(ctx, "GET", "/", nil, 0)); !errors.Is(err, context.Canceled) || <-d.reusable {
			t.Errorf("%q: %v", response, err)
		}
	}
}

func TestSwitchedConnectionHasBufferedData(t *testing.T) {
	d := dial(t, func(conn net.Conn, r *bufio.Reader) {
		http.ReadRequest(r)
		io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nhello")
		line, _ := r.ReadString('\n')
		io.WriteString(conn, line)
	})
	res, err := d.send(newRequest(t.Context(), "GET", "/", nil, 0))
	if err != nil {
		t.Fatal(err)
	}
	both := res.Body.(io.ReadWriteCloser)
	io.WriteString(both, ", world\n")
	if all, err := io.ReadAll(both); string(all) != "hello, world\n" || err != nil {
		t.Errorf("got %q, %v", all, err)
	}
	both.Close()
	if <-d.reusable {
		t.Error("the connection is reusable")
	}
}
