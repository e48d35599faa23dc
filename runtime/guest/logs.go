package guest

import (
	"context"
	"fmt"
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
type LogStream struct{ frames }

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
	return &LogStream{frames{response: a, endless: follow}}, nil
}

// Next returns the next piece, or io.EOF after the last. A stream that is cut
// off, or that follows and ends before its process, returns ErrLost (wrapped).
func (s *LogStream) Next() (LogEvent, error) { return nextEvent(&s.frames, s.parse) }

func (s *LogStream) parse(t FrameType, data []byte) (ev LogEvent, err error) {
	switch t {
	case FrameStdout:
		return LogEvent{Stream: "stdout", Data: data}, nil
	case FrameStderr:
		return LogEvent{Stream: "stderr", Data: data}, nil
	case FrameSkipped:
		var v Skipped
		if err = DecodePayload(data, &v); err == nil && v.Bytes < 0 {
			err = fmt.Errorf("%w: %d bytes skipped", ErrFrame, v.Bytes)
		}
		ev.Skipped = v.Bytes
	case FrameExit:
		ev.Process = &Process{}
		if err = DecodePayload(data, ev.Process); err == nil {
			err = ev.Process.check()
		}
		if err == nil {
			s.finish()
		}
	default:
		err = fmt.Errorf("%w: type %d in a log", ErrFrame, t)
	}
	return ev, err
}
