package api

import (
	"context"
	"errors"
	"io"
	"net/http"
	"reflect"

	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
)

// maxLogs is more than a guest keeps of a process's output; what a broken one
// sends beyond is not read.
const maxLogs = 8 << 20

type logsInput struct {
	ProcessPath
	Exchange
	Follow bool `query:"follow" doc:"Answer with server-sent events: what was kept, then what comes"`
}

// Logs is what was kept of a process's output, in the order in which it came.
type Logs struct {
	Logs      []LogChunk `json:"logs" nullable:"false"`
	Next      string     `json:"next,omitempty" doc:"Always missing: what is kept is bounded"`
	Truncated bool       `json:"truncated" doc:"There was more than one answer can carry"`
}

// LogChunk is a piece of output.
type LogChunk struct {
	Stream string `json:"stream" enum:"stdout,stderr"`
	Output
}

// Skipped is the data of the event skipped.
type Skipped struct {
	Bytes int64 `json:"bytes" doc:"Output that was overwritten before this reader got to it"`
}

func (a *API) registerLogs() {
	page := answerJSON[Logs](a, "What was kept; or with follow: that, and what comes until the process ends")
	page.Content[eventStreamType] = eventSchema(a, map[string]reflect.Type{
		"stdout":  reflect.TypeFor[Output](),
		"stderr":  reflect.TypeFor[Output](),
		"skipped": reflect.TypeFor[Skipped](),
		"exit":    reflect.TypeFor[guest.Process](),
		"error":   reflect.TypeFor[problem.Problem](),
	})
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/process/{process}/logs", id: "get-logs", tag: "processes",
		summary: "Output of a process",
		description: "Wakes the sandbox, because the output is kept inside it, and keeps it awake while it is followed. " +
			"The process's log_file has more of it.",
		codes:   onSandbox(wakeCodes, []problem.Code{problem.ProcessNotFound, problem.CallLimitExceeded, problem.StreamLimitExceeded}),
		answers: map[int]*huma.Response{http.StatusOK: page},
	}, a.logs)
}

func (a *API) logs(ctx context.Context, in *logsInput) (*huma.StreamResponse, error) {
	sb, err := a.lookup(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	room := &a.calls
	if in.Follow {
		room = &a.streams
	}
	process, err := sb.Process(in.Process)
	if err != nil {
		return nil, noProcess(sb, err)
	}
	if err := room.enter(ctx, 1); err != nil {
		return nil, err
	}
	source, lease, err := a.openLogs(ctx, sb.ID, process.ID, in.Follow)
	if err != nil {
		return nil, err
	}
	end := func() {
		source.Close()
		lease.Release()
	}
	if in.Follow {
		return &huma.StreamResponse{Body: func(huma.Context) {
			defer end()
			a.streamLogs(in, source)
		}}, nil
	}
	defer end()
	logs, err := collectLogs(source)
	if err != nil {
		return nil, err
	}
	return &huma.StreamResponse{Body: func(huma.Context) { writeJSON(in.w, http.StatusOK, logs) }}, nil
}

func (a *API) openLogs(ctx context.Context, id sandbox.ID, process string, follow bool) (*guest.LogStream, *sandbox.Lease, error) {
	lease, err := a.sandboxes.Acquire(ctx, id, sandbox.CauseProcess)
	if err != nil {
		return nil, nil, err
	}
	source, err := lease.Guest().Logs(ctx, process, follow)
	if err != nil {
		lease.Release()
		return nil, nil, fromGuest(err)
	}
	return source, lease, nil
}

// collectLogs reads what was kept to its end, or until there is no room for more.
func collectLogs(source *guest.LogStream) (*Logs, error) {
	c := logCollector{joiners: map[string]*runeJoiner{"stdout": {}, "stderr": {}}, room: maxLogs}
	for {
		ev, err := source.Next()
		switch {
		case errors.Is(err, io.EOF), err == nil && ev.Process != nil:
			return c.finish(), nil
		case err != nil:
			return nil, fromGuest(err)
		case ev.Skipped > 0:
			c.truncated = true
		default:
			stream := streamName(ev.Stream)
			c.add(stream, c.joiners[stream].join(ev.Data))
			if c.truncated && c.room == 0 {
				return c.finish(), nil
			}
		}
	}
}

// logCollector joins what came from one stream in a row, and bounds it all.
type logCollector struct {
	joiners   map[string]*runeJoiner
	chunks    []rawChunk
	room      int
	truncated bool
}

type rawChunk struct {
	stream string
	data   []byte
}

func (c *logCollector) add(stream string, b []byte) {
	if len(b) > c.room {
		c.truncated = true
		b = b[:c.room]
		b = b[:len(b)-incompleteTail(b)]
		c.room = len(b)
	}
	if len(b) == 0 {
		return
	}
	c.room -= len(b)
	if n := len(c.chunks); n == 0 || c.chunks[n-1].stream != stream {
		c.chunks = append(c.chunks, rawChunk{stream: stream})
	}
	last := &c.chunks[len(c.chunks)-1]
	last.data = append(last.data, b...)
}

func (c *logCollector) finish() *Logs {
	for _, stream := range []string{"stdout", "stderr"} {
		c.add(stream, c.joiners[stream].rest())
	}
	logs := &Logs{Logs: make([]LogChunk, len(c.chunks)), Truncated: c.truncated}
	for i, chunk := range c.chunks {
		text, encoding := encode(chunk.data)
		logs.Logs[i] = LogChunk{Stream: chunk.stream, Output: Output{Data: text, Encoding: encoding}}
	}
	return logs
}

// streamName is "stdout" or "stderr", whatever a guest says.
func streamName(name string) string {
	if name == "stderr" {
		return name
	}
	return "stdout"
}

func (a *API) streamLogs(in *logsInput, source *guest.LogStream) {
	s := a.openStream(in.Exchange, in.SandboxPath)
	defer s.close()
	if in.r.Method == http.MethodHead {
		return
	}
	stop := context.AfterFunc(s.ctx, func() { source.Close() })
	defer stop()
	senders := map[string]*outputSender{
		"stdout": {s: s, event: "stdout"},
		"stderr": {s: s, event: "stderr"},
	}
	for {
		ev, err := source.Next()
		switch {
		case clientGone(s.ctx):
			return
		case errors.Is(err, io.EOF), err == nil && ev.Process != nil:
			senders["stdout"].flush()
			senders["stderr"].flush()
			if ev.Process != nil {
				s.send("exit", "", ev.Process)
			}
			return
		case err != nil:
			s.fail(fromGuest(err))
			return
		case ev.Skipped > 0:
			s.send("skipped", "", Skipped{Bytes: ev.Skipped})
			continue
		}
		senders[streamName(ev.Stream)].send(ev.Data)
	}
}
