//go:build integration

package e2e

import (
	"net/http"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/testkit"
)

// No machine has 99 % of its memory available: the reserve makes it short for the node, which
// reads the kernel's own figures.
func TestSandboxesThatSleptLongestAreStoppedWhenMemoryIsShort(t *testing.T) {
	n := ownNode(t)
	running := n.newWebBox(t)
	var asleep []*box
	for range 3 {
		asleep = append(asleep, n.newWebBox(t))
	}
	for _, b := range asleep {
		b.sleep()
	}
	if available := n.metric(t, "doze_memory_available_bytes"); available <= 0 || n.metric(t, "doze_memory_pressure") != 0 {
		t.Errorf("%v bytes are available; the pressure is %v", available, n.metric(t, "doze_memory_pressure"))
	}
	reload := func(options ...string) {
		t.Helper()
		running.must(n.Configure(caddyfile(t, options...)))
		if out, err := n.Command("reload", "--config", n.Caddyfile()).CombinedOutput(); err != nil {
			t.Fatalf("doze reload: %v\n%s", err, out)
		}
	}
	reload("memory_reserve 99%")
	var stopped []types.Event
	for _, b := range asleep {
		b.awaitState(types.StateStopped)
		if sb := b.show(); sb.StateReason != types.StateReasonMemoryPressure || sb.Condition != nil {
			t.Errorf("it is stopped: %s, condition %+v", sb.StateReason, sb.Condition)
		}
		events := b.awaitEvents("stopped", 1)
		if len(events) != 1 || events[0].Reason != types.StateReasonMemoryPressure || !strings.HasSuffix(events[0].Detail, "% are required") {
			t.Fatalf("it stopped: %+v", events)
		}
		stopped = append(stopped, events[0])
	}
	for i := 1; i < len(stopped); i++ {
		if !stopped[i-1].Time.Before(stopped[i].Time) {
			t.Errorf("of those that slept in this order, number %d was stopped at %s and the next one at %s", i, stopped[i-1].Time, stopped[i].Time)
		}
	}
	testkit.Eventually(t, "the metrics have the pressure and the stops", func() bool { // a stop is counted after its event
		return n.metric(t, "doze_memory_pressure") == 1 && n.metric(t, "doze_memory_pressure_stops_total", `outcome="stopped"`) == 3
	})
	// Under pressure, too, a request wakes, and what runs is not stopped.
	first := asleep[0]
	first.get(n.browser(t, "h2"), "/", http.StatusOK)
	if woke := first.awaitEvents("woke", 1); len(woke) != 1 || woke[0].Kind != types.WakeKindCold || woke[0].Cause != types.CausePreview {
		t.Errorf("it woke: %+v", woke)
	}
	if running.state() != types.StateRunning || first.state() != types.StateRunning {
		t.Errorf("the running ones are %s and %s", running.state(), first.state())
	}
	reload()
	first.sleep()
	running.sleep()
	first.get(n.browser(t, "h2"), "/", http.StatusOK)
	if woke := first.awaitEvents("woke", 2); woke[len(woke)-1].Kind != types.WakeKindWarm {
		t.Errorf("without pressure it woke: %+v", woke)
	}
}
