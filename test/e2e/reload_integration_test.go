//go:build integration

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/testkit"
)

func TestReloadTouchesNoSandboxAndCutsNoStream(t *testing.T) {
	n := ownNode(t)
	b := n.newWebBox(t)
	asleep := n.newBox(t)
	asleep.sleep()
	before := b.hostPID()
	c := n.browser(t, "h2")
	conn := b.dialWebSocket(n.browser(t, "h1"))
	b.echo(conn, "before")

	// A download whose first half is read before the reload, the rest after.
	const size = 64 * mib
	req, err := http.NewRequestWithContext(testkit.Context(t), "GET", fmt.Sprintf("%s/zeros?n=%d", b.url, size), nil)
	b.must(err)
	download, err := c.Do(req)
	b.must(err)
	defer download.Body.Close()
	_, err = io.CopyN(io.Discard, download.Body, size/2)
	b.must(err)
	// Events that are followed, and a command that runs.
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	seen := make(chan types.Event, 100)
	followed := make(chan error, 1)
	go func() {
		followed <- n.API.Follow(ctx, b.id, 0, func(e types.Event) error { seen <- e; return nil })
	}()
	// next waits for the next event: the stream must not end.
	next := func() types.Event {
		t.Helper()
		select {
		case e := <-seen:
			return e
		case err := <-followed:
			t.Fatalf("the event stream was cut: %v", err)
		case <-testkit.Context(t).Done():
			t.Fatal("there is no event")
		}
		return types.Event{}
	}
	next()
	type ended struct {
		result types.ExecResult
		err    error
	}
	command := make(chan ended, 1)
	go func() {
		r, err := n.API.Exec(testkit.Context(t), b.id, client.ExecRequest{Command: types.Command{Command: "touch /tmp/begun; while [ ! -e /tmp/go ]; do sleep 0.05; done; echo done"}})
		command <- ended{r, err}
	}()
	testkit.Eventually(t, "the command runs", func() bool { return b.try("test -e /tmp/begun").ExitCode == 0 })

	for round, after := range []string{"7m", "8m"} {
		b.must(n.Configure(caddyfile(t, "sleep_after "+after)))
		if out, err := n.Command("reload", "--config", n.Caddyfile()).CombinedOutput(); err != nil {
			t.Fatalf("doze reload: %v\n%s", err, out)
		}
		b.echo(conn, fmt.Sprint("after ", round))
		sb, _, err := n.API.Create(testkit.Context(t), types.CreateSandboxRequest{Name: "after-" + after})
		b.must(err)
		if want, _ := time.ParseDuration(after); time.Duration(sb.SleepAfter) != want {
			t.Errorf("a new sandbox has sleep_after %s, want %s", time.Duration(sb.SleepAfter), after)
		}
	}
	if rest, err := io.Copy(io.Discard, download.Body); err != nil || rest != size/2 {
		t.Errorf("of the download came %d bytes more, want %d: %v", rest, size/2, err)
	}
	b.exec("touch /tmp/go")
	if e := <-command; e.err != nil || e.result.Stdout != "done\n" {
		t.Errorf("the command ended with %+v, %v", e.result, e.err)
	}
	b.sleep()
	for next().Type != "slept" {
	}
	leave()
	if err := <-followed; !errors.Is(err, context.Canceled) {
		t.Errorf("the event stream ended with %v", err)
	}
	if asleep.state() != types.StateAsleep || len(asleep.events("woke")) != 0 {
		t.Errorf("the sleeping one is %s", asleep.state())
	}
	if after := b.hostPID(); after != before {
		t.Errorf("its first process was %d and is %d", before, after)
	}
	b.get(n.browser(t, "h2"), "/", http.StatusOK)

	b.must(n.Configure(caddyfile(t, "sleep_after never")))
	if out, err := n.Command("reload", "--config", n.Caddyfile()).CombinedOutput(); err == nil {
		t.Errorf("a wrong Caddyfile was taken: %s", out)
	}
	b.get(n.browser(t, "h2"), "/", http.StatusOK)
}
