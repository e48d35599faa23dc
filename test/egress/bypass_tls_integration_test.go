//go:build integration

package egress

import (
	"strings"
	"testing"

	"github.com/doze-run/doze/api/client"
)

// A name in TLS that is not the one that led there is another host's.
func TestTLSForAnotherHostIsRefused(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t).canSay()
	for _, to := range []string{"front.pass.test", "front.look.test"} {
		b.refused("https://hidden.look.test/", "-k", "--connect-to hidden.look.test:443:"+to+":443")
		b.audited(client.FlowFilter{Host: to, Kind: "connection"}, `for "hidden.look.test", not for the host`)
		// No name at all.
		if r := b.try("printf 'GET / HTTP/1.0\\r\\n\\r\\n' | python3 /tmp/say.py tls " + to + " 443 -"); r.ExitCode != 7 {
			t.Errorf("no SNI to %s: %+v", to, r)
		}
		b.audited(client.FlowFilter{Host: to, Kind: "connection"}, "no server name (SNI)")
	}
	// On another port nothing but the name is known, and it counts there too.
	b.refused("https://hidden.look.test:8443/", "-k", "--connect-to hidden.look.test:8443:other-port.pass.test:8443")
	b.audited(client.FlowFilter{Host: "other-port.pass.test", Kind: "connection"}, `for "hidden.look.test", not for the host`)
	if got := n.servers.requests("hidden.look.test"); len(got) != 0 {
		t.Errorf("the hidden host got %+v", got)
	}
}

// The hidden name is never read: the client learns that ECH is not supported, and ends the
// connection.
func TestEncryptedClientHelloIsRejected(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t).goClient()
	for _, to := range []string{"ech.pass.test:443", "ech-port.pass.test:8443", "ech.look.test:443"} {
		// The public name is the one that was looked up.
		host, _, _ := strings.Cut(to, ":")
		if r := b.try("/srv/client fronting -connect " + to + " -sni hidden.pass.test -ech " + host + " hidden.pass.test"); r.ExitCode == 0 || !strings.Contains(r.Stderr, "rejected ECH") {
			t.Errorf("%s: %+v", to, r)
		}
		b.audited(client.FlowFilter{Host: host, Kind: "connection", Verdict: "error"}, "encrypted client hello required")
	}
	// Another one.
	if r := b.try("/srv/client fronting -connect ech2.pass.test:443 -sni hidden.pass.test -ech public.pass.test hidden.pass.test"); r.ExitCode == 0 {
		t.Errorf("another public name: %+v", r)
	}
	b.audited(client.FlowFilter{Host: "ech2.pass.test", Kind: "connection"}, "not for the host")
	for _, host := range []string{"hidden.pass.test", "ech.pass.test", "ech-port.pass.test", "ech2.pass.test", "ech.look.test"} {
		if got := n.servers.requests(host); len(got) != 0 {
			t.Errorf("%s got %+v", host, got)
		}
	}
}

// A connection is for one host, also where the certificate would be for several:
// the servers of the tests have all names.
func TestConnectionIsNotReusedForAnotherHost(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t).goClient()
	r := b.try("/srv/client fronting -connect reused.look.test:443 -sni reused.look.test reused.look.test hidden.look.test reused.look.test:444 reused.look.test")
	lines := strings.Split(strings.TrimSpace(r.Stdout), "\n")
	if r.ExitCode != 0 || len(lines) != 4 || !strings.HasPrefix(lines[0], "200 ") || !strings.HasPrefix(lines[3], "200 ") {
		t.Fatalf("got %+v", r)
	}
	for _, line := range lines[1:3] {
		if !strings.HasPrefix(line, "421 ") || !strings.Contains(line, "the connection is to reused.look.test") {
			t.Errorf("got %s", line)
		}
	}
	if r := b.try("curl -sS -w ' %{http_code}' -H 'Host: hidden.look.test' https://reused.look.test/"); !strings.HasSuffix(r.Stdout, " 421") {
		t.Errorf("by curl: %+v", r)
	}
	b.audited(client.FlowFilter{Host: "reused.look.test", Kind: "request"}, `the request is for "hidden.look.test"`)
	if got := n.servers.requests("hidden.look.test"); len(got) != 0 {
		t.Errorf("the hidden host got %+v", got)
	}
}
