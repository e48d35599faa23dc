package egress

import (
	"strings"
	"testing"

	"github.com/doze-run/doze/egress/audit"
)

func TestASenderHasSoManyRequestsUnderWayAtMost(t *testing.T) {
	r := newRig(t)
	b, other := r.box("k3f9x2m7q1az"), r.box("z3f9x2m7q1az")
	m := &r.members[b.sb.ID].sender
	for range maxSenderRequests {
		if full := m.begin(); full != "" {
			t.Fatal(full)
		}
	}
	a := b.get("http://a.plain.test/more")
	b.want(a, 503, "requests under way")
	if a.header.Get("Retry-After") == "" || a.header.Get("X-Doze-Egress") != codeLimit {
		t.Errorf("its header is %v", a.header)
	}
	e := b.entry("a.plain.test", func(e audit.Entry) bool { return e.Path == "/more" })
	if e.Verdict != audit.Deny || e.Status != 503 || !strings.Contains(e.Reason, "a limit was reached") {
		t.Errorf("the audit log says %+v", e)
	}
	other.want(other.get("http://a.plain.test/more"), 200, "")
	r.requests.Add(maxRequests - maxSenderRequests)
	other.want(other.get("http://a.plain.test/more"), 503, "in the node")
	r.requests.Add(maxSenderRequests - maxRequests)
	for range maxSenderRequests {
		m.finish()
	}
	b.want(b.get("http://a.plain.test/last"), 200, "")
	b.entry("a.plain.test", func(e audit.Entry) bool { return e.Path == "/last" }) // written after it was counted out
	if n, all := m.requests.Load(), r.requests.Load(); n != 0 || all != 0 {
		t.Errorf("%d and %d are counted when all have ended", n, all)
	}
}
