package guest

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"
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

	stdin   io.Writer     // nil without StreamStdin
	stall   time.Duration // the longest that one write to stdin may take
	header  [FrameHeader]byte
	mu      sync.Mutex
	unacked int // bytes of input on their way
}

// Exec runs a command. It returns once the guest has started it; a command that
// cannot be started is an *Error with CodeNoCommand, CodeNoShell or another.
//
// When ctx ends or the stream is closed before the end, the guest kills the
// command and everything that it started. After the command itself has exited
// the stream goes on until its output is read: processes that it left in the
// background may add to that for 250 ms at most; later output of theirs is
// discarded.
func (c *Client) Exec(ctx context.Context, req ExecRequest) (*ExecStream, error) {
	req.Defaults = c.defaultsOr(req.Defaults)
	r := request{method: http.MethodPost, route: RouteExec, json: req}
	if req.StreamStdin {
		r.header = http.Header{"Connection": {"Upgrade"}, "Upgrade": {UpgradeExec}}
		r.upgrade = true
	}
	a, err := c.send(ctx, r)
	if err != nil {
		return nil, err
	}
	s := &ExecStream{frames: frames{response: a, endless: true}, stall: c.stall}
	if !req.StreamStdin {
		return s, nil
	}
	s.stdin, _ = a.Body.(io.Writer)
	if a.StatusCode != http.StatusSwitchingProtocols || s.stdin == nil {
		a.Close()
		return nil, fmt.Errorf("guest responded to %s with status %d and does not read standard input", RouteExec, a.StatusCode)
	}
	// The transport does not watch an upgraded connection.
	context.AfterFunc(a.watch.ctx, func() { a.Body.Close() })
	return s, nil
}

// ErrStdinWindow refuses input beyond StdinWindow.
var ErrStdinWindow = fmt.Errorf("more than %d bytes of standard input are not acknowledged", StdinWindow)

// WriteStdin sends standard input. It does not wait for the command to read it:
// the caller counts the bytes that it has sent and that no FrameStdinAck has
// acknowledged, StdinWindow at most. More is ErrStdinWindow. After FrameStdinClosed
// it is discarded.
func (s *ExecStream) WriteStdin(p []byte) error {
	s.mu.Lock()
	if s.unacked+len(p) > StdinWindow {
		s.mu.Unlock()
		return ErrStdinWindow
	}
	s.unacked += len(p)
	s.mu.Unlock()
	for len(p) > 0 {
		n := min(len(p), MaxFrame)
		if err := s.writeFrame(FrameStdin, p[:n]); err != nil {
			return err
		}
		p = p[n:]
	}
	return nil
}

// CloseStdin sends the end of the command's input.
func (s *ExecStream) CloseStdin() error { return s.writeFrame(FrameStdinEOF, nil) }

func (s *ExecStream) writeFrame(t FrameType, p []byte) error {
	// The guest always reads.
	timer := time.AfterFunc(s.stall, func() { s.response.watch.cancel(ErrNoResponse) })
	defer timer.Stop()
	PutFrameHeader(s.header[:], t, len(p))
	_, err := s.stdin.Write(s.header[:])
	if err == nil && len(p) > 0 {
		_, err = s.stdin.Write(p)
	}
	if err != nil {
		return s.response.watch.explain(lost(err))
	}
	return nil
}

// acknowledge counts n bytes of input as written to the command's pipe.
func (s *ExecStream) acknowledge(n int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n <= 0 || n > s.unacked {
		return fmt.Errorf("%w: %d bytes of standard input acknowledged, %d were sent", ErrFrame, n, s.unacked)
	}
	s.unacked -= n
	return nil
}

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
		if err = payload(data, &v); err == nil && v.PID <= 0 {
			err = fmt.Errorf("%w: no pid at the start", ErrFrame)
		}
		s.started, ev.PID = true, v.PID
	case FrameStdout, FrameStderr:
		ev.Data = data
	case FrameStdinAck:
		var v StdinAck
		if err = payload(data, &v); err == nil {
			err = s.acknowledge(v.Bytes)
		}
		ev.Bytes = v.Bytes
	case FrameStdinClosed:
	case FrameComplete:
		ev.Result = &ExecResult{}
		err = payload(data, ev.Result)
		switch r := ev.Result; {
		case err != nil:
		case !isExit(r.ExitCode, r.Signal) || r.Duration < 0:
			err = fmt.Errorf("guest reported the unusable result %d %q after %s", r.ExitCode, Shorten(r.Signal, 20), r.Duration)
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
