//go:build integration

package browser_test

import (
	"context"
	"crypto/md5"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/security"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/test/testnode"
	"github.com/doze-run/doze/testkit"
)

// terminalPage is the page of a terminal, in a tab.
type terminalPage struct {
	*tab
	box *box
}

// press presses keys on whatever has the focus. As with a keyboard, and other than by
// chromedp.KeyEvent, a page that handles the keydown gets no keypress.
func (p *tab) press(keys string, modifiers ...chromedp.Modifier) {
	p.t.Helper()
	for _, r := range keys {
		events := kb.Encode(r)
		down, up := *events[0], *events[len(events)-1]
		for _, modifier := range modifiers {
			down.Modifiers |= int64(modifier)
		}
		up.Modifiers = down.Modifiers
		if unicode.IsLetter(r) {
			down.WindowsVirtualKeyCode = int64(unicode.ToUpper(r))
			up.WindowsVirtualKeyCode = down.WindowsVirtualKeyCode
		}
		if len(events) == 3 && down.Modifiers&int64(chromedp.ModifierCtrl) == 0 {
			down.Text, down.UnmodifiedText = events[1].Text, events[1].UnmodifiedText
		}
		call(p, "pressing a key", input.DispatchKeyEvent, down)
		call(p, "releasing a key", input.DispatchKeyEvent, up)
	}
}

// call calls a command of the browser's protocol.
func call[P, R any](p *tab, what string, command cdp.Command[P, R], params P) {
	p.t.Helper()
	p.within(what, func(ctx context.Context) error {
		return chromedp.Do(ctx, chromedp.Func(func(ctx context.Context, t *chromedp.Target) error {
			_, err := cdp.Call(ctx, t, command, params)
			return err
		}))
	})
}

// insert enters text as an input method does.
func (p *tab) insert(text string) {
	p.t.Helper()
	call(p, "inserting text", input.InsertText, input.InsertTextParams{Text: text})
}

// paste pastes text into the terminal.
func (p terminalPage) paste(text string) {
	p.t.Helper()
	quoted, _ := json.Marshal(text)
	evaluate[any](p.tab, `void (() => {
		const clipboardData = new DataTransfer();
		clipboardData.setData("text/plain", `+string(quoted)+`);
		document.activeElement.dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }));
	})()`)
}

// shows waits until the visible lines of the terminal contain a text, which keys alone must not be.
func (p terminalPage) shows(text string) {
	p.t.Helper()
	quoted, _ := json.Marshal(text)
	p.waitFor(`(document.querySelector(".xterm-rows")?.innerText ?? "").replaceAll("\u00a0", " ").includes(` + string(quoted) + `)`)
}

func (p terminalPage) is(state, status string) {
	p.t.Helper()
	p.waitFor(fmt.Sprintf(`document.body.dataset.state === %q && document.getElementById("status").textContent.includes(%q)`, state, status))
}

func (p terminalPage) connected() { p.t.Helper(); p.is("connected", "Connected") }

func (p terminalPage) clear() {
	p.t.Helper()
	p.press("clear\r")
	p.waitFor(`document.querySelector(".xterm-rows").innerText.trim().split("\n").length === 1`)
}

// file waits for a file in the sandbox with that content.
func (p terminalPage) file(path, want string) {
	p.t.Helper()
	var got string
	testkit.Eventually(p.t, path, func() bool {
		status, text, err := p.box.node.Do(p.t.Context(), "GET", "/sandbox/"+p.box.id+"/files/read?path="+url.QueryEscape(path), "", nil)
		if err != nil {
			p.t.Fatal(err)
		}
		got = fmt.Sprintf("%d %q", status, text)
		return text == want
	}, func() string { return got })
}

// testTerminal: a person logs in to the page of a terminal and works there, through the sleep
// of the sandbox and restarts of the node.
func testTerminal(t *testing.T, n *testnode.Node, browser context.Context) {
	b := create(t, n, types.CreateSandboxRequest{Name: "term"})
	b.sleep()
	woke := len(b.events("woke"))
	origin := fmt.Sprintf("https://api.doze.localhost:%d", n.Port)
	p := terminalPage{openTab(t, browser), b}
	call(p.tab, "noting violations of the page's policy", page.AddScriptToEvaluateOnNewDocument, page.AddScriptToEvaluateOnNewDocumentParams{
		Source: `window.violations = [];
			addEventListener("securitypolicyviolation", (e) => violations.push(e.violatedDirective + " " + e.blockedURI + " " + e.sample));`,
	})
	violations := func() {
		t.Helper()
		if got := evaluate[[]string](p.tab, "window.violations"); len(got) > 0 {
			t.Errorf("the page violates its policy: %q", got)
		}
	}

	// Login: neither the page nor a login wakes the sandbox, only a terminal does.
	response := p.open(origin + "/terminal/term")
	if response.Status != http.StatusOK || response.SecurityState != security.StateSecure {
		t.Fatalf("the page: status %d, connection %s", response.Status, response.SecurityState)
	}
	p.waitFor(`document.activeElement.id === "token"`)
	p.accessible("the login")
	p.press("not-the-token-of-this-node\r")
	p.waitFor(`document.getElementById("reason").textContent === "The token is not valid for this node."`)
	if state := b.state(); state != types.StateAsleep || len(b.events("woke")) != woke {
		t.Errorf("the login has made the sandbox %s", state)
	}
	p.press(n.Token + "\r")
	p.connected()
	if events := b.events("woke"); len(events) != woke+1 || events[woke].Cause != types.CauseTerminal {
		t.Errorf("the terminal woke the sandbox %d times: %+v", len(events)-woke, events[woke:])
	}
	if stored := evaluate[string](p.tab, "JSON.stringify([localStorage, sessionStorage]) + document.cookie + document.documentElement.outerHTML"); strings.Contains(stored, n.Token) {
		t.Error("the page stores the token")
	}

	// Each step builds on those before it.
	step := func(name string, test func(*testing.T)) {
		t.Helper()
		if !t.Run(name, test) {
			t.FailNow()
		}
	}
	step("Typing", func(t *testing.T) {
		p := p.of(t)
		p.press("echo $((6*7))\r")
		p.shows("\n42\n")
		p.insert("printf '%s|%s\\n' 'grüße 世界' 😀🎉")
		p.press("\r")
		p.shows("\ngrüße 世界|😀🎉\n")
		// Emoji are two columns wide, here and for programs: the cursor is where the program thinks.
		p.press(`printf '\U1F600\U1F600\033[6n'; IFS='[;' read -rsd R _ _ column; echo; echo column=$column` + "\r")
		p.shows("\ncolumn=5\n")
		p.press("sh -c 'echo begun=$((1+1)); exec sleep 1000'\r")
		p.shows("\nbegun=2\n")
		p.press("c", chromedp.ModifierCtrl)
		p.press("echo code=$?\r")
		p.shows("\ncode=130\n")
	})

	step("Pasting", func(t *testing.T) {
		p := p.of(t)
		p.clear()
		p.paste("echo pasted-$((1+1))\necho pasted-$((2+2))")
		p.shows("echo pasted-$((2+2))") // the shell waits for Enter
		p.press("\r")
		p.shows("\npasted-2\npasted-4\n")
		text := strings.Repeat(strings.Repeat("x", 99)+"\n", 5000)
		p.press("stty -echo; md5sum > /tmp/sum; stty echo\r")
		p.paste(text)
		p.press("d", chromedp.ModifierCtrl)
		p.file("/tmp/sum", fmt.Sprintf("%x  -\n", md5.Sum([]byte(text))))
	})

	step("Resizing", func(t *testing.T) {
		p := p.of(t)
		p.clear()
		rows := func() int { return evaluate[int](p.tab, `document.querySelector(".xterm-rows").children.length`) }
		before := rows()
		p.within("resizing", func(ctx context.Context) error { return chromedp.Do(ctx, chromedp.EmulateViewport(1000, 400)) })
		p.waitFor(fmt.Sprintf(`document.querySelector(".xterm-rows").children.length < %d`, before))
		small := rows()
		p.press("echo rows=$(stty size | cut -d' ' -f1)\r")
		p.shows(fmt.Sprintf("\nrows=%d\n", small))
		p.within("resizing", func(ctx context.Context) error { return chromedp.Do(ctx, chromedp.EmulateViewport(1200, 800)) })
		p.waitFor(fmt.Sprintf(`document.querySelector(".xterm-rows").children.length > %d`, small))
	})

	step("Appearance", func(t *testing.T) {
		p := p.of(t)
		p.accessible("the terminal")
		background := func(scheme string) string {
			call(p.tab, "setting the color scheme", emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
				Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}},
			})
			return evaluate[string](p.tab, `getComputedStyle(document.getElementById("terminal")).backgroundColor`)
		}
		if dark, light := background("dark"), background("light"); dark == light {
			t.Errorf("dark and light are both %s", dark)
		}
		background("dark")
		p.accessible("the dark terminal")
		p.press(kb.F6, chromedp.ModifierShift)
		p.waitFor(`document.activeElement.id === "reader"`)
		p.press(" ")
		p.waitFor(`document.querySelector(".xterm-accessibility") && document.activeElement.getAttribute("aria-pressed") === "true"`)
		p.press(" ")
		p.waitFor(`!document.querySelector(".xterm-accessibility")`)
		evaluate[any](p.tab, `document.querySelector(".xterm-helper-textarea").focus()`)
	})

	step("Reloading", func(t *testing.T) {
		p := p.of(t)
		p.clear()
		// A program asks the terminal what it is. When the output is shown again, the terminal
		// must not respond again: its response would be typed into the program.
		p.press(`stty raw -echo; printf 'asked\n\033[c'; dd bs=1 count=8 of=/tmp/answer 2>/dev/null; stty sane; echo after=$((1+1))` + "\r")
		p.file("/tmp/answer", "\x1b[?1;2c")
		p.reload()
		p.connected()
		p.shows("asked")
		p.press("!")
		p.file("/tmp/answer", "\x1b[?1;2c!")
		p.shows("after=2\n")
		violations()
	})

	step("Flood", func(t *testing.T) {
		p := p.of(t)
		p.clear()
		p.press("yes $(seq 1 40 | tr '\\n' -) | head -c 60000000; echo over=$((1+1))\r")
		p.shows("over=2\n")
		p.connected()
		p.press("yes\r")
		p.shows("y\ny\n")
		p.press("c", chromedp.ModifierCtrl)
		p.press("echo stopped=$((1+1))\r")
		p.shows("\nstopped=2\n")
		p.connected()
	})

	step("Sleep", func(t *testing.T) {
		p := p.of(t)
		p.clear()
		b.sleep()
		woke := len(b.events("woke"))
		// Neither a resized window nor a reconnecting page wakes it.
		p.within("resizing", func(ctx context.Context) error { return chromedp.Do(ctx, chromedp.EmulateViewport(1100, 700)) })
		restart(t, n, n.Stop)
		p.is("asleep", "Type to wake it")
		if state := b.state(); state != types.StateAsleep || len(b.events("woke")) != woke {
			t.Errorf("an open page made the sandbox %s", state)
		}
		p.press("echo typed-$((1+2)) $(stty size)\r")
		p.shows(fmt.Sprintf("\ntyped-3 %d ", evaluate[int](p.tab, `document.querySelector(".xterm-rows").children.length`)))
		p.connected()
		if events := b.events("woke"); len(events) != woke+1 {
			t.Errorf("typing woke the sandbox %d times", len(events)-woke)
		}
	})

	step("Reconnecting", func(t *testing.T) {
		p := p.of(t)
		p.clear()
		p.press("for i in $(seq 400); do printf '%d.' $i; sleep 0.02; done; echo\r")
		p.shows("20.")
		restart(t, n, n.Kill)
		var want strings.Builder
		for i := range 400 {
			fmt.Fprintf(&want, "%d.", i+1)
		}
		quoted, _ := json.Marshal(want.String())
		p.waitFor(`document.querySelector(".xterm-rows").innerText.replace(/\s/g, "").includes(` + string(quoted) + `)`)
		p.connected()
	})

	step("Exit", func(t *testing.T) {
		p := p.of(t)
		p.clear()
		p.press("exit 3\r")
		p.is("ended", "exit code 3")
		p.press("ls\r") // its Enter opens a new terminal, which gets none of it
		p.connected()
		p.press("echo new=$((1+1))\r")
		p.shows("\nnew=2\n")
		b.stop()
		p.is("ended", "Press Enter for a new") // it may see the end of the program, or the sandbox's first
		if state := b.state(); state != types.StateStopped {
			t.Errorf("an open page made the sandbox %s", state)
		}
		p.press("\r")
		p.connected()
		p.press("exec sh -c 'kill -9 $$'\r")
		p.is("ended", "SIGKILL")
		violations()
	})

	signature := evaluate[string](p.tab, `new URL(sessionStorage["doze-terminal/term"]).searchParams.get("signature")`)
	evaluate[any](p.tab, `void document.getElementById("logout").click()`)
	p.waitFor(`document.activeElement.id === "token" && sessionStorage.length === 0`)
	p.reload()
	p.waitFor(`document.activeElement.id === "token"`)
	for _, requested := range p.requests() {
		if address := strings.Replace(requested, "wss:", "https:", 1); !strings.HasPrefix(address, origin+"/") {
			t.Errorf("the page has requested %s", requested)
		}
	}
	output, err := io.ReadAll(n.Output())
	if err != nil {
		t.Fatal(err)
	}
	if len(signature) < 20 || strings.Contains(string(output), signature) || strings.Contains(string(output), n.Token) {
		t.Errorf("the node has logged the signature %q or the token", signature)
	}
}

// of returns the page for a subtest.
func (p terminalPage) of(t *testing.T) terminalPage {
	t.Helper()
	outer := p.tab.t
	p.tab.t, p.box.t = t, t
	t.Cleanup(func() { p.tab.t, p.box.t = outer, outer })
	return p
}

func restart(t *testing.T, n *testnode.Node, end func() error) {
	t.Helper()
	if err := end(); err != nil {
		t.Fatal(err)
	}
	if err := n.Start(); err != nil {
		t.Fatal(err)
	}
}

// accessible checks the page by the rules of WCAG 2 that a program can check.
func (p *tab) accessible(what string) {
	p.t.Helper()
	source, err := os.ReadFile(filepath.Join(testnode.Modules(p.t, "terminal"), "node_modules", "axe-core", "axe.min.js"))
	if err != nil {
		p.t.Fatal(err)
	}
	evaluate[any](p, "void (() => {"+string(source)+"})()")
	evaluate[any](p, `void window.axe.run(document, { runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"] }).then((report) => {
		window.report = report.violations.map((v) => v.id + ": " + v.help + ": " + v.nodes.map((n) => n.html + " " + n.failureSummary).join("; "));
	}, (error) => { window.report = [String(error)]; })`)
	p.waitFor("window.report !== undefined")
	for _, violation := range evaluate[[]string](p, "window.report") {
		p.t.Errorf("%s: %s", what, violation)
	}
	evaluate[any](p, "void (delete window.report)")
}

// testTerminalRefused: pages of terminals of sandboxes that do not exist, are stopped, and are
// destroyed.
func testTerminalRefused(t *testing.T, n *testnode.Node, browser context.Context) {
	address := fmt.Sprintf("https://api.doze.localhost:%d/terminal/", n.Port)
	p := terminalPage{openTab(t, browser), nil}
	login := func(name string) {
		t.Helper()
		p.open(address + name)
		p.waitFor(`document.activeElement.id === "token"`)
		p.press(n.Token + "\r")
	}
	login("nosuchsandbox")
	p.waitFor(`document.getElementById("reason").textContent.includes("nosuchsandbox") && document.activeElement.id === "token"`)
	if stored := evaluate[int](p.tab, "sessionStorage.length"); stored != 0 {
		t.Error("a login that failed is stored")
	}

	b := create(t, n, types.CreateSandboxRequest{Name: "refused"})
	p.box = b
	b.stop()
	login("refused")
	p.connected() // by a cold wake
	p.press("echo up=$((1+1))\r")
	p.shows("\nup=2\n")

	if err := n.API.Delete(t.Context(), b.id); err != nil {
		t.Fatal(err)
	}
	p.waitFor(`document.body.dataset.state !== "connected"`)
	p.reload()
	p.is("failed", "not found")
}

// testTerminalAddon: a page of another site uses a terminal through Cloudflare's add-on for
// xterm.js, as it is on npm.
func testTerminalAddon(t *testing.T, n *testnode.Node, browser context.Context) {
	b := create(t, n, types.CreateSandboxRequest{Name: "addon"})
	files := http.NewServeMux()
	files.Handle("GET /node_modules/", http.FileServer(http.Dir(testnode.Modules(t, "terminal"))))
	files.Handle("GET /", http.FileServer(http.Dir("terminal")))
	site := httptest.NewServer(files)
	t.Cleanup(site.Close)
	sign := func(req types.SignTerminalURLRequest) types.SignedURL {
		t.Helper()
		signed, err := n.API.SignTerminalURL(t.Context(), b.id, req)
		if err != nil {
			t.Fatal(err)
		}
		// The API's client uses the address, which the certificate has, too; the browser trusts both.
		return signed
	}
	open := func(p terminalPage, signed types.SignedURL) {
		t.Helper()
		p.open(site.URL + "/?url=" + url.QueryEscape(signed.URL))
	}

	p := terminalPage{openTab(t, browser), b}
	open(p, sign(types.SignTerminalURLRequest{}))
	p.waitFor(`window.errors.length > 0 && document.body.dataset.state === "disconnected"`) // not its origin
	if status, list, err := n.Do(t.Context(), "GET", "/sandbox/"+b.id+"/terminals", "", nil); err != nil || strings.TrimSpace(list) != `{"terminals":[]}` {
		t.Errorf("a page of another origin has opened %d %s, %v", status, list, err)
	}

	open(p, sign(types.SignTerminalURLRequest{Origin: site.URL}))
	p.waitFor(`document.body.dataset.state === "connected"`)
	p.press("echo $((6*7)); stty size\r")
	p.shows("\n42\n30 100\n")
	evaluate[any](p.tab, "void terminal.resize(90, 25)")
	p.press("clear; stty size\r")
	p.shows("25 90\n")
	b.sleep()
	p.press("echo awake=$((1+1))\r")
	p.shows("\nawake=2\n")

	// The add-on reconnects, and shows the same output once.
	p.press("clear; for i in $(seq 100); do printf '%d.' $i; sleep 0.02; done; echo\r")
	p.shows("20.")
	evaluate[any](p.tab, "void (states.length = 0)")
	restart(t, n, n.Kill)
	p.waitFor(`states.includes("disconnected") && states.at(-1) === "connected"`)
	p.shows("99.100.")
	shown := evaluate[string](p.tab, `document.querySelector(".xterm-rows").innerText.replace(/\s/g, "")`)
	if numbers := regexp.MustCompile(`(^|[^.\d])1\.2\.3\.`).FindAllString(shown, -1); len(numbers) != 1 {
		t.Errorf("after a new connection the terminal shows %s", shown)
	}

	p.press("exit 7\r")
	p.waitFor(`window.errors.includes("Session exited with code 7")`)

	// A refusal reaches the page in words, and the end of the URL ends the connection.
	open(p, sign(types.SignTerminalURLRequest{Origin: site.URL, ExpiresIn: duration(2 * time.Second)}))
	p.waitFor(`window.errors.some((text) => text.includes("expired"))`)
}

func duration(d time.Duration) *types.Duration { return (*types.Duration)(&d) }
