package guest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
)

// LogEvent is one piece of a process's output, or its end.
type LogEvent struct {
	Stream string // "stdout" or "stderr", with Data
	Data   []byte // valid until the next Next
	// Skipped bytes of output were overwritten before this reader, who is
	// slower than the process writes, got to them.
	Skipped int64
	// Process is set on the last event of a process that has ended.
	Process *Process
}

// LogStream is the output of a background process.
type LogStream struct {
	frames
	follow bool
}

// Logs returns the last 256 KiB of a process's output and, with follow, what it
// writes from then on, across restarts, until its final end; nothing is lost between the
// two. Without follow, all of it must arrive within the time of one response.
// Errors: CodeNoProcess.
func (c *Client) Logs(ctx context.Context, id string, follow bool) (*LogStream, error) {
	a, err := c.send(ctx, request{
		method: http.MethodGet, route: processRoute(id, SuffixLogs),
		query: url.Values{"follow": {strconv.FormatBool(follow)}},
	})
	if err != nil {
		return nil, err
	}
	if !follow {
		a.watch.set(c.timeout)
	}
	return &LogStream{frames: frames{response: a}, follow: follow}, nil
}

// Next returns the next piece, or io.EOF after the last. A stream that is cut
// off, or that follows and ends before its process, returns ErrLost (wrapped).
func (s *LogStream) Next() (LogEvent, error) {
	if s.done != nil {
		return LogEvent{}, s.done
	}
	ev, err := s.next()
	if err != nil {
		s.fail(err)
	}
	return ev, err
}

func (s *LogStream) next() (LogEvent, error) {
	t, data, err := s.frame()
	if err == io.EOF && s.follow {
		err = ErrLost
	}
	if err != nil {
		return LogEvent{}, err
	}
	switch t {
	case FrameStdout:
		return LogEvent{Stream: "stdout", Data: data}, nil
	case FrameStderr:
		return LogEvent{Stream: "stderr", Data: data}, nil
	case FrameSkipped:
		var v Skipped
		if err := json.Unmarshal(data, &v); err != nil || v.Bytes < 0 {
			return LogEvent{}, fmt.Errorf("%w: unusable count of skipped bytes", ErrFrame)
		}
		return LogEvent{Skipped: v.Bytes}, nil
	case FrameExit:
		p := &Process{}
		if err := json.Unmarshal(data, p); err != nil {
			return LogEvent{}, fmt.Errorf("%w: unusable process", ErrFrame)
		}
		if err := p.check(); err != nil {
			return LogEvent{}, err
		}
		s.finish()
		return LogEvent{Process: p}, nil
	}
	return LogEvent{}, fmt.Errorf("%w: type %d in a log", ErrFrame, t)
}

// Close ends the stream; the process goes on. It may be called more than once
// and while Next waits.
func (s *LogStream) Close() error { return s.response.Close() }
