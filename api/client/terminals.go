package client

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"sync"

	"github.com/coder/websocket"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
)

// TerminalOptions are how a terminal is opened or joined.
type TerminalOptions struct {
	// ID of the terminal. One that runs is joined, otherwise it is opened. Empty opens a new
	// one with an id that the sandbox chooses.
	ID string
	// Cols and Rows are the size of a new terminal. 0: 80 and 24.
	Cols, Rows uint16
	// Since resumes after the Cursor of an earlier connection to the terminal ID, which is
	// never opened then. nil begins with the output that the sandbox still has.
	Since *int64
	// Command line of a new terminal, for /bin/sh -c. Empty: an interactive shell.
	Command string
	// Cwd is the working directory of a new terminal. Empty: the session's, or the image's.
	Cwd string
	// Session is the id of a session whose working directory and exported variables a new terminal
	// starts with. Empty: none.
	Session string
}

func (o TerminalOptions) query() url.Values {
	q := url.Values{}
	set := func(name, value string) {
		if value != "" {
			q.Set(name, value)
		}
	}
	set("id", o.ID)
	set("command", o.Command)
	set("cwd", o.Cwd)
	set("session", o.Session)
	if o.Cols > 0 {
		set("cols", strconv.Itoa(int(o.Cols)))
	}
	if o.Rows > 0 {
		set("rows", strconv.Itoa(int(o.Rows)))
	}
	if o.Since != nil {
		set("since", strconv.FormatInt(*o.Since, 10))
	}
	return q
}

// Terminal is a connection to a terminal. One goroutine may call Next and another Write, Resize and
// Signal; Close may be called at any time.
type Terminal struct {
	*socket
	watching sync.WaitGroup
	message  bytes.Buffer
	id       string
	cursor   int64
	since    bool // the cursor is known
}

// TerminalEvent is something that happened on a terminal: one of its fields is set.
type TerminalEvent struct {
	Output    []byte                   // valid until the next Next
	Ready     *types.TerminalReady     // the output from before the connection is complete
	Truncated *types.TerminalTruncated // output is missing
	Exit      *types.TerminalExit      // the program has ended; the last event
}

// ErrTerminalLost means that the connection to a terminal was lost. The terminal may run on.
var ErrTerminalLost = errors.New("the connection to the terminal was lost")

// OpenTerminal wakes the sandbox and opens or joins a terminal. It ends with ctx.
func (c *Client) OpenTerminal(ctx context.Context, idOrName string, o TerminalOptions) (*Terminal, error) {
	path := sandboxPath(idOrName, "terminal")
	if q := o.query(); len(q) > 0 {
		path += "?" + q.Encode()
	}
	conn, err := c.openSocket(ctx, path)
	if err != nil {
		return nil, err
	}
	t := &Terminal{socket: newSocket(ctx, conn), id: o.ID}
	if o.Since != nil {
		t.cursor, t.since = *o.Since, true
	}
	t.busy.Store(true)
	t.watching.Go(func() { t.watch(func() {}, fmt.Errorf("%w: the node does not respond", ErrTerminalLost)) }) // ended by Close
	return t, nil
}

// ID is the id of the terminal; of one that the sandbox chose, it is known after the event
// Ready.
func (t *Terminal) ID() string { return t.id }

// Cursor is the position after the output that Next has returned. ok is false while it is
// unknown: before the event Ready, unless TerminalOptions.Since was set.
func (t *Terminal) Cursor() (cursor int64, ok bool) { return t.cursor, t.since }

// Write types p.
func (t *Terminal) Write(p []byte) (n int, err error) {
	for len(p) > 0 {
		part := p[:min(len(p), stdinChunk)]
		if err := t.conn.Write(t.ctx, websocket.MessageBinary, part); err != nil {
			return n, t.lost(err)
		}
		p, n = p[len(part):], n+len(part)
	}
	return n, nil
}

// Resize sets the size of the terminal for all its clients.
func (t *Terminal) Resize(cols, rows uint16) error {
	return t.lost(t.send(types.TerminalResize{Type: types.TerminalMessageTypeResize, Cols: cols, Rows: rows}))
}

// Signal signals the process group in the foreground.
func (t *Terminal) Signal(name string) error {
	return t.lost(t.send(types.TerminalSignal{Type: types.TerminalMessageTypeSignal, Signal: name}))
}

// Next returns what happens next. It is not called again after the event Exit or an error.
// Errors: ErrTerminalLost (wrapped), *problem.Problem, the context's.
func (t *Terminal) Next() (TerminalEvent, error) {
	for {
		t.busy.Store(false)
		kind, err := t.read(&t.message)
		t.busy.Store(true)
		if err != nil {
			return TerminalEvent{}, t.lost(err)
		}
		if kind == websocket.MessageBinary {
			t.cursor += int64(t.message.Len())
			return TerminalEvent{Output: t.message.Bytes()}, nil
		}
		if ev, err := t.parse(t.message.Bytes()); err != nil || ev != nil {
			return *cmp.Or(ev, &TerminalEvent{}), err
		}
	}
}

// parse parses a text message. Of a type that this version does not know, it returns nil.
func (t *Terminal) parse(message []byte) (*TerminalEvent, error) {
	var m struct {
		Type    types.TerminalMessageType `json:"type"`
		Problem *problem.Problem          `json:"problem"`
	}
	ev := &TerminalEvent{}
	err := json.Unmarshal(message, &m)
	if err == nil {
		switch m.Type {
		case types.TerminalMessageTypeReady:
			if err = json.Unmarshal(message, &ev.Ready); err == nil {
				t.id, t.cursor, t.since = ev.Ready.ID, ev.Ready.Cursor, true
			}
		case types.TerminalMessageTypeTruncated:
			if err = json.Unmarshal(message, &ev.Truncated); err == nil {
				t.cursor = ev.Truncated.Cursor
			}
		case types.TerminalMessageTypeExit:
			err = json.Unmarshal(message, &ev.Exit)
		case types.TerminalMessageTypeError:
			return nil, cmp.Or(m.Problem, &problem.Problem{})
		default:
			return nil, nil
		}
	}
	if err != nil {
		return nil, fmt.Errorf("unexpected message: %w", err)
	}
	return ev, nil
}

// Close disconnects. The terminal runs on.
func (t *Terminal) Close() error {
	t.fail(nil)
	t.conn.CloseNow()
	t.watching.Wait()
	return nil
}

// lost returns why the connection has failed.
func (t *Terminal) lost(err error) error {
	if err == nil {
		return nil
	}
	if err = t.explain(err); errors.Is(err, ErrTerminalLost) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrTerminalLost, err)
}

// Terminals returns the terminals as last known. It never wakes the sandbox.
func (c *Client) Terminals(ctx context.Context, idOrName string) ([]types.Terminal, error) {
	page, err := fetch[types.TerminalList](ctx, c, request{path: sandboxPath(idOrName, "terminals")})
	return page.Terminals, err
}

// CloseTerminal ends the program of a terminal.
func (c *Client) CloseTerminal(ctx context.Context, idOrName, terminal string) (types.Terminal, error) {
	return fetch[types.Terminal](ctx, c, request{method: http.MethodDelete, path: sandboxPath(idOrName, "terminal", url.PathEscape(terminal))})
}
