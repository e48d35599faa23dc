package egress

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/flow"
	"github.com/doze-run/doze/egress/proxy"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/ruleset"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

const proxyKey = "doze_key-of-ann"

// agent is a program outside of sandboxes that uses the proxy.
type agent struct {
	*box   // only for its rig and checks
	proxy  *httptest.Server
	Client *http.Client
}

// agent starts a proxy with TLS and returns a client of it.
func (r *rig) agent() *agent {
	r.t.Helper()
	handler := &proxy.Handler{Egress: r.Egress, Authenticate: func(key string) (string, bool) { return owner, key == proxyKey }}
	a := &agent{box: &box{rig: r}}
	a.proxy = httptest.NewUnstartedServer(handler)
	a.proxy.EnableHTTP2 = true
	a.proxy.StartTLS()
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(r.Trust())
	roots.AppendCertsFromPEM(r.servers.ca)
	roots.AddCert(a.proxy.Certificate())
	at, _ := url.Parse(a.proxy.URL)
	at.User = url.UserPassword("anybody", proxyKey)
	transport := &http.Transport{Proxy: http.ProxyURL(at), TLSClientConfig: &tls.Config{RootCAs: roots}} // without HTTP/2, because net/http would negotiate it with the proxy and then send CONNECT over HTTP/1.1
	a.Client = &http.Client{Transport: transport, Timeout: testkit.Patience}
	a.box.Client = a.Client
	r.t.Cleanup(a.proxy.Close)
	r.t.Cleanup(transport.CloseIdleConnections)
	return a
}

// rules sets the owner's rules.
func (a *agent) rules(rules ...rule.Rule) {
	a.t.Helper()
	if _, _, err := a.SetRules(testkit.Context(a.t), owner, "", ruleset.Update{Rules: rules}); err != nil {
		a.t.Fatal(err)
	}
}

// entry waits for an entry about a host.
func (a *agent) entry(host string) audit.Entry {
	a.t.Helper()
	flows, stop := a.Flows.Follow(flow.ProxyName(owner), audit.Filter{})
	defer stop()
	ctx := testkit.Context(a.t)
	for {
		select {
		case e := <-flows:
			if e.Host == host {
				return e
			}
		case <-ctx.Done():
			a.t.Fatalf("no entry about %s: %+v", host, a.Flows.Entries(flow.ProxyName(owner), audit.Filter{}))
		}
	}
}

func TestProxyClientsGetTheSecretsOfTheirOwnersRules(t *testing.T) {
	a := newRig(t).agent()
	a.push("bearer", bearer(1))
	a.secret("api", token, "a.web.test")
	a.rules(through("a.web.test", "bearer", "api"))
	a.servers.handle(echo)
	a.want(a.get("https://a.web.test/user"), 200, "Bearer "+strings.Repeat("*", len(token)))
	got := a.servers.last(t)
	if got.Header.Get("Authorization") != "Bearer "+token {
		t.Errorf("the server got %v", got.Header)
	}
	e := a.entry("a.web.test")
	if e.Sandbox != "proxy/ann" || e.Kind != audit.Request || e.Verdict != audit.Allow || e.Rule != "owner/through" || len(e.Secrets) != 1 {
		t.Errorf("the audit log says %+v", e)
	}
	flows, _ := json.Marshal(a.Flows.Entries(flow.ProxyName(owner), audit.Filter{}))
	for _, secret := range []string{token, proxyKey} {
		if strings.Contains(string(flows), secret) || strings.Contains(a.log.String(), secret) {
			t.Errorf("%q is in the audit log or the node's log", secret)
		}
	}
}

func TestProxyRequestsWithoutTLSAreDecidedOnOneByOne(t *testing.T) {
	a := newRig(t).agent()
	a.rules(rule.Rule{Name: "no", Hosts: []string{"a.plain.test"}, Paths: []string{"/no"}, Action: rule.Deny})
	a.want(a.get("http://a.plain.test/yes?q=1"), 200, "this is a.plain.test")
	got := a.servers.last(t)
	for name := range got.Header {
		if strings.HasPrefix(name, "Proxy-") {
			t.Errorf("the server got %s", name)
		}
	}
	if got.RequestURI != "/yes?q=1" {
		t.Errorf("the server got %s", got.RequestURI)
	}
	a.want(a.get("http://a.plain.test/no"), 403, `"rule":"owner/no"`)
	a.rules() // for the next request
	a.want(a.get("http://a.plain.test/no"), 200, "this is a.plain.test")
	if e := a.entry("a.plain.test"); e.Kind != audit.Request || e.Path != "/yes" || e.Verdict != audit.Allow {
		t.Errorf("the audit log says %+v", e)
	}
}

func TestProxyConnectionsPassThroughUnlessARuleInspectsThem(t *testing.T) {
	a := newRig(t).agent()
	a.want(a.get("https://b.web.test/x"), 200, "this is b.web.test")
	a.Client.CloseIdleConnections()
	if e := a.entry("b.web.test"); e.Kind != audit.Connection || e.Verdict != audit.Allow || e.Rule != "default" || e.BytesIn == 0 || e.BytesOut == 0 {
		t.Errorf("the audit log says %+v", e)
	}
}

// connect requests a tunnel from the proxy over HTTP/1.1 and returns the response.
func (a *agent) connect(to string, more ...string) (net.Conn, *bufio.Reader, *http.Response) {
	a.t.Helper()
	config := a.proxy.Client().Transport.(*http.Transport).TLSClientConfig.Clone()
	config.NextProtos = nil // the HTTP/2 client adds its own
	conn, err := tls.Dial("tcp", a.proxy.Listener.Addr().String(), config)
	if err != nil {
		a.t.Fatal(err)
	}
	a.t.Cleanup(func() { conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(testkit.Patience))
	fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\nHost: %s\r\nProxy-Authorization: Bearer %s\r\n\r\n%s", to, to, proxyKey, strings.Join(more, ""))
	from := bufio.NewReader(conn)
	res, err := http.ReadResponse(from, &http.Request{Method: "CONNECT"})
	if err != nil {
		a.t.Fatal(err)
	}
	return conn, from, res
}

func TestDeniedTunnelsGetTheReason(t *testing.T) {
	a := newRig(t).agent()
	a.rules(rule.Rule{Name: "no", Hosts: []string{"*.tcp.test"}, Action: rule.Deny, Reason: "not that one"})
	for to, want := range map[string]struct {
		status int
		reason string
	}{
		"a.tcp.test:7":         {403, "not that one"},
		"a.tcp.test:443":       {403, "not that one"},
		"127.0.0.1:22":         {403, "the address was not looked up by a name"},
		"[::ffff:10.0.0.1]:22": {403, "the address was not looked up by a name"},
	} {
		_, from, res := a.connect(to)
		body, err := io.ReadAll(io.LimitReader(from, res.ContentLength))
		if err != nil || res.StatusCode != want.status || !strings.Contains(string(body), want.reason) || res.Header.Get(problem.HeaderError) != "egress_denied" {
			t.Errorf("%s: %d %q, %v", to, res.StatusCode, body, err)
		}
	}
	if e := a.entry("a.tcp.test"); e.Kind != audit.Connection || e.Verdict != audit.Deny || e.Rule != "owner/no" || e.Reason != "not that one" {
		t.Errorf("the audit log says %+v", e)
	}
}

func TestTunnelsCarryEarlyDataAndHalfClose(t *testing.T) {
	a := newRig(t).agent()
	conn, from, res := a.connect("a.tcp.test:7", "early, ")
	if res.StatusCode != 200 {
		t.Fatal(res.Status)
	}
	fmt.Fprint(conn, "late")
	if err := conn.(*tls.Conn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(from); err != nil || string(got) != "early, late" {
		t.Errorf("%q, %v", got, err)
	}
	if e := a.entry("a.tcp.test"); e.BytesIn != 11 || e.BytesOut != 11 || e.Verdict != audit.Allow || e.Port != 7 {
		t.Errorf("the audit log says %+v", e)
	}
}

func TestTunnelsRequireTheNameOfTheirTarget(t *testing.T) {
	a := newRig(t).agent()
	conn, from, res := a.connect("a.web.test:443")
	if res.StatusCode != 200 {
		t.Fatal(res.Status)
	}
	before := a.servers.count()
	inner := tls.Client(&tunneled{conn, from}, &tls.Config{ServerName: "b.web.test", InsecureSkipVerify: true})
	if err := inner.HandshakeContext(testkit.Context(t)); err == nil {
		t.Error("a handshake for another host succeeded")
	}
	if e := a.entry("a.web.test"); e.Verdict != audit.Deny || !strings.Contains(e.Reason, "b.web.test") {
		t.Errorf("the audit log says %+v", e)
	}
	if a.servers.count() != before {
		t.Error("the server got a request")
	}
}

type tunneled struct {
	net.Conn
	from io.Reader
}

func (c *tunneled) Read(p []byte) (int, error) { return c.from.Read(p) }

// http2Tunnel requests a tunnel over HTTP/2.
func (a *agent) http2Tunnel(to string) (io.WriteCloser, *http.Response) {
	a.t.Helper()
	client := a.proxy.Client()
	up, sending := io.Pipe()
	a.t.Cleanup(func() { sending.Close() })
	r := newRequest(a.t, "CONNECT", a.proxy.URL, up)
	r.Host = to
	r.Header.Set("Proxy-Authorization", "Bearer "+proxyKey)
	res, err := client.Do(r)
	if err != nil {
		a.t.Fatal(err)
	}
	a.t.Cleanup(func() { res.Body.Close() })
	if res.ProtoMajor != 2 {
		a.t.Fatal(res.Proto)
	}
	return sending, res
}

func TestTunnelsOverHTTP2AreIntercepted(t *testing.T) {
	a := newRig(t).agent()
	a.push("bearer", bearer(1))
	a.secret("api", token, "a.web.test")
	a.rules(through("a.web.test", "bearer", "api"))
	up, res := a.http2Tunnel("a.web.test:443")
	if res.StatusCode != 200 {
		t.Fatal(res.Status)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(a.Trust())
	inner := tls.Client(&streamed{up: up, down: res.Body}, &tls.Config{ServerName: "a.web.test", RootCAs: roots, NextProtos: []string{"http/1.1"}})
	from := bufio.NewReader(inner)
	for range 2 { // the second requires that the deadline of the first's background read is reset
		fmt.Fprint(inner, "GET / HTTP/1.1\r\nHost: a.web.test\r\n\r\n")
		res, err := http.ReadResponse(from, nil)
		if err != nil {
			t.Fatal(err)
		}
		if body, err := io.ReadAll(res.Body); err != nil || res.StatusCode != 200 || string(body) != "this is a.web.test" {
			t.Errorf("%s %q, %v", res.Status, body, err)
		}
	}
	if got := a.servers.last(t); got.Header.Get("Authorization") != "Bearer "+token {
		t.Errorf("the server got %v", got.Header)
	}
}

func TestTunnelsOverHTTP2CarryTheEndOfTheStream(t *testing.T) {
	a := newRig(t).agent()
	up, res := a.http2Tunnel("a.tcp.test:7")
	fmt.Fprint(up, "hello")
	up.Close()
	if got, err := io.ReadAll(res.Body); err != nil || string(got) != "hello" {
		t.Errorf("%q, %v", got, err)
	}
	if e := a.entry("a.tcp.test"); e.BytesIn != 5 || e.BytesOut != 5 {
		t.Errorf("the audit log says %+v", e)
	}
}

// streamed is a tunnel over HTTP/2.
type streamed struct {
	net.Conn
	up   io.WriteCloser
	down io.ReadCloser
}

func (s *streamed) Read(p []byte) (int, error)  { return s.down.Read(p) }
func (s *streamed) Write(p []byte) (int, error) { return s.up.Write(p) }
func (s *streamed) Close() error                { return s.up.Close() }

func TestProxyConnectionsOfAnOwnerAreBounded(t *testing.T) {
	a := newRig(t, func(c *Config) { c.Settings.MaxSandboxConnections = 2 }).agent()
	var open []net.Conn
	for range 2 {
		conn, _, res := a.connect("a.tcp.test:7")
		if res.StatusCode != 200 {
			t.Fatal(res.Status)
		}
		open = append(open, conn)
	}
	if _, _, res := a.connect("a.tcp.test:7"); res.StatusCode != 503 || res.Header.Get(problem.HeaderError) != "egress_limit_exceeded" {
		t.Errorf("one more: %s %v", res.Status, res.Header)
	}
	if n := a.carrier.Connections.Used(); n != 2 {
		t.Errorf("%d connections count", n)
	}
	for _, conn := range open {
		conn.Close()
	}
	a.entry("a.tcp.test")
	a.want(a.get("http://a.plain.test/"), 200, "this is")
}

// A rule with a placeholder applies, but programs outside of sandboxes get no placeholder.
func TestProxyClientsHaveNoPlaceholders(t *testing.T) {
	a := newRig(t).agent()
	a.secret("api", token, "a.web.test")
	a.rules(offering("a.web.test"))
	a.want(a.get("https://a.web.test/user"), 200, "this is a.web.test")
	if e := a.entry("a.web.test"); e.Kind != audit.Request || e.Rule != "owner/offer" || len(e.Secrets) != 0 {
		t.Errorf("the audit log says %+v", e)
	}
	explained, err := a.ExplainProxy(testkit.Context(t), owner, "GET", "https://a.web.test/user", nil)
	if err != nil || explained.Rule != "owner/offer" || explained.Placeholders != nil {
		t.Errorf("%+v, %v", explained, err)
	}
	o, err := a.proxyClient(testkit.Context(t), owner)
	if err != nil || o.Table().Offers != nil || o.Table().Environment != nil {
		t.Errorf("%+v, %v", o, err)
	}
}

func TestTunnelsEndWithTheNode(t *testing.T) {
	r := newRig(t)
	a := r.agent()
	to, passed, res := a.connect("a.tcp.test:7")
	_, silent, res2 := a.connect("a.web.test:443") // the client must speak first
	up, stream := a.http2Tunnel("a.tcp.test:7")
	if res.StatusCode != 200 || res2.StatusCode != 200 || stream.StatusCode != 200 {
		t.Fatal(res.Status, res2.Status, stream.Status)
	}
	for _, one := range []struct {
		io.Writer
		io.Reader
	}{{to, passed}, {up, stream.Body}} { // the tunnel reaches the server
		fmt.Fprint(one, "hello")
		if _, err := io.ReadFull(one, make([]byte, 5)); err != nil {
			t.Fatal(err)
		}
	}
	node := r.Egress
	if n := node.carrier.Connections.Used(); n != 3 {
		t.Errorf("%d connections count, want 3", n)
	}
	closed := make(chan error, 1)
	go func() { closed <- node.Close() }() // ends with the tunnels, or their clients
	for name, from := range map[string]io.Reader{"one that passes": passed, "one that is awaited to speak": silent, "one over HTTP/2": stream.Body} {
		_, err := io.Copy(io.Discard, from)
		if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("%s did not end", name)
		}
	}
	if err := <-closed; err != nil {
		t.Error(err)
	}
	if n := node.carrier.Connections.Used(); n != 0 {
		t.Errorf("%d connections count", n)
	}
	if _, _, res := a.connect("a.tcp.test:7"); res.StatusCode != http.StatusServiceUnavailable || res.Header.Get(problem.HeaderError) != "node_unavailable" {
		t.Errorf("a tunnel through a node that is closed: %s %v", res.Status, res.Header)
	}
	r.open() // for the cleanup, which closes it
}

func TestRequestsOfStalledClientsEndWithTheNode(t *testing.T) {
	r := newRig(t)
	w := &stuck{header: http.Header{}, writing: make(chan struct{}), limited: make(chan struct{})}
	ended := make(chan struct{})
	go func() { // ends with the node
		defer close(ended)
		defer func() { _ = recover() }() // http.ErrAbortHandler
		r.Request(w, newRequest(t, "GET", "http://a.plain.test/", nil), owner, proxy.Target{Host: "a.plain.test", Port: 80})
	}()
	<-w.writing
	r.reopen()
	<-ended
}

// stuck is a client that reads nothing: a write ends at its deadline.
type stuck struct {
	header           http.Header
	writing, limited chan struct{}
	once, limit      sync.Once
}

func (w *stuck) Header() http.Header { return w.header }

func (w *stuck) WriteHeader(int) {}

func (w *stuck) Write([]byte) (int, error) {
	w.once.Do(func() { close(w.writing) })
	<-w.limited
	return 0, os.ErrDeadlineExceeded
}

func (w *stuck) SetWriteDeadline(time.Time) error {
	w.limit.Do(func() { close(w.limited) })
	return nil
}
