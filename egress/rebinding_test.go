package egress

import (
	"net/http"
	"net/netip"
	"strings"
	"testing"

	"github.com/doze-run/doze/egress/audit"
)

// The owner of a name can resolve it to a public address when rules are made, and to the
// node's network when it is used (DNS rebinding).
func TestRebindingToAPrivateAddressIsRefused(t *testing.T) {
	z := newZone(t)
	r := newRig(t, func(c *Config) { c.Settings.NameServers = []netip.AddrPort{z.addr} })
	public := newConnectProxy(t, r.servers.plain.Listener.Addr())
	b := r.box("k3f9x2m7q1az")
	turn := func(addrs ...string) {
		t.Helper()
		z.say(addrs...)
		// Resolved names are cached for seconds. New settings clear the cache.
		if err := r.reload(func(s *Settings) { s.UpstreamProxy = public.url }); err != nil {
			t.Fatal(err)
		}
	}
	const url = "http://turns.example/"
	turn("9.9.9.1")
	b.want(b.get(url), http.StatusOK, "this is turns.example")
	before := b.servers.count()
	for _, c := range []struct{ address, class string }{
		{"127.0.0.1", "loopback"}, {"10.0.0.1", "private"}, {"169.254.169.254", "metadata"}, {"64:ff9b::7f00:1", "translated"},
	} {
		turn(c.address)
		b.want(b.get(url), http.StatusForbidden, "turns.example is at "+c.address+" ("+c.class+")")
		b.fails("turns.example:7", "hello")
		for _, kind := range []audit.Kind{audit.Request, audit.Connection} {
			e := b.entry("turns.example", func(e audit.Entry) bool { return e.Kind == kind && e.Address.String() == c.address })
			if e.Verdict != audit.Deny || !strings.Contains(e.Reason, "("+c.class+")") {
				t.Errorf("the audit log says %+v", e)
			}
		}
	}
	if b.servers.count() != before {
		t.Error("a server got a request")
	}
	turn("10.0.0.1", "9.9.9.2") // only the public one is dialed
	b.want(b.get(url), http.StatusOK, "this is turns.example")
	public.received(t, "CONNECT 9.9.9.1:80", "CONNECT 9.9.9.2:80")
}
