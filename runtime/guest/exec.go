package guest

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/http"
)

// ExecEvent is one thing that happened to a command. Its Kind is FrameStart first, FrameStdout
// or FrameStderr, and FrameComplete last; with ExecRequest.StreamStdin also FrameStdinAck, when
// Bytes of input were written to the command's pipe, and FrameStdinClosed, when the command
// reads no more input.
type ExecEvent struct {
	Kind   FrameType
	PID    int         // inside the sandbox, of FrameStart
	Data   []byte      // of FrameStdout and FrameStderr; valid until the next Next
	Result *ExecResult // of FrameComplete
	Bytes  int         // of FrameStdinAck
}

// ExecStream is a running command. One goroutine may call Next and another
// WriteStdin and CloseStdin; Close may be called at any time.
type ExecStream struct {
	frames
	started bool
	stdin   *input // nil without StreamStdin
}

// Exec runs a command. It returns once the guest has started it; a command that
// cannot be started is an *Error with CodeNoCommand, CodeNoShell or another.
//
// When ctx ends or the stream is closed before the end, the guest kills the
// command and everything that it started. After the command itself has exited
// the stream goes on until its output is read: processes that it left in the
// background may add to that for 250 ms at most; later output of theirs is
// discarded.
//
// With a Session the call also waits until the session has executed the commands before it,
// and a command that is ended early is interrupted: SIGINT, and SIGKILL to its processes 2 s
// later. The session goes on unless its shell ignores that for 2 s more. Errors: CodeNoSession,
// CodeSessionLost, and CodeSessionBusy, with which nothing was executed.
func (c *Client) Exec(ctx context.Context, req ExecRequest) (*ExecStream, error) {
	req.Defaults, req.Changes = c.defaultsOr(req.Defaults), c.changesOr(req.Changes)
	r := request{method: http.MethodPost, route: RouteExec, json: req}
	if req.Session != "" {
		r.wait = cmp.Or(req.Timeout, maxSessionWait)
	}
	s := &ExecStream{}
	var a *response
	var err error
	if req.StreamStdin {
		a, s.stdin, err = c.upgrade(ctx, r, UpgradeExec)
	} else {
		a, err = c.send(ctx, r)
	}
	if err != nil {
		return nil, err
	}
	s.frames = frames{response: a, endless: true}
	return s, nil
}

// WriteStdin sends standard input. It does not wait for the command to read it:
// the caller counts the bytes that it has sent and that no FrameStdinAck has
// acknowledged, StdinWindow at most. More is ErrStdinWindow. After FrameStdinClosed
// it is discarded.
func (s *ExecStream) WriteStdin(p []byte) error {
	if !s.stdin.reserve(len(p)) {
		return ErrStdinWindow
	}
	return s.stdin.write(p)
}

// CloseStdin sends the end of the command's input.
func (s *ExecStream) CloseStdin() error { return s.stdin.frame(FrameStdinEOF, nil) }

// Next returns what happens next: FrameStart, output, FrameComplete, then io.EOF.
// It blocks while the command is silent. A stream that ends before FrameComplete
// returns ErrLost (wrapped).
func (s *ExecStream) Next() (ExecEvent, error) { return nextEvent(&s.frames, s.parse) }

func (s *ExecStream) parse(t FrameType, data []byte) (ev ExecEvent, err error) {
	if s.started == (t == FrameStart) {
		return ev, fmt.Errorf("%w: type %d out of order", ErrFrame, t)
	}
	ev.Kind = t
	switch t {
	case FrameStart:
		var v Started
		if err = DecodePayload(data, &v); err == nil && v.PID <= 0 {
			err = fmt.Errorf("%w: no pid at the start", ErrFrame)
		}
		s.started, ev.PID = true, v.PID
	case FrameStdout, FrameStderr:
		ev.Data = data
	case FrameStdinAck:
		if s.stdin == nil {
			return ev, fmt.Errorf("%w: standard input acknowledged that was not sent", ErrFrame)
		}
		ev.Bytes, err = s.stdin.acknowledge(data)
	case FrameStdinClosed:
	case FrameComplete:
		ev.Result, err = decodeResult(data)
		switch {
		case err != nil:
		case s.stdin == nil:
			s.finish()
		default:
			s.fail(io.EOF)
		}
	default:
		err = fmt.Errorf("%w: type %d in an exec", ErrFrame, t)
	}
	return ev, err
}

// decodeResult decodes a FrameComplete and refuses an invalid result.
func decodeResult(data []byte) (*ExecResult, error) {
	r := &ExecResult{}
	if err := DecodePayload(data, r); err != nil {
		return nil, err
	}
	if !isExit(r.ExitCode, r.Signal) || r.Duration < 0 {
		return nil, fmt.Errorf("guest reported the unusable result %d %q after %s", r.ExitCode, Shorten(r.Signal, 20), r.Duration)
	}
	return r, nil
}
