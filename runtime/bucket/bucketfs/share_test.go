package bucketfs

import "testing"

func TestQuotaLeavesAPartOfThePoolToOthers(t *testing.T) {
	p := &pool{limit: 120}
	a, b, c := &quota{pool: p, max: 120}, &quota{pool: p, max: 120}, &quota{pool: p, max: 10}
	for _, step := range []struct {
		what  string
		quota *quota
		n     int64
		want  bool
	}{
		{"half of all", a, 60, true},
		{"more than half", a, 1, false},
		{"half of what is left", b, 30, true},
		{"more than half of what is left", b, 1, false},
		{"nothing, with less left than before", a, 0, true},
		{"the maximum", c, 10, true},
		{"more than the maximum", c, 1, false},
	} {
		if got := step.quota.acquire(step.n); got != step.want {
			t.Errorf("%s: acquire(%d) returned %t", step.what, step.n, got)
		}
	}
	a.free(60)
	if !b.acquire(25) || b.inUse() != 55 || p.used != 65 {
		t.Errorf("after a release, b uses %d of %d", b.inUse(), p.used)
	}
}
