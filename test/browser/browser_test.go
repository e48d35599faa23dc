//go:build integration

package browser_test

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/chromedp/cdproto/security"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/test/testnode"
	"github.com/doze-run/doze/testkit"
)

// caddyfile has previews under a domain that is not localhost's: dev servers let
// every name of that one pass, so it would hide a wrong Host.
const caddyfile = `{
	admin off
	storage file_system {$DOZE_HOME}/caddy
	skip_install_trust
	default_bind 127.0.0.1
	https_port {$DOZE_HTTPS_PORT}
	auto_https disable_redirects
	doze {
		preview_domain ` + previewDomain + `
		preview_port {$DOZE_HTTPS_PORT}
	}
}
api.doze.localhost {
	doze_api
}
*.` + previewDomain + ` {
	tls internal
	doze_preview
}
`

// previewDomain is of a reserved name (RFC 6761, section 6.2). The
// browser resolves it to this machine.
const previewDomain = "preview.doze.test"

// TestPages opens previews and terminals of one node in one browser, for both take time
// to start.
func TestPages(t *testing.T) {
	n := testnode.Start(t, testnode.Config{Caddyfile: caddyfile})
	browser := startChromium(t, n)
	t.Run("Vite", func(t *testing.T) { testVite(t, n, browser) })
	t.Run("Stream", func(t *testing.T) { testStream(t, n, browser) })
	t.Run("Pages", func(t *testing.T) { testPages(t, n, browser) })
	t.Run("SignedURLs", func(t *testing.T) { testSignedURLs(t, n, browser) })
	t.Run("Nothing", func(t *testing.T) { testNothing(t, n, browser) })
	t.Run("Terminal", func(t *testing.T) { testTerminal(t, n, browser) })
	t.Run("TerminalRefused", func(t *testing.T) { testTerminalRefused(t, n, browser) })
	t.Run("TerminalAddon", func(t *testing.T) { testTerminalAddon(t, n, browser) })
}

// box is a sandbox of a test.
type box struct {
	t    *testing.T
	node *testnode.Node
	id   string
}

// create creates a sandbox that sleeps at the test's request only, unless req differs.
func create(t *testing.T, n *testnode.Node, req types.CreateSandboxRequest) *box {
	t.Helper()
	if req.SleepAfter == nil {
		never := types.Duration(0)
		req.SleepAfter = &never
	}
	sb, _, err := n.API.Create(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	return &box{t: t, node: n, id: sb.ID}
}

func (b *box) put(dir string, folders ...string) {
	b.t.Helper()
	if err := b.node.API.PutArchive(b.t.Context(), b.id, dir, pack(folders...)); err != nil {
		b.t.Fatal(err)
	}
}

func (b *box) write(path, text string) {
	b.t.Helper()
	if _, err := b.node.API.WriteFile(b.t.Context(), b.id, path, 0, strings.NewReader(text)); err != nil {
		b.t.Fatal(err)
	}
}

func (b *box) remove(path string) {
	b.t.Helper()
	status, text, err := b.node.Do(b.t.Context(), "DELETE", "/sandbox/"+b.id+"/files?path="+path, "", nil)
	if err != nil || status/100 != 2 {
		b.t.Fatalf("removing %s: %d %s, %v", path, status, text, err)
	}
}

// run starts a process that is started again at every cold wake.
func (b *box) run(cwd string, argv ...string) {
	b.t.Helper()
	_, err := b.node.API.StartProcess(b.t.Context(), b.id, types.StartProcessRequest{Command: types.Command{Argv: argv, Cwd: cwd}, Name: "web", Restart: "on_wake"})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		if b.t.Failed() {
			b.showLogs()
		}
	})
}

func (b *box) showLogs() {
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	defer cancel()
	processes, err := b.node.API.Processes(ctx, b.id)
	for _, p := range processes {
		err = errors.Join(err, b.node.API.Logs(ctx, b.id, p.ID, false, func(l client.Log) error {
			b.t.Logf("%s: %s", p.Name, l.Data)
			return nil
		}))
	}
	if err != nil {
		b.t.Log(err)
	}
}

// expose returns the preview URL of a port, once a server listens on it.
func (b *box) expose(port uint16) string {
	b.t.Helper()
	p, err := b.node.API.Expose(b.t.Context(), b.id, types.ExposePortRequest{Port: port, WaitTimeout: types.Duration(testkit.Patience / 3)})
	if err != nil {
		b.t.Fatal(err)
	}
	return p.URL
}

// sleep puts the sandbox to sleep once it is not in use.
func (b *box) sleep() {
	b.t.Helper()
	b.settle("sleep", types.StateAsleep, b.node.API.Sleep)
}

// stop stops the sandbox once it is not in use.
func (b *box) stop() {
	b.t.Helper()
	b.settle("stop", types.StateStopped, b.node.API.Stop)
}

// forceStop ends its processes although it is used.
func (b *box) forceStop() {
	b.t.Helper()
	b.settle("stop", types.StateStopped, b.node.API.ForceStop)
}

func (b *box) settle(what string, state types.State, ask func(context.Context, string) (types.Sandbox, error)) {
	b.t.Helper()
	var sb types.Sandbox
	var err error
	// The browser's last request may be in flight still.
	testkit.Eventually(b.t, what, func() bool {
		sb, err = ask(b.t.Context(), b.id)
		return !problem.Has(err, problem.SandboxBusy)
	}, func() string { return err.Error() })
	if err != nil {
		b.t.Fatal(err)
	}
	if sb.State != state {
		b.t.Fatalf("after %s the sandbox is %s", what, sb.State)
	}
}

func (b *box) state() types.State {
	b.t.Helper()
	sb, err := b.node.API.Get(b.t.Context(), b.id)
	if err != nil {
		b.t.Fatal(err)
	}
	return sb.State
}

// events returns the events of a type so far.
func (b *box) events(kind types.EventType) []types.Event {
	b.t.Helper()
	all, err := b.node.API.Events(b.t.Context(), b.id, 0)
	if err != nil {
		b.t.Fatal(err)
	}
	return slices.DeleteFunc(all, func(e types.Event) bool { return e.Type != kind })
}

// testNothing: previews that do not exist show an error page.
func testNothing(t *testing.T, n *testnode.Node, browser context.Context) {
	b := create(t, n, types.CreateSandboxRequest{Name: "nothing"})
	port, err := n.API.Expose(t.Context(), b.id, types.ExposePortRequest{Port: 8000})
	if err != nil {
		t.Fatal(err)
	}
	p := openTab(t, browser)

	response := p.open(port.URL)
	p.waitFor(`document.title === "Port not listening"`)
	if response.Status != http.StatusBadGateway {
		t.Errorf("a port without a server: status %d", response.Status)
	}
	if response.SecurityState != security.StateSecure {
		t.Errorf("the preview's certificate was not verified: %s", response.SecurityState)
	}

	response = p.open(strings.Replace(port.URL, "https://8000-", "https://8001-", 1))
	p.waitFor(`document.title === "Preview not found"`)
	p.waitFor(`document.body.innerText.includes("404 preview_not_found")`)
	if response.Status != http.StatusNotFound {
		t.Errorf("a preview that does not exist: status %d", response.Status)
	}
}
