//go:build integration

package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/test/testnode"
	"github.com/doze-run/doze/testkit"
)

func (b *box) dialWebSocket(c *http.Client) *websocket.Conn {
	b.t.Helper()
	c = &http.Client{Transport: c.Transport} // a Timeout would apply to the connection
	conn, _, err := websocket.Dial(testkit.Context(b.t), b.url+"/ws", &websocket.DialOptions{HTTPClient: c})
	b.must(err)
	b.t.Cleanup(func() { conn.CloseNow() })
	return conn
}

// echo sends a text over a WebSocket and waits until it comes back.
func (b *box) echo(conn *websocket.Conn, text string) {
	b.t.Helper()
	b.must(conn.Write(testkit.Context(b.t), websocket.MessageText, []byte(text)))
	_, answer, err := conn.Read(testkit.Context(b.t))
	b.must(err)
	if string(answer) != text {
		b.t.Fatalf("the echo of %q is %q", text, answer)
	}
}

func TestSleepingGuestIsSmall(t *testing.T) {
	b := commonNode(t).newBox(t)
	b.exec("true")
	b.sleep()
	if size := testnode.Memory(t, b.hostPID(), "VmRSS"); size > mostGuest {
		t.Errorf("the frozen guest holds %d bytes, at most %d are allowed", size, mostGuest)
	}
}

// Terminals, sessions, searches and waits that have ended leave little in it.
func TestGuestIsSmallAfterItsUse(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	ctx := testkit.Context(t)
	_, err := n.API.StartProcess(ctx, b.id, types.StartProcessRequest{Name: "web", Command: types.Command{Command: "echo ready; exec sleep 100000"}})
	b.must(err)
	for range 20 {
		term, err := n.API.OpenTerminal(ctx, b.id, client.TerminalOptions{Command: "seq 200000"})
		b.must(err)
		for err == nil {
			_, err = term.Next()
		}
		term.Close()
		session, err := n.API.OpenSession(ctx, b.id, types.OpenSessionRequest{})
		b.must(err)
		_, err = n.API.Exec(ctx, b.id, client.ExecRequest{Session: session.ID, Command: types.Command{Command: "seq 200000; exit"}})
		b.must(err)
		_, err = n.API.SearchFiles(ctx, b.id, "/etc", client.SearchOptions{Content: "(a|b|c){300}x", Hidden: true})
		b.must(err)
		_, err = n.API.WaitProcess(ctx, b.id, "web", types.ReadyCondition{Log: "ready|[a-z]{900}[a-z]{900}"})
		b.must(err)
	}
	testkit.Eventually(t, "its guest is small", func() bool { return testnode.Memory(t, b.hostPID(), "VmRSS") <= mostGuest })
	b.sleep()
	if size := testnode.Memory(t, b.hostPID(), "VmRSS"); size > mostGuest {
		t.Errorf("the frozen guest holds %d bytes, at most %d are allowed", size, mostGuest)
	}
}

// patch changes a sandbox by the API.
func (b *box) patch(body string) {
	b.t.Helper()
	if status, text := b.node.do(b.t, "PATCH", "/sandbox/"+b.id, "application/json", strings.NewReader(body)); status != http.StatusOK {
		b.t.Fatalf("PATCH: %d %s", status, text)
	}
}

func TestIdleSandboxFallsAsleepAndStops(t *testing.T) {
	t.Parallel() // it mostly waits
	b := commonNode(t).newWebBox(t)
	b.patch(`{"sleep_after":"1s"}`)
	b.awaitState(types.StateAsleep)
	if slept := b.awaitEvents("slept", 1); len(slept) != 1 || slept[0].Reason != "idle" {
		t.Errorf("it slept: %+v", slept)
	}
	b.patch(`{"stop_after":"1s"}`)
	b.awaitState(types.StateStopped)
	if stopped := b.awaitEvents("stopped", 1); len(stopped) != 1 || stopped[0].Reason != "stop_after" {
		t.Errorf("it stopped: %+v", stopped)
	}
}

// A sandbox whose memory does not persist stops, and one whose disk does not has the files of its
// image again. In both cases a visitor wakes it.
func TestSleepKeepsWhatPersists(t *testing.T) {
	t.Parallel() // it mostly waits
	n := commonNode(t)
	for persist, want := range map[types.Persist]string{types.PersistDisk: "kept", types.PersistNone: "gone"} {
		t.Run(string(persist), func(t *testing.T) {
			t.Parallel()
			b := n.newBox(t, func(req *types.CreateSandboxRequest) { req.Persist = persist })
			b.serveBy(types.ExposePortRequest{}, types.StartProcessRequest{
				Command: types.Command{Argv: []string{"python3", "-m", "http.server", strconv.Itoa(webPort), "--directory", "/usr/share"}},
			})
			b.exec("echo kept >/root/file")
			b.patch(`{"sleep_after":"1s"}`)
			b.awaitState(types.StateStopped)
			if slept := b.awaitEvents("stopped", 1); len(slept) != 1 || slept[0].Reason != "idle" {
				t.Errorf("it stopped: %+v", slept)
			}
			b.patch(`{"sleep_after":"0s"}`)
			b.get(n.browser(t, "h1"), "/", http.StatusOK)
			if got := b.exec("cat /root/file || echo gone"); got != want {
				t.Errorf("the file is %q, want %q", got, want)
			}
			if sb := b.show(); sb.Condition != nil {
				t.Errorf("condition %+v", sb.Condition)
			}
			b.sleep()
			if sb := b.show(); sb.State != types.StateStopped || sb.StateReason != types.StateReasonSlept {
				t.Errorf("after a sleep it is %s (%s)", sb.State, sb.StateReason)
			}
			b.get(n.browser(t, "h1"), "/", http.StatusOK)
		})
	}
}

func TestSilentWebSocketSurvivesSleep(t *testing.T) {
	t.Parallel() // it mostly waits
	n := commonNode(t)
	b := n.newWebBox(t, sleepAfter(time.Second))
	conn := b.dialWebSocket(n.browser(t, "h1"))
	for _, text := range []string{"first", "second"} {
		b.echo(conn, text)
		b.awaitState(types.StateAsleep)
	}
	b.echo(conn, "third")
	woke := b.awaitEvents("woke", 2)
	for _, e := range woke {
		if e.Cause != "websocket" || e.Kind != "warm" {
			t.Errorf("it woke by %+v", e)
		}
	}
}

func TestWebSocketMayHoldItAwake(t *testing.T) {
	t.Parallel() // it mostly waits
	n := commonNode(t)
	b := n.newBox(t, sleepAfter(time.Second))
	b.serve(types.ExposePortRequest{WebSocket: "keep_awake"})
	conn := b.dialWebSocket(n.browser(t, "h1"))
	b.outlast()
	b.echo(conn, "still here")
	conn.CloseNow()
	b.awaitState(types.StateAsleep)
}

func TestStreamKeepsItAwakeAsLongAsItLasts(t *testing.T) {
	t.Parallel() // it mostly waits
	n := commonNode(t)
	for _, proto := range []string{"h2", "h1"} {
		t.Run(proto, func(t *testing.T) {
			t.Parallel()
			b := n.newWebBox(t, sleepAfter(time.Second))
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			req, err := http.NewRequestWithContext(ctx, "GET", b.url+"/ticks", nil)
			b.must(err)
			resp, err := n.browser(t, proto).Do(req)
			b.must(err)
			defer resp.Body.Close()
			lines := bufio.NewScanner(resp.Body)
			tick := func() {
				if !lines.Scan() {
					t.Fatalf("the stream was cut: %v", lines.Err())
				}
			}
			tick()
			b.outlast()
			for range 60 { // also what has come meanwhile
				tick()
			}
			leave()
			b.awaitState(types.StateAsleep)
		})
	}
}

func TestSilentStreamSurvivesSleep(t *testing.T) {
	t.Parallel() // it mostly waits
	n := commonNode(t)
	for _, proto := range []string{"h2", "h1"} {
		t.Run(proto, func(t *testing.T) {
			t.Parallel()
			b := n.newWebBox(t, sleepAfter(time.Second))
			c := n.browser(t, proto)
			req, err := http.NewRequestWithContext(testkit.Context(t), "GET", b.url+"/events", nil)
			b.must(err)
			resp, err := (&http.Client{Transport: c.Transport}).Do(req)
			b.must(err)
			defer resp.Body.Close()
			lines := bufio.NewReader(resp.Body)
			for range 3 {
				if line, err := lines.ReadString('\n'); err != nil || line != "data: event\n" {
					t.Fatalf("the stream sent %q, %v", line, err)
				}
				if _, err := lines.Discard(1); err != nil {
					t.Fatal(err)
				}
				b.awaitState(types.StateAsleep)
				b.get(c, "/event", http.StatusOK)
			}
			for _, e := range b.awaitEvents("woke", 3) {
				if e.Kind != "warm" {
					t.Errorf("it woke by %+v", e)
				}
			}
		})
	}
}

// A visitor who stops reading, as one does whose player is paused.
func TestStalledDownloadSurvivesSleep(t *testing.T) {
	t.Parallel() // it mostly waits
	n := commonNode(t)
	for _, proto := range []string{"h2", "h1"} {
		t.Run(proto, func(t *testing.T) {
			t.Parallel()
			b := n.newWebBox(t, sleepAfter(time.Second))
			const size = 64 << 20 // more than all buffers on the way
			req, err := http.NewRequestWithContext(testkit.Context(t), "GET", fmt.Sprintf("%s/zeros?n=%d", b.url, size), nil)
			b.must(err)
			resp, err := (&http.Client{Transport: n.browser(t, proto).Transport}).Do(req)
			b.must(err)
			defer resp.Body.Close()
			b.awaitState(types.StateAsleep)
			if got, err := io.Copy(io.Discard, resp.Body); err != nil || got != size {
				t.Errorf("got %d of %d bytes, %v", got, size, err)
			}
			b.awaitState(types.StateAsleep)
		})
	}
}

// outlast returns when another sandbox, as idle as can be, has fallen asleep twice
// after a sleep_after of 1 s, and fails if this one has slept.
func (b *box) outlast() {
	b.t.Helper()
	clock := b.node.newBox(b.t, sleepAfter(time.Second))
	clock.awaitState(types.StateAsleep)
	clock.exec("true")
	clock.awaitState(types.StateAsleep)
	if slept := b.events("slept"); len(slept) != 0 || b.state() != types.StateRunning {
		b.t.Errorf("it slept: %+v", slept)
	}
}

func TestLongRequestIsNotCutBySleep(t *testing.T) {
	t.Parallel() // it mostly waits
	n := commonNode(t)
	b := n.newWebBox(t, sleepAfter(time.Second))
	c := n.browser(t, "h2")
	answer := make(chan error, 1)
	go func() {
		text, _, err := fetch(testkit.Context(t), c, b.url+"/held", http.StatusOK)
		if err == nil && text != "waited" {
			err = fmt.Errorf("the response is %q", text)
		}
		answer <- err
	}()
	testkit.Eventually(t, "the server has the request", func() bool {
		text, _ := b.get(c, "/open", http.StatusOK)
		return text == "1"
	})
	b.outlast()
	b.get(c, "/free", http.StatusOK)
	b.must(<-answer)
	b.awaitState(types.StateAsleep)
}

func TestRunningCommandKeepsItAwake(t *testing.T) {
	t.Parallel() // it mostly waits
	n := commonNode(t)
	b := n.newBox(t, sleepAfter(time.Second))
	b.exec("mkfifo /tmp/begun /tmp/go")
	type ended struct {
		result types.ExecResult
		err    error
	}
	command := make(chan ended, 1)
	go func() {
		// It waits without using the CPU.
		r, err := n.API.Exec(testkit.Context(t), b.id, client.ExecRequest{Command: types.Command{Command: "echo >/tmp/begun; cat /tmp/go"}})
		command <- ended{r, err}
	}()
	b.exec("cat /tmp/begun")
	b.outlast()
	b.exec("echo done >/tmp/go")
	if e := <-command; e.err != nil || e.result.Stdout != "done\n" {
		t.Errorf("the command ended with %+v, %v", e.result, e.err)
	}
	b.awaitState(types.StateAsleep)
}

func TestHoldFromInsideKeepsItAwake(t *testing.T) {
	t.Parallel() // it mostly waits
	n := commonNode(t)
	b := n.newBox(t)
	b.exec("/.doze/bin/doze-guest hold 10m")
	testkit.Eventually(t, "the hold is known", func() bool { return b.show().HoldUntil.After(time.Now().Add(9 * time.Minute)) })
	b.patch(`{"sleep_after":"1s"}`)
	b.outlast()
	b.exec("/.doze/bin/doze-guest hold 0")
	b.awaitState(types.StateAsleep)
	if held := b.events("held"); len(held) != 2 {
		t.Errorf("%d events of holds: %+v", len(held), held)
	}
}
