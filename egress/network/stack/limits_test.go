package stack

import (
	"net/netip"
	"testing"
	"time"
)

func TestRefusalsAreReportedOncePerDestination(t *testing.T) {
	var r refusals
	now := time.Now()
	to := func(port int) netip.AddrPort {
		return netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), uint16(port))
	}
	if !r.isNew(to(443), now) || r.isNew(to(443), now.Add(refusedAgain-1)) || !r.isNew(to(443), now.Add(refusedAgain)) {
		t.Error("a destination is not reported once per interval")
	}
	reported := 0
	for port := range 10 * maxRefusedReported {
		if r.isNew(to(1000+port), now.Add(2*refusedAgain)) {
			reported++
		}
	}
	if reported != maxRefusedReported {
		t.Errorf("%d destinations are reported, want %d", reported, maxRefusedReported)
	}
}
