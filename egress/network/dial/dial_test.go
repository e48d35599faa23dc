package dial

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/doze-run/doze/egress/network/address"
	"github.com/doze-run/doze/testkit"
	"github.com/miekg/dns"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func addrs(texts ...string) []netip.Addr {
	var all []netip.Addr
	for _, s := range texts {
		all = append(all, netip.MustParseAddr(s))
	}
	return all
}

// resolver is the subset of net.Resolver that a Dialer uses.
type resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
}

// testConfig is a Config with parts of the node that tests replace.
type testConfig struct {
	Config
	resolver resolver
	own      func() ([]netip.Addr, error)
}

func (cfg testConfig) new() *Dialer {
	d := New(cfg.Config)
	if cfg.resolver != nil {
		d.cache.resolve = cfg.resolver.LookupNetIP
	}
	if cfg.own != nil {
		d.own.list = cfg.own
	}
	return d
}

// zone is a resolver whose results change: each lookup of a name returns the next
// one, and the last one repeats.
type zone struct {
	mu      sync.Mutex
	names   map[string][][]netip.Addr
	queried []string
}

func (z *zone) next(name string) []netip.Addr {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.queried = append(z.queried, name)
	all := z.names[name]
	if len(all) == 0 {
		return nil
	}
	if len(all) > 1 {
		z.names[name] = all[1:]
	}
	return all[0]
}

func (z *zone) LookupNetIP(_ context.Context, network, host string) ([]netip.Addr, error) {
	if network != "ip" || !strings.HasSuffix(host, ".") {
		return nil, fmt.Errorf("lookup of %q in %q", host, network)
	}
	found := z.next(strings.TrimSuffix(host, "."))
	if found == nil {
		return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
	}
	return found, nil
}

// recorder replaces the network: it calls guards, and connects to the addresses
// that respond.
type recorder struct {
	mu      sync.Mutex
	dialed  []string
	respond func(ctx context.Context, a netip.AddrPort) error // nil: all respond
}

type pipe struct {
	net.Conn
	to     netip.AddrPort
	closed *atomic.Int32
}

func (p *pipe) Close() error { p.closed.Add(1); return p.Conn.Close() }

func (r *recorder) connect(ctx context.Context, a netip.AddrPort, control control) (net.Conn, error) {
	if err := control(ctx, "tcp", a.String(), nil); err != nil {
		return nil, &net.OpError{Op: "dial", Err: err}
	}
	r.mu.Lock()
	r.dialed = append(r.dialed, a.Addr().String())
	r.mu.Unlock()
	if r.respond != nil {
		if err := r.respond(ctx, a); err != nil {
			return nil, err
		}
	}
	ours, theirs := net.Pipe()
	theirs.Close()
	return &pipe{ours, a, new(atomic.Int32)}, nil
}

func newRecorded(cfg testConfig) (*Dialer, *recorder) {
	d, r := cfg.new(), new(recorder)
	d.connect = r.connect
	return d, r
}

// oneOf has an address of each class.
var oneOf = map[address.Class]string{
	address.Public: "9.9.9.9", address.Private: "10.1.2.3", address.Shared: "100.64.0.1", address.LinkLocal: "169.254.1.1",
	address.Documentation: "192.0.2.1", address.Benchmark: "198.18.5.5", address.Reserved: "240.0.0.1", address.Loopback: "127.0.0.2",
	address.Metadata: "169.254.169.254", address.Translated: "64:ff9b::a00:1", address.Unspecified: "0.0.0.0",
	address.Multicast: "224.0.0.1", address.Broadcast: "255.255.255.255",
}

func TestClassesThatMayBeReached(t *testing.T) {
	for name, tc := range map[string]struct {
		target     Target
		overridden bool
		want       []address.Class
	}{
		"a name":         {Target{Host: "x.example"}, false, []address.Class{address.Public}},
		"an address":     {Target{}, false, []address.Class{address.Public}},
		"a private name": {Target{Host: "x.example", Private: true}, false, []address.Class{address.Public, address.Private, address.Shared}},
		"a listed address": {Target{Listed: true}, false, []address.Class{address.Public, address.Private, address.Shared,
			address.LinkLocal, address.Documentation, address.Benchmark, address.Reserved}},
		"Listed is not about names": {Target{Host: "x.example", Listed: true}, false, []address.Class{address.Public}},
		"a name that the operator gave an address": {Target{Host: "x.example"}, true, []address.Class{address.Public, address.Private,
			address.Shared, address.LinkLocal, address.Documentation, address.Benchmark, address.Reserved, address.Loopback,
			address.Metadata, address.Translated}},
	} {
		for class, text := range oneOf {
			a := netip.MustParseAddr(text)
			if got := address.Classify(a); got != class {
				t.Fatalf("%s is %s", a, got)
			}
			t.Run(name+" "+string(class), func(t *testing.T) {
				cfg := testConfig{resolver: &zone{names: map[string][][]netip.Addr{"x.example": {{a}}}}}
				if tc.overridden {
					cfg.Overrides = map[string]Override{"x.example": {Addrs: []netip.Addr{a}}}
				}
				d, r := newRecorded(cfg)
				target := tc.target
				target.Port = 443
				if target.Host == "" {
					target.Address = a
				}
				conn, err := d.Dial(t.Context(), target)
				if slices.Contains(tc.want, class) {
					if err != nil || !slices.Equal(r.dialed, []string{text}) {
						t.Fatalf("%v, dialed %q", err, r.dialed)
					}
					conn.Close()
					return
				}
				var refused *RefusedError
				if !errors.As(err, &refused) || refused.Address != a || refused.Host != target.Host || len(r.dialed) > 0 {
					t.Fatalf("%v, dialed %q", err, r.dialed)
				}
				if !strings.Contains(err.Error(), text) || !strings.Contains(err.Error(), string(class)) || !strings.Contains(err.Error(), target.Host) {
					t.Errorf("%v", err)
				}
			})
		}
	}
}

func TestMappedAddressesAreCheckedAsIPv4(t *testing.T) {
	d, r := newRecorded(testConfig{resolver: &zone{names: map[string][][]netip.Addr{
		"public.example":  {addrs("::ffff:9.9.9.9")},
		"private.example": {addrs("::ffff:10.0.0.1")},
	}}})
	if _, err := d.Dial(t.Context(), Target{Host: "public.example", Port: 1}); err != nil || r.dialed[0] != "9.9.9.9" {
		t.Errorf("%v, dialed %q", err, r.dialed)
	}
	for _, target := range []Target{{Host: "private.example", Port: 1}, {Address: netip.MustParseAddr("::ffff:10.0.0.1"), Port: 1}} {
		if _, err := d.Dial(t.Context(), target); err == nil || !strings.Contains(err.Error(), "10.0.0.1 (private)") {
			t.Error(err)
		}
	}
}

func TestThisNodeIsNotReached(t *testing.T) {
	own := netip.MustParseAddr("9.9.9.9")
	z := &zone{names: map[string][][]netip.Addr{"me.example": {{own}}, "named.example": {{own}}}}
	d, r := newRecorded(testConfig{
		resolver: z, own: func() ([]netip.Addr, error) { return addrs("10.0.0.9", "::ffff:9.9.9.9"), nil },
		Config: Config{Overrides: map[string]Override{"named.example": {Addrs: []netip.Addr{own}}}},
	})
	for _, target := range []Target{
		{Host: "me.example"}, {Host: "me.example", Private: true}, {Address: own}, {Address: own, Listed: true},
		{Address: netip.MustParseAddr("10.0.0.9"), Listed: true},
	} {
		target.Port = 80
		if _, err := d.Dial(t.Context(), target); err == nil || !strings.Contains(err.Error(), "this node") || len(r.dialed) > 0 {
			t.Errorf("%+v: %v, dialed %q", target, err, r.dialed)
		}
	}
	if _, err := d.Dial(t.Context(), Target{Host: "named.example", Port: 80}); err != nil {
		t.Error(err)
	}

	unknown, r := newRecorded(testConfig{resolver: z, own: func() ([]netip.Addr, error) { return nil, errors.New("no list") }})
	if _, err := unknown.Dial(t.Context(), Target{Host: "me.example", Port: 80}); err == nil || len(r.dialed) > 0 {
		t.Errorf("%v, dialed %q", err, r.dialed)
	}
}

func TestInterfacesAreOwn(t *testing.T) {
	list, err := interfaceAddresses()
	if err != nil || !slices.Contains(list, netip.MustParseAddr("127.0.0.1")) && !slices.Contains(list, netip.MustParseAddr("::ffff:127.0.0.1")) {
		t.Errorf("%s, %v", list, err)
	}
}

func TestOwnAddressesAreListedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		list := addrs("10.0.0.1")
		o := own{list: func() ([]netip.Addr, error) { return list, nil }}
		a := netip.MustParseAddr("10.0.0.2")
		if has, err := o.has(a); has || err != nil {
			t.Errorf("%t, %v", has, err)
		}
		list = append(list, a)
		time.Sleep(ownFor)
		if has, err := o.has(a); !has || err != nil {
			t.Errorf("%t, %v", has, err)
		}
	})
}

func TestRefusedAddressesAreSkipped(t *testing.T) {
	d, r := newRecorded(testConfig{resolver: &zone{names: map[string][][]netip.Addr{
		"x.example": {addrs("127.0.0.1", "10.0.0.1", "9.9.9.9", "169.254.169.254", "2620:fe::fe", "9.9.9.9", "::1")},
	}}})
	r.respond = func(context.Context, netip.AddrPort) error { return errors.New("unreachable") }
	_, err := d.Dial(t.Context(), Target{Host: "x.example", Port: 1})
	if err == nil || !slices.Equal(r.dialed, []string{"9.9.9.9", "2620:fe::fe"}) {
		t.Errorf("%v, dialed %q", err, r.dialed)
	}
	if refused := (*RefusedError)(nil); errors.As(err, &refused) {
		t.Errorf("a failure is reported as a refusal: %v", err)
	}
}

func TestGuardChecksTheDialedAddress(t *testing.T) {
	d := New(Config{Overrides: map[string]Override{"x.example": {Addrs: addrs("127.0.0.1")}}})
	r := route{Target{Host: "x.example"}, grantPublic, nil}
	checked := netip.MustParseAddrPort("9.9.9.9:443")
	for actual, want := range map[string]string{
		"9.9.9.9:443":   "",
		"9.9.9.9:80":    "not the address that was checked",
		"127.0.0.1:443": "not the address that was checked",
		"garbage":       "address to be dialed",
	} {
		err := d.guard(r, checked, actual)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", actual, err)
		}
	}
	private := netip.MustParseAddrPort("10.0.0.1:443")
	if err := d.guard(r, private, private.String()); err == nil {
		t.Error("an address that is not allowed passed")
	}

	// Each dial calls the guard.
	public := testConfig{resolver: &zone{names: map[string][][]netip.Addr{"x.example": {addrs("9.9.9.9")}}}}.new()
	public.connect = func(ctx context.Context, _ netip.AddrPort, control control) (net.Conn, error) {
		return nil, &net.OpError{Op: "dial", Err: control(ctx, "tcp4", "127.0.0.1:443", nil)}
	}
	_, got := public.Dial(t.Context(), Target{Host: "x.example", Port: 443})
	if _, ok := got.(*RefusedError); !ok || !strings.Contains(got.Error(), "127.0.0.1") {
		t.Error(got)
	}

	// The socket calls its control function.
	err := errors.New("stopped")
	_, got = connect(t.Context(), netip.MustParseAddrPort("127.0.0.1:9"), func(_ context.Context, _, a string, _ rawConn) error {
		if a != "127.0.0.1:9" {
			t.Errorf("about %s", a)
		}
		return err
	})
	if !errors.Is(got, err) {
		t.Error(got)
	}
}

func TestRealConnections(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	to := l.Addr().(*net.TCPAddr).AddrPort()
	z := &zone{names: map[string][][]netip.Addr{"x.example": {addrs("127.0.0.1")}}}
	d := testConfig{resolver: z, Config: Config{Overrides: map[string]Override{"*.named.example": {Addrs: addrs("127.0.0.1")}}}}.new()
	conn, err := d.Dial(t.Context(), Target{Host: "a.named.example", Port: to.Port()})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, ok := conn.(*net.TCPConn); !ok || conn.RemoteAddr().String() != to.String() {
		t.Errorf("%T to %s", conn, conn.RemoteAddr())
	}
	if _, err := d.Dial(t.Context(), Target{Host: "x.example", Port: to.Port(), Private: true}); err == nil {
		t.Error("the node's loopback was reached")
	}
	l.Close()
	_, err = d.Dial(t.Context(), Target{Host: "a.named.example", Port: to.Port()})
	if err == nil || !strings.Contains(err.Error(), "connect to a.named.example, port") || !strings.Contains(err.Error(), "refused") {
		t.Error(err)
	}
	if refused := (*RefusedError)(nil); errors.As(err, &refused) {
		t.Errorf("a failure is reported as a refusal: %v", err)
	}
	if _, err := d.Dial(t.Context(), Target{Host: "a.named.example"}); err == nil {
		t.Error("port 0 was reached")
	}
}

func TestOverrides(t *testing.T) {
	o := overrides{"git.corp": {Addrs: addrs("10.0.0.1")}, "*.corp": {Addrs: addrs("10.0.0.2")}, "*.b.corp": {Addrs: addrs("10.0.0.3")}}
	for host, want := range map[string]string{
		"git.corp": "[10.0.0.1]", "a.corp": "[10.0.0.2]", "a.git.corp": "[10.0.0.2]", "b.corp": "[10.0.0.2]", "x.b.corp": "[10.0.0.3]",
		"corp": "[]", "acorp": "[]", "git.corp.example": "[]", "": "[]",
	} {
		found, ok := o.find(host)
		if got := fmt.Sprint(found.Addrs); got != want || ok != (want != "[]") {
			t.Errorf("%s is at %s, want %s", host, got, want)
		}
	}
}

func TestPortOfOverrideIsDialed(t *testing.T) {
	d, r := newRecorded(testConfig{Config: Config{Overrides: map[string]Override{"git.corp": {Addrs: addrs("10.0.0.1"), Port: 8443}}}})
	conn, err := d.Dial(t.Context(), Target{Host: "git.corp", Port: 443})
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	if got := conn.(*pipe).to.String(); got != "10.0.0.1:8443" || len(r.dialed) != 1 {
		t.Errorf("dialed %s", got)
	}
}

func TestFamiliesAlternate(t *testing.T) {
	for _, tc := range []struct{ found, want string }{
		{"6::1 6::2 6::3 1.1.1.1 2.2.2.2", "6::1 1.1.1.1 6::2 2.2.2.2 6::3"},
		{"1.1.1.1 6::1 6::2", "1.1.1.1 6::1 6::2"},
		{"1.1.1.1", "1.1.1.1"},
		{"1.1.1.1 2.2.2.2", "1.1.1.1 2.2.2.2"},
	} {
		if got := interleave(addrs(strings.Fields(tc.found)...)); !slices.Equal(got, addrs(strings.Fields(tc.want)...)) {
			t.Errorf("%s: %s", tc.found, got)
		}
	}
}

func TestNextAddressIsTriedInParallel(t *testing.T) {
	const port = 443
	for name, tc := range map[string]struct {
		first  time.Duration // until the first one responds; 0: it fails immediately, negative: never
		want   string
		after  time.Duration
		dialed int
	}{
		"the first responds":       {attemptDelay - 1, "2620:fe::1", attemptDelay - 1, 1},
		"the first is silent":      {-1, "9.9.9.1", attemptDelay, 2},
		"the first fails":          {0, "9.9.9.1", 0, 2},
		"the first comes too late": {attemptDelay + 1, "9.9.9.1", attemptDelay, 2},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d, r := newRecorded(testConfig{resolver: &zone{names: map[string][][]netip.Addr{"x.example": {addrs("2620:fe::1", "9.9.9.1", "9.9.9.2")}}}})
				r.respond = func(ctx context.Context, a netip.AddrPort) error {
					switch {
					case a.Addr().Is4():
						return nil
					case tc.first == 0:
						return errors.New("unreachable")
					case tc.first < 0:
						<-ctx.Done()
						return ctx.Err()
					}
					select {
					case <-time.After(tc.first):
						return nil
					case <-ctx.Done():
						return ctx.Err()
					}
				}
				begun := time.Now()
				conn, err := d.Dial(t.Context(), Target{Host: "x.example", Port: port})
				if err != nil {
					t.Fatal(err)
				}
				if got := conn.(*pipe).to; got.Addr().String() != tc.want || got.Port() != port {
					t.Errorf("connected to %s, want %s", got, tc.want)
				}
				if took := time.Since(begun); took != tc.after || len(r.dialed) != tc.dialed {
					t.Errorf("after %s, dialed %q", took, r.dialed)
				}
			})
		})
	}
}

func TestFailureOfAnyAddressIsNotARefusal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		own := addrs("10.0.0.9")
		d, r := newRecorded(testConfig{
			resolver: &zone{names: map[string][][]netip.Addr{"x.example": {addrs("9.9.9.1", "9.9.9.2")}}},
			own:      func() ([]netip.Addr, error) { return own, nil },
		})
		r.respond = func(ctx context.Context, _ netip.AddrPort) error {
			d.own.mu.Lock()
			own, d.own.until = addrs("9.9.9.2"), time.Time{} // so the second address is refused while the first is dialed
			d.own.mu.Unlock()
			<-ctx.Done()
			return ctx.Err()
		}
		if _, err := d.Dial(t.Context(), Target{Host: "x.example", Port: 1}); isRefused(err) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%T: %v, want a timeout", err, err)
		}
		if !slices.Equal(r.dialed, []string{"9.9.9.1"}) {
			t.Errorf("dialed %q", r.dialed)
		}
	})
}

func TestLateConnectionIsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, _ := newRecorded(testConfig{})
		var late *pipe
		d.connect = func(ctx context.Context, a netip.AddrPort, _ control) (net.Conn, error) {
			ours, _ := net.Pipe()
			p := &pipe{ours, a, new(atomic.Int32)}
			if a.Addr().Is6() {
				late = p
				<-ctx.Done() // it connects at the moment the other attempt wins
			}
			return p, nil
		}
		conn, err := d.race(t.Context(), route{Target{}, grantPublic, addrs("2620:fe::1", "9.9.9.1")})
		if err != nil || conn.(*pipe).closed.Load() != 0 {
			t.Fatal(err)
		}
		if late.closed.Load() != 1 {
			t.Error("the late connection is open")
		}
	})
}

func TestDialTimesOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, r := newRecorded(testConfig{resolver: &zone{names: map[string][][]netip.Addr{"x.example": {addrs("9.9.9.1", "9.9.9.2")}}}})
		r.respond = func(ctx context.Context, _ netip.AddrPort) error { <-ctx.Done(); return ctx.Err() }
		begun := time.Now()
		if _, err := d.Dial(t.Context(), Target{Host: "x.example", Port: 1}); !errors.Is(err, context.DeadlineExceeded) || time.Since(begun) != timeout {
			t.Errorf("%v after %s", err, time.Since(begun))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		begun = time.Now()
		if _, err := d.Dial(ctx, Target{Host: "x.example", Port: 1}); err == nil || time.Since(begun) != time.Second {
			t.Errorf("%v after %s", err, time.Since(begun))
		}
	})
}

func TestNumberOfTriedAddressesIsBounded(t *testing.T) {
	var many []netip.Addr
	for i := range 200 {
		many = append(many, netip.AddrFrom4([4]byte{9, 9, 9, byte(i)}))
	}
	d, r := newRecorded(testConfig{resolver: &zone{names: map[string][][]netip.Addr{"x.example": {many}}}})
	r.respond = func(context.Context, netip.AddrPort) error { return errors.New("unreachable") }
	if _, err := d.Dial(t.Context(), Target{Host: "x.example", Port: 1}); err == nil || len(r.dialed) != maxAddresses {
		t.Errorf("%v, dialed %q", err, r.dialed)
	}
}

func TestLookupsAreCached(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		z := &zone{names: map[string][][]netip.Addr{"x.example": {addrs("9.9.9.1"), addrs("10.0.0.1")}}}
		d, r := newRecorded(testConfig{resolver: z})
		dial := func(host string) error {
			_, err := d.Dial(t.Context(), Target{Host: host, Port: 1})
			return err
		}
		for range 3 {
			if err := dial("x.example"); err != nil {
				t.Error(err)
			}
		}
		time.Sleep(foundFor)
		if err := dial("x.example"); err == nil {
			t.Error("a private address was dialed")
		}
		if len(z.queried) != 2 || !slices.Equal(r.dialed, []string{"9.9.9.1", "9.9.9.1", "9.9.9.1"}) {
			t.Errorf("queried %q, dialed %q", z.queried, r.dialed)
		}

		z.queried = nil
		for range 3 {
			if err := dial("missing.example"); err == nil || !strings.Contains(err.Error(), "no such host") {
				t.Error(err)
			}
		}
		time.Sleep(missingFor)
		_ = dial("missing.example")
		if len(z.queried) != 2 {
			t.Errorf("queried %q", z.queried)
		}
	})
}

type failing struct{ queries int }

func (f *failing) LookupNetIP(context.Context, string, string) ([]netip.Addr, error) {
	f.queries++
	return nil, &net.DNSError{Err: "server misbehaving", IsTemporary: true}
}

func TestResolverFailuresAreNotCached(t *testing.T) {
	f := new(failing)
	d, _ := newRecorded(testConfig{resolver: f})
	for range 2 {
		if _, err := d.Dial(t.Context(), Target{Host: "x.example", Port: 1}); err == nil {
			t.Error("connected")
		}
	}
	if f.queries != 2 {
		t.Errorf("%d queries, want 2", f.queries)
	}
}

// all is a resolver that knows every name.
type all struct{}

func (all) LookupNetIP(context.Context, string, string) ([]netip.Addr, error) {
	return addrs("9.9.9.9"), nil
}

func TestCacheIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := cache{resolve: all{}.LookupNetIP}
		lookups := func(n int, below string) {
			for i := range n {
				if _, err := c.lookup(t.Context(), fmt.Sprintf("n%d.%s", i, below)); err != nil {
					t.Fatal(err)
				}
			}
		}
		lookups(2*maxNames, "old.example")
		if len(c.lookups) != maxNames {
			t.Errorf("%d names", len(c.lookups))
		}
		time.Sleep(foundFor + 1)
		c.lookups["new.example"] = lookup{until: time.Now().Add(foundFor)}
		lookups(5, "example")
		if _, ok := c.lookups["new.example"]; !ok || len(c.lookups) != 6 {
			t.Errorf("%d names; expired ones are dropped first", len(c.lookups))
		}
	})
}

// crowd is a resolver that returns as many addresses for every name as a response holds.
type crowd struct{}

func (crowd) LookupNetIP(context.Context, string, string) ([]netip.Addr, error) {
	list := make([]netip.Addr, 4000)
	for i := range list {
		list[i] = netip.AddrFrom4([4]byte{9, 9, byte(i >> 8), byte(i)})
	}
	return list, nil
}

func TestCachedAddressesAreBounded(t *testing.T) {
	c := cache{resolve: crowd{}.LookupNetIP}
	got, err := c.lookup(t.Context(), "x.example")
	if err != nil || len(got) != maxFound || got[0] != netip.MustParseAddr("9.9.0.0") {
		t.Errorf("%d addresses, %v", len(got), err)
	}
	if stored := c.lookups["x.example"].addrs; cap(stored) > 2*maxFound {
		t.Errorf("the capacity is %d", cap(stored))
	}
}

func TestValidate(t *testing.T) {
	good := Config{
		Servers:   []netip.AddrPort{netip.MustParseAddrPort("192.0.2.53:53")},
		Overrides: map[string]Override{"git.corp": {Addrs: addrs("10.0.0.1", "::1")}, "*.corp": {Addrs: addrs("169.254.169.254")}},
		Proxy:     parseURL("http://user:password@proxy.corp:3128"),
	}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	if err := (&Config{}).Validate(); err != nil {
		t.Error(err)
	}
	for want, bad := range map[string]Config{
		"name server":           {Servers: make([]netip.AddrPort, 1)},
		"in lower case":         {Overrides: map[string]Override{"Git.corp": {Addrs: addrs("10.0.0.1")}}},
		`"*.*.corp"`:            {Overrides: map[string]Override{"*.*.corp": {Addrs: addrs("10.0.0.1")}}},
		`"10.0.0.1"`:            {Overrides: map[string]Override{"10.0.0.1": {Addrs: addrs("10.0.0.1")}}},
		"has no address":        {Overrides: map[string]Override{"git.corp": {}}},
		"0.0.0.0 (unspecified)": {Overrides: map[string]Override{"git.corp": {Addrs: addrs("0.0.0.0")}}},
		"as such":               {Overrides: map[string]Override{"git.corp": {Addrs: addrs("::ffff:10.0.0.1")}}},
		"no zone":               {Overrides: map[string]Override{"git.corp": {Addrs: addrs("fe80::1%eth0")}}},
		"begins with http":      {Proxy: parseURL("socks5://proxy.corp")},
		"names no host":         {Proxy: parseURL("http://")},
		"ends after the host":   {Proxy: parseURL("http://proxy.corp/path")},
	} {
		if err := bad.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want one about %s", err, want)
		}
	}
}

// serveDNS serves a zone over UDP on the loopback until the test ends, and returns
// the server's address.
func serveDNS(tb testing.TB, z *zone) netip.AddrPort {
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	handler := dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg).SetReply(q)
		name, isA := strings.TrimSuffix(q.Question[0].Name, "."), q.Question[0].Qtype == dns.TypeA
		if found := z.namesOf(name, isA); found == nil {
			m.Rcode = dns.RcodeNameError
		} else {
			for _, a := range found {
				switch {
				case a.Is4() && isA:
					m.Answer = append(m.Answer, &dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: 1}, A: a.AsSlice()})
				case a.Is6() && !isA:
					m.Answer = append(m.Answer, &dns.AAAA{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeAAAA, Class: 1}, AAAA: a.AsSlice()})
				}
			}
		}
		_ = w.WriteMsg(m)
	})
	started := make(chan struct{})
	s := &dns.Server{PacketConn: pc, Handler: handler, NotifyStartedFunc: func() { close(started) }}
	var ended sync.WaitGroup
	ended.Go(func() { _ = s.ActivateAndServe() })
	<-started
	tb.Cleanup(func() { _ = s.Shutdown(); ended.Wait() })
	return pc.LocalAddr().(*net.UDPAddr).AddrPort()
}

// namesOf is next for a resolver that queries A and AAAA: only an A query advances the zone.
func (z *zone) namesOf(name string, isA bool) []netip.Addr {
	if isA {
		return z.next(name)
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	if all := z.names[name]; len(all) > 0 {
		return all[0]
	}
	return nil
}

// The same holds with the test's resolver and with Go's, which queries a server on
// the loopback.
func TestRebindingIsRefused(t *testing.T) {
	for name, config := range map[string]func(*testing.T, *zone) testConfig{
		"fake": func(_ *testing.T, z *zone) testConfig { return testConfig{resolver: z} },
		"real": func(t *testing.T, z *zone) testConfig {
			return testConfig{Config: Config{Servers: []netip.AddrPort{serveDNS(t, z)}}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			z := &zone{names: map[string][][]netip.Addr{
				"changes.example": {addrs("9.9.9.1"), addrs("127.0.0.1"), addrs("9.9.9.2"), addrs("169.254.169.254")},
				"mixed.example":   {addrs("127.0.0.1", "9.9.9.3")},
				"private.example": {addrs("10.0.0.1", "192.168.1.1", "::1")},
			}}
			d, r := newRecorded(config(t, z))
			dial := func(host string) error {
				d.cache.lookups = nil // as if the cached names had expired
				_, err := d.Dial(t.Context(), Target{Host: host, Port: 443})
				return err
			}
			for i, ok := range []bool{true, false, true, false, false} {
				if err := dial("changes.example"); (err == nil) != ok {
					t.Errorf("dial %d: %v", i, err)
				}
			}
			if err := dial("mixed.example"); err != nil {
				t.Error(err)
			}
			var refused *RefusedError
			if err := dial("private.example"); !errors.As(err, &refused) {
				t.Error(err)
			}
			if err := dial("missing.example"); err == nil || errors.As(err, &refused) {
				t.Error(err)
			}
			if want := []string{"9.9.9.1", "9.9.9.2", "9.9.9.3"}; !slices.Equal(r.dialed, want) {
				t.Errorf("dialed %q, want %q", r.dialed, want)
			}
			z.mu.Lock()
			defer z.mu.Unlock()
			if slices.ContainsFunc(z.queried, func(s string) bool { return !strings.HasSuffix(s, ".example") }) {
				t.Errorf("queried %q", z.queried)
			}
		})
	}
}

func TestNextServerIsQueriedWhenOneIsSilent(t *testing.T) {
	closed, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	dead := closed.LocalAddr().(*net.UDPAddr).AddrPort()
	closed.Close()
	z := &zone{names: map[string][][]netip.Addr{"x.example": {addrs("9.9.9.9")}}}
	r := newResolver([]netip.AddrPort{dead, serveDNS(t, z)})
	for range 3 {
		if found, err := r.LookupNetIP(t.Context(), "ip", "x.example."); err != nil || len(found) != 1 {
			t.Errorf("%s, %v", found, err)
		}
	}
}

func BenchmarkDial(b *testing.B) {
	z := &zone{names: map[string][][]netip.Addr{"x.example": {addrs("9.9.9.9")}}}
	server := serveDNS(b, z)
	d, _ := newRecorded(testConfig{Config: Config{Servers: []netip.AddrPort{server}}})
	target := Target{Host: "x.example", Port: 443}
	run := func(name string, f func()) {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				f()
				if _, err := d.route(b.Context(), target, grantPublic); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	run("resolved", func() { d.cache.lookups = nil })
	run("cached", func() {})
	b.Run("own addresses", func(b *testing.B) {
		for b.Loop() {
			if _, err := interfaceAddresses(); err != nil {
				b.Fatal(err)
			}
		}
	})
}
