//go:build !race

package egress

import (
	"testing"

	"github.com/doze-run/doze/testkit"
)

func TestMemoryOfReplacedPoliciesIsReleased(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	b.push("bearer", bearer(0))
	b.secret("api", token, "a.web.test")
	b.rules(through("a.web.test", "bearer", "api"))
	grown := testkit.HeapGrowth(t, func() {
		for n := range 50 {
			b.push("bearer", bearer(n+1))
			b.want(b.get("https://a.web.test/"), 200, "this is")
		}
	})
	r.uses(t, 1)
	if grown > 20<<20 {
		t.Errorf("the heap grew by %d KiB", grown>>10)
	}
}
