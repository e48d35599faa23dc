//go:build integration

package browser_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/chromedp"

	"github.com/doze-run/doze/testkit"
)

// tab is one tab of the browser.
type tab struct {
	t   *testing.T
	ctx context.Context

	mu         sync.Mutex
	socketURLs []string // URLs of WebSockets
	closed     int      // of them
	requested  []string // URLs
}

// openTab opens a tab that is closed when the test ends. If it has failed, what
// the tab shows then is kept in the folder build.
func openTab(t *testing.T, browser context.Context) *tab {
	t.Helper()
	ctx, cancel := chromedp.NewContext(browser)
	t.Cleanup(cancel)
	p := &tab{t: t, ctx: ctx}
	begin(t, "opening a tab", ctx)
	if err := chromedp.Listen(ctx, p.note); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			p.screenshot()
		}
	})
	return p
}

// note is called for every event of the tab.
func (p *tab) note(event any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch event := event.(type) {
	case *network.EventRequestWillBeSent:
		p.requested = append(p.requested, event.Request.URL)
	case *network.EventWebSocketCreated:
		p.socketURLs = append(p.socketURLs, event.URL)
	case *network.EventWebSocketClosed:
		p.closed++
	}
}

// webSockets returns how many WebSockets the tab has opened and closed so far.
func (p *tab) webSockets() (opened, closed int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.socketURLs), p.closed
}

// requests are the URLs of all requests and WebSockets of the tab so far.
func (p *tab) requests() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Concat(p.requested, p.socketURLs)
}

// webSocketHost is the host, with its port, of the last WebSocket.
func (p *tab) webSocketHost() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.socketURLs) == 0 {
		return ""
	}
	host := strings.TrimPrefix(p.socketURLs[len(p.socketURLs)-1], "wss://")
	host, _, _ = strings.Cut(host, "/")
	return host
}

// within runs an action of the browser, which must end and succeed.
func (p *tab) within(what string, act func(context.Context) error) {
	p.t.Helper()
	// Canceling a derived context ends the action and not the tab.
	ctx, cancel := context.WithTimeout(p.ctx, testkit.Patience)
	defer cancel()
	if err := act(ctx); err != nil {
		p.t.Fatalf("%s: %v", what, err)
	}
}

// open navigates to a URL and returns the response, whatever its status.
func (p *tab) open(url string) *network.Response {
	p.t.Helper()
	var response *network.Response
	p.within("opening "+url, func(ctx context.Context) (err error) {
		response, err = chromedp.Run(ctx, chromedp.NavigateResponse(url))
		return err
	})
	if response == nil {
		p.t.Fatalf("open %s: no response", url)
	}
	return response
}

// navigateAway goes to an empty page, which ends what the last one did.
func (p *tab) navigateAway() {
	p.t.Helper()
	p.within("leaving", func(ctx context.Context) error { return chromedp.Do(ctx, chromedp.Navigate("about:blank")) })
}

// close closes the tab. Nothing may be asked of it afterwards.
func (p *tab) close() {
	p.t.Helper()
	if err := chromedp.Cancel(p.ctx); err != nil {
		p.t.Fatalf("closing the tab: %v", err)
	}
}

func (p *tab) reload() {
	p.t.Helper()
	p.within("reloading", func(ctx context.Context) error { return chromedp.Do(ctx, chromedp.Reload()) })
}

// evaluate returns the value of a JavaScript expression in the page.
func evaluate[T any](p *tab, expression string) T {
	p.t.Helper()
	var value T
	p.within(expression, func(ctx context.Context) (err error) {
		value, err = chromedp.Run(ctx, chromedp.Evaluate[T](expression))
		return err
	})
	return value
}

// waitFor waits until an expression is true in the page, or in the one that
// follows it.
func (p *tab) waitFor(expression string) {
	p.t.Helper()
	var last error
	testkit.Eventually(p.t, expression, func() bool {
		ctx, cancel := context.WithTimeout(p.ctx, 10*time.Second)
		defer cancel()
		// A page that is being replaced cannot be asked.
		value, err := chromedp.Run(ctx, chromedp.Evaluate[bool](expression))
		last = err
		return err == nil && value
	}, func() string { return fmt.Sprintf("%v; the page: %s", last, p.text()) })
}

// waitForText waits until the page's first element of that kind has that text.
func (p *tab) waitForText(element, text string) {
	p.t.Helper()
	p.waitFor(fmt.Sprintf("document.querySelector(%q)?.textContent === %q", element, text))
}

// text is what the page shows, for messages.
func (p *tab) text() string {
	ctx, cancel := context.WithTimeout(p.ctx, 10*time.Second)
	defer cancel()
	text, err := chromedp.Run(ctx, chromedp.Evaluate[string]("location.href + '\\n' + document.title + '\\n' + document.body.innerText"))
	if err != nil {
		return err.Error()
	}
	return text
}

// screenshot saves a picture of the tab.
func (p *tab) screenshot() {
	ctx, cancel := context.WithTimeout(p.ctx, 20*time.Second)
	defer cancel()
	picture, err := chromedp.Run(ctx, chromedp.CaptureScreenshot())
	if err != nil {
		p.t.Logf("no picture of the page: %v", err)
		return
	}
	name := strings.ReplaceAll(p.t.Name(), "/", "-") + ".png"
	dir, err := filepath.Abs(filepath.Join("..", "..", "build"))
	if err == nil {
		err = os.MkdirAll(dir, 0o755)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, name), picture, 0o644)
	}
	if err != nil {
		p.t.Logf("no picture of the page: %v", err)
		return
	}
	p.t.Logf("the page as it was: build/%s", name)
}
