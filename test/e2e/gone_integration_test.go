//go:build integration

package e2e

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

// usage is what a node uses that it could leak.
type usage struct {
	goroutines, descriptors, children, processes int
}

var goroutineTotal = regexp.MustCompile(`goroutine profile: total (\d+)`)

func (n *node) usage(t *testing.T, b *box) usage {
	t.Helper()
	total := goroutineTotal.FindStringSubmatch(n.admin(t, "/debug/pprof/goroutine?debug=1"))
	if total == nil {
		t.Fatal("the node does not report its goroutines")
	}
	goroutines, err := strconv.Atoi(total[1])
	if err != nil {
		t.Fatal(err)
	}
	descriptors, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", n.PID()))
	if err != nil {
		t.Fatal(err)
	}
	return usage{goroutines, len(descriptors), len(n.children()), len(b.hostPIDs())}
}

// calls is a writer that calls it for every write.
type calls func()

func (c calls) Write(b []byte) (int, error) { c(); return len(b), nil }

func TestClientsThatGoAwayLeaveNothingBehind(t *testing.T) {
	n := ownNode(t)
	b := n.newWebBox(t)
	slow := n.newSlowBox(t) // whose server never responds after a stop
	coder := n.newBox(t, image("python"))
	b.exec(`git init -q -b main /srv/origin; cd /srv/origin; git config user.name agent; git config user.email agent@example.com
		echo text >file; git add .; git commit -qm first
		printf '#!/bin/sh\necho "Enumerating objects: 1, done." >&2; sleep 1000\n' >/srv/hook; chmod +x /srv/hook
		git config --global uploadpack.packObjectsHook /srv/hook`)
	const most = 20
	for _, way := range []struct {
		name string
		many int // clients; 0: most
		// enter begins something that has not ended when it calls begun, and
		// returns when ctx has ended.
		enter func(ctx context.Context, c *http.Client, i int, begun func()) error
	}{
		{"exec", 0, func(ctx context.Context, _ *http.Client, _ int, begun func()) error {
			_, err := n.API.ExecStream(ctx, b.id, client.ExecRequest{Command: types.Command{Command: "echo begun; sleep 1000 & sleep 1000"}},
				client.ExecStreams{Stdout: calls(begun)})
			return err
		}},
		{"exec with unread input", 0, func(ctx context.Context, _ *http.Client, _ int, begun func()) error {
			_, err := n.API.ExecStream(ctx, b.id, client.ExecRequest{Command: types.Command{Command: "echo begun; sleep 1000 & sleep 1000"}},
				client.ExecStreams{Stdin: zeros{}, Stdout: calls(begun)})
			return err
		}},
		{"buffered exec", 0, func(ctx context.Context, _ *http.Client, i int, begun func()) error {
			file := fmt.Sprint("/tmp/begun-", names.Add(1))
			await(ctx, begun, func() bool {
				_, err := n.API.Stat(ctx, b.id, file, client.StatOptions{})
				return err == nil
			})
			_, err := n.API.Exec(ctx, b.id, client.ExecRequest{Command: types.Command{Command: "trap '' TERM HUP; touch " + file + "; sleep 1000"}})
			return err
		}},
		{"upload", 0, func(ctx context.Context, _ *http.Client, i int, begun func()) error {
			_, err := n.API.WriteFile(ctx, b.id, fmt.Sprintf("/srv/upload-%d", i), 0, &endless{ctx: ctx, begun: begun})
			return err
		}},
		{"archive", 0, func(ctx context.Context, _ *http.Client, i int, begun func()) error {
			return n.API.PutArchive(ctx, b.id, fmt.Sprintf("/srv/archive-%d", i), &endless{ctx: ctx, begun: begun, head: bigTar(t)})
		}},
		{"session exec", 0, func(ctx context.Context, _ *http.Client, _ int, begun func()) error {
			s, err := n.API.OpenSession(ctx, b.id, types.OpenSessionRequest{})
			if err != nil {
				return err
			}
			defer n.API.CloseSession(context.WithoutCancel(ctx), b.id, s.ID)
			_, err = n.API.ExecStream(ctx, b.id, client.ExecRequest{Session: s.ID, Command: types.Command{Command: "echo begun; sleep 1000"}},
				client.ExecStreams{Stdout: calls(begun)})
			return err
		}},
		{"terminal", 0, func(ctx context.Context, _ *http.Client, _ int, begun func()) error {
			// It prints more than the connection holds, and its client reads only the beginning.
			term, err := n.API.OpenTerminal(ctx, b.id, client.TerminalOptions{Command: "seq 100000; exec sleep 1000"})
			if err != nil {
				return err
			}
			defer func() {
				term.Close()
				n.API.CloseTerminal(context.WithoutCancel(ctx), b.id, term.ID())
			}()
			for term.ID() == "" {
				if _, err := term.Next(); err != nil {
					return err
				}
			}
			begun()
			<-ctx.Done()
			return ctx.Err()
		}},
		{"watch", 8, func(ctx context.Context, _ *http.Client, _ int, begun func()) error { // of 16, with those that can be resumed
			return n.API.Watch(ctx, b.id, "/srv", client.WatchOptions{}, func(client.Change) error { begun(); return nil })
		}},
		{"wait", 0, func(ctx context.Context, _ *http.Client, i int, begun func()) error {
			await(ctx, begun, func() bool { return n.metric(t, "doze_sandbox_leases") > float64(i) })
			_, err := n.API.WaitProcess(ctx, b.id, b.web.ID, types.ReadyCondition{Port: 1, Timeout: types.Duration(testkit.Patience)})
			return err
		}},
		{"code", 4, func(ctx context.Context, _ *http.Client, i int, begun func()) error {
			id := fmt.Sprint("context-", i) // in the second round it executes code again
			_, err := n.API.OpenContext(ctx, coder.id, types.OpenContextRequest{ID: id, Language: types.LanguagePython})
			if err != nil && !problem.Has(err, problem.ContextExists) {
				return err
			}
			_, err = n.API.RunCodeStream(ctx, coder.id, client.RunCodeRequest{Context: id, Code: "import time\nprint('begun', flush=True)\ntime.sleep(1000)"},
				client.CodeEvents{Stdout: func([]byte) error { begun(); return nil }})
			return err
		}},
		{"clone", 0, func(ctx context.Context, _ *http.Client, _ int, begun func()) error {
			_, err := n.API.CloneRepository(ctx, b.id, types.GitCloneRequest{URL: "file:///srv/origin", TargetDir: fmt.Sprint("/srv/clone-", names.Add(1))},
				func(types.GitProgress) { begun() })
			return err
		}},
		{"events", 0, func(ctx context.Context, _ *http.Client, _ int, begun func()) error {
			return n.API.Follow(ctx, b.id, 0, func(types.Event) error { begun(); return nil })
		}},
		{"logs", 0, func(ctx context.Context, _ *http.Client, _ int, begun func()) error {
			p, err := n.API.StartProcess(ctx, b.id, types.StartProcessRequest{Command: types.Command{Command: "echo begun; exec sleep 1000"}})
			if err != nil {
				return err
			}
			defer n.API.StopProcess(context.WithoutCancel(ctx), b.id, p.ID, "")
			return n.API.Logs(ctx, b.id, p.ID, true, func(client.Log) error { begun(); return nil })
		}},
		{"preview stream", 0, func(ctx context.Context, c *http.Client, _ int, begun func()) error {
			return read(ctx, c, b.url+"/ticks", begun)
		}},
		{"preview download", 0, func(ctx context.Context, c *http.Client, _ int, begun func()) error {
			return read(ctx, c, b.url+"/zeros?n=100000000000", begun)
		}},
		{"preview without a response", 0, func(ctx context.Context, c *http.Client, i int, begun func()) error {
			await(ctx, begun, func() bool {
				open, _, err := fetch(ctx, c, b.url+"/open", http.StatusOK)
				return err == nil && open == strconv.Itoa(i+1) // the server has this one too
			})
			_, _, err := fetch(ctx, c, b.url+"/never", http.StatusOK)
			return err
		}},
		{"preview upload", 0, func(ctx context.Context, c *http.Client, _ int, begun func()) error {
			req, err := http.NewRequestWithContext(ctx, "POST", b.url+"/sink", &endless{ctx: ctx, begun: begun})
			if err != nil {
				return err
			}
			resp, err := c.Do(req)
			if err == nil {
				resp.Body.Close()
			}
			return err
		}},
		{"WebSocket", 0, func(ctx context.Context, c *http.Client, i int, begun func()) error {
			conn := b.dialWebSocket(n.browser(t, "h1"))
			if i%2 == 0 {
				b.echo(conn, "hello")
			}
			begun()
			<-ctx.Done()
			conn.CloseNow()
			return ctx.Err()
		}},
		{"create", 0, func(ctx context.Context, _ *http.Client, i int, begun func()) error {
			for try := 0; ctx.Err() == nil; try++ {
				// Its client goes away as soon as the node knows of it.
				req := types.CreateSandboxRequest{Name: fmt.Sprintf("left-%d-%d", i, try)}
				early, leave := context.WithCancel(ctx)
				await(early, leave, func() bool {
					_, err := n.API.Get(early, req.Name)
					return err == nil
				})
				_, _, err := n.API.Create(early, req)
				leave()
				// It goes on without its client, and asking again joins it.
				sb, created, again := n.API.Create(context.WithoutCancel(ctx), req)
				if again != nil || created || sb.State != types.StateRunning {
					t.Errorf("asked again for %s: created %t, %+v, %v", req.Name, created, sb, again)
				}
				if err := n.API.Delete(context.WithoutCancel(ctx), req.Name); err != nil {
					t.Error(err)
				}
				if err != nil { // else it was made before its client had left
					begun()
					return err
				}
			}
			return ctx.Err()
		}},
		{"wake", 0, func(ctx context.Context, c *http.Client, i int, begun func()) error {
			if i == 0 {
				slow.write("/srv/slow", nil)
				slow.stop()
			}
			await(ctx, begun, func() bool {
				return n.metric(t, "doze_sandbox_leases")+n.metric(t, "doze_wake_waiters") > float64(i) // all of them wait
			})
			_, _, err := fetch(ctx, c, slow.url, http.StatusOK)
			return err
		}},
	} {
		t.Run(way.name, func(t *testing.T) {
			many := cmp.Or(way.many, most)
			var clients []*http.Client
			rest := func() {
				// A connection over HTTP/2 is idle some time after its last request.
				for _, c := range clients {
					c.CloseIdleConnections()
				}
				n.settle(t, b)
			}
			round := func() {
				ctx, leave := context.WithCancel(t.Context())
				defer leave()
				done := make(chan error, many)
				for i := range many {
					begun := make(chan struct{}, 1)
					c := n.browser(t, []string{"h1", "h2"}[i%2])
					clients = append(clients, c)
					go func() {
						err := way.enter(ctx, c, i, func() {
							select {
							case begun <- struct{}{}:
							default:
							}
						})
						if ctx.Err() != nil { // perhaps the node's word that its client has gone reached it
							err = ctx.Err()
						}
						done <- err
					}()
					select {
					case <-begun:
					case <-time.After(testkit.Patience):
						t.Fatal("it did not begin")
					}
				}
				leave()
				for range many {
					if err := <-done; !errors.Is(err, context.Canceled) {
						t.Errorf("it ended before its client went away: %v", err)
					}
				}
				rest()
			}
			round() // the first creates shared state such as idle connections
			before := n.usage(t, b)
			round()
			var after usage
			deadline := time.Now().Add(testkit.Patience)
			// Some that are kept come and go: pools of connections, timers.
			for {
				after = n.usage(t, b)
				if after.goroutines <= before.goroutines+many/4 && after.descriptors <= before.descriptors+many/4 &&
					after.children <= before.children && after.processes <= before.processes {
					break
				}
				if time.Now().After(deadline) {
					t.Fatalf("before %+v, after %+v\n%s", before, after, n.admin(t, "/debug/pprof/goroutine?debug=1"))
				}
				rest()
			}
			b.exec("true")
		})
	}
	// The guest writes to a file of its own in the same folder, or to the file.
	testkit.Eventually(t, "nothing is left of uploads and clones", func() bool {
		return b.exec("find /srv /tmp -name '*upload*' -o -name '.doze-*' -o -name 'clone-*'") == ""
	})
}

// await calls begun when something holds, unless ctx ends before.
func await(ctx context.Context, begun func(), holds func() bool) {
	go func() { // ends with ctx
		for ctx.Err() == nil {
			if holds() {
				begun()
				return
			}
			select {
			case <-time.After(time.Millisecond):
			case <-ctx.Done():
			}
		}
	}()
}

// settle waits until nothing is under way at the node, and ends what it keeps for
// the next request.
func (n *node) settle(t *testing.T, b *box) {
	t.Helper()
	n.API.Close()
	c := n.browser(t, "h1")
	b.get(c, "/", http.StatusOK) // it is awake and its server is up
	c.CloseIdleConnections()
	testkit.Eventually(t, "all leases are released", func() bool {
		return n.metric(t, "doze_sandbox_leases") == 0 && n.metric(t, "doze_wake_waiters") == 0
	})
	testkit.Eventually(t, "no process of a client is left inside", func() bool { return len(b.hostPIDs()) <= 2 })
}

// endless is a body that signals its second read, which means that the first was
// sent, and blocks from then on until ctx ends.
type endless struct {
	ctx   context.Context
	begun func()
	head  []byte // its first bytes
	reads int
}

func (e *endless) Read(b []byte) (int, error) {
	if e.reads++; e.reads > 1 {
		e.begun()
		<-e.ctx.Done()
		return 0, e.ctx.Err()
	}
	return copy(b, append(e.head, bytes.Repeat([]byte("x"), 4096)...)), nil
}

// bigTar is the beginning of a tar with a large file.
func bigTar(t *testing.T) []byte {
	t.Helper()
	var head bytes.Buffer
	if err := tar.NewWriter(&head).WriteHeader(&tar.Header{Name: "upload", Typeflag: tar.TypeReg, Mode: 0o644, Size: gib}); err != nil {
		t.Fatal(err)
	}
	return head.Bytes()
}

// read reads the beginning of a stream and nothing more, until ctx ends.
func read(ctx context.Context, c *http.Client, url string, begun func()) error {
	req, err := http.NewRequestWithContext(ctx, "GET", url, nil)
	if err != nil {
		return err
	}
	resp, err := (&http.Client{Transport: c.Transport}).Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s", resp.Status)
	}
	if _, err := io.ReadFull(resp.Body, make([]byte, 1)); err != nil {
		return err
	}
	begun()
	<-ctx.Done()
	return ctx.Err()
}
