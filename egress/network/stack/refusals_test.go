package stack

import (
	"net/netip"
	"testing"
	"time"
)

func TestARefusalIsToldOncePerPlaceAndNotTooOften(t *testing.T) {
	var r refusals
	now := time.Now()
	place := func(port int) netip.AddrPort {
		return netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), uint16(port))
	}
	if !r.isNew(place(443), now) || r.isNew(place(443), now.Add(refusedAgain-1)) || !r.isNew(place(443), now.Add(refusedAgain)) {
		t.Error("one place is not told once within the time")
	}
	told := 0
	for port := range 10 * maxRefusedTold {
		if r.isNew(place(1000+port), now.Add(2*refusedAgain)) {
			told++
		}
	}
	if told != maxRefusedTold {
		t.Errorf("%d places are told", told)
	}
}
