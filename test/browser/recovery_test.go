//go:build integration

package browser_test

import (
	"context"
	"net/http"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/test/testnode"
)

// testPages: error pages of the node name the cause and recover by themselves, without
// starting what was stopped.
func testPages(t *testing.T, n *testnode.Node, browser context.Context) {
	b := create(t, n, types.CreateSandboxRequest{Name: "pages"})
	const port = 8000
	exposed, err := n.API.Expose(t.Context(), b.id, types.ExposePortRequest{Port: port})
	if err != nil {
		t.Fatal(err)
	}
	p := openTab(t, browser)
	title := func(text string) {
		t.Helper()
		p.waitFor(`document.title === "` + text + `"`)
	}
	says := func(text string) {
		t.Helper()
		p.waitFor(`document.body.innerText.includes("` + text + `")`)
	}
	click := func() {
		t.Helper()
		evaluate[any](p, `window.old = true; void document.querySelector("a.button").click()`)
		p.waitFor("window.old !== true")
	}

	// Nothing listens, and then something does.
	p.open(exposed.URL)
	title("Port not listening")
	b.write("/srv/pages/index.html", "<!doctype html><title>up</title>")
	b.run("/srv/pages", "sh", "-c", "if [ -e fail ]; then echo module missing >&2; exit 3; fi; while [ -e wait ]; do sleep 0.05; done; exec python3 -m http.server 8000")
	title("up")

	// The server crashes. Asking whether it is back does not start the sandbox.
	b.remove("/srv/pages/index.html")
	b.write("/srv/pages/fail", "")
	p.navigateAway()
	b.stop()
	if response := p.open(exposed.URL); response.Status != http.StatusBadGateway && response.Status != http.StatusServiceUnavailable {
		t.Errorf("a server that crashes: status %d", response.Status)
	}
	title("Process exited")
	says("process web exited with code 3")
	says("module missing")
	b.stop()
	woke := len(b.events("woke"))
	evaluate[any](p, `void (async () => {
		window.asked = 0;
		while (true) {
			const response = await fetch("/.doze/status", { cache: "no-store" });
			if (response.ok && !(await response.json()).listening) window.asked++;
		}
	})()`)
	p.waitFor("window.asked > 20")
	if events := b.events("woke"); len(events) != woke {
		t.Errorf("asking for its status woke it: %+v", events[woke:])
	}

	// The button starts it, and a stop while the page waits is not undone.
	click()
	title("Process exited")
	b.remove("/srv/pages/fail")
	b.write("/srv/pages/wait", "")
	b.stop()
	click()
	title("Waking up…")
	b.forceStop() // the page that waits keeps it busy
	title("Sandbox stopped")
	woke = len(b.events("woke"))
	p.waitFor(`document.querySelector("a.button").textContent === "Start the sandbox"`)
	if state := b.state(); state != types.StateStopped {
		t.Errorf("while the page waited it was stopped and is %s", state)
	}
	click()
	title("Waking up…")
	b.remove("/srv/pages/wait")
	b.write("/srv/pages/index.html", "<!doctype html><title>up again</title>")
	title("up again")
	if events := b.events("woke"); len(events) != woke+1 {
		t.Errorf("the button woke it %d times", len(events)-woke)
	}

	// Destroyed while the page waits.
	p.navigateAway()
	b.write("/srv/pages/wait", "")
	b.stop()
	p.open(exposed.URL)
	title("Waking up…")
	if err := n.API.Delete(t.Context(), b.id); err != nil {
		t.Fatal(err)
	}
	title("Preview not found")
}
