package egress

import (
	"context"
	"net"
	"strings"
	"testing"

	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/flow"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/quota"
	"github.com/doze-run/doze/testkit"
)

// A pending dial outlives its canceled request, so a sandbox could start any number of dials
// at no cost.
func TestAbandonedDialsAreBounded(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	b.push("bearer", bearer(1))
	b.secret("api", token, "a.tcp.test")
	b.rules(through("a.tcp.test", "bearer", "api"))
	came, end := make(chan bool), make(chan bool)
	b.servers.mu.Lock()
	b.servers.speak = func(net.Conn) { // sends nothing, so that the TLS handshake does not start
		came <- true
		<-end
	}
	b.servers.mu.Unlock()
	t.Cleanup(func() { close(end) })
	_ = b.find(b.sb.ID).Usage.Dials.TryAcquire(flow.MaxClientDials - 1)
	ctx, leave := context.WithCancel(testkit.Context(t))
	left := make(chan bool)
	go func() {
		defer close(left)
		_, _ = b.try(newRequest(t, "GET", "https://a.tcp.test/", nil).WithContext(ctx))
	}()
	<-came
	leave()
	<-left
	b.want(b.get("https://a.tcp.test/"), 503, `"code":"egress_limit_exceeded"`)
	b.entry("a.tcp.test", func(e audit.Entry) bool {
		return e.Verdict == audit.Deny && e.Status == 503 && strings.Contains(e.Reason, "being established")
	})
}

// Otherwise bodies that are declared but never sent would exhaust the node's memory.
func TestBodiesWithPlaceholdersAreBoundedInMemory(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	b.secret("api", token, "a.web.test")
	b.rules(offering("a.web.test"))
	text := b.Environment(b.sb.ID)["API_TOKEN"]
	_ = b.carrier.Usage.Bodies.TryAcquire(flow.MaxBodies)
	send := func() response {
		return b.do(newRequest(t, "POST", "https://a.web.test/", strings.NewReader("key="+text)))
	}
	b.want(send(), 403, "too many such bodies are in flight")
	b.want(b.do(newRequest(t, "POST", "https://a.web.test/", strings.NewReader("no key"))), 200, "this is")
	b.carrier.Usage.Bodies.Release(flow.MaxBodies)
	m := b.find(b.sb.ID)
	_ = m.Usage.Bodies.TryAcquire(flow.MaxClientBodies)
	b.want(send(), 403, "too many such bodies are in flight")
	m.Usage.Bodies.Release(flow.MaxClientBodies)
	b.want(send(), 200, "this is")
	b.entry("a.web.test", func(e audit.Entry) bool { return e.Status == 200 && len(e.Secrets) == 1 })
	if n := b.carrier.Usage.Bodies.Used() + m.Usage.Bodies.Used(); n != 0 {
		t.Errorf("%d bytes are held after the requests", n)
	}
}

func TestBodiesOfPoliciesAreBoundedInMemory(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	b.push("body", inBody())
	b.secret("api", token, "a.web.test")
	b.rules(through("a.web.test", "body", "api"))
	send := func(path string) response {
		return b.do(newRequest(t, "POST", "https://a.web.test"+path, strings.NewReader("x")))
	}
	b.want(send("/first"), 200, "this is")
	m := b.find(b.sb.ID)
	for _, pool := range []*quota.Pool{m.Usage.PolicyBodies, b.carrier.Usage.PolicyBodies} {
		limit := int64(flow.MaxPolicyBodies)
		if pool == m.Usage.PolicyBodies {
			limit = flow.MaxClientPolicyBodies
		}
		_ = pool.TryAcquire(limit)
		b.want(send("/more"), 503, "bytes of bodies that policies read or write")
		pool.Release(limit)
	}
	b.want(send("/last"), 200, "this is")
	b.entry("a.web.test", func(e audit.Entry) bool { return e.Path == "/last" })
	if n := b.carrier.Usage.PolicyBodies.Used(); n != 0 {
		t.Errorf("%d bytes are held after the requests", n)
	}
}

func TestManyRequestsHaveSmallWindows(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	m := r.find(b.sb.ID)
	for name, requests := range map[string]struct {
		of   *quota.Pool
		wide int64
	}{"of the sandbox": {m.Usage.Requests, flow.MaxClientLargeWindows}, "of the node": {r.carrier.Usage.Requests, flow.MaxLargeWindows}} {
		_ = requests.of.TryAcquire(requests.wide)
		if m.SmallWindow() {
			t.Errorf("%s: %d are", name, requests.wide)
		}
		_ = requests.of.TryAcquire(1)
		if !m.SmallWindow() {
			t.Errorf("%s: one more is not", name)
		}
		requests.of.Release(requests.wide + 1)
	}
}

func TestRequestsOfAClientAreBounded(t *testing.T) {
	r := newRig(t)
	b, other := r.box("k3f9x2m7q1az"), r.box("z3f9x2m7q1az")
	m := r.find(b.sb.ID)
	for range flow.MaxClientRequests {
		if err := m.Usage.Requests.TryAcquire(1); err != nil {
			t.Fatal(err)
		}
	}
	a := b.get("http://a.plain.test/more")
	b.want(a, 503, "requests under way")
	if a.header.Get("Retry-After") == "" || a.header.Get(problem.HeaderError) != "egress_limit_exceeded" {
		t.Errorf("its header is %v", a.header)
	}
	e := b.entry("a.plain.test", func(e audit.Entry) bool { return e.Path == "/more" })
	if e.Verdict != audit.Deny || e.Status != 503 || !strings.Contains(e.Reason, "a limit was reached") {
		t.Errorf("the audit log says %+v", e)
	}
	other.want(other.get("http://a.plain.test/more"), 200, "")
	_ = r.carrier.Usage.Requests.TryAcquire(flow.MaxRequests - flow.MaxClientRequests)
	other.want(other.get("http://a.plain.test/more"), 503, "in the node")
	r.carrier.Usage.Requests.Release(flow.MaxRequests - flow.MaxClientRequests)
	m.Usage.Requests.Release(flow.MaxClientRequests)
	b.want(b.get("http://a.plain.test/last"), 200, "")
	b.entry("a.plain.test", func(e audit.Entry) bool { return e.Path == "/last" }) // written after the request is no longer counted
	if n, all := m.Usage.Requests.Used(), r.carrier.Usage.Requests.Used(); n != 0 || all != 0 {
		t.Errorf("%d and %d are counted when all have ended", n, all)
	}
}
