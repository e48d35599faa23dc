package dial

import (
	"bufio"
	"context"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"syscall"
	"testing"
)

type rawConn = syscall.RawConn

func parseURL(s string) *url.URL {
	u, err := url.Parse(s)
	if err != nil {
		panic(err)
	}
	return u
}

// peer starts a server on the loopback that calls serve for each connection, and returns the
// server's address.
func peer(t *testing.T, serve func(net.Conn)) netip.AddrPort {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() { defer conn.Close(); serve(conn) })
		}
	})
	t.Cleanup(func() { l.Close(); all.Wait() })
	return l.Addr().(*net.TCPAddr).AddrPort()
}

// asking is a proxy that reports the request in the tunnel itself and then echoes.
func asking(conn net.Conn) {
	r := bufio.NewReader(conn)
	q, err := http.ReadRequest(r)
	if err != nil {
		return
	}
	_, _ = io.WriteString(conn, "HTTP/1.1 200 Connection established\r\nVia: x\r\n\r\n"+
		q.Method+" "+q.RequestURI+" "+q.Host+" "+q.Header.Get("Proxy-Authorization")+"\n")
	_, _ = io.Copy(conn, r)
}

func dialThrough(t *testing.T, cfg Config, target Target) (net.Conn, *bufio.Reader, string) {
	t.Helper()
	conn, err := New(cfg).Dial(t.Context(), target)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	r := bufio.NewReader(conn)
	line, err := r.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return conn, r, strings.TrimSpace(line)
}

func TestPublicAddressesAreReachedThroughTheProxy(t *testing.T) {
	at := peer(t, asking)
	z := &zone{names: map[string][][]netip.Addr{"x.example": {addrs("10.0.0.1", "9.9.9.9")}, "six.example": {addrs("2620:fe::1")}}}
	cfg := Config{Resolver: z, Proxy: parseURL("http://user:pass%3Aword@" + at.String())}
	conn, r, said := dialThrough(t, cfg, Target{Host: "x.example", Port: 443})
	credentials := base64.StdEncoding.EncodeToString([]byte("user:pass:word"))
	if want := "CONNECT 9.9.9.9:443 9.9.9.9:443 Basic " + credentials; said != want {
		t.Errorf("asked %q, want %q", said, want)
	}
	if conn.RemoteAddr().String() != "9.9.9.9:443" {
		t.Errorf("to %s", conn.RemoteAddr())
	}
	if _, err := io.WriteString(conn, "hello"); err != nil {
		t.Fatal(err)
	}
	if err := conn.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if echo, err := io.ReadAll(r); string(echo) != "hello" || err != nil {
		t.Errorf("%q, %v", echo, err)
	}

	cfg.Proxy.User = nil
	if _, _, said := dialThrough(t, cfg, Target{Host: "six.example", Port: 22}); said != "CONNECT [2620:fe::1]:22 [2620:fe::1]:22" {
		t.Errorf("asked %q", said)
	}
	if _, _, said := dialThrough(t, cfg, Target{Address: netip.MustParseAddr("9.9.9.8"), Port: 22}); said != "CONNECT 9.9.9.8:22 9.9.9.8:22" {
		t.Errorf("asked %q", said)
	}
	var refused *RefusedError
	if _, err := New(cfg).Dial(t.Context(), Target{Address: netip.MustParseAddr("10.0.0.1"), Port: 22}); !errors.As(err, &refused) {
		t.Error(err)
	}
}

func TestTheProxyIsWhereTheOperatorSays(t *testing.T) {
	at := peer(t, asking)
	z := &zone{names: map[string][][]netip.Addr{"proxy.corp": {addrs("127.0.0.1")}, "x.example": {addrs("9.9.9.9")}}}
	cfg := Config{Resolver: z, Proxy: parseURL("http://proxy.corp:" + at.String()[len("127.0.0.1:"):])}
	if _, _, said := dialThrough(t, cfg, Target{Host: "x.example", Port: 443}); said != "CONNECT 9.9.9.9:443 9.9.9.9:443" {
		t.Errorf("asked %q", said)
	}
	// Only the operator's configuration leads to the proxy's address.
	if _, err := New(cfg).Dial(t.Context(), Target{Address: at.Addr(), Port: at.Port()}); err == nil {
		t.Error("the node's loopback was reached")
	}
}

func TestWhatTheOperatorNamedIsReachedDirectly(t *testing.T) {
	at := peer(t, func(conn net.Conn) { _, _ = io.WriteString(conn, "direct\n") })
	cfg := Config{
		Resolver:  new(zone),
		Proxy:     parseURL("http://127.0.0.1:1"),
		Overrides: map[string]Override{"git.corp": {Addrs: []netip.Addr{at.Addr()}}},
	}
	if _, _, said := dialThrough(t, cfg, Target{Host: "git.corp", Port: at.Port()}); said != "direct" {
		t.Errorf("said %q", said)
	}
	d, r := newRecorded(Config{
		Resolver: &zone{names: map[string][][]netip.Addr{"db.corp": {addrs("10.0.0.1")}}},
		Proxy:    parseURL("http://127.0.0.1:1"),
	})
	if _, err := d.Dial(t.Context(), Target{Host: "db.corp", Port: 1, Private: true}); err != nil || len(r.dialled) != 1 || r.dialled[0] != "10.0.0.1" {
		t.Errorf("%v, dialled %q", err, r.dialled)
	}
}

func TestProxiesThatSpeakTLS(t *testing.T) {
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\n\r\nsecured\n")
	}))
	s.Config.ErrorLog = log.New(io.Discard, "", 0) // one client does not trust the certificate
	s.StartTLS()
	defer s.Close()
	z := &zone{names: map[string][][]netip.Addr{"x.example": {addrs("9.9.9.9")}}}
	cfg := Config{Resolver: z, Proxy: parseURL(s.URL), ProxyRoots: x509.NewCertPool()}
	if _, err := New(cfg).Dial(t.Context(), Target{Host: "x.example", Port: 443}); err == nil || !strings.Contains(err.Error(), "TLS with the upstream proxy") {
		t.Error(err)
	}
	cfg.ProxyRoots.AddCert(s.Certificate())
	if _, _, said := dialThrough(t, cfg, Target{Host: "x.example", Port: 443}); said != "secured" {
		t.Errorf("said %q", said)
	}
}

func TestProxiesThatDoNotConnect(t *testing.T) {
	for name, tc := range map[string]struct {
		answer string
		waits  bool // instead of closing the connection
		want   string
	}{
		"refuses":           {"HTTP/1.1 403 Forbidden\r\n\r\n", true, `the upstream proxy answers "403 Forbidden"`},
		"wants credentials": {"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", true, "407"},
		"hangs up":          {"", false, "reading the upstream proxy's answer"},
		"is none":           {"SSH-2.0-x\r\n", true, "reading the upstream proxy's answer"},
		"has no end":        {"HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 2*maxProxyAnswer), true, "reading the upstream proxy's answer"},
	} {
		t.Run(name, func(t *testing.T) {
			at := peer(t, func(conn net.Conn) {
				if _, err := http.ReadRequest(bufio.NewReader(conn)); err == nil {
					_, _ = io.WriteString(conn, tc.answer)
				}
				if tc.waits {
					_, _ = io.Copy(io.Discard, conn)
				}
			})
			z := &zone{names: map[string][][]netip.Addr{"x.example": {addrs("9.9.9.1", "9.9.9.2", "9.9.9.3", "9.9.9.4")}}}
			d := New(Config{Resolver: z, Proxy: parseURL("http://user:hidden@" + at.String())})
			_, err := d.Dial(t.Context(), Target{Host: "x.example", Port: 443})
			if err == nil || !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "hidden") || len(err.Error()) > 500 {
				t.Error(err)
			}
		})
	}
	t.Run("is not there", func(t *testing.T) {
		d := New(Config{Resolver: new(zone), Proxy: parseURL("http://127.0.0.1:1")})
		if _, err := d.Dial(t.Context(), Target{Address: netip.MustParseAddr("9.9.9.9"), Port: 443}); err == nil || !strings.Contains(err.Error(), "reaching the upstream proxy") {
			t.Error(err)
		}
	})
}

func TestASilentProxyIsLeft(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	at := peer(t, func(conn net.Conn) {
		_, _ = http.ReadRequest(bufio.NewReader(conn))
		cancel()
		_, _ = io.Copy(io.Discard, conn)
	})
	d := New(Config{Resolver: new(zone), Proxy: parseURL("http://" + at.String())})
	if _, err := d.Dial(ctx, Target{Address: netip.MustParseAddr("9.9.9.9"), Port: 443}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestAnotherAddressIsAskedForWhenTheProxyCannotReachOne(t *testing.T) {
	at := peer(t, func(conn net.Conn) {
		q, err := http.ReadRequest(bufio.NewReader(conn))
		switch {
		case err != nil:
		case strings.HasPrefix(q.Host, "["):
			_, _ = io.WriteString(conn, "HTTP/1.1 502 Bad Gateway\r\n\r\n")
		default:
			_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\n\r\n"+q.Host+"\n")
		}
	})
	z := &zone{names: map[string][][]netip.Addr{"x.example": {addrs("2620:fe::1", "9.9.9.9")}}}
	if _, _, said := dialThrough(t, Config{Resolver: z, Proxy: parseURL("http://" + at.String())}, Target{Host: "x.example", Port: 443}); said != "9.9.9.9:443" {
		t.Errorf("asked for %q", said)
	}
}

func TestTheEndOfADialIsNotTheConnections(t *testing.T) {
	at := peer(t, asking)
	cfg := Config{Resolver: new(zone), Proxy: parseURL("http://" + at.String())}
	conn, r, _ := dialThrough(t, cfg, Target{Address: netip.MustParseAddr("9.9.9.9"), Port: 443})
	for range 100 {
		if _, err := io.WriteString(conn, "later\n"); err != nil {
			t.Fatal(err)
		}
		if line, err := r.ReadString('\n'); line != "later\n" {
			t.Fatalf("%q, %v", line, err)
		}
	}
}
