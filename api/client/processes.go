package client

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/url"

	"github.com/doze-run/doze/api/types"
)

// StartProcess wakes the sandbox and starts a process in the background.
func (c *Client) StartProcess(ctx context.Context, idOrName string, req types.StartProcessRequest) (types.Process, error) {
	return fetch[types.Process](ctx, c, request{method: http.MethodPost, path: sandboxPath(idOrName, "process"), body: req})
}

// Processes returns the processes as last known. It never wakes the sandbox.
func (c *Client) Processes(ctx context.Context, idOrName string) ([]types.Process, error) {
	page, err := fetch[types.ProcessList](ctx, c, request{path: sandboxPath(idOrName, "processes")})
	return page.Processes, err
}

// StopProcess ends a process, by its id or name, and its process tree. With a signal, such
// as SIGHUP, it only delivers the signal.
func (c *Client) StopProcess(ctx context.Context, idOrName, process, signal string) (types.Process, error) {
	r := request{method: http.MethodDelete, path: sandboxPath(idOrName, "process", url.PathEscape(process))}
	if signal != "" {
		r.query = url.Values{"signal": {signal}}
	}
	return fetch[types.Process](ctx, c, r)
}

// WaitProcess waits until a process, by its id or name, is ready. The error of a process that
// is not is a *problem.Problem with problem.ProcessNotReady or problem.ProcessExited.
func (c *Client) WaitProcess(ctx context.Context, idOrName, process string, condition types.ReadyCondition) (types.ReadyProcess, error) {
	return fetch[types.ReadyProcess](ctx, c, request{method: http.MethodPost, path: sandboxPath(idOrName, "process", url.PathEscape(process), "wait"), body: condition})
}

// Log is a chunk of a process's output, or a gap in it. The last one of a followed log has
// only Exit: the process after its end.
type Log struct {
	Stream  types.LogStream
	Data    []byte
	Dropped int64 // number of bytes that were overwritten before they were sent
	Exit    *types.Process
}

// MarshalJSON writes output in the API's form.
func (l Log) MarshalJSON() ([]byte, error) {
	switch {
	case l.Exit != nil:
		return json.Marshal(map[string]*types.Process{"exit": l.Exit})
	case l.Dropped > 0:
		return json.Marshal(map[string]types.LogsDropped{"dropped": {Bytes: l.Dropped}})
	}
	return json.Marshal(types.LogChunk{Stream: l.Stream, Output: types.NewOutput(l.Data)})
}

// Logs yields the stored output of a process, and with follow then new output, until the
// process ends or yield returns an error.
func (c *Client) Logs(ctx context.Context, idOrName, process string, follow bool, yield func(Log) error) error {
	path := sandboxPath(idOrName, "process", url.PathEscape(process), "logs")
	if follow {
		return c.followLogs(ctx, path, yield)
	}
	var page types.Log
	if _, err := c.call(ctx, request{path: path}, &page); err != nil {
		return err
	}
	for _, l := range page.Logs {
		data, err := l.Encoding.Decode(l.Data)
		if err != nil {
			return err
		}
		if err := yield(Log{Stream: l.Stream, Data: data}); err != nil {
			return err
		}
	}
	return nil
}

func (c *Client) followLogs(ctx context.Context, path string, yield func(Log) error) error {
	ended := false
	err := c.stream(ctx, request{path: path}, func(m message) error {
		switch m.event {
		case "stdout", "stderr":
			o, err := decode[types.Output](m)
			if err != nil {
				return err
			}
			data, err := o.Encoding.Decode(o.Data)
			if err != nil {
				return err
			}
			return yield(Log{Stream: types.LogStream(m.event), Data: data})
		case "exit":
			p, err := decode[types.Process](m)
			if err != nil {
				return err
			}
			ended = true
			return yield(Log{Exit: &p})
		case "dropped":
			dropped, err := decode[types.LogsDropped](m)
			if err != nil {
				return err
			}
			return yield(Log{Dropped: dropped.Bytes})
		}
		return nil
	})
	if err == nil && !ended {
		err = errNoEnd
	}
	return err
}

// errNoEnd means that the node shut down or the connection was lost.
var errNoEnd = errors.New("the stream ended before the process did")
