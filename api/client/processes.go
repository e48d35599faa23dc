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
func (c *Client) StartProcess(ctx context.Context, idOrName string, req types.StartProcessRequest) (p types.Process, err error) {
	_, err = c.call(ctx, request{method: http.MethodPost, path: sandboxPath(idOrName, "process"), body: req}, &p)
	return p, err
}

// Processes returns the processes as last known, and wakes nothing.
func (c *Client) Processes(ctx context.Context, idOrName string) ([]types.Process, error) {
	var page types.ProcessList
	_, err := c.call(ctx, request{method: http.MethodGet, path: sandboxPath(idOrName, "processes")}, &page)
	return page.Processes, err
}

// StopProcess ends a process, named by its id or name, and its tree. With a signal, such as SIGHUP, it only
// delivers that.
func (c *Client) StopProcess(ctx context.Context, idOrName, process, signal string) (p types.Process, err error) {
	r := request{method: http.MethodDelete, path: sandboxPath(idOrName, "process", url.PathEscape(process))}
	if signal != "" {
		r.query = url.Values{"signal": {signal}}
	}
	_, err = c.call(ctx, r, &p)
	return p, err
}

// Log is a piece of a process's output, or a gap in it. The last of a followed
// log has Exit instead: the process as it ended.
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
	text, encoding := EncodeOutput(l.Data)
	return json.Marshal(types.LogChunk{Stream: l.Stream, Output: types.Output{Data: text, Encoding: encoding}})
}

// Logs calls yield with what was kept of a process's output, and with follow with
// what comes, until the process ends or yield returns an error.
func (c *Client) Logs(ctx context.Context, idOrName, process string, follow bool, yield func(Log) error) error {
	path := sandboxPath(idOrName, "process", url.PathEscape(process), "logs")
	if follow {
		return c.followLogs(ctx, path, yield)
	}
	var page types.Log
	if _, err := c.call(ctx, request{method: http.MethodGet, path: path}, &page); err != nil {
		return err
	}
	for _, l := range page.Logs {
		data, err := decodeText(l.Data, l.Encoding)
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
	stream, err := c.openStream(ctx, request{method: http.MethodGet, path: path})
	if err != nil {
		return err
	}
	defer stream.Close()
	ended := false
	err = stream.each(func(m message) error {
		switch m.event {
		case "stdout", "stderr":
			data, err := m.output()
			if err != nil {
				return err
			}
			return yield(Log{Stream: types.LogStream(m.event), Data: data})
		case "exit":
			var p types.Process
			if err := m.decode(&p); err != nil {
				return err
			}
			ended = true
			return yield(Log{Exit: &p})
		case "dropped":
			var dropped types.LogsDropped
			if err := m.decode(&dropped); err != nil {
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

// errNoEnd: the node shut down, or the connection broke.
var errNoEnd = errors.New("the stream ended before the process did")
