//go:build integration

package e2e

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

// crowd is the number of concurrent visitors.
const crowd = 1000

// visit makes crowd concurrent requests and returns when all have ended.
func visit(t *testing.T, c *http.Client, url string) {
	t.Helper()
	var all sync.WaitGroup
	gate := make(chan struct{})
	failures := make(chan error, crowd)
	for range crowd {
		all.Go(func() {
			<-gate
			text, _, err := fetch(t.Context(), c, url, http.StatusOK)
			if err == nil && text != "hello" {
				err = fmt.Errorf("response %q", text)
			}
			if err != nil {
				failures <- err
			}
		})
	}
	close(gate)
	all.Wait()
	if n := len(failures); n > 0 {
		t.Errorf("%d of %d requests failed; the first: %v", n, crowd, <-failures)
	}
}

func TestAThousandRequestsShareOneWake(t *testing.T) {
	n := commonNode(t)
	for _, proto := range []string{"h2", "h1"} {
		for _, rest := range []string{"asleep", "stopped"} {
			t.Run(proto+" "+rest, func(t *testing.T) {
				b := n.newWebBox(t)
				c := n.browser(t, proto)
				if rest == "asleep" {
					b.sleep()
				} else {
					b.stop()
				}
				before := n.metric(t, "doze_wakes_total")
				visit(t, c, b.url)
				if woke := b.awaitEvents("woke", 1); len(woke) != 1 || woke[0].Cause != "preview" {
					t.Errorf("%d events of wakes: %+v", len(woke), woke)
				}
				if wakes := n.metric(t, "doze_wakes_total") - before; wakes != 1 {
					t.Errorf("the metrics count %v wakes", wakes)
				}
			})
		}
	}
}

func TestRequestsSucceedWhileItIsPutToSleep(t *testing.T) {
	n := commonNode(t)
	for _, proto := range []string{"h2", "h1"} {
		t.Run(proto, func(t *testing.T) {
			b := n.newWebBox(t)
			c := n.browser(t, proto)
			ctx, cancel := context.WithCancel(t.Context())
			var sleeper sync.WaitGroup
			var slept atomic.Int64
			sleeper.Go(func() {
				for ctx.Err() == nil {
					_, err := n.API.Sleep(ctx, b.id)
					switch {
					case err == nil:
						slept.Add(1)
					case ctx.Err() == nil && !problem.Has(err, problem.SandboxBusy):
						t.Error(err)
						return
					}
				}
			})
			// Not by events: only the newest are stored.
			wakes := func() float64 { return n.metric(t, "doze_wakes_total") }
			awake := wakes()
			const bursts = 5
			for range bursts {
				before := slept.Load()
				testkit.Eventually(t, "it was put to sleep", func() bool { return slept.Load() > before })
				visit(t, c, b.url) // and goes on being put to sleep
			}
			testkit.Eventually(t, "each burst has woken it", func() bool { return wakes() >= awake+bursts })
			awake = wakes()
			for range 200 { // one after another there is room to fall asleep in between
				if _, _, err := fetch(t.Context(), c, b.url, http.StatusOK); err != nil {
					t.Error(err)
				}
			}
			testkit.Eventually(t, "some of them have woken it", func() bool { return wakes() >= awake+2 })
			cancel()
			sleeper.Wait()
		})
	}
}

func TestEveryWayInWakes(t *testing.T) {
	n := commonNode(t)
	b := n.newWebBox(t)
	c := n.browser(t, "h2")
	b.get(c, "/", http.StatusOK)
	before := b.hostPID()
	for _, way := range []struct {
		name  string
		cause types.Cause
		enter func(t *testing.T) error
	}{
		{"preview", "preview", func(t *testing.T) error {
			_, header := b.get(c, "/", http.StatusOK)
			if header.Get("Doze-Wake") != "warm" || !strings.HasPrefix(header.Get("Server-Timing"), "wake;dur=") {
				return fmt.Errorf("headers %v", header)
			}
			return nil
		}},
		{"exec", "exec", func(t *testing.T) error {
			_, err := n.API.Exec(testkit.Context(t), b.id, client.ExecRequest{Command: types.Command{Argv: []string{"true"}}})
			return err
		}},
		{"files", "files", func(t *testing.T) error {
			_, err := n.API.WriteFile(testkit.Context(t), b.id, "/tmp/f", 0, strings.NewReader("x"))
			return err
		}},
		{"reading a file", "files", func(t *testing.T) error {
			_, err := n.API.Stat(testkit.Context(t), b.id, "/srv/server.js", client.StatOptions{})
			return err
		}},
		{"archive", "files", func(t *testing.T) error {
			tar, err := n.API.GetArchive(testkit.Context(t), b.id, "/srv")
			if err != nil {
				return err
			}
			defer tar.Close()
			_, err = io.Copy(io.Discard, tar)
			return err
		}},
		{"process", "process", func(t *testing.T) error {
			_, err := n.API.StartProcess(testkit.Context(t), b.id, types.StartProcessRequest{Command: types.Command{Argv: []string{"true"}}})
			return err
		}},
		{"logs", "process", func(t *testing.T) error {
			return n.API.Logs(testkit.Context(t), b.id, b.web.ID, false, func(client.Log) error { return nil })
		}},
		{"requested", "requested", func(t *testing.T) error {
			_, err := n.API.Wake(testkit.Context(t), b.id)
			return err
		}},
	} {
		t.Run(way.name, func(t *testing.T) {
			b.sleep()
			known := len(b.events("woke"))
			if err := way.enter(t); err != nil {
				t.Fatal(err)
			}
			woke := b.awaitEvents("woke", known+1)[known:]
			if len(woke) != 1 || woke[0].Kind != "warm" || woke[0].Cause != way.cause {
				t.Errorf("it woke by %+v, want one warm wake by %s", woke, way.cause)
			}
		})
	}
	if after := b.hostPID(); after != before {
		t.Errorf("its first process was %d and is %d", before, after)
	}
}

func TestReadsWakeNothing(t *testing.T) {
	n := commonNode(t)
	b := n.newWebBox(t)
	for _, rest := range []struct {
		state types.State
		enter func()
	}{{types.StateAsleep, b.sleep}, {types.StateStopped, b.stop}} {
		rest.enter()
		known := len(b.events("woke"))
		for _, path := range []string{
			"/sandbox", "/sandbox/" + b.id, "/sandbox/" + b.id + "/ports", "/sandbox/" + b.id + "/processes",
			"/sandbox/" + b.id + "/process/" + b.web.ID, "/sandbox/" + b.id + "/events", "/events", "/node",
		} {
			if status, text := n.do(t, "GET", path, "", nil); status != http.StatusOK {
				t.Errorf("GET %s: %d %s", path, status, text)
			}
			if state := b.state(); state != rest.state {
				t.Fatalf("GET %s: it was %s and is %s", path, rest.state, state)
			}
		}
		n.admin(t, "/metrics")
		_, err := n.API.Hold(testkit.Context(t), b.id, 0)
		b.must(err)
		if woke := b.events("woke")[known:]; len(woke) != 0 || b.state() != rest.state {
			t.Errorf("%s: it was woken by %+v", rest.state, woke)
		}
	}
}
