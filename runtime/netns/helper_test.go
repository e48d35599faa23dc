package netns

import (
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/netns/wire"
)

// The node treats a helper whose socket is full as one that hangs.
func TestSocketOfABusyHelperHoldsAllRequests(t *testing.T) {
	ours, theirs, err := packetPair()
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	defer theirs.Close()
	h := &helper{control: ours}
	request := wire.Request{Op: wire.OpSocket, ID: "abcdefghijkl",
		Cgroup: "/" + strings.Repeat("x", 400)}
	for n := range maxRequests {
		packet, err := request.AppendTo(nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := h.send(packet); err != nil {
			t.Fatalf("request %d of %d: %v", n+1, maxRequests, err)
		}
	}
}
