package egress

import (
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/miekg/dns"

	"github.com/doze-run/doze/egress/audit"
)

// zone is a name server whose owner changes his mind.
type zone struct {
	addr netip.AddrPort

	mu    sync.Mutex
	addrs []netip.Addr // of every name
}

func newZone(t testing.TB) *zone {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	z := &zone{addr: conn.LocalAddr().(*net.UDPAddr).AddrPort()}
	started := make(chan struct{})
	server := &dns.Server{PacketConn: conn, Handler: z, NotifyStartedFunc: func() { close(started) }}
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.ActivateAndServe() }) // ends with Shutdown
	<-started
	t.Cleanup(func() { _ = server.Shutdown(); serving.Wait() })
	return z
}

func (z *zone) say(addrs ...string) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.addrs = nil
	for _, a := range addrs {
		z.addrs = append(z.addrs, netip.MustParseAddr(a))
	}
}

// ServeDNS implements dns.Handler.
func (z *zone) ServeDNS(w dns.ResponseWriter, q *dns.Msg) {
	z.mu.Lock()
	defer z.mu.Unlock()
	m := new(dns.Msg).SetReply(q)
	h := dns.RR_Header{Name: q.Question[0].Name, Class: dns.ClassINET, Rrtype: q.Question[0].Qtype}
	for _, a := range z.addrs {
		switch {
		case a.Is4() && h.Rrtype == dns.TypeA:
			m.Answer = append(m.Answer, &dns.A{Hdr: h, A: a.AsSlice()})
		case a.Is6() && h.Rrtype == dns.TypeAAAA:
			m.Answer = append(m.Answer, &dns.AAAA{Hdr: h, AAAA: a.AsSlice()})
		}
	}
	_ = w.WriteMsg(m)
}

// internet is an HTTP proxy of the operator that finds servers.plain at every
// address: so that tests reach public ones without a network.
type internet struct {
	url *url.URL

	mu    sync.Mutex
	asked []string
}

func (s *servers) internet(t testing.TB) *internet {
	t.Helper()
	in := &internet{}
	proxy := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		in.mu.Lock()
		in.asked = append(in.asked, r.Host)
		in.mu.Unlock()
		server, err := net.Dial("tcp", s.plain.Listener.Addr().String())
		if err != nil {
			http.Error(w, "no server", http.StatusBadGateway)
			return
		}
		defer server.Close()
		client, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer client.Close()
		_, _ = io.WriteString(client, "HTTP/1.1 200 OK\r\n\r\n")
		var back sync.WaitGroup
		back.Go(func() { _, _ = io.Copy(client, server); client.Close() })
		_, _ = io.Copy(server, client)
		server.Close()
		back.Wait()
	}))
	proxy.Config.ErrorLog = log.New(io.Discard, "", 0)
	proxy.Start()
	t.Cleanup(proxy.Close)
	in.url, _ = url.Parse(proxy.URL)
	return in
}

// Who owns a name can have it lead to a public address when rules are made, and
// to the node's network when it is used (DNS rebinding).
func TestANameThatTurnsPrivateIsRefusedAndAudited(t *testing.T) {
	z := newZone(t)
	r := newRig(t, func(c *Config) { c.Settings.NameServers = []netip.AddrPort{z.addr} })
	public := r.servers.internet(t)
	b := r.box("k3f9x2m7q1az")
	turn := func(addrs ...string) {
		t.Helper()
		z.say(addrs...)
		// What was resolved is kept for seconds; other settings forget it.
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
	turn("10.0.0.1", "9.9.9.2") // of several the public one is dialled
	b.want(b.get(url), http.StatusOK, "this is turns.example")
	public.mu.Lock()
	defer public.mu.Unlock()
	if want := []string{"9.9.9.1:80", "9.9.9.2:80"}; !slices.Equal(public.asked, want) {
		t.Errorf("asked for were %q, want %q", public.asked, want)
	}
}
