//go:build integration

package browser_test

import (
	"context"
	"testing"
	"time"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/test/testnode"
	"github.com/doze-run/doze/testkit"
)

// testStream: a page that only listens keeps its sandbox awake for as long as it
// is open, and no longer.
func testStream(t *testing.T, n *testnode.Node, browser context.Context) {
	soon := types.Duration(time.Second)
	b := create(t, n, types.CreateSandboxRequest{Name: "stream", SleepAfter: &soon})
	b.put("/srv", "testdata")
	b.run("/srv", "python3", "stream.py")
	url := b.expose(8000)
	p := openTab(t, browser)
	p.open(url)
	p.waitFor("window.count > 1")
	before := len(b.events("slept"))

	if _, err := n.API.Sleep(t.Context(), b.id); !problem.Has(err, problem.SandboxBusy) {
		t.Errorf("sleep during a stream: %v, want busy", err)
	}
	p.waitFor("window.count > 60") // three times sleep_after
	if slept := b.events("slept"); len(slept) != before {
		t.Errorf("the sandbox slept during a stream: %+v", slept)
	}
	if opened := evaluate[int](p, "window.opened"); opened != 1 {
		t.Errorf("the page has opened the stream %d times", opened)
	}

	// Chromium keeps the connections of a page that one only navigates away from
	// for a minute, to come back to.
	p.close()
	testkit.Eventually(t, "the sandbox sleeps by itself", func() bool { return b.state() == types.StateAsleep }, func() string { return string(b.state()) })
}
