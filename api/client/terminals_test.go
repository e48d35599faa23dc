package client

import (
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/coder/websocket"

	"github.com/doze-run/doze/problem"
)

// terminalNode is the node's end of a connection to a terminal.
type terminalNode struct {
	t    *testing.T
	conn *websocket.Conn
}

func (n *terminalNode) sendText(s string) {
	n.conn.Write(n.t.Context(), websocket.MessageText, []byte(s))
}
func (n *terminalNode) sendBinary(s string) {
	n.conn.Write(n.t.Context(), websocket.MessageBinary, []byte(s))
}

func (n *terminalNode) expect(kind websocket.MessageType, want string) {
	n.t.Helper()
	if got, b, err := n.conn.Read(n.t.Context()); err != nil || got != kind || string(b) != want {
		n.t.Errorf("got %v %q, %v, want %q", got, b, err, want)
	}
}

// connectTerminal connects to a node that behaves so. The connection ends when node returns.
func connectTerminal(t *testing.T, o TerminalOptions, query string, node func(*terminalNode)) *Terminal {
	t.Helper()
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer token" || r.URL.Path != "/api/v1/sandbox/a/terminal" || r.URL.RawQuery != query {
			t.Errorf("request for %s?%s with token %q", r.URL.Path, r.URL.RawQuery, r.Header.Get("Authorization"))
		}
		conn, err := websocket.Accept(w, r, nil)
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.CloseNow()
		node(&terminalNode{t: t, conn: conn})
	})
	term, err := c.OpenTerminal(t.Context(), "a", o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { term.Close() })
	return term
}

func TestTerminalEventsAndCursor(t *testing.T) {
	term := connectTerminal(t, TerminalOptions{Cols: 100, Rows: 30, Command: "x y", Session: "dev"}, "cols=100&command=x+y&rows=30&session=dev", func(n *terminalNode) {
		n.sendBinary("before")
		n.sendText(`{"type":"ready","id":"t-1","cursor":1006}`)
		n.sendText(`{"type":"news"}`)
		n.sendBinary("after")
		n.sendText(`{"type":"truncated","cursor":5000}`)
		n.sendBinary("!")
		n.sendText(`{"type":"exit","code":137,"signal":"SIGKILL"}`)
	})
	if _, ok := term.Cursor(); ok {
		t.Error("the cursor is known before the event ready")
	}
	next := func() TerminalEvent {
		t.Helper()
		ev, err := term.Next()
		if err != nil {
			t.Fatal(err)
		}
		return ev
	}
	cursor := func(want int64) {
		t.Helper()
		if got, ok := term.Cursor(); !ok || got != want {
			t.Errorf("the cursor is %d, not %d", got, want)
		}
	}
	if ev := next(); string(ev.Output) != "before" {
		t.Errorf("got %+v", ev)
	}
	if ev := next(); ev.Ready == nil || term.ID() != "t-1" {
		t.Errorf("got %+v of %q", ev, term.ID())
	}
	cursor(1006)
	if ev := next(); string(ev.Output) != "after" {
		t.Errorf("got %+v", ev)
	}
	cursor(1011)
	if ev := next(); ev.Truncated == nil {
		t.Errorf("got %+v", ev)
	}
	if ev := next(); string(ev.Output) != "!" {
		t.Errorf("got %+v", ev)
	}
	cursor(5001)
	if ev := next(); ev.Exit == nil || ev.Exit.Code != 137 || ev.Exit.Signal != "SIGKILL" {
		t.Errorf("got %+v", ev)
	}
}

func TestTerminalSends(t *testing.T) {
	term := connectTerminal(t, TerminalOptions{ID: "main", Since: new(int64(7))}, "id=main&since=7", func(n *terminalNode) {
		n.expect(websocket.MessageBinary, "ls\r")
		n.expect(websocket.MessageText, `{"type":"resize","cols":132,"rows":50}`)
		n.expect(websocket.MessageText, `{"type":"signal","signal":"SIGINT"}`)
		n.expect(websocket.MessageBinary, strings.Repeat("x", stdinChunk))
		n.expect(websocket.MessageBinary, "x")
		n.sendText(`{"type":"exit","code":0}`)
	})
	if cursor, ok := term.Cursor(); !ok || cursor != 7 || term.ID() != "main" {
		t.Errorf("the cursor is %d of %q", cursor, term.ID())
	}
	_, err := term.Write([]byte("ls\r"))
	err = errors.Join(err, term.Resize(132, 50), term.Signal("SIGINT"))
	if _, again := term.Write([]byte(strings.Repeat("x", stdinChunk+1))); err != nil || again != nil {
		t.Fatal(err, again)
	}
	if ev, err := term.Next(); err != nil || ev.Exit == nil {
		t.Errorf("got %+v, %v", ev, err)
	}
}

func TestTerminalThatIsLost(t *testing.T) {
	for name, node := range map[string]func(*terminalNode){
		"cut":    func(n *terminalNode) { n.conn.CloseNow() },
		"closed": func(n *terminalNode) { n.conn.Close(websocket.StatusGoingAway, "") },
	} {
		t.Run(name, func(t *testing.T) {
			term := connectTerminal(t, TerminalOptions{}, "", node)
			if ev, err := term.Next(); !errors.Is(err, ErrTerminalLost) {
				t.Errorf("got %+v, %v", ev, err)
			}
		})
	}
}

func TestTerminalFailsWithTheProblemOfTheNode(t *testing.T) {
	term := connectTerminal(t, TerminalOptions{}, "", func(n *terminalNode) {
		n.sendText(`{"type":"error","message":"x","problem":{"code":"guest_lost","status":502,"detail":"x"}}`)
	})
	if ev, err := term.Next(); !problem.Has(err, problem.GuestLost) {
		t.Errorf("got %+v, %v", ev, err)
	}
	c := serve(t, func(w http.ResponseWriter, r *http.Request) { problem.New(problem.TerminalLost, "gone").Write(w, r) })
	if _, err := c.OpenTerminal(t.Context(), "a", TerminalOptions{}); !problem.Has(err, problem.TerminalLost) {
		t.Errorf("got %v", err)
	}
}
