package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/coder/websocket"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
)

// execNode is the node's end of one exec.
type execNode struct {
	t       *testing.T
	conn    *websocket.Conn
	command map[string]any
}

// serveExec returns a client of a node that runs a command so. The connection ends
// when node returns.
func serveExec(t *testing.T, node func(*execNode)) *Client {
	t.Helper()
	return serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer token" || r.URL.Path != "/api/v1/sandbox/a/exec" {
			t.Errorf("request for %s with token %q", r.URL.Path, r.Header.Get("Authorization"))
		}
		conn, err := websocket.Accept(w, r, nil)
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.CloseNow()
		conn.SetReadLimit(1 << 21)
		n := &execNode{t: t, conn: conn}
		if kind, b, err := conn.Read(t.Context()); err != nil || kind != websocket.MessageText || json.Unmarshal(b, &n.command) != nil {
			t.Errorf("first message %q, error %v", b, err)
			return
		}
		node(n)
	})
}

func (n *execNode) text(s string) { n.conn.Write(n.t.Context(), websocket.MessageText, []byte(s)) }
func (n *execNode) binary(s string) {
	n.conn.Write(n.t.Context(), websocket.MessageBinary, []byte(s))
}

// read returns the next message, or an error when the client has gone.
func (n *execNode) read() (string, error) {
	_, b, err := n.conn.Read(n.t.Context())
	return string(b), err
}

func TestExecStreamPassesOutputInItsOrder(t *testing.T) {
	c := serveExec(t, func(n *execNode) {
		n.text(`{"type":"start","pid":7}`)
		n.binary("\x01out \x00\xff")
		n.binary("\x02err")
		n.binary("\x01more")
		n.binary("\x09of a stream that this version does not know")
		n.binary("")
		n.text(`{"type":"news"}`)
		n.text(`{"type":"complete","exit_code":3,"signal":"","timed_out":true,"duration_ms":1.5}`)
	})
	var order bytes.Buffer
	result, err := c.ExecStream(t.Context(), "a", ExecRequest{Command: types.Command{Command: "x"}}, ExecStreams{Stdout: &order, Stderr: &order})
	if err != nil || order.String() != "out \x00\xfferrmore" || result.ExitCode != 3 || !result.TimedOut || result.DurationMS != 1.5 {
		t.Fatalf("got %q, %+v, %v", order.String(), result, err)
	}
}

func TestExecStreamNeverInventsAnExitCode(t *testing.T) {
	for _, tt := range []struct {
		name  string
		node  func(*execNode)
		check func(error) bool
	}{
		{"ends early", func(n *execNode) { n.text(`{"type":"start","pid":7}`); n.binary("\x01a") }, func(err error) bool { return errors.Is(err, errNoResult) }},
		{"closes early", func(n *execNode) { n.conn.Close(websocket.StatusNormalClosure, "") }, func(err error) bool { return errors.Is(err, errNoResult) }},
		{"fails", func(n *execNode) {
			n.text(`{"type":"error","problem":{"code":"guest_lost","detail":"gone","status":502}}`)
		}, func(err error) bool { return problem.Has(err, problem.GuestLost) }},
		{"fails without a problem", func(n *execNode) { n.text(`{"type":"error"}`) }, func(err error) bool { return err != nil }},
		{"not JSON", func(n *execNode) { n.text(`complete`) }, func(err error) bool { return err != nil }},
		{"too large", func(n *execNode) { n.binary("\x01" + strings.Repeat("x", maxSocketMessage)) }, func(err error) bool { return errors.Is(err, errNoResult) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := serveExec(t, tt.node).ExecStream(t.Context(), "a", ExecRequest{Command: types.Command{Command: "x"}}, ExecStreams{}); !tt.check(err) {
				t.Fatalf("got %v", err)
			}
		})
	}
}

func TestExecStreamReadsRefusals(t *testing.T) {
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(http.StatusNotFound)
		io.WriteString(w, `{"code":"sandbox_not_found","detail":"no","status":404}`)
	})
	if _, err := c.ExecStream(t.Context(), "a", ExecRequest{Command: types.Command{Command: "x"}}, ExecStreams{}); !problem.Has(err, problem.SandboxNotFound) {
		t.Fatalf("got %v", err)
	}
}

// reads counts what is read of a stream that never ends.
type reads struct{ n int }

func (r *reads) Read(p []byte) (int, error) { r.n += len(p); return len(p), nil }

// Input is read only when the node has room for it, so that a command that reads
// nothing takes little of a script's own input.
func TestExecStreamReadsNoMoreInputThanTheWindow(t *testing.T) {
	const window = 100_000
	c := serveExec(t, func(n *execNode) {
		if n.command["stream_stdin"] != true {
			t.Errorf("command %v", n.command)
		}
		n.text(`{"type":"start","pid":7,"stdin_window_bytes":100000}`)
		for got := 0; got < window; {
			m, err := n.read()
			if err != nil || m == "" || m[0] != 0 {
				t.Errorf("message %.10q, error %v", m, err)
				return
			}
			got += len(m) - 1
		}
		n.text(`{"type":"complete"}`)
	})
	in := &reads{}
	if _, err := c.ExecStream(t.Context(), "a", ExecRequest{Command: types.Command{Command: "x"}}, ExecStreams{Stdin: in}); err != nil {
		t.Fatal(err)
	}
	if in.n != window {
		t.Errorf("%d bytes were read", in.n)
	}
}

func TestExecStreamSendsInputAndItsEnd(t *testing.T) {
	c := serveExec(t, func(n *execNode) {
		n.text(`{"type":"start","pid":7,"stdin_window_bytes":4}`)
		for _, want := range []string{"\x00abcd", "\x00ef", `{"type":"stdin_eof"}`} {
			if m, err := n.read(); m != want || err != nil {
				t.Errorf("message %q, error %v; want %q", m, err, want)
			}
			n.text(`{"type":"stdin_ack","bytes":4}`)
		}
		n.text(`{"type":"complete"}`)
	})
	if _, err := c.ExecStream(t.Context(), "a", ExecRequest{Command: types.Command{Command: "x"}}, ExecStreams{Stdin: strings.NewReader("abcdef")}); err != nil {
		t.Fatal(err)
	}
}

func TestExecStreamStopsReadingInputThatTheCommandClosed(t *testing.T) {
	c := serveExec(t, func(n *execNode) {
		n.text(`{"type":"start","pid":7,"stdin_window_bytes":4}`)
		n.read()
		n.text(`{"type":"stdin_closed"}`)
		n.text(`{"type":"stdin_ack","bytes":4}`)
		n.text(`{"type":"complete"}`)
	})
	in := &reads{}
	if _, err := c.ExecStream(t.Context(), "a", ExecRequest{Command: types.Command{Command: "x"}}, ExecStreams{Stdin: in}); err != nil || in.n != 4 {
		t.Fatalf("%d bytes were read; error %v", in.n, err)
	}
}

type failing struct{}

var errFailing = errors.New("the disk is broken")

func (failing) Read([]byte) (int, error)  { return 0, errFailing }
func (failing) Write([]byte) (int, error) { return 0, errFailing }

// Input that cannot be read must not look to the command as if it had ended.
func TestExecStreamFailsWithItsInput(t *testing.T) {
	ended := make(chan string, 1)
	c := serveExec(t, func(n *execNode) {
		n.text(`{"type":"start","pid":7,"stdin_window_bytes":4}`)
		m, _ := n.read()
		ended <- m
	})
	if _, err := c.ExecStream(t.Context(), "a", ExecRequest{Command: types.Command{Command: "x"}}, ExecStreams{Stdin: failing{}}); !errors.Is(err, errFailing) {
		t.Errorf("got %v", err)
	}
	if m := <-ended; m != "" {
		t.Errorf("the node got %q", m)
	}
}

func TestExecStreamFailsWithItsOutput(t *testing.T) {
	c := serveExec(t, func(n *execNode) {
		n.text(`{"type":"start","pid":7}`)
		n.binary("\x01a")
		n.read()
	})
	if _, err := c.ExecStream(t.Context(), "a", ExecRequest{Command: types.Command{Command: "x"}}, ExecStreams{Stdout: failing{}}); !errors.Is(err, errFailing) {
		t.Errorf("got %v", err)
	}
}

func TestExecStreamEndsWithItsContext(t *testing.T) {
	gone := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	c := serveExec(t, func(n *execNode) {
		n.text(`{"type":"start","pid":7}`)
		cancel()
		_, err := n.read()
		gone <- err
	})
	if _, err := c.ExecStream(ctx, "a", ExecRequest{Command: types.Command{Command: "x"}}, ExecStreams{}); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
	if <-gone == nil {
		t.Error("the node still has the connection")
	}
}
