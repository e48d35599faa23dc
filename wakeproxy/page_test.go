package wakeproxy

import (
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

func TestStatusReportsTheListeningPortWithoutAWake(t *testing.T) {
	f := newFront(t, newFakeNode(t, app(t, hello), sandbox.Port{}), Options{})
	status := func() string {
		t.Helper()
		res := f.do(f.request("GET", StatusPath))
		if res.StatusCode != 200 || res.Header.Get("Content-Type") != "application/json" || res.Header.Get("Cache-Control") != "no-store" {
			t.Errorf("status %d, headers %v", res.StatusCode, res.Header)
		}
		return testkit.Body(t, res)
	}
	if got := status(); got != `{"listening":true}` {
		t.Errorf("running: %s", got)
	}
	f.node.serve("")
	if got := status(); got != `{"listening":false}` {
		t.Errorf("nothing listens: %s", got)
	}
	for _, kind := range []sandbox.WakeKind{sandbox.WakeWarm, sandbox.WakeCold} {
		f.node.sleep(kind, nil)
		if got := status(); got != `{"listening":false}` {
			t.Errorf("%s: %s", kind, got)
		}
	}
	if n := f.node.wakes.Load() + f.node.acquired.Load() + f.node.touches.Load(); n != 0 {
		t.Errorf("it counted as use %d times", n)
	}
	wantProblem(t, f.do(f.request("POST", StatusPath)), 405, "method_not_allowed")
	f.node.set(func(n *fakeNode) { n.sb.Ports = nil })
	wantProblem(t, f.do(f.request("GET", StatusPath)), 404, "preview_not_found")
}

func TestPagesOfTemporaryProblemsReload(t *testing.T) {
	f := newFront(t, newFakeNode(t, "", sandbox.Port{}), Options{})
	page := func(method string) string {
		t.Helper()
		req := asNavigation(f.request("GET", "/"))
		req.Method = method
		res := f.do(req)
		text := testkit.Body(t, res)
		if policy := res.Header.Get("Content-Security-Policy"); !strings.Contains(policy, hashOf(pageScript)) || !strings.Contains(policy, "connect-src 'self'") {
			t.Errorf("policy %q", policy)
		}
		return text
	}
	const button, asks, script = `<a class="button" href="">Try again</a>`, `data-status="` + StatusPath + `"`, "<script>"
	if text := page("GET"); !strings.Contains(text, button) || !strings.Contains(text, asks) || !strings.Contains(text, pageScript) {
		t.Errorf("the page lacks something: %s", text)
	}
	// A form is not sent again without a person.
	if text := page("POST"); !strings.Contains(text, button) || strings.Contains(text, asks) || strings.Contains(text, script) {
		t.Errorf("the page of a form: %s", text)
	}
	f.node.set(func(n *fakeNode) { n.sb.Ports = nil })
	if text := page("GET"); strings.Contains(text, button) || strings.Contains(text, asks) || strings.Contains(text, script) {
		t.Errorf("the page of a preview that is gone: %s", text)
	}
}
