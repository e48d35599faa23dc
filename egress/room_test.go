package egress

import (
	"strings"
	"testing"

	"github.com/doze-run/doze/egress/audit"
)

// Otherwise bodies that are declared, and never sent, would fill the node.
func TestBodiesAreHeldForPlaceholdersOnlySoLongAsThereIsRoom(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	b.secret("api", token, "a.web.test")
	b.rules(offering("a.web.test"))
	text := b.Environment(b.sb.ID)["API_TOKEN"]
	b.Egress.load.held.take(maxHeldAll, maxHeldAll)
	send := func() answer {
		return b.do(newRequest(t, "POST", "https://a.web.test/", strings.NewReader("key="+text)))
	}
	b.want(send(), 403, "of which too many are in flight")
	b.want(b.do(newRequest(t, "POST", "https://a.web.test/", strings.NewReader("no key"))), 200, "this is")
	b.Egress.load.held.give(maxHeldAll)
	m := &b.find(b.sb.ID).sender
	m.load.held.take(maxHeld, maxHeld)
	b.want(send(), 403, "of which too many are in flight")
	m.load.held.give(maxHeld)
	b.want(send(), 200, "this is")
	b.entry("a.web.test", func(e audit.Entry) bool { return e.Status == 200 && len(e.Secrets) == 1 })
	if n := b.Egress.load.held.used.Load() + m.load.held.used.Load(); n != 0 {
		t.Errorf("%d bytes are held after the requests", n)
	}
}
