package dns

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/time/rate"

	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/runtime/netns/link"
	"github.com/doze-run/doze/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const reason = "no rule allows it"

// decide allows all names except denied.example and those below it.
func decide(name string) (bool, string) {
	if name == "denied.example" || strings.HasSuffix(name, ".denied.example") {
		return false, reason
	}
	return true, ""
}

// testServer is a server with the refusals that it reported.
type testServer struct {
	*Server
	mu      sync.Mutex
	refused []string
}

// newTestServer sets the callbacks that are nil.
func newTestServer(cfg Config) *testServer {
	a := &testServer{}
	if cfg.Decide == nil {
		cfg.Decide = decide
	}
	if cfg.Record == nil {
		cfg.Record = func(string, netip.Addr) {}
	}
	if cfg.Forget == nil {
		cfg.Forget = func(netip.Addr) {}
	}
	cfg.Refused = func(name, reason string) {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.refused = append(a.refused, name+": "+reason)
	}
	a.Server = New(cfg)
	return a
}

func query(name string, rrtype uint16) *dns.Msg {
	q := new(dns.Msg).SetQuestion(dns.Fqdn(name), rrtype)
	return q.SetEdns0(4096, false)
}

// exchange returns the answer of the first name server, or nil if there is none.
func (a *testServer) exchange(t *testing.T, q *dns.Msg) *dns.Msg {
	t.Helper()
	return a.exchangeWith(t, link.Gateway, q)
}

func (a *testServer) exchangeWith(t *testing.T, server netip.Addr, q *dns.Msg) *dns.Msg {
	t.Helper()
	packed, err := q.Pack()
	if err != nil {
		t.Fatal(err)
	}
	answer := a.Answer(server, packed)
	if answer == nil {
		return nil
	}
	if len(answer) > dns.MinMsgSize {
		t.Errorf("an answer of %d bytes", len(answer))
	}
	m := new(dns.Msg)
	if err := m.Unpack(answer); err != nil {
		t.Fatal(err)
	}
	if m.Id != q.Id || !m.Response || m.Truncated || m.Authoritative || m.RecursionDesired != q.RecursionDesired {
		t.Errorf("header %+v", m.MsgHdr)
	}
	return m
}

// addressOf queries the address of a name.
func (a *testServer) addressOf(t *testing.T, name string) netip.Addr {
	t.Helper()
	m := a.exchange(t, query(name, dns.TypeA))
	if m.Rcode != dns.RcodeSuccess || len(m.Answer) != 1 {
		t.Fatalf("%s: %s", name, m)
	}
	addr, ok := netip.AddrFromSlice(m.Answer[0].(*dns.A).A)
	if !ok {
		t.Fatalf("%s: %s", name, m)
	}
	return addr.Unmap()
}

// address returns the address that is assigned to a name, without a query.
func (a *testServer) address(name string) (netip.Addr, bool) {
	a.names.mu.Lock()
	defer a.names.mu.Unlock()
	if e := a.names.byName[name]; e != nil {
		return toAddress(e.Value.(*record).offset), true
	}
	return netip.Addr{}, false
}

func TestEachNameHasAnAddressOfItsOwn(t *testing.T) {
	a := newTestServer(Config{})
	first, second := a.addressOf(t, "one.example"), a.addressOf(t, "two.example")
	if first == second || !link.Pool.Contains(first) || link.Reserved.Contains(first) {
		t.Errorf("%s and %s", first, second)
	}
	if again := a.addressOf(t, "ONE.Example."); again != first {
		t.Errorf("first %s, then %s", first, again)
	}
	for addr, want := range map[netip.Addr]string{first: "one.example", second: "two.example"} {
		if got, ok := a.Host(addr); got != want || !ok {
			t.Errorf("%s is %q, want %q", addr, got, want)
		}
		if got, ok := a.Host(netip.AddrFrom16(addr.As16())); got != want || !ok {
			t.Errorf("mapped, %s is %q", addr, got)
		}
		if got, ok := a.address(want); got != addr || !ok {
			t.Errorf("%s has %s", want, got)
		}
	}
	for _, addr := range []string{"198.18.0.1", "198.18.0.2", "198.18.0.0", "198.19.255.255", "192.0.2.1", "::1", "::"} {
		if name, ok := a.Host(netip.MustParseAddr(addr)); ok {
			t.Errorf("%s is %s", addr, name)
		}
	}
	if addr, ok := a.address("three.example"); ok {
		t.Errorf("a name that was never queried has %s", addr)
	}
}

func TestAnswers(t *testing.T) {
	a := newTestServer(Config{})
	assigned := a.addressOf(t, "assigned.example")
	reverse, _ := dns.ReverseAddr(assigned.String())
	for _, tc := range []struct {
		name   string
		rrtype uint16
		rcode  int
		want   string // the record's data
	}{
		{"assigned.example", dns.TypeA, dns.RcodeSuccess, assigned.String()},
		{"assigned.example", dns.TypeAAAA, dns.RcodeSuccess, ""},
		{"assigned.example", dns.TypeHTTPS, dns.RcodeSuccess, ""},
		{"assigned.example", dns.TypeSVCB, dns.RcodeSuccess, ""},
		{"assigned.example", dns.TypeMX, dns.RcodeSuccess, ""},
		{"assigned.example", dns.TypeTXT, dns.RcodeSuccess, ""},
		{"assigned.example", 65280, dns.RcodeSuccess, ""},
		{"assigned.example", dns.TypeANY, dns.RcodeSuccess, `"RFC8482" ""`},
		{"assigned.example", dns.TypeAXFR, dns.RcodeNotImplemented, ""},
		{"assigned.example", dns.TypeIXFR, dns.RcodeNotImplemented, ""},
		{".", dns.TypeNS, dns.RcodeSuccess, ""},
		{reverse, dns.TypePTR, dns.RcodeSuccess, "assigned.example."},
		{strings.ToUpper(reverse), dns.TypePTR, dns.RcodeSuccess, "assigned.example."},
		{reverse, dns.TypeA, dns.RcodeSuccess, ""},
		{"9.9.19.198.in-addr.arpa", dns.TypePTR, dns.RcodeNameError, ""},
		{"8.8.8.8.in-addr.arpa", dns.TypePTR, dns.RcodeNameError, ""},
		{"0." + reverse, dns.TypePTR, dns.RcodeNameError, ""},
		{"1.0.0.127.in-addr.arpa", dns.TypePTR, dns.RcodeSuccess, "localhost."},
		{"1.0.0.0.ip6.arpa", dns.TypePTR, dns.RcodeNameError, ""},
		{"ipv4only.arpa", dns.TypeAAAA, dns.RcodeNameError, ""},
		{"_dns.resolver.arpa", dns.TypeSVCB, dns.RcodeNameError, ""},
		{"localhost", dns.TypeA, dns.RcodeSuccess, "127.0.0.1"},
		{"app.localhost", dns.TypeA, dns.RcodeSuccess, "127.0.0.1"},
		{"localhost", dns.TypeAAAA, dns.RcodeSuccess, "::1"},
		{"localhost", dns.TypeMX, dns.RcodeSuccess, ""},
		{"a.invalid", dns.TypeA, dns.RcodeNameError, ""},
		{"a.onion", dns.TypeA, dns.RcodeNameError, ""},
		{"use-application-dns.net", dns.TypeA, dns.RcodeNameError, ""},
	} {
		t.Run(tc.name+" "+dns.Type(tc.rrtype).String(), func(t *testing.T) {
			m := a.exchange(t, query(tc.name, tc.rrtype))
			if m.Rcode != tc.rcode {
				t.Errorf("%s, want %s", dns.RcodeToString[m.Rcode], dns.RcodeToString[tc.rcode])
			}
			got := ""
			if len(m.Answer) == 1 {
				got = strings.TrimPrefix(m.Answer[0].String(), m.Answer[0].Header().String())
				if m.Answer[0].Header().Ttl != ttl {
					t.Errorf("TTL %d s", m.Answer[0].Header().Ttl)
				}
			}
			if got != tc.want || len(m.Answer) > 1 {
				t.Errorf("%q, want %q", got, tc.want)
			}
			// The TTL of negative answers is short, too.
			hasSOA := len(m.Ns) == 1 && m.Ns[0].(*dns.SOA).Minttl == ttl
			if wantSOA := tc.want == "" && tc.rcode != dns.RcodeNotImplemented; hasSOA != wantSOA {
				t.Errorf("authority %v", m.Ns)
			}
		})
	}
	if len(a.refused) > 0 {
		t.Errorf("refused: %q", a.refused)
	}
	if _, ok := a.address("localhost"); ok {
		t.Error("localhost has an address of the pool")
	}
	home := newTestServer(Config{})
	home.addressOf(t, "nas.home.arpa")
}

func TestAnswersPreserveTheCaseOfTheQuestion(t *testing.T) {
	m := newTestServer(Config{}).exchange(t, query("wWw.ExAmPlE.", dns.TypeA))
	if m.Question[0].Name != "wWw.ExAmPlE." || m.Answer[0].Header().Name != "wWw.ExAmPlE." {
		t.Errorf("%s", m)
	}
}

func ede(m *dns.Msg) *dns.EDNS0_EDE {
	if opt := m.IsEdns0(); opt != nil {
		for _, o := range opt.Option {
			if e, ok := o.(*dns.EDNS0_EDE); ok {
				return e
			}
		}
	}
	return nil
}

// musl waits for an answer other than REFUSED.
func TestSecondServerReportsRefusedNamesAsNonexistent(t *testing.T) {
	a := newTestServer(Config{})
	for _, rrtype := range []uint16{dns.TypeA, dns.TypeAAAA} {
		q := query("a.denied.example", rrtype)
		a.exchange(t, q)
		m := a.exchangeWith(t, link.SecondServer, q)
		if e := ede(m); m.Rcode != dns.RcodeNameError || len(m.Answer) != 0 || e == nil || e.ExtraText != reason {
			t.Errorf("%s", m)
		}
		if len(m.Ns) != 0 {
			t.Errorf("clients may cache it: %s", m)
		}
	}
	if want := []string{"a.denied.example: " + reason}; !slices.Equal(a.refused, want) {
		t.Errorf("reported %q, want %q", a.refused, want)
	}
	q := query("a.example", dns.TypeA)
	first, second := a.exchange(t, q), a.exchangeWith(t, link.SecondServer, q)
	if len(first.Answer) != 1 || first.String() != second.String() {
		t.Errorf("a name that is allowed: %s\n%s", first, second)
	}
}

func TestRefusalsHaveTheReason(t *testing.T) {
	a := newTestServer(Config{})
	for _, rrtype := range []uint16{dns.TypeA, dns.TypeAAAA, dns.TypeTXT} {
		m := a.exchange(t, query("a.denied.example", rrtype))
		e := ede(m)
		if m.Rcode != dns.RcodeRefused || e == nil || e.InfoCode != dns.ExtendedErrorCodeProhibited || e.ExtraText != reason {
			t.Errorf("%s", m)
		}
	}
	q := query("b.denied.example", dns.TypeA)
	q.Extra = nil
	if m := a.exchange(t, q); m.Rcode != dns.RcodeRefused || len(m.Extra) > 0 {
		t.Errorf("without EDNS: %s", m)
	}
	if want := []string{"a.denied.example: " + reason, "b.denied.example: " + reason}; !slices.Equal(a.refused, want) {
		t.Errorf("reported %q, want %q", a.refused, want)
	}
	if _, ok := a.address("a.denied.example"); ok {
		t.Error("a refused name has an address")
	}
}

func TestInvalidHostNamesAreRefused(t *testing.T) {
	a := newTestServer(Config{})
	names := []string{
		"10.0.0.1", "0x7f000001", `a\.b.example`, `a\000.example`, `\255\254.example`, "a b.example", "xn--0.example",
		`a\.localhost`, `a\.invalid`, `use-application-dns\.net`, // one label each
	}
	for _, name := range names {
		m := a.exchange(t, query(name, dns.TypeA))
		if m.Rcode != dns.RcodeRefused {
			t.Errorf("%s: %s", name, m)
		}
	}
	if len(a.refused) != len(names) {
		t.Errorf("reported %q", a.refused)
	}
}

func TestLongestAnswersFitIn512Bytes(t *testing.T) {
	a := newTestServer(Config{Decide: func(name string) (bool, string) {
		return strings.HasPrefix(name, "b"), strings.Repeat("é", 300)
	}})
	name := strings.Repeat(strings.Repeat("a", 61)+".", 4) + "aaaa"
	for _, q := range []*dns.Msg{query(name, dns.TypeA), query("b"+name[1:], dns.TypeA), query("b"+name[1:], dns.TypeAAAA)} {
		if m := a.exchange(t, q); len(m.Question[0].Name) != 253 {
			t.Errorf("%d bytes", len(m.Question[0].Name))
		}
	}
	reverse, _ := dns.ReverseAddr(a.addressOf(t, "b"+name[1:]).String())
	a.exchange(t, query(reverse, dns.TypePTR))
}

func TestEDNS(t *testing.T) {
	a := newTestServer(Config{})
	q := query("x.example", dns.TypeA)
	q.IsEdns0().SetDo()
	q.IsEdns0().Option = []dns.EDNS0{
		&dns.EDNS0_SUBNET{Code: dns.EDNS0SUBNET, Family: 1, SourceNetmask: 24, Address: net.IPv4(192, 0, 2, 0)},
		&dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0123456789abcdef"},
	}
	m := a.exchange(t, q)
	if opt := m.IsEdns0(); opt == nil || !opt.Do() || opt.UDPSize() != udpSize || opt.Version() != 0 || len(opt.Option) != 0 {
		t.Errorf("%s", m)
	}
	q = query("x.example", dns.TypeA)
	q.IsEdns0().SetVersion(1)
	if m := a.exchange(t, q); m.Rcode != dns.RcodeBadVers || len(m.Answer) != 0 {
		t.Errorf("a later version: %s", m)
	}
	q = query("x.example", dns.TypeA)
	q.Extra = append(q.Extra, q.Extra[0])
	if m := a.exchange(t, q); m.Rcode != dns.RcodeFormatError {
		t.Errorf("two OPT records: %s", m)
	}
}

func TestOtherClassesAreRefused(t *testing.T) {
	a := newTestServer(Config{})
	q := query("version.bind", dns.TypeTXT)
	q.Question[0].Qclass = dns.ClassCHAOS
	if m := a.exchange(t, q); m.Rcode != dns.RcodeRefused {
		t.Errorf("%s", m)
	}
}

func TestBadMessages(t *testing.T) {
	a := newTestServer(Config{})
	change := func(f func(q *dns.Msg)) []byte {
		q := query("x.example", dns.TypeA)
		f(q)
		b, err := q.Pack()
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	whole := change(func(*dns.Msg) {})
	record := func() dns.RR {
		return &dns.A{Hdr: dns.RR_Header{Name: "x.", Rrtype: dns.TypeA, Class: 1}, A: net.IPv4(1, 2, 3, 4)}
	}
	for name, tc := range map[string]struct {
		message []byte
		rcode   int // -1: no answer
	}{
		"nothing":          {nil, -1},
		"half a header":    {whole[:11], -1},
		"an answer":        {change(func(q *dns.Msg) { q.Response = true }), -1},
		"a header":         {whole[:12], dns.RcodeFormatError},
		"half a question":  {whole[:20], dns.RcodeFormatError},
		"half an OPT":      {whole[:len(whole)-1], dns.RcodeFormatError},
		"no question":      {change(func(q *dns.Msg) { q.Question = nil }), dns.RcodeFormatError},
		"two questions":    {change(func(q *dns.Msg) { q.Question = append(q.Question, q.Question[0]) }), dns.RcodeFormatError},
		"an answer's part": {change(func(q *dns.Msg) { q.Answer = []dns.RR{record()} }), dns.RcodeFormatError},
		"an authority":     {change(func(q *dns.Msg) { q.Ns = []dns.RR{record()} }), dns.RcodeFormatError},
		"many records":     {change(func(q *dns.Msg) { q.Extra = append(q.Extra, record(), record()) }), dns.RcodeFormatError},
		"a notify":         {change(func(q *dns.Msg) { q.Opcode = dns.OpcodeNotify }), dns.RcodeNotImplemented},
		"an update":        {change(func(q *dns.Msg) { q.Opcode = dns.OpcodeUpdate }), dns.RcodeNotImplemented},
		"too long":         {append(slices.Clone(whole), make([]byte, maxQuery)...), dns.RcodeFormatError},
		"a loop in a name": {append(slices.Clone(whole[:12]), 0xc0, 12, 0, 1, 0, 1), dns.RcodeFormatError},
		"trailing data":    {append(slices.Clone(whole), 1, 2, 3), dns.RcodeSuccess},
	} {
		t.Run(name, func(t *testing.T) {
			answer := a.Answer(link.Gateway, tc.message)
			if tc.rcode < 0 {
				if answer != nil {
					t.Errorf("%x", answer)
				}
				return
			}
			m := new(dns.Msg)
			if err := m.Unpack(answer); err != nil {
				t.Fatal(err)
			}
			if m.Rcode != tc.rcode || !m.Response || m.Id != uint16(tc.message[0])<<8|uint16(tc.message[1]) {
				t.Errorf("%s", m)
			}
		})
	}
}

func TestFloodsAreDropped(t *testing.T) {
	a := newTestServer(Config{})
	a.limiter = rate.NewLimiter(1e-9, 3)
	for i := range 10 {
		if got := a.exchange(t, query("x.example", dns.TypeA)) != nil; got != (i < 3) {
			t.Errorf("answer %d: %t", i, got)
		}
	}
	if len(a.refused) != 1 || !strings.Contains(a.refused[0], "too many DNS queries") {
		t.Errorf("reported %q", a.refused)
	}
}

// recorder stores addresses in memory, as a store would.
type recorder struct {
	mu    sync.Mutex
	known map[netip.Addr]string
}

func (r *recorder) record(name string, a netip.Addr) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if other, ok := r.known[a]; ok {
		panic("the address of " + other + " is assigned to " + name)
	}
	r.known[a] = name
}

func (r *recorder) forget(a netip.Addr) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.known[a] == "" {
		panic(a.String() + " has no name")
	}
	delete(r.known, a)
}

func TestNamesRetainTheirAddressesAcrossARestart(t *testing.T) {
	r := &recorder{known: map[netip.Addr]string{}}
	before := newTestServer(Config{Record: r.record})
	one, two := before.addressOf(t, "one.example"), before.addressOf(t, "two.example")
	before.addressOf(t, "one.example")
	if want := map[netip.Addr]string{one: "one.example", two: "two.example"}; !maps.Equal(r.known, want) {
		t.Fatalf("recorded %v", r.known)
	}

	known := maps.Clone(r.known)
	known[netip.MustParseAddr("192.0.2.1")] = "elsewhere.example"
	known[link.Gateway] = "gateway.example"
	known[netip.MustParseAddr("198.19.0.1")] = "no name"
	known[netip.Addr{}] = "nowhere.example"
	after := newTestServer(Config{Known: known, Record: r.record})
	three := after.addressOf(t, "three.example")
	if got := after.addressOf(t, "one.example"); got != one {
		t.Errorf("one had %s, and now %s", one, got)
	}
	if three != two.Next() {
		t.Errorf("three has %s after %s and %s", three, one, two)
	}
	if got := newTestServer(Config{Known: map[netip.Addr]string{three: "three.example"}}).addressOf(t, "four.example"); got != three.Next() {
		t.Errorf("four has %s: addresses that were never assigned come first", got)
	}
	if len(after.names.byName) != 3 {
		t.Errorf("%d names are known", len(after.names.byName))
	}
}

func TestFreedAddressIsAssignedAfterAllOthers(t *testing.T) {
	r := &recorder{known: map[netip.Addr]string{}}
	const limit = 1000
	a := newTestServer(Config{Record: r.record, Forget: r.forget})
	a.names.limit = limit
	now := time.Now()
	name := func(i int) string { return fmt.Sprintf("n%d.example", i) }
	for i := range limit {
		if _, ok := a.names.assign(name(i), now); !ok {
			t.Fatalf("name %d has no address", i)
		}
	}
	if _, ok := a.names.assign("more.example", now.Add(maxIdle-1)); ok {
		t.Error("a name lost its address within an hour")
	}
	first, _ := a.address(name(0))
	second, _ := a.address(name(1))
	connect := func(at time.Time) { // to the first name
		if got, ok := a.names.host(first, at); got != name(0) || !ok {
			t.Fatalf("%s is %q", first, got)
		}
	}
	connect(now.Add(time.Minute))
	if got, ok := a.names.assign("more.example", now.Add(maxIdle)); !ok || got == second || r.known[second] != "" {
		t.Errorf("assigned %s, %t; %s is %q", got, ok, second, r.known[second])
	}
	if got, ok := a.Host(second); ok {
		t.Errorf("%s, which was freed, is %s", second, got)
	}
	if len(a.names.byName) != limit || len(a.names.byAddress) != limit || a.names.used.Len() != limit {
		t.Errorf("%d names, %d addresses, %d records", len(a.names.byName), len(a.names.byAddress), a.names.used.Len())
	}

	// assignUntil assigns names, one an hour, until one gets the freed address or all
	// others were assigned, and returns the number of those.
	assignUntil := func(freed netip.Addr, hourly func()) int {
		seen := map[netip.Addr]bool{}
		for range 2 * poolSize {
			now = now.Add(maxIdle)
			hourly()
			got, ok := a.names.assign(fmt.Sprintf("m%d.example", now.Unix()), now)
			if !ok {
				t.Fatal("no address is free")
			}
			if got == freed {
				break
			}
			seen[got] = true
		}
		return len(seen)
	}
	if n := assignUntil(second, func() { connect(now) }); n < poolSize-2*limit {
		t.Errorf("assigned again after %d others of %d", n, poolSize)
	}
	// The first name has retained its address while all others were assigned to other names.
	// It is freed now, and so has to come after them again.
	if n := assignUntil(first, func() {}); n < poolSize-2*limit {
		t.Errorf("assigned again after %d others of %d", n, poolSize)
	}
}

const poolSize = int(1<<17 - 1<<8) // of link.Pool without link.Reserved

func TestRestartRetainsNamesBeyondTheLimit(t *testing.T) {
	known := map[netip.Addr]string{}
	for i := range 3 {
		known[toAddress(firstOffset+uint32(i))] = fmt.Sprintf("n%d.example", i)
	}
	r := &recorder{known: maps.Clone(known)}
	n := names{limit: 2, record: r.record, forget: r.forget}
	now := time.Now()
	n.load(known, now)
	if _, ok := n.assign("more.example", now.Add(maxIdle-1)); ok || !maps.Equal(r.known, known) {
		t.Errorf("within an hour the names are %v", r.known)
	}
	if _, ok := n.assign("more.example", now.Add(maxIdle)); !ok || len(r.known) != 2 {
		t.Errorf("after an hour the names are %v", r.known)
	}
}

func TestRestartAssignsFreedAddressesLast(t *testing.T) {
	last := toAddress(endOffset - 2)
	a := newTestServer(Config{Known: map[netip.Addr]string{toAddress(firstOffset): "one.example", last: "two.example"}})
	for i, want := range []netip.Addr{last.Next(), toAddress(firstOffset + 1), toAddress(firstOffset + 2)} {
		if got := a.addressOf(t, fmt.Sprintf("n%d.example", i)); got != want {
			t.Errorf("name %d has %s, want %s", i, got, want)
		}
	}
}

func TestTooManyNamesAreRefused(t *testing.T) {
	r := &recorder{known: map[netip.Addr]string{}}
	a := newTestServer(Config{Record: r.record})
	a.names.limit = 2
	a.addressOf(t, "one.example")
	a.addressOf(t, "two.example")
	m := a.exchange(t, query("three.example", dns.TypeA))
	if e := ede(m); m.Rcode != dns.RcodeServerFailure || e == nil || !strings.Contains(e.ExtraText, "too many names") {
		t.Errorf("%s", m)
	}
	a.addressOf(t, "one.example")
	if len(a.refused) != 1 || len(r.known) != 2 {
		t.Errorf("reported %q, recorded %v", a.refused, r.known)
	}
}

func TestNamesAreForgottenBeforeOthersAreRecorded(t *testing.T) {
	var calls []string
	a := newTestServer(Config{
		Record: func(name string, a netip.Addr) { calls = append(calls, "+"+name+" "+a.String()) },
		Forget: func(a netip.Addr) { calls = append(calls, "-"+a.String()) },
	})
	a.names.limit = 1
	one := a.addressOf(t, "one.example")
	a.names.used.Front().Value.(*record).at = time.Now().Add(-2 * maxIdle)
	two := a.addressOf(t, "two.example")
	testkit.Diff(t, "calls", calls, []string{"+one.example " + one.String(), "-" + one.String(), "+two.example " + two.String()})
	if two == one {
		t.Error("the freed address was assigned immediately")
	}
}

func TestAddressIsRecordedBeforeConcurrentQueriesGetIt(t *testing.T) {
	var a *testServer
	answered := make(chan struct{})
	a = newTestServer(Config{Record: func(name string, _ netip.Addr) {
		go func() {
			defer close(answered)
			a.addressOf(t, name)
		}()
		for range 1000 {
			runtime.Gosched()
		}
		select {
		case <-answered:
			t.Error("a query was answered before the address was recorded")
		default:
		}
	}})
	a.addressOf(t, "one.example")
	testkit.Closed(t, "the second answer", answered)
}

func TestConcurrentQueries(t *testing.T) {
	r := &recorder{known: map[netip.Addr]string{}}
	a := newTestServer(Config{Record: r.record})
	a.limiter.SetLimit(rate.Inf)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for i := range 200 {
				name := fmt.Sprintf("n%d.example", i)
				if got, _ := a.Host(a.addressOf(t, name)); got != name {
					t.Errorf("%s is %s", name, got)
				}
			}
		})
	}
	all.Wait()
	if len(r.known) != 200 {
		t.Errorf("%d addresses", len(r.known))
	}
}

// serve answers on a UDP socket of the loopback until the test ends, and returns its
// address.
func serve(t *testing.T, a *testServer) string {
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var ended sync.WaitGroup
	ended.Go(func() {
		b := make([]byte, 65536)
		for {
			n, from, err := pc.ReadFrom(b)
			if err != nil {
				return
			}
			if answer := a.Answer(link.Gateway, b[:n]); answer != nil {
				_, _ = pc.WriteTo(answer, from)
			}
		}
	})
	t.Cleanup(func() { pc.Close(); ended.Wait() })
	return pc.LocalAddr().String()
}

func TestGoResolver(t *testing.T) {
	a := newTestServer(Config{})
	server := serve(t, a)
	r := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, server)
	}}
	addrs, err := r.LookupNetIP(t.Context(), "ip", "some.example.")
	if err != nil || len(addrs) != 1 {
		t.Fatalf("%v, %v", addrs, err)
	}
	if want, _ := a.address("some.example"); addrs[0].Unmap() != want {
		t.Errorf("%s, want %s", addrs[0], want)
	}
	names, err := r.LookupAddr(t.Context(), addrs[0].Unmap().String())
	if err != nil || !slices.Equal(names, []string{"some.example."}) {
		t.Errorf("%q, %v", names, err)
	}
	if mx, err := r.LookupMX(t.Context(), "some.example."); len(mx) > 0 || err == nil {
		t.Errorf("%v, %v", mx, err)
	}
	if addrs, err := r.LookupNetIP(t.Context(), "ip", "denied.example."); err == nil {
		t.Errorf("a refused name has %v", addrs)
	}
}

// FuzzAnswer checks that the answer to any query is a message of at most 512 bytes with
// the same question, and that an address in it is assigned to the queried name, which is
// not refused.
func FuzzAnswer(f *testing.F) {
	for _, q := range []*dns.Msg{
		query("x.example", dns.TypeA), query("X.denied.Example", dns.TypeA), query("denied.example", dns.TypeAAAA), query("localhost", dns.TypeANY),
		query("1.1.18.198.in-addr.arpa", dns.TypePTR), query(`a\.b\000.x`, dns.TypeHTTPS), query("xn--bcher-kva.example", dns.TypeA),
	} {
		b, err := q.Pack()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		s := newTestServer(Config{})
		answer := s.Answer(link.Gateway, b)
		if answer == nil {
			if isQuery(b) {
				t.Error("no answer to a query")
			}
			return
		}
		var m, q dns.Msg
		if err := m.Unpack(answer); err != nil || len(answer) > dns.MinMsgSize {
			t.Fatalf("%d bytes: %v", len(answer), err)
		}
		if !m.Response || answer[0] != b[0] || answer[1] != b[1] {
			t.Errorf("%s", &m)
		}
		if len(m.Question) == 0 {
			return // malformed
		}
		if err := q.Unpack(b); err != nil || !slices.Equal(m.Question, q.Question) {
			t.Fatalf("%v answered as %v: %v", q.Question, m.Question, err)
		}
		for _, rr := range m.Answer {
			a, ok := rr.(*dns.A)
			if !ok || a.A.IsLoopback() {
				continue
			}
			addr, _ := netip.AddrFromSlice(a.A.To4())
			want, err := rule.CleanHost(q.Question[0].Name)
			if got, ok := s.Host(addr); err != nil || got != want || !ok {
				t.Errorf("%s is %q, queried as %q: %v", addr, got, want, err)
			}
			if allowed, why := decide(want); !allowed {
				t.Errorf("%q has the address %s, and is refused: %s", want, addr, why)
			}
		}
	})
}

func BenchmarkAnswer(b *testing.B) {
	for _, tc := range []struct {
		name, host string
		rrtype     uint16
	}{{"A", "api.example.com", dns.TypeA}, {"AAAA", "api.example.com", dns.TypeAAAA}, {"refused", "a.denied.example", dns.TypeA}} {
		b.Run(tc.name, func(b *testing.B) {
			s := newTestServer(Config{})
			s.limiter.SetLimit(rate.Inf)
			q, _ := query(tc.host, tc.rrtype).Pack()
			b.ReportAllocs()
			for b.Loop() {
				s.Answer(link.Gateway, q)
			}
		})
	}
}
