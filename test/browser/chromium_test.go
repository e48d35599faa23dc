//go:build integration

package browser_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"

	"github.com/doze-run/doze/test/testnode"
	"github.com/doze-run/doze/testkit"
)

// startChromium starts a browser that trusts the node's CA and no other of ours:
// it verifies certificates as a visitor's does. The context opens its tabs.
func startChromium(t *testing.T, n *testnode.Node) context.Context {
	t.Helper()
	home := t.TempDir()
	trust(t, home, n.CA)
	options := append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(chromiumPath(t)),
		chromedp.UserDataDir(filepath.Join(home, "profile")),
		chromedp.Env("HOME="+home, "XDG_CONFIG_HOME="+home, "XDG_CACHE_HOME="+home),
		// Its own sandbox needs what containers often lack; it opens our pages only.
		chromedp.NoSandbox,
		chromedp.DisableGPU,
		chromedp.Flag("disable-component-update", true),
		chromedp.Flag("disable-quic", true), // TCP, so that WebSockets and pages go the same way
		chromedp.Flag("no-proxy-server", true),
		chromedp.Flag("host-resolver-rules", "MAP *."+previewDomain+" 127.0.0.1"),
	)
	allocator, end := chromedp.NewExecAllocator(context.Background(), options...)
	t.Cleanup(end)
	browser, cancel := chromedp.NewContext(allocator, chromedp.WithErrorf(t.Logf))
	t.Cleanup(cancel)
	begin(t, "starting Chromium", browser)
	return browser
}

// begin makes the browser or the tab of a context, which lives as long as the
// context that it was begun with: hence no derived one with a deadline.
func begin(t *testing.T, what string, ctx context.Context) {
	t.Helper()
	begun := make(chan error, 1)
	go func() { begun <- chromedp.Do(ctx) }() // ends with ctx at the latest
	select {
	case err := <-begun:
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	case <-time.After(testkit.Patience):
		t.Fatalf("%s takes longer than %s", what, testkit.Patience)
	}
}

func chromiumPath(t *testing.T) string {
	t.Helper()
	for _, name := range []string{"chromium", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	t.Fatal("there is no Chromium: packaging/host/setup --with-tests installs it")
	return ""
}

// trust makes the certificate store that Chromium reads on Linux, with one CA.
func trust(t *testing.T, home, ca string) {
	t.Helper()
	store := filepath.Join(home, ".pki", "nssdb")
	if err := os.MkdirAll(store, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"-N", "--empty-password"},
		{"-A", "-n", "node", "-t", "C,,", "-i", ca},
	} {
		cmd := exec.Command("certutil", append(args, "-d", "sql:"+store)...)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("certutil %s: %v: %s", strings.Join(args, " "), err, out)
		}
	}
}
