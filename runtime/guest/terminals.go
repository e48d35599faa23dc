package guest

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

// TerminalSize is the size of a terminal in characters.
type TerminalSize struct {
	Cols uint16 `json:"cols"`
	Rows uint16 `json:"rows"`
}

// TerminalSpec is a program that runs on a terminal of its own. Without a command it is
// the image's shell, interactive: bash, or sh.
type TerminalSpec struct {
	Command
	// ID is unique among the running terminals of a sandbox. If it is empty, the guest
	// generates one.
	ID string `json:"id,omitempty"`
	// Session is the id of a session whose working directory and exported variables the program
	// starts with, in place of the command's environment; empty: none.
	Session string `json:"session,omitempty"`
	// Size; 0 stands for 80 columns and 24 rows.
	TerminalSize
}

// SurroundingsWait is how long a terminal waits for the commands of its session.
const SurroundingsWait = 10 * time.Second

// Terminal is a terminal and its program.
type Terminal struct {
	ID      string `json:"id"`
	PID     int    `json:"pid"`     // of the program, inside the sandbox
	Command string `json:"command"` // its words, with a space between; the beginning of a long one
	TerminalSize
	State     ProcessState `json:"state"`
	ExitCode  *int         `json:"exit_code,omitempty"` // nil while it runs
	Signal    string       `json:"signal,omitempty"`
	StartedAt time.Time    `json:"started_at"`
	ExitedAt  *time.Time   `json:"exited_at,omitempty"`
	// Closed: the terminal is forgotten.
	Closed bool `json:"closed,omitempty"`
}

// TerminalReady is the payload of FrameReady.
type TerminalReady struct {
	Cursor int64 `json:"cursor"`
}

// TerminalSignal is the payload of FrameSignal.
type TerminalSignal struct {
	Signal string `json:"signal"`
}

const (
	terminalIDPrefix = "t-"
	maxTerminalID    = 64
)

// MaxTerminalCommand bounds Terminal.Command.
const MaxTerminalCommand = 256

// NewTerminalID returns a random id of a terminal, such as "t-k3f9x2m7".
func NewTerminalID() string { return terminalIDPrefix + randomID() }

// OpenTerminal starts a program on a terminal. Errors: CodeExists when a running terminal
// has that id, CodeTooMany, CodeNoCommand, CodeNoShell, CodeInvalid, CodeNoSession, CodeSessionLost,
// CodeSessionBusy.
func (c *Client) OpenTerminal(ctx context.Context, spec TerminalSpec) (Terminal, error) {
	spec.Defaults, spec.Changes = c.defaultsOr(spec.Defaults), c.changesOr(spec.Changes)
	r := request{method: http.MethodPost, route: RouteTerminal, json: spec}
	if spec.Session != "" {
		r.wait = SurroundingsWait
	}
	return c.terminal(ctx, r)
}

// CloseTerminal sends SIGTERM to the program and everything that it started, SIGKILL to what
// is left after grace, and returns when the terminal has ended. It is forgotten then.
func (c *Client) CloseTerminal(ctx context.Context, id string, grace time.Duration) (Terminal, error) {
	return c.terminal(ctx, request{
		method: http.MethodDelete, route: terminalRoute(id, ""),
		query: url.Values{"grace": {grace.String()}}, wait: grace,
	})
}

func (c *Client) terminal(ctx context.Context, r request) (Terminal, error) {
	t, err := get[Terminal](ctx, c, r)
	if err != nil {
		return Terminal{}, err
	}
	return t, t.check()
}

// check refuses an invalid terminal.
func (t *Terminal) check() error {
	if t.State != ProcessRunning && t.State != ProcessExited {
		return fmt.Errorf("guest reported a terminal that is %q", Shorten(string(t.State), 20))
	}
	if t.PID <= 0 || t.ID == "" || len(t.ID) > maxTerminalID || len(t.Command) > MaxTerminalCommand {
		return fmt.Errorf("guest reported the unusable terminal %q with the pid %d and a command of %d bytes", Shorten(t.ID, 20), t.PID, len(t.Command))
	}
	return checkEnd(t.State, t.ExitCode, t.Signal)
}

// TerminalEvent is one thing that happened on a terminal. Its Kind is FrameStdout,
// FrameSkipped, when Bytes of output are not available any more, FrameReady, once the output
// from before the connection is complete, and FrameComplete last.
type TerminalEvent struct {
	Kind   FrameType
	Data   []byte // of FrameStdout; valid until the next Next
	Bytes  int64  // of FrameSkipped
	Cursor int64  // of FrameReady
	Result *ExecResult
}

// TerminalStream is a connection to a terminal. One goroutine may call Next and another
// Write, Resize and Signal; Close may be called at any time.
type TerminalStream struct {
	frames
	keys         *input
	acknowledged chan struct{} // has an element after input was acknowledged
}

// AttachTerminal connects to a terminal, whose last output comes first: all of it since the
// position, or as much as is kept if since is negative. Errors: CodeNoTerminal, CodeTooMany,
// CodeInvalid when the terminal has not printed as much as since.
func (c *Client) AttachTerminal(ctx context.Context, id string, since int64) (*TerminalStream, error) {
	r := request{method: http.MethodGet, route: terminalRoute(id, SuffixAttach), query: url.Values{}}
	if since >= 0 {
		r.query.Set("since", strconv.FormatInt(since, 10))
	}
	a, in, err := c.upgrade(ctx, r, UpgradeTerminal)
	if err != nil {
		return nil, err
	}
	return &TerminalStream{frames: frames{response: a, endless: true}, keys: in, acknowledged: make(chan struct{}, 1)}, nil
}

func terminalRoute(id, suffix string) string {
	return RouteTerminal + "/" + url.PathEscape(id) + suffix
}

// Write types p. It blocks while the program does not read its input and the buffers
// between are full.
func (s *TerminalStream) Write(p []byte) (n int, err error) {
	for len(p) > 0 {
		part := p[:min(len(p), MaxFrame)]
		if err = s.Reserve(len(part)); err == nil {
			err = s.WriteReserved(part)
		}
		if err != nil {
			return n, err
		}
		p, n = p[len(part):], n+len(part)
	}
	return n, nil
}

// Reserve blocks until the buffers have space for n bytes, which are MaxFrame at most, so that
// WriteReserved does not wait for the program.
func (s *TerminalStream) Reserve(n int) error {
	for !s.keys.reserve(n) {
		select {
		case <-s.acknowledged:
		case <-s.response.watch.ctx.Done():
			return ErrLost
		}
	}
	return nil
}

// WriteReserved types what Reserve has reserved.
func (s *TerminalStream) WriteReserved(p []byte) error { return s.keys.write(p) }

// Resize sets the size of the terminal for all its viewers.
func (s *TerminalStream) Resize(size TerminalSize) error { return s.keys.json(FrameResize, size) }

// Signal signals the process group in the foreground. A name that is unknown ends the stream.
func (s *TerminalStream) Signal(name string) error {
	return s.keys.json(FrameSignal, TerminalSignal{Signal: name})
}

// Next returns what happens next: output, FrameReady once, FrameComplete, then io.EOF. It
// blocks while the terminal is silent. A stream that ends before FrameComplete returns ErrLost
// (wrapped).
func (s *TerminalStream) Next() (ev TerminalEvent, err error) {
	for err == nil && ev.Kind == 0 {
		ev, err = nextEvent(&s.frames, s.parse)
	}
	return ev, err
}

func (s *TerminalStream) parse(t FrameType, data []byte) (ev TerminalEvent, err error) {
	switch t {
	case FrameStdout:
		return TerminalEvent{Kind: FrameStdout, Data: data}, nil
	case FrameSkipped:
		var v Skipped
		if err = DecodePayload(data, &v); err == nil && v.Bytes <= 0 {
			err = fmt.Errorf("%w: %d bytes skipped", ErrFrame, v.Bytes)
		}
		return TerminalEvent{Kind: FrameSkipped, Bytes: v.Bytes}, err
	case FrameReady:
		var v TerminalReady
		if err = DecodePayload(data, &v); err == nil && v.Cursor < 0 {
			err = fmt.Errorf("%w: the cursor %d", ErrFrame, v.Cursor)
		}
		return TerminalEvent{Kind: FrameReady, Cursor: v.Cursor}, err
	case FrameStdinAck:
		if _, err = s.keys.acknowledge(data); err == nil {
			select {
			case s.acknowledged <- struct{}{}:
			default:
			}
		}
		return ev, err
	case FrameStdinClosed: // the program has ended
		return ev, nil
	case FrameComplete:
		if ev.Result, err = decodeResult(data); err == nil {
			s.fail(io.EOF)
		}
		ev.Kind = t
		return ev, err
	}
	return ev, fmt.Errorf("%w: type %d from a terminal", ErrFrame, t)
}
