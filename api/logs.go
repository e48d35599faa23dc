package api

import (
	"context"
	"errors"
	"io"
	"net/http"
	"slices"

	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
)

const (
	// maxLogs limits the memory that the output of a process takes. A guest stores 256 KiB.
	maxLogs = 4 << 20
	// chunkCost is the memory of a chunk in addition to its output, here and in the response.
	chunkCost = 256
)

type logsInput struct {
	ProcessPath
	Exchange
}

func (a *API) registerLogs() {
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/process/{process}/logs", id: "list-process-logs", tag: "processes",
		summary: "Get the output of a process",
		description: "Wakes the sandbox, which stores the last 256 KiB of the output: of ended processes 1 MiB in all, and 16 KiB of each older one. With Accept: text/event-stream, sends the stored output and then new output as " +
			"events, and keeps the sandbox awake. The process's log_file has more output.",
		codes:     slices.Concat(wakeCodes, []problem.Code{problem.ProcessNotFound, problem.CallLimitExceeded, problem.StreamLimitExceeded}),
		responses: map[int]*huma.Response{http.StatusOK: responseJSON[types.Log](a, "The stored output; as events also new output, until the process ends")},
		events:    map[string]any{"stdout": types.Output{}, "stderr": types.Output{}, "dropped": types.LogsDropped{}, "exit": types.Process{}},
	}, withSandbox(a, a.logs))
}

func (a *API) logs(ctx context.Context, in *logsInput, sb sandbox.Sandbox) (*huma.StreamResponse, error) {
	follow := wantsEvents(in.r)
	limit, slots := &a.calls, execSlots(maxLogs)
	if follow {
		limit, slots = &a.streams, 1
	}
	process, err := sb.Process(in.Process)
	if err != nil {
		return nil, noProcess(sb, err)
	}
	if err := limit.acquire(ctx, slots); err != nil {
		return nil, err
	}
	source, lease, err := a.openLogs(ctx, sb.ID, process.ID, follow)
	if err != nil {
		return nil, err
	}
	end := func() {
		source.Close()
		lease.Release()
	}
	if follow {
		return &huma.StreamResponse{Body: func(huma.Context) {
			defer end()
			a.serveEvents(in.Exchange, func(s *eventStream) { sendLogs(s, source) })
		}}, nil
	}
	defer end()
	logs, err := collectLogs(source)
	if err != nil {
		return nil, err
	}
	return jsonResponse(in.Exchange, logs), nil
}

func (a *API) openLogs(ctx context.Context, id sandbox.ID, process string, follow bool) (*guest.LogStream, *sandbox.Lease, error) {
	lease, err := a.cfg.Sandboxes.Acquire(ctx, id, sandbox.CauseProcess)
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

// collectLogs reads the stored output, as much of it as takes maxLogs bytes.
func collectLogs(source *guest.LogStream) (*types.Log, error) {
	c := logCollector{joiners: map[types.LogStream]*runeJoiner{types.LogStreamStdout: {}, types.LogStreamStderr: {}}, remaining: maxLogs}
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
			stream := logStreamOf(ev.Stream)
			c.add(stream, c.joiners[stream].join(ev.Data))
			if c.truncated && c.remaining == 0 {
				return c.finish(), nil
			}
		}
	}
}

// logCollector joins consecutive output of the same stream, and limits the total.
type logCollector struct {
	joiners   map[types.LogStream]*runeJoiner
	chunks    []rawChunk
	remaining int // bytes of memory; 0 when no more output is added
	truncated bool
}

type rawChunk struct {
	stream types.LogStream
	data   []byte
}

func (c *logCollector) add(stream types.LogStream, b []byte) {
	if len(b) == 0 {
		return
	}
	cost := 0
	if n := len(c.chunks); n == 0 || c.chunks[n-1].stream != stream {
		cost = chunkCost
	}
	free := max(0, c.remaining-cost)
	if len(b) > free {
		c.truncated = true
		b = b[:free-incompleteTail(b[:free])]
		free = len(b)
	}
	c.remaining = free - len(b)
	if len(b) == 0 {
		return
	}
	if cost > 0 {
		c.chunks = append(c.chunks, rawChunk{stream: stream})
	}
	last := &c.chunks[len(c.chunks)-1]
	last.data = append(last.data, b...)
}

func (c *logCollector) finish() *types.Log {
	for _, stream := range types.LogStream("").Values() {
		c.add(stream, c.joiners[stream].remainder())
	}
	logs := &types.Log{Logs: make([]types.LogChunk, len(c.chunks)), Truncated: c.truncated}
	for i, chunk := range c.chunks {
		logs.Logs[i] = types.LogChunk{Stream: chunk.stream, Output: types.NewOutput(chunk.data)}
	}
	return logs
}

// logStreamOf returns stdout for a stream that the API does not have.
func logStreamOf(name string) types.LogStream {
	if name == string(types.LogStreamStderr) {
		return types.LogStreamStderr
	}
	return types.LogStreamStdout
}

func sendLogs(s *eventStream, source *guest.LogStream) {
	defer context.AfterFunc(s.ctx, func() { source.Close() })()
	streams := map[types.LogStream]*outputStream{
		types.LogStreamStdout: {s: s, event: "stdout"},
		types.LogStreamStderr: {s: s, event: "stderr"},
	}
	for {
		ev, err := source.Next()
		switch {
		case clientGone(s.ctx):
			return
		case errors.Is(err, io.EOF), err == nil && ev.Process != nil:
			streams[types.LogStreamStdout].flush()
			streams[types.LogStreamStderr].flush()
			if ev.Process != nil {
				s.send("exit", "", processOf(*ev.Process))
			}
			return
		case err != nil:
			s.fail(fromGuest(err))
			return
		case ev.Skipped > 0:
			s.send("dropped", "", types.LogsDropped{Bytes: ev.Skipped})
			continue
		}
		streams[logStreamOf(ev.Stream)].send(ev.Data)
	}
}
