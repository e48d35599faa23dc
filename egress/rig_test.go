package egress

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/network/dial"
	"github.com/doze-run/doze/egress/network/stack/stacktest"
	"github.com/doze-run/doze/egress/policy/policytest"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/ruleset"
	"github.com/doze-run/doze/runtime/netns/tun/tuntest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/store"
	"github.com/doze-run/doze/runtime/store/storetest"
	"github.com/doze-run/doze/testkit"
	"github.com/doze-run/doze/testkit/testca"
)

// compiler is the policy compiler of all tests.
var compiler string

func TestMain(m *testing.M) {
	tuntest.EnterNamespaces()
	dir, err := os.MkdirTemp("", "doze-egress-")
	if err == nil {
		compiler, err = policytest.BuildCompiler(dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		_ = os.RemoveAll(dir)
		os.Exit(code)
	}))
}

// Owner and operator of the tests.
const (
	owner    = "ann"
	operator = "node/operator" // owner names are arbitrary strings
)

// rig is an Egress with its environment.
type rig struct {
	*Egress
	t         testing.TB
	config    Config
	documents *documents
	sandboxes *sandboxes
	devices   *devices
	servers   *servers
	log       *testkit.Log
}

// newRig opens an Egress whose settings resolve *.test to servers of the test: *.web.test
// with TLS, *.plain.test without, and *.tcp.test served by servers.speak.
func newRig(t testing.TB, change ...func(*Config)) *rig {
	t.Helper()
	s := newServers(t)
	r := &rig{t: t, servers: s, documents: &documents{Badger: storetest.New(t)}, log: testkit.NewLog(t)}
	r.sandboxes = &sandboxes{all: map[sandbox.ID]sandbox.Sandbox{}, touched: map[sandbox.ID]int{}}
	r.devices = &devices{t: t, networks: map[sandbox.ID]*attached{}}
	r.config = Config{
		Folder: t.TempDir(), Documents: r.documents, Device: r.devices.TUN, Sandboxes: r.sandboxes,
		Operator: operator, Settings: s.settings(), Log: r.log.Logger(),
		PolicyCompiler: compiler,
	}
	for _, c := range change {
		c(&r.config)
	}
	r.open()
	t.Cleanup(func() { r.close() })
	return r
}

func (r *rig) open() {
	r.t.Helper()
	e, err := Open(testkit.Context(r.t), r.config)
	if err != nil {
		r.t.Fatal(err)
	}
	r.Egress = e
}

func (r *rig) close() {
	r.t.Helper()
	if err := r.Close(); err != nil {
		r.t.Errorf("close: %v", err)
	}
}

// reopen simulates a restart of the node.
func (r *rig) reopen() {
	r.t.Helper()
	r.close()
	r.open()
}

// reload changes the node's settings.
func (r *rig) reload(change func(*Settings)) error {
	r.t.Helper()
	s := *r.settings.Load()
	change(&s)
	c, err := r.Prepare(testkit.Context(r.t), s)
	if err != nil {
		return err
	}
	c.Apply()
	return nil
}

// nodeRules replaces the node's rules.
func (r *rig) nodeRules(rules ...rule.Rule) {
	r.t.Helper()
	if err := r.reload(func(s *Settings) { s.Rules = compileNodeRules(r.t, nil, rules...) }); err != nil {
		r.t.Fatal(err)
	}
}

func compileNodeRules(t testing.TB, presets *rule.Presets, rules ...rule.Rule) *rule.Layer {
	t.Helper()
	l, err := rule.Compile(rule.Node, rules, presets)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// documents is a store whose operations can fail.
type documents struct {
	*store.Badger
	mu   sync.Mutex
	fail error
}

func (d *documents) failWith(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fail = err
}

func (d *documents) failure() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.fail
}

func (d *documents) PutDocument(ctx context.Context, kind, name string, value []byte) error {
	if err := d.failure(); err != nil {
		return err
	}
	return d.Badger.PutDocument(ctx, kind, name, value)
}

func (d *documents) DeleteDocument(ctx context.Context, kind, name string) error {
	if err := d.failure(); err != nil {
		return err
	}
	return d.Badger.DeleteDocument(ctx, kind, name)
}

// named returns the documents whose names contain a text.
func (d *documents) named(t testing.TB, text string) []string {
	t.Helper()
	var found []string
	for _, kind := range []string{namesKind, "rules", "policies", "secrets", "ca", keysKind} {
		err := d.Documents(testkit.Context(t), kind, func(name string, _ []byte) error {
			if strings.Contains(name, text) {
				found = append(found, kind+" "+name)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return found
}

// sandboxes is a Manager whose sandboxes all run.
type sandboxes struct {
	mu      sync.Mutex
	all     map[sandbox.ID]sandbox.Sandbox
	touched map[sandbox.ID]int
	roused  func(ctx context.Context, id sandbox.ID) error
}

func (s *sandboxes) ByID(id sandbox.ID) (sandbox.Sandbox, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sb, ok := s.all[id]
	return sb, ok
}

func (s *sandboxes) Touch(id sandbox.ID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.touched[id]++
}

func (s *sandboxes) Rouse(ctx context.Context, id sandbox.ID) error {
	s.mu.Lock()
	roused := s.roused
	s.mu.Unlock()
	if roused == nil {
		return nil
	}
	return roused(ctx, id)
}

func (s *sandboxes) put(sb sandbox.Sandbox) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all[sb.ID] = sb
}

func (s *sandboxes) remove(id sandbox.ID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.all, id)
}

// devices makes devices in network namespaces of the test. TUN is a DeviceFunc.
type devices struct {
	t testing.TB

	mu       sync.Mutex
	networks map[sandbox.ID]*attached
	ended    map[int]bool // processes
	made     func()       // called after a device is made, before TUN returns it
}

type attached struct {
	*stacktest.Network
	pid int
}

func (d *devices) TUN(ctx context.Context, id sandbox.ID, pid int) (*os.File, *net.TCPListener, error) {
	if err := ctx.Err(); err != nil {
		return nil, nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ended[pid] {
		return nil, nil, errors.New("there is no such process")
	}
	network := d.networks[id]
	if network == nil || network.pid != pid {
		if network != nil {
			network.Close()
		}
		network = &attached{stacktest.New(d.t), pid}
		d.networks[id] = network
	}
	device, listener := network.Device(d.t)
	if d.made != nil {
		d.made()
	}
	return device, listener, nil
}

func (d *devices) network(id sandbox.ID) *attached {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.networks[id]
}

// box is an attached sandbox.
type box struct {
	*rig
	sb sandbox.Sandbox
	*stacktest.Network
	Client *http.Client
}

// box makes a sandbox and attaches it.
func (r *rig) box(id sandbox.ID) *box {
	r.t.Helper()
	sb := sandbox.Sandbox{ID: id, Name: "name-" + string(id), Owner: owner, Labels: map[string]string{"team": "a"}}
	r.sandboxes.put(sb)
	b := &box{rig: r, sb: sb}
	b.attach()
	return b
}

func (b *box) attach() {
	b.t.Helper()
	if err := b.Attach(testkit.Context(b.t), b.sb, 1); err != nil {
		b.t.Fatal(err)
	}
	b.Network = b.devices.network(b.sb.ID).Network
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(b.Trust())
	roots.AppendCertsFromPEM(b.servers.ca)
	transport := &http.Transport{
		DialContext: b.DialContext, TLSClientConfig: &tls.Config{RootCAs: roots}, ForceAttemptHTTP2: true,
	}
	b.Client = &http.Client{Transport: transport, Timeout: testkit.Patience, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	b.t.Cleanup(transport.CloseIdleConnections)
}

// response is the response to a request, with its body read.
type response struct {
	status int
	header http.Header
	body   string
}

func (b *box) do(r *http.Request) response {
	b.t.Helper()
	a, err := b.try(r)
	if err != nil {
		b.t.Fatalf("%s %s: %v", r.Method, r.URL, err)
	}
	return a
}

func (b *box) try(r *http.Request) (response, error) {
	res, err := b.Client.Do(r)
	if err != nil {
		return response{}, err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	return response{res.StatusCode, res.Header, string(body)}, err
}

func (b *box) get(url string) response {
	b.t.Helper()
	return b.do(newRequest(b.t, "GET", url, nil))
}

func newRequest(t testing.TB, method, url string, body io.Reader) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(testkit.Context(t), method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// want fails the test unless the response has this status and contains this text.
func (b *box) want(a response, status int, text string) {
	b.t.Helper()
	if a.status != status || !strings.Contains(a.body, text) {
		b.t.Errorf("got %d %q, want %d with %q", a.status, a.body, status, text)
	}
}

// rules sets the sandbox's rules.
func (b *box) rules(rules ...rule.Rule) {
	b.t.Helper()
	if _, _, err := b.SetRules(testkit.Context(b.t), owner, b.sb.ID, ruleset.Update{Rules: rules}); err != nil {
		b.t.Fatal(err)
	}
}

// entry waits for the next entry about a host that f accepts, and returns it.
func (b *box) entry(host string, f func(audit.Entry) bool) audit.Entry {
	b.t.Helper()
	flows, stop := b.Flows.Follow(string(b.sb.ID), audit.Filter{})
	defer stop()
	ctx := testkit.Context(b.t)
	for {
		select {
		case e := <-flows:
			if e.Host == host && (f == nil || f(e)) {
				return e
			}
		case <-ctx.Done():
			b.t.Fatalf("no matching entry about %s: %+v", host, b.Flows.Entries(string(b.sb.ID), audit.Filter{}))
		}
	}
}

// servers are the servers that sandboxes can reach.
type servers struct {
	ca         []byte // the issuer of their certificates, in PEM
	web, plain *httptest.Server
	tcp        net.Listener
	serving    sync.WaitGroup

	mu    sync.Mutex
	got   []got
	serve http.HandlerFunc
	speak func(net.Conn)
}

// got is a request as a server received it.
type got struct {
	*http.Request
	body string
}

func newServers(t testing.TB) *servers {
	t.Helper()
	certificate, ca, err := testca.New("*.web.test", "*.tcp.test")
	if err != nil {
		t.Fatal(err)
	}
	s := &servers{ca: ca}
	start := func(f func(*httptest.Server)) *httptest.Server {
		server := httptest.NewUnstartedServer(s)
		server.Config.ErrorLog = log.New(io.Discard, "", 0)
		f(server)
		t.Cleanup(server.Close)
		return server
	}
	s.plain = start(func(h *httptest.Server) { h.Start() })
	s.web = start(func(h *httptest.Server) {
		h.TLS = &tls.Config{Certificates: []tls.Certificate{certificate}}
		h.EnableHTTP2 = true
		h.StartTLS()
	})
	if s.tcp, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	s.serving.Go(s.accept) // ends with the listener
	t.Cleanup(func() {
		s.tcp.Close()
		s.serving.Wait()
	})
	return s
}

func (s *servers) accept() {
	for {
		conn, err := s.tcp.Accept()
		if err != nil {
			return
		}
		s.mu.Lock()
		speak := s.speak
		s.mu.Unlock()
		s.serving.Go(func() {
			defer conn.Close()
			if speak == nil {
				_, _ = io.Copy(conn, conn)
				return
			}
			speak(conn)
		})
	}
}

func (s *servers) handle(h http.HandlerFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.serve = h
}

func (s *servers) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	s.mu.Lock()
	if err == nil {
		s.got = append(s.got, got{r, string(body)})
	}
	serve := s.serve
	s.mu.Unlock()
	if serve != nil {
		r.Body = io.NopCloser(strings.NewReader(string(body)))
		serve(w, r)
		return
	}
	_, _ = io.WriteString(w, "this is "+r.Host)
}

// last returns the last request that a server received. It fails the test without one.
func (s *servers) last(t testing.TB) got {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.got) == 0 {
		t.Fatal("no server got anything")
	}
	return s.got[len(s.got)-1]
}

func (s *servers) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.got)
}

func (s *servers) settings() Settings {
	at := func(a net.Addr) dial.Override {
		return dial.Override{Addrs: []netip.Addr{netip.MustParseAddr("127.0.0.1")}, Port: uint16(a.(*net.TCPAddr).Port)}
	}
	settings := DefaultSettings()
	settings.UpstreamCAs = s.ca
	settings.Resolve = map[string]dial.Override{
		"*.web.test": at(s.web.Listener.Addr()), "*.plain.test": at(s.plain.Listener.Addr()), "*.tcp.test": at(s.tcp.Addr()),
	}
	// The tests' modules share few cores with other tests.
	settings.PolicyTime = 10 * time.Second
	return settings
}
