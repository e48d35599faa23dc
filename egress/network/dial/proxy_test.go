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

// echoingProxy writes its request to the tunnel and then echoes.
func echoingProxy(conn net.Conn) {
	r := bufio.NewReader(conn)
	q, err := http.ReadRequest(r)
	if err != nil {
		return
	}
	_, _ = io.WriteString(conn, "HTTP/1.1 200 Connection established\r\nVia: x\r\n\r\n"+
		q.Method+" "+q.RequestURI+" "+q.Host+" "+q.Header.Get("Proxy-Authorization")+"\n")
	_, _ = io.Copy(conn, r)
}

func dialThrough(t *testing.T, cfg testConfig, target Target) (net.Conn, *bufio.Reader, string) {
	t.Helper()
	conn, err := cfg.new().Dial(t.Context(), target)
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
	at := peer(t, echoingProxy)
	z := &zone{names: map[string][][]netip.Addr{"x.example": {addrs("10.0.0.1", "9.9.9.9")}, "six.example": {addrs("2620:fe::1")}}}
	cfg := testConfig{resolver: z, Config: Config{Proxy: parseURL("http://user:pass%3Aword@" + at.String())}}
	conn, r, line := dialThrough(t, cfg, Target{Host: "x.example", Port: 443})
	credentials := base64.StdEncoding.EncodeToString([]byte("user:pass:word"))
	if want := "CONNECT 9.9.9.9:443 9.9.9.9:443 Basic " + credentials; line != want {
		t.Errorf("got %q, want %q", line, want)
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
	if _, _, line := dialThrough(t, cfg, Target{Host: "six.example", Port: 22}); line != "CONNECT [2620:fe::1]:22 [2620:fe::1]:22" {
		t.Errorf("got %q", line)
	}
	if _, _, line := dialThrough(t, cfg, Target{Address: netip.MustParseAddr("9.9.9.8"), Port: 22}); line != "CONNECT 9.9.9.8:22 9.9.9.8:22" {
		t.Errorf("got %q", line)
	}
	var refused *RefusedError
	if _, err := cfg.new().Dial(t.Context(), Target{Address: netip.MustParseAddr("10.0.0.1"), Port: 22}); !errors.As(err, &refused) {
		t.Error(err)
	}
}

func TestProxyMayHaveAnyAddress(t *testing.T) {
	at := peer(t, echoingProxy)
	z := &zone{names: map[string][][]netip.Addr{"proxy.corp": {addrs("127.0.0.1")}, "x.example": {addrs("9.9.9.9")}}}
	cfg := testConfig{resolver: z, Config: Config{Proxy: parseURL("http://proxy.corp:" + at.String()[len("127.0.0.1:"):])}}
	if _, _, line := dialThrough(t, cfg, Target{Host: "x.example", Port: 443}); line != "CONNECT 9.9.9.9:443 9.9.9.9:443" {
		t.Errorf("got %q", line)
	}
	// Only the operator's configuration leads to the proxy's address.
	if _, err := cfg.new().Dial(t.Context(), Target{Address: at.Addr(), Port: at.Port()}); err == nil {
		t.Error("the node's loopback was reached")
	}
}

func TestOverridesAndPrivateAddressesAreReachedDirectly(t *testing.T) {
	at := peer(t, func(conn net.Conn) { _, _ = io.WriteString(conn, "direct\n") })
	cfg := testConfig{resolver: new(zone), Config: Config{
		Proxy:     parseURL("http://127.0.0.1:1"),
		Overrides: map[string]Override{"git.corp": {Addrs: []netip.Addr{at.Addr()}}},
	}}
	if _, _, line := dialThrough(t, cfg, Target{Host: "git.corp", Port: at.Port()}); line != "direct" {
		t.Errorf("got %q", line)
	}
	d, r := newRecorded(testConfig{
		resolver: &zone{names: map[string][][]netip.Addr{"db.corp": {addrs("10.0.0.1")}}},
		Config:   Config{Proxy: parseURL("http://127.0.0.1:1")},
	})
	if _, err := d.Dial(t.Context(), Target{Host: "db.corp", Port: 1, Private: true}); err != nil || len(r.dialed) != 1 || r.dialed[0] != "10.0.0.1" {
		t.Errorf("%v, dialed %q", err, r.dialed)
	}
}

func TestProxyOverTLS(t *testing.T) {
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
	cfg := testConfig{resolver: z, Config: Config{Proxy: parseURL(s.URL), ProxyRoots: x509.NewCertPool()}}
	if _, err := cfg.new().Dial(t.Context(), Target{Host: "x.example", Port: 443}); err == nil || !strings.Contains(err.Error(), "TLS with the upstream proxy") {
		t.Error(err)
	}
	cfg.ProxyRoots.AddCert(s.Certificate())
	if _, _, line := dialThrough(t, cfg, Target{Host: "x.example", Port: 443}); line != "secured" {
		t.Errorf("got %q", line)
	}
}

func TestErrorsOfTheProxy(t *testing.T) {
	for name, tc := range map[string]struct {
		response string
		waits    bool // instead of closing the connection
		want     string
	}{
		"refuses":               {"HTTP/1.1 403 Forbidden\r\n\r\n", true, `the upstream proxy responded with "403 Forbidden"`},
		"wants credentials":     {"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", true, "407"},
		"disconnects":           {"", false, "read the upstream proxy's response"},
		"is not HTTP":           {"SSH-2.0-x\r\n", true, "read the upstream proxy's response"},
		"has an endless header": {"HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 2*maxProxyResponse), true, "read the upstream proxy's response"},
	} {
		t.Run(name, func(t *testing.T) {
			at := peer(t, func(conn net.Conn) {
				if _, err := http.ReadRequest(bufio.NewReader(conn)); err == nil {
					_, _ = io.WriteString(conn, tc.response)
				}
				if tc.waits {
					_, _ = io.Copy(io.Discard, conn)
				}
			})
			z := &zone{names: map[string][][]netip.Addr{"x.example": {addrs("9.9.9.1", "9.9.9.2", "9.9.9.3", "9.9.9.4")}}}
			d := testConfig{resolver: z, Config: Config{Proxy: parseURL("http://user:hidden@" + at.String())}}.new()
			_, err := d.Dial(t.Context(), Target{Host: "x.example", Port: 443})
			if err == nil || !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "hidden") || len(err.Error()) > 500 {
				t.Error(err)
			}
		})
	}
	t.Run("unreachable", func(t *testing.T) {
		d := testConfig{resolver: new(zone), Config: Config{Proxy: parseURL("http://127.0.0.1:1")}}.new()
		if _, err := d.Dial(t.Context(), Target{Address: netip.MustParseAddr("9.9.9.9"), Port: 443}); err == nil || !strings.Contains(err.Error(), "reach the upstream proxy") {
			t.Error(err)
		}
	})
}

func TestDialToSilentProxyIsCanceled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	at := peer(t, func(conn net.Conn) {
		_, _ = http.ReadRequest(bufio.NewReader(conn))
		cancel()
		_, _ = io.Copy(io.Discard, conn)
	})
	d := testConfig{resolver: new(zone), Config: Config{Proxy: parseURL("http://" + at.String())}}.new()
	if _, err := d.Dial(ctx, Target{Address: netip.MustParseAddr("9.9.9.9"), Port: 443}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestProxyIsAskedForTheNextAddress(t *testing.T) {
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
	if _, _, line := dialThrough(t, testConfig{resolver: z, Config: Config{Proxy: parseURL("http://" + at.String())}}, Target{Host: "x.example", Port: 443}); line != "9.9.9.9:443" {
		t.Errorf("got %q", line)
	}
}

func TestConnectionOutlivesItsDial(t *testing.T) {
	at := peer(t, echoingProxy)
	cfg := testConfig{resolver: new(zone), Config: Config{Proxy: parseURL("http://" + at.String())}}
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
