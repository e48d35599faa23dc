//go:build integration

package browser_test

import (
	"context"
	"net/http"
	"strings"
	"testing"

	"github.com/chromedp/cdproto/security"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/test/testnode"
)

// vitePort is the default port of Vite's dev server.
const vitePort = 5173

// testVite takes a real project through a day of its life: a developer works on it
// with the page open, it falls asleep, and it is stopped.
func testVite(t *testing.T, n *testnode.Node, browser context.Context) {
	b := create(t, n, types.CreateSandboxRequest{Name: "vite"})
	b.put("/srv/page", testnode.Modules(t, "project"), "project")
	b.run("/srv/page", "npm", "run", "dev")
	url := b.expose(vitePort)
	edit := func(name, text string) {
		t.Helper()
		b.write("/srv/page/src/"+name+".js", "export const "+name+" = \""+text+"\";\n")
	}

	p := openTab(t, browser)
	response := p.open(url)
	if response.Status != http.StatusOK || response.SecurityState != security.StateSecure {
		t.Fatalf("the page: status %d, connection %s", response.Status, response.SecurityState)
	}
	p.waitForText("h1", "a heading")
	// A response by the WebSocket: it is open.
	p.waitFor("typeof window.ask === 'function'")
	ask := func(text string) {
		t.Helper()
		evaluate[any](p, "window.ask(\""+text+"\")")
		p.waitForText("p", text)
	}
	ask("awake")
	if at, page := p.webSocketHost(), strings.TrimPrefix(url, "https://"); at != strings.TrimSuffix(page, "/") {
		t.Errorf("the WebSocket is on host %s, the page on %s", at, page)
	}
	evaluate[any](p, `void fetch("/hosts").then((response) => response.json()).then((hosts) => { window.hosts = hosts; })`)
	p.waitFor("window.hosts !== undefined")
	if hosts := evaluate[map[string]string](p, "window.hosts"); hosts["page"] != "localhost:5173" || hosts["socket"] != hosts["page"] {
		t.Errorf("the server was asked as %v, want localhost:5173", hosts)
	}
	evaluate[bool](p, "window.loadedOnce = true")
	sameSocket := func(when string) {
		t.Helper()
		if opened, closed := p.webSockets(); opened != 1 || closed != 0 {
			t.Fatalf("%s, the page has opened %d WebSockets and closed %d", when, opened, closed)
		}
		if !evaluate[bool](p, "window.loadedOnce === true") {
			t.Fatalf("%s, the page has loaded again", when)
		}
	}

	edit("heading", "another heading")
	p.waitForText("h1", "another heading")
	sameSocket("after an edit")

	b.sleep()
	sameSocket("asleep")
	// Another file: Vite overlooks a change of the same file until a timer of
	// 50 ms has fired, and frozen as it was the timer may not have.
	edit("detail", "another detail")
	p.waitForText("h2", "another detail")
	sameSocket("after an edit that woke it")

	b.sleep()
	ask("are you there?")
	sameSocket("after a message that woke it")

	b.sleep()
	p.reload()
	p.waitForText("h2", "another detail")
	if evaluate[bool](p, "window.loadedOnce === true") {
		t.Error("the page has not loaded again")
	}
	wakes := b.events("woke")
	if len(wakes) < 3 {
		t.Errorf("after three sleeps there were %d wakes", len(wakes))
	}
	for _, woke := range wakes {
		if woke.Kind != "warm" {
			t.Errorf("a wake so far was %s: %+v", woke.Kind, woke)
		}
	}

	// Vite's page asks for its server again every second once its WebSocket is
	// gone, and this one does too.
	b.stop()
	woke := len(b.events("woke"))
	evaluate[any](p, `void (async () => {
		window.refused = 0;
		while (true) {
			const response = await fetch("/hosts", { cache: "no-store" }).catch(() => null);
			const refused = response?.status === 503 && response.headers.has("Retry-After");
			const socket = new WebSocket("wss://" + location.host);
			const opened = await new Promise((end) => { socket.onopen = () => end(true); socket.onerror = () => end(false); });
			if (refused && !opened) window.refused++;
			await new Promise((end) => setTimeout(end, 250));
		}
	})()`)
	p.waitFor("window.refused > 12") // three seconds
	if state := b.state(); state != types.StateStopped || len(b.events("woke")) != woke {
		t.Errorf("with a page open, the sandbox was stopped and is %s: %+v", state, b.events("woke")[woke:])
	}
	p.reload()
	p.waitForText("h2", "another detail")
	if events := b.events("woke"); len(events) != woke+1 || events[woke].Kind != "cold" {
		t.Errorf("a reload woke it %d times: %+v", len(events)-woke, events[woke:])
	}

	p.navigateAway()
	b.write("/srv/page/slow", "")
	b.stop()
	response = p.open(url)
	if response.Status != http.StatusServiceUnavailable {
		t.Errorf("while the server starts: status %d", response.Status)
	}
	p.waitFor(`document.title === "Waking up…"`)
	p.waitFor(`document.body.innerText.includes("It opens by itself")`)
	b.remove("/srv/page/slow")
	p.waitForText("h2", "another detail")
	ask("again")
}
