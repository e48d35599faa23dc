package testkit_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/doze-run/doze/testkit"
)

// client sends every request to the upstream, whatever its host.
func client(t *testing.T, u *testkit.Upstream, http2 bool) *http.Client {
	t.Helper()
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(u.PEM())
	p := new(http.Protocols)
	p.SetHTTP1(!http2)
	p.SetHTTP2(http2)
	p.SetUnencryptedHTTP2(http2)
	transport := &http.Transport{
		Protocols: p, TLSClientConfig: &tls.Config{RootCAs: roots},
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", u.Addr().String())
		},
	}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

func TestUpstream(t *testing.T) {
	for _, o := range []testkit.UpstreamOptions{{}, {TLS: true}, {HTTP2: true}, {TLS: true, HTTP2: true, Names: []string{"a.test", "127.0.0.1"}}} {
		t.Run(fmt.Sprintf("tls=%v http2=%v", o.TLS, o.HTTP2), func(t *testing.T) {
			u := testkit.NewUpstream(t, o)
			scheme, host, proto := "http", "www.example.com", "HTTP/1.1"
			if o.TLS {
				scheme = "https"
			}
			if o.Names != nil {
				host = o.Names[0]
			}
			if o.HTTP2 {
				proto = "HTTP/2.0"
			}
			c := client(t, u, o.HTTP2)
			post := func(path string) string {
				res, err := c.Post(scheme+"://"+host+path, "text/plain", strings.NewReader("a body"))
				if err != nil {
					t.Fatal(err)
				}
				return testkit.Body(t, res)
			}
			if got := post("/one"); got != "this is "+host {
				t.Errorf("got %q", got)
			}
			u.Handle(func(w http.ResponseWriter, r *http.Request) {
				b, _ := io.ReadAll(r.Body)
				fmt.Fprintf(w, "%s %s", r.URL.Path, b)
			})
			if got := post("/two"); got != "/two a body" {
				t.Errorf("got %q", got)
			}
			testkit.Diff(t, "number of requests", len(u.Requests()), 2)
			last := u.Last(t)
			testkit.Diff(t, "last request", []string{last.Method, last.URL.Path, last.Host, last.Proto, last.Text()}, []string{"POST", "/two", host, proto, "a body"})
		})
	}
}

func TestUpstreamWithoutRequestsHasNoLast(t *testing.T) {
	u := testkit.NewUpstream(t, testkit.UpstreamOptions{})
	wantFatal(t, run(func(f *fakeT) { u.Last(f) }), "no request")
}

func TestStreamedUpstreamRespondsDuringTheUpload(t *testing.T) {
	// HTTP/2, for a client of HTTP/1.1 may end its upload with the response.
	u := testkit.NewUpstream(t, testkit.UpstreamOptions{Streamed: true, HTTP2: true})
	u.Handle(func(w http.ResponseWriter, r *http.Request) {
		b := make([]byte, 4)
		if _, err := io.ReadFull(r.Body, b); err != nil {
			t.Error(err)
		}
		http.NewResponseController(w).Flush()
		_, _ = io.Copy(w, r.Body)
	})
	reader, writer := io.Pipe()
	defer writer.Close()
	go func() { _, _ = io.WriteString(writer, "half") }()
	req, err := http.NewRequestWithContext(testkit.Context(t), "POST", "http://www.example.com/", reader)
	if err != nil {
		t.Fatal(err)
	}
	res, err := client(t, u, true).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	if got := u.Last(t).Text(); got != "half" {
		t.Errorf("recorded %q during the upload", got)
	}
	_, _ = io.WriteString(writer, "rest")
	writer.Close()
	if got := testkit.Body(t, res); got != "rest" {
		t.Errorf("got %q", got)
	}
	if got := u.Last(t).Text(); got != "halfrest" {
		t.Errorf("recorded %q", got)
	}
}

func TestRawUpstream(t *testing.T) {
	for _, secure := range []bool{false, true} {
		began := make(chan struct{}, 2)
		u := testkit.NewUpstream(t, testkit.UpstreamOptions{TLS: secure, Names: []string{"a.test"}, Raw: func(conn net.Conn) {
			_, _ = io.WriteString(conn, "hello\n")
			began <- struct{}{}
			_, _ = io.Copy(conn, conn) // ends when the upstream does
		}})
		conn, err := new(net.Dialer).DialContext(testkit.Context(t), "tcp", u.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		if secure {
			roots := x509.NewCertPool()
			roots.AppendCertsFromPEM(u.PEM())
			conn = tls.Client(conn, &tls.Config{RootCAs: roots, ServerName: "a.test"})
		}
		t.Cleanup(func() { conn.Close() }) // before the upstream's cleanup
		if line, err := bufio.NewReader(conn).ReadString('\n'); line != "hello\n" {
			t.Errorf("TLS %v: %q, %v", secure, line, err)
		}
		testkit.Receive(t, "a connection", began)
	}
}

func TestRawUpstreamEndsConnectionsWithTheTest(t *testing.T) {
	ended := make(chan struct{})
	t.Run("test", func(t *testing.T) {
		began := make(chan struct{})
		u := testkit.NewUpstream(t, testkit.UpstreamOptions{Raw: func(conn net.Conn) {
			defer close(ended)
			close(began)
			_, _ = io.Copy(io.Discard, conn)
		}})
		conn, err := net.Dial("tcp", u.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			defer conn.Close()
			_, _ = io.Copy(io.Discard, conn)
		}()
		testkit.Closed(t, "a connection", began)
	})
	select {
	case <-ended:
	default:
		t.Error("the connection outlives the test")
	}
}
