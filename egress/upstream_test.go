package egress

import (
	"bufio"
	"io"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/testkit"
)

// Requests and connections that pass through use the operator's proxy, and go to the
// address that was checked.
func TestServersAreReachedThroughTheOperatorsProxy(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	p := newConnectProxy(t, r.servers.plain.Listener.Addr())
	names := newZone(t)
	names.say("9.9.9.9")
	err := r.reload(func(s *Settings) { s.UpstreamProxy, s.NameServers = p.url, []netip.AddrPort{names.addr} })
	if err != nil {
		t.Fatal(err)
	}
	b.want(b.get("http://a.public.example/"), 200, "this is a.public.example")
	conn, err := b.DialContext(testkit.Context(t), "tcp", "b.public.example:8080")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(testkit.Patience))
	_, _ = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: b.public.example\r\nConnection: close\r\n\r\n")
	if line, err := bufio.NewReader(conn).ReadString('\n'); !strings.Contains(line, " 200 ") {
		t.Errorf("passed through: %q, %v", line, err)
	}
	p.received(t, "CONNECT 9.9.9.9:80", "CONNECT 9.9.9.9:8080")
	conn.Close()
	for _, host := range []string{"a.public.example", "b.public.example"} {
		if e := b.entry(host, nil); e.Verdict != audit.Allow || e.Address.String() != "9.9.9.9" {
			t.Errorf("the audit log says %+v", e)
		}
	}
}
