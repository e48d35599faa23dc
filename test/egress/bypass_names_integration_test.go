//go:build integration

package egress

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/miekg/dns"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/testkit"
)

// nameServer is the node's name server in a test, with the test's answers.
type nameServer struct {
	net.PacketConn

	mu      sync.Mutex
	zone    map[string][][]netip.Addr // by name: the answers, one after another; the last stays
	queries []string
}

func newNameServer(t *testing.T) *nameServer {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &nameServer{PacketConn: conn, zone: map[string][][]netip.Addr{}}
	server := &dns.Server{PacketConn: conn, Handler: s}
	done := make(chan struct{})
	go func() { defer close(done); _ = server.ActivateAndServe() }()
	t.Cleanup(func() { conn.Close(); <-done })
	return s
}

// say sets the answers for a name.
func (s *nameServer) say(name string, answers ...[]netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.zone[name] = answers
}

// about returns the names below one that were asked for.
func (s *nameServer) about(below string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(s.queries), func(name string) bool { return !strings.HasSuffix(name, below) })
}

// ServeDNS implements dns.Handler.
func (s *nameServer) ServeDNS(w dns.ResponseWriter, q *dns.Msg) {
	question := q.Question[0]
	name := strings.ToLower(strings.TrimSuffix(question.Name, "."))
	s.mu.Lock()
	s.queries = append(s.queries, name)
	var addrs []netip.Addr
	if answers := s.zone[name]; len(answers) > 0 {
		addrs = answers[0]
		if len(answers) > 1 && question.Qtype == dns.TypeA {
			s.zone[name] = answers[1:]
		}
	}
	s.mu.Unlock()
	m := new(dns.Msg).SetReply(q)
	for _, a := range addrs {
		h := dns.RR_Header{Name: question.Name, Class: dns.ClassINET}
		switch {
		case a.Is4() && question.Qtype == dns.TypeA:
			h.Rrtype = dns.TypeA
			m.Answer = append(m.Answer, &dns.A{Hdr: h, A: a.AsSlice()})
		case !a.Is4() && question.Qtype == dns.TypeAAAA:
			h.Rrtype = dns.TypeAAAA
			m.Answer = append(m.Answer, &dns.AAAA{Hdr: h, AAAA: a.AsSlice()})
		}
	}
	_ = w.WriteMsg(m)
}

func addresses(texts ...string) (list []netip.Addr) {
	for _, text := range texts {
		list = append(list, netip.MustParseAddr(text))
	}
	return list
}

// Names that lead to where no sandbox may come, the names of others among them.
func TestPrivateAddressesOfNamesAreRefused(t *testing.T) {
	names := newNameServer(t)
	d := newDecoy(t)
	n := ownNode(t, "resolvers "+names.LocalAddr().String(), "rule private {\nhosts *.corp.example\nallow_private\nallow\n}",
		"rule look {\nhosts *.seen.example\npaths /**\nallow\n}")
	b := n.newBox(t)
	own := machine(t)
	for i, to := range []struct{ address, class string }{
		{"127.0.0.1", "loopback"}, {"127.1.2.3", "loopback"}, {"::1", "loopback"}, {"0.0.0.0", "unspecified"}, {"::", "unspecified"},
		{"169.254.169.254", "metadata"}, {"fd00:ec2::254", "metadata"}, {"100.100.100.200", "metadata"}, {"169.254.170.2", "metadata"},
		{"10.1.2.3", "private"}, {"172.16.1.1", "private"}, {"192.168.1.1", "private"}, {"fd12::1", "private"}, {"100.64.0.1", "shared"},
		{"169.254.1.1", "link-local"}, {"fe80::1", "link-local"}, {"224.0.0.1", "multicast"}, {"ff02::1", "multicast"}, {"255.255.255.255", "broadcast"},
		{"240.0.0.1", "reserved"}, {"198.18.0.1", "benchmark"}, {"198.18.1.1", "benchmark"},
		{"64:ff9b::7f00:1", "translated"}, {"64:ff9b::a9fe:a9fe", "translated"}, {"64:ff9b:1::7f00:1", "translated"},
		{"2002:7f00:1::", "translated"}, {"2001:0:7f00:1::", "translated"}, {"::ffff:0:7f00:1", "translated"}, {"::7f00:1", "translated"},
	} {
		for _, suffix := range []string{"rebound.example", "seen.example"} {
			name := fmt.Sprintf("n%d.%s", i, suffix)
			names.say(name, addresses(to.address))
			b.refused(fmt.Sprintf("http://%s:%d/", name, d.port()))
			r := b.try("curl -sS -w ' %{http_code}' --max-time 20 http://" + name + "/")
			if !strings.HasSuffix(r.Stdout, " 403") || !strings.Contains(r.Stdout, to.class) {
				t.Errorf("%s: %+v", to.address, r)
			}
			b.audited(client.FlowFilter{Host: name}, "("+to.class+")")
		}
	}
	// A rule lets hosts be at private addresses: not the node's, nor its loopback.
	for i, a := range append(own, addresses("127.0.0.1", "169.254.169.254")...) {
		name := fmt.Sprintf("n%d.corp.example", i)
		names.say(name, []netip.Addr{a})
		b.refused(fmt.Sprintf("http://%s:%d/", name, d.port()))
		b.audited(client.FlowFilter{Host: name}, name+" is at "+a.String())
	}
}

// The answers of a name change (DNS rebinding), or one has several addresses. A
// forbidden address is not dialed because an answer also had another; package dial tests
// the case in which the other may be dialed, which needs a network.
func TestRebindingIsRefused(t *testing.T) {
	names := newNameServer(t)
	d := newDecoy(t)
	n := ownNode(t, "resolvers "+names.LocalAddr().String())
	b := n.newBox(t)
	names.say("turns.rebound.example", addresses("192.0.2.1"), addresses("127.0.0.1"), addresses("192.0.2.1"), addresses("127.0.0.1"))
	names.say("both.rebound.example", addresses("192.0.2.1", "127.0.0.1", "::1"))
	for range 4 {
		for _, host := range []string{"turns.rebound.example", "both.rebound.example"} {
			b.refused(fmt.Sprintf("http://%s:%d/", host, d.port()))
		}
	}
	b.audited(client.FlowFilter{Host: "both.rebound.example"}, "refused: both.rebound.example is at ")
	b.audited(client.FlowFilter{Host: "turns.rebound.example"}, "refused: turns.rebound.example is at 192.0.2.1")
}

// Names carry nothing out: a query is not forwarded.
func TestNameQueriesDoNotLeaveTheNode(t *testing.T) {
	names := newNameServer(t)
	n := ownNode(t, "resolvers "+names.LocalAddr().String(), "rule never {\nhosts *.denied.example\ndeny\n}")
	b := n.newBox(t).canSay()
	label := strings.Repeat("a", 60)
	long := strings.Join([]string{label, label, label, "tunnel.example"}, ".")
	b.exec("for i in $(seq 200); do getent ahosts $i." + label + ".tunnel.example; done >/dev/null; getent ahosts " + long)
	b.exec("getent ahosts x.denied.example && exit 1; true")
	// TXT, NULL and what else a tunnel would use: no answer has anything in it.
	for _, kind := range []uint16{dns.TypeTXT, dns.TypeNULL, dns.TypeCNAME, dns.TypeMX, dns.TypeSRV, dns.TypeHTTPS, dns.TypeANY, dns.TypeAAAA} {
		q := new(dns.Msg).SetQuestion(dns.Fqdn("payload."+label+".tunnel.example"), kind)
		packed, err := q.Pack()
		if err != nil {
			t.Fatal(err)
		}
		for _, how := range []string{"udp", "tcp"} {
			stdin := packed
			if how == "tcp" {
				stdin = append([]byte{byte(len(packed) >> 8), byte(len(packed))}, packed...)
			}
			// A server of TCP ends the connection when the client says no more.
			r, err := n.API.Exec(testkit.Context(t), b.id, client.ExecRequest{Command: types.Command{Argv: []string{"python3", "/tmp/say.py", how, "198.18.0.1", "53"}}, Stdin: stdin})
			if err != nil || r.ExitCode != 0 {
				t.Errorf("%s by %s: %+v, %v", dns.TypeToString[kind], how, r, err)
				continue
			}
			text := plain(r.Stdout, r)
			if how == "tcp" {
				text = text[2:]
			}
			var answer dns.Msg
			if err := answer.Unpack(text); err != nil {
				t.Errorf("%s by %s: %v", dns.TypeToString[kind], how, err)
			}
			for _, rr := range answer.Answer {
				if _, hinfo := rr.(*dns.HINFO); !hinfo { // RFC 8482
					t.Errorf("%s by %s is answered: %v", dns.TypeToString[kind], how, rr)
				}
			}
		}
	}
	if asked := names.about("example"); len(asked) != 0 {
		t.Errorf("the node asked for %q", asked)
	}
	b.audited(client.FlowFilter{Host: "x.denied.example", Kind: "dns"}, "denied by a rule")
	// Other name servers are not reached, by TCP neither.
	b.refused("http://8.8.8.8:53/")
	b.auditedAddress("8.8.8.8", unnamed)
}

// DNS over HTTPS is a host like others: a rule denies it, and its number leads
// nowhere.
func TestDNSOverHTTPSFollowsTheRules(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	b.rules(`[{"name":"doh","hosts":["doh.look.test"],"action":"deny","reason":"the node has DNS"}]`)
	b.refused("https://a.pass.test/", "-k", "--doh-url https://doh.look.test/dns-query")
	b.audited(client.FlowFilter{Host: "doh.look.test", Kind: "dns"}, "the node has DNS")
	b.refused("https://doh.look.test/dns-query", "-k", "--resolve doh.look.test:443:8.8.8.8")
	b.auditedAddress("8.8.8.8", unnamed)
}
