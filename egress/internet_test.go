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
	"sync"
	"testing"

	"github.com/miekg/dns"
)

// zone is a name server whose records change.
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

// connectProxy is an upstream proxy of the operator that connects every address to one
// server, so that tests reach public addresses without a network. It records its requests.
type connectProxy struct {
	url    *url.URL
	server string // host:port

	mu       sync.Mutex
	requests []string
}

func newConnectProxy(t testing.TB, server net.Addr) *connectProxy {
	t.Helper()
	p := &connectProxy{server: server.String()}
	s := httptest.NewUnstartedServer(p)
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.Start()
	t.Cleanup(s.Close)
	p.url, _ = url.Parse(s.URL) // cannot fail: net/http/httptest wrote it
	return p
}

func (p *connectProxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	p.requests = append(p.requests, r.Method+" "+r.RequestURI)
	p.mu.Unlock()
	server, err := net.Dial("tcp", p.server)
	if err != nil {
		w.WriteHeader(http.StatusBadGateway)
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
	back.Go(func() {
		_, _ = io.Copy(client, server)
		client.Close()
	})
	_, _ = io.Copy(server, client)
	server.Close()
	back.Wait()
}

// received fails the test unless the proxy got exactly these requests, in this order.
func (p *connectProxy) received(t testing.TB, want ...string) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if !slices.Equal(p.requests, want) {
		t.Errorf("the proxy received %q, want %q", p.requests, want)
	}
}
