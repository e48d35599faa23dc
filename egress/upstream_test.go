package egress

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/doze-run/doze/egress/audit"
)

// Names of owners are of any kind.
func TestNoTwoWaysShareConnections(t *testing.T) {
	pools := map[string]way{}
	ann, other, inside := &sender{owner: "ann"}, &sender{owner: "ann private"}, &sender{id: "k3f9x2m7q1az", owner: "ann"}
	for _, w := range []way{{ann, false}, {ann, true}, {other, false}, {other, true}, {inside, false}, {inside, true}} {
		pool := poolOf(w.along(newRequest(t, "GET", "http://a.test/", nil)).Context())
		if other, taken := pools[pool]; taken {
			t.Errorf("%s, private %v, and %s, private %v, share connections", w.from.name(), w.private, other.from.name(), other.private)
		}
		pools[pool] = w
	}
}

// nameServer answers that every name is at one address, until the test ends.
func nameServer(t *testing.T, at string) netip.AddrPort {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &dns.Server{PacketConn: conn, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg).SetReply(q)
		if question := q.Question[0]; question.Qtype == dns.TypeA {
			h := dns.RR_Header{Name: question.Name, Rrtype: dns.TypeA, Class: dns.ClassINET}
			m.Answer = append(m.Answer, &dns.A{Hdr: h, A: net.ParseIP(at)})
		}
		_ = w.WriteMsg(m)
	})}
	var running sync.WaitGroup
	running.Go(func() { _ = server.ActivateAndServe() })
	t.Cleanup(func() {
		conn.Close()
		running.Wait()
	})
	return netip.MustParseAddrPort(conn.LocalAddr().String())
}

// connectProxy connects whoever asks to a server, and keeps what they asked for.
type connectProxy struct {
	*httptest.Server
	server string // host:port

	mu    sync.Mutex
	asked []string
}

func newConnectProxy(t *testing.T, server net.Addr) *connectProxy {
	t.Helper()
	p := &connectProxy{server: server.String()}
	p.Server = httptest.NewServer(p)
	t.Cleanup(p.Close)
	return p
}

func (p *connectProxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	p.asked = append(p.asked, r.Method+" "+r.RequestURI)
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

// Requests and connections that pass through go by the operator's proxy, to the
// address that was checked.
func TestServersAreReachedThroughTheOperatorsProxy(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	p := newConnectProxy(t, r.servers.plain.Listener.Addr())
	at, err := url.Parse(p.URL)
	if err != nil {
		t.Fatal(err)
	}
	names := nameServer(t, "9.9.9.9")
	err = r.reload(func(s *Settings) { s.UpstreamProxy, s.NameServers = at, []netip.AddrPort{names} })
	if err != nil {
		t.Fatal(err)
	}
	b.want(b.get("http://a.public.example/"), 200, "this is a.public.example")
	conn, err := b.DialContext(within(t), "tcp", "b.public.example:8080")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(patience))
	_, _ = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: b.public.example\r\nConnection: close\r\n\r\n")
	if line, err := bufio.NewReader(conn).ReadString('\n'); !strings.Contains(line, " 200 ") {
		t.Errorf("passed through: %q, %v", line, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if want := []string{"CONNECT 9.9.9.9:80", "CONNECT 9.9.9.9:8080"}; !slices.Equal(p.asked, want) {
		t.Errorf("the proxy was asked for %q, want %q", p.asked, want)
	}
	conn.Close()
	for _, host := range []string{"a.public.example", "b.public.example"} {
		if e := b.entry(host, nil); e.Verdict != audit.Allow || e.Address.String() != "9.9.9.9" {
			t.Errorf("the audit log says %+v", e)
		}
	}
}
