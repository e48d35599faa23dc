package egress

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/flow"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/tls/clienthello/hellotest"
	"github.com/doze-run/doze/testkit"
)

// greases sends a request for authority over HTTPS to a host and returns its status. Its
// ClientHello has a GREASE ECH extension, as in browsers; Go's client does not send one.
func (b *box) greases(address, authority string) (status int) {
	b.t.Helper()
	tstclnt, err := exec.LookPath("tstclnt")
	if err != nil {
		b.t.Fatal("there is no tstclnt: run packaging/host/setup --with-tests")
	}
	conn, err := b.DialContext(testkit.Context(b.t), "tcp", address)
	if err != nil {
		b.t.Fatal(err)
	}
	host, _, _ := net.SplitHostPort(address)
	_, port, _ := net.SplitHostPort(b.relay(conn))
	cmd := exec.CommandContext(testkit.Context(b.t), tstclnt, "-h", "127.0.0.1", "-p", port, "-a", host, "-i", "100", "-o", "-D")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		b.t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		b.t.Fatal(err)
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		b.t.Fatal(err)
	}
	_, _ = io.WriteString(stdin, "GET /x HTTP/1.1\r\nHost: "+authority+"\r\n\r\n")
	res, err := http.ReadResponse(bufio.NewReader(stdout), nil)
	_ = cmd.Process.Kill() // or it waits for the server to close
	_ = cmd.Wait()
	if err != nil {
		b.t.Fatalf("tstclnt: %v: %s", err, stderr.Bytes())
	}
	return res.StatusCode
}

// relay listens on the loopback for one client, which it connects with conn. It returns the
// address.
func (b *box) relay(conn net.Conn) string {
	b.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.t.Fatal(err)
	}
	var relaying sync.WaitGroup
	relaying.Go(func() { // ends with either connection, or the test
		defer conn.Close()
		client, err := l.Accept()
		if err != nil {
			return
		}
		relaying.Go(func() {
			defer client.Close()
			_, _ = io.Copy(client, conn)
		})
		_, _ = io.Copy(conn, client)
	})
	b.t.Cleanup(func() {
		l.Close()
		conn.Close()
		relaying.Wait()
	})
	return l.Addr().String()
}

func TestConnectionsWithECHAreIntercepted(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	b.servers.handle(echo)
	for _, port := range []string{"443", "8443"} {
		host := "p" + port + ".web.test"
		if got := b.greases(host+":"+port, host+":"+port); got != 200 {
			t.Errorf("got %d", got)
		}
		e := b.entry(host, nil)
		if e.Kind != audit.Request || e.Verdict != audit.Allow || e.Rule != "default" || e.Reason != flow.ReasonECH || e.Status != 200 || e.Path != "/x" {
			t.Errorf("the audit log says %+v", e)
		}
		if got := b.servers.last(t); got.TLS.ServerName != host {
			t.Errorf("the server got %+v", got.TLS)
		}
		// Requests for another host are refused.
		before := b.servers.count()
		if got := b.greases(host+":"+port, "other.web.test:"+port); got != http.StatusMisdirectedRequest {
			t.Errorf("got %d", got)
		}
		e = b.entry(host, func(e audit.Entry) bool { return e.Status == 421 })
		if e.Verdict != audit.Deny || !strings.Contains(e.Reason, "other.web.test") {
			t.Errorf("the audit log says %+v", e)
		}
		if b.servers.count() != before {
			t.Error("a server got it")
		}
	}
}

// hidden connects to address with a ClientHello that hides another name (ECH).
func (b *box) hidden(address, public, hidden string) error {
	b.t.Helper()
	conn, err := b.DialContext(testkit.Context(b.t), "tcp", address)
	if err != nil {
		b.t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(testkit.Patience))
	configs, err := hellotest.ECHConfigs(public)
	if err != nil {
		b.t.Fatal(err)
	}
	return tls.Client(conn, &tls.Config{
		ServerName: hidden, MinVersion: tls.VersionTLS13, EncryptedClientHelloConfigList: configs,
		EncryptedClientHelloRejectionVerify: func(tls.ConnectionState) error { return nil },
	}).Handshake()
}

func TestHiddenNamesReachNoServer(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	var received bytes.Buffer
	b.servers.mu.Lock()
	b.servers.speak = func(conn net.Conn) { _, _ = io.Copy(&received, conn) }
	b.servers.mu.Unlock()
	b.rules(rule.Rule{Name: "look", Hosts: []string{"look.tcp.test"}, Ports: []rule.Ports{{First: 1, Last: 65535}}, Methods: []string{"GET"}, Action: rule.Allow},
		rule.Rule{Name: "never", Hosts: []string{"never.tcp.test"}, Ports: []rule.Ports{{First: 443, Last: 443}}, Action: rule.Deny, Reason: "not this one"})
	for _, address := range []string{"pass.tcp.test:443", "other-port.tcp.test:8443", "look.tcp.test:443", "never.tcp.test:443"} {
		host, _, _ := net.SplitHostPort(address)
		var rejected *tls.ECHRejectionError
		if err := b.hidden(address, host, "hidden.tcp.test"); !errors.As(err, &rejected) || len(rejected.RetryConfigList) > 0 {
			t.Errorf("%s: %v", address, err)
		}
		e := b.entry(host, func(e audit.Entry) bool { return e.Verdict == audit.Error })
		if e.Kind != audit.Connection || !strings.Contains(e.Reason, "encrypted client hello required") {
			t.Errorf("the audit log says %+v", e)
		}
	}
	// The outer name must be the name that was looked up.
	if err := b.hidden("pass2.tcp.test:443", "public.tcp.test", "hidden.tcp.test"); err == nil {
		t.Error("another public name: TLS was made")
	}
	if e := b.entry("pass2.tcp.test", nil); e.Verdict != audit.Deny || !strings.Contains(e.Reason, `for "public.tcp.test", not for the host`) {
		t.Errorf("the audit log says %+v", e)
	}
	b.close() // all connections have ended
	b.servers.tcp.Close()
	b.servers.serving.Wait()
	if received.Len() > 0 {
		t.Errorf("servers received %q", received.Bytes())
	}
	b.open()
}

func TestOperatorsCanAllowECH(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Settings.AllowECH = true })
	b := r.box("k3f9x2m7q1az")
	for _, address := range []string{"a.web.test:443", "b.web.test:8443"} {
		host, _, _ := net.SplitHostPort(address)
		if got := b.greases(address, address); got != 200 {
			t.Errorf("got %d", got)
		}
		if e := b.entry(host, nil); e.Kind != audit.Connection || e.Verdict != audit.Allow || e.BytesIn == 0 {
			t.Errorf("the audit log says %+v", e)
		}
	}
	if flows := b.Flows.Entries(string(b.sb.ID), audit.Filter{}); slices.ContainsFunc(flows, func(e audit.Entry) bool { return e.Kind == audit.Request }) {
		t.Errorf("the audit log says %+v", flows)
	}
}
