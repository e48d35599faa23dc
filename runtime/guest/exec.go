package guest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
)

// ExecKind says what an ExecEvent carries.
type ExecKind int

const (
	ExecStart    ExecKind = iota + 1 // PID; first
	ExecStdout                       // Data
	ExecStderr                       // Data
	ExecComplete                     // Result; last
)

// ExecEvent is one thing that happened to a command.
type ExecEvent struct {
	Kind   ExecKind
	PID    int         // inside the sandbox, of ExecStart
	Data   []byte      // of ExecStdout and ExecStderr; valid until the next Next
	Result *ExecResult // of ExecComplete
}

// ExecStream is a running command. It is not safe for concurrent use, but for
// Close, which may be called at any time.
type ExecStream struct {
	frames
	started bool
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
	a, err := c.send(ctx, request{method: http.MethodPost, route: RouteExec, json: req})
	if err != nil {
		return nil, err
	}
	return &ExecStream{frames: frames{answer: a}}, nil
}

// Next returns what happens next: ExecStart, output, ExecComplete, then io.EOF.
// It blocks while the command is silent. A stream that ends before ExecComplete
// returns ErrLost (wrapped).
func (s *ExecStream) Next() (ExecEvent, error) {
	if s.done != nil {
		return ExecEvent{}, s.done
	}
	ev, err := s.next()
	if err != nil {
		s.fail(err)
	}
	return ev, err
}

func (s *ExecStream) next() (ExecEvent, error) {
	t, data, err := s.frame()
	if err == io.EOF {
		err = ErrLost
	}
	if err != nil {
		return ExecEvent{}, err
	}
	if s.started == (t == FrameStart) {
		return ExecEvent{}, fmt.Errorf("%w: type %d out of order", ErrFrame, t)
	}
	switch t {
	case FrameStart:
		var v Started
		if err := json.Unmarshal(data, &v); err != nil || v.PID <= 0 {
			return ExecEvent{}, fmt.Errorf("%w: no pid at the start", ErrFrame)
		}
		s.started = true
		return ExecEvent{Kind: ExecStart, PID: v.PID}, nil
	case FrameStdout:
		return ExecEvent{Kind: ExecStdout, Data: data}, nil
	case FrameStderr:
		return ExecEvent{Kind: ExecStderr, Data: data}, nil
	case FrameComplete:
		var v ExecResult
		if err := json.Unmarshal(data, &v); err != nil {
			return ExecEvent{}, fmt.Errorf("%w: unusable result", ErrFrame)
		}
		if err := v.check(); err != nil {
			return ExecEvent{}, err
		}
		s.finish()
		return ExecEvent{Kind: ExecComplete, Result: &v}, nil
	}
	return ExecEvent{}, fmt.Errorf("%w: type %d in an exec", ErrFrame, t)
}

// check refuses a result that no guest of ours would report.
func (r *ExecResult) check() error {
	if !isExit(r.ExitCode, r.Signal) || r.Duration < 0 {
		return fmt.Errorf("guest reported the unusable result %d %q after %s", r.ExitCode, cut(r.Signal, 20), r.Duration)
	}
	return nil
}

// Close ends the stream. Before ExecComplete, the guest kills the command and
// everything that it started. It may be called more than once.
func (s *ExecStream) Close() error { return s.answer.Close() }

// Output is what Run returns of a command.
type Output struct {
	Stdout, Stderr []byte
	Truncated      bool // one of them was longer than the limit
	Result         ExecResult
}

// Run runs a command to its end and returns its output, of which it keeps the
// first limit bytes each of stdout and stderr. It reads the rest and drops it.
func (c *Client) Run(ctx context.Context, req ExecRequest, limit int) (Output, error) {
	s, err := c.Exec(ctx, req)
	if err != nil {
		return Output{}, err
	}
	defer s.Close()
	var out Output
	keep := func(to *[]byte, data []byte) {
		room := limit - len(*to)
		if len(data) > room {
			data, out.Truncated = data[:room], true
		}
		*to = append(*to, data...)
	}
	for {
		ev, err := s.Next()
		if err != nil {
			return out, err
		}
		switch ev.Kind {
		case ExecStdout:
			keep(&out.Stdout, ev.Data)
		case ExecStderr:
			keep(&out.Stderr, ev.Data)
		case ExecComplete:
			out.Result = *ev.Result
			return out, nil
		}
	}
}
