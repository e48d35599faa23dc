package server

import (
	"context"
	"encoding/json"
	"net/http"
	"sync"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

// execBuffer is read from a command's pipe at once. Half of what a pipe holds,
// so that the command fills one half while the other is sent.
const execBuffer = 32 << 10

var execBuffers = sync.Pool{New: func() any { return new([guest.FrameHeader + execBuffer]byte) }}

func (s *Server) exec(w http.ResponseWriter, r *http.Request) error {
	var req guest.ExecRequest
	if err := readJSON(r, &req); err != nil {
		return err
	}
	if req.Timeout < 0 {
		return refuse(guest.CodeInvalid, "timeout %s is negative", req.Timeout)
	}
	cmd, err := s.command(req.Command, req.Argv, req.Cwd, variables{req.Env, req.Defaults})
	if err != nil {
		return err
	}
	run := &execution{server: s, began: time.Now()}
	if run.running, err = s.start(cmd, req.Stdin); err != nil {
		return err
	}
	out := &frameWriter{w: w, rc: http.NewResponseController(w)}
	w.Header().Set("Content-Type", "application/octet-stream")
	out.json(guest.FrameStart, guest.Started{PID: run.tree.root.pid}, true)

	timedOut := run.send(r.Context(), req.Timeout, out)
	out.json(guest.FrameComplete, run.result(timedOut), false)
	if out.failed() {
		panic(http.ErrAbortHandler)
	}
	return nil
}

// execution is a command whose output goes to one client.
type execution struct {
	*running
	server *Server
	began  time.Time
	took   time.Duration // until the command itself had exited
}

// send sends output until the command has ended and its output is drained. It
// kills the tree when the timeout is over, the client gone or the output refused.
func (x *execution) send(ctx context.Context, timeout time.Duration, out *frameWriter) (timedOut bool) {
	var copying sync.WaitGroup
	refused := make(chan struct{})
	var once sync.Once
	for i, p := range x.outputs {
		copying.Go(func() { // ended by the end of the command, see outputPipe.copy
			if err := x.copy(p, guest.FrameStdout+guest.FrameType(i), out); err != nil {
				once.Do(func() { close(refused) })
			}
		})
	}
	var expired <-chan time.Time
	if timeout > 0 {
		timer := time.NewTimer(timeout - time.Since(x.began))
		defer timer.Stop()
		expired = timer.C
	}
	select {
	case <-x.tree.root.done:
	case <-expired:
		// Both may have come: who has ended by himself was in time.
		if timedOut = x.tree.root.running(); timedOut {
			x.tree.kill()
		}
	case <-ctx.Done():
		x.tree.kill()
	case <-refused:
		x.tree.kill()
	}
	x.wait()
	x.took = time.Since(x.began)
	copying.Wait()
	return timedOut
}

// copy sends one output of the command.
func (x *execution) copy(p *outputPipe, t guest.FrameType, out *frameWriter) error {
	buf := execBuffers.Get().(*[guest.FrameHeader + execBuffer]byte)
	defer execBuffers.Put(buf)
	open, err := p.copy(buf[guest.FrameHeader:], func(data []byte) error {
		return out.output(t, buf[:guest.FrameHeader+len(data)])
	})
	if open && err == nil {
		x.server.spill.take(p.file)
	} else {
		p.file.Close()
	}
	return err
}

func (x *execution) result(timedOut bool) guest.ExecResult {
	code, signal := exitOf(x.tree.root.status)
	return guest.ExecResult{ExitCode: code, Signal: signal, TimedOut: timedOut, Duration: x.took}
}

// frameWriter writes frames for several goroutines. Writing blocks while the
// client does not read; that is how the command is slowed down.
type frameWriter struct {
	rc *http.ResponseController

	mu  sync.Mutex
	w   http.ResponseWriter
	err error
}

// output sends a frame whose payload stands behind room for its header.
func (f *frameWriter) output(t guest.FrameType, frame []byte) error {
	guest.PutFrameHeader(frame, t, len(frame)-guest.FrameHeader)
	return f.write(frame, true)
}

func (f *frameWriter) json(t guest.FrameType, v any, flush bool) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	frame := make([]byte, guest.FrameHeader, guest.FrameHeader+len(b))
	guest.PutFrameHeader(frame, t, len(b))
	return f.write(append(frame, b...), flush)
}

func (f *frameWriter) write(b []byte, flush bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err != nil {
		return f.err
	}
	_, f.err = f.w.Write(b)
	if flush && f.err == nil {
		f.err = f.rc.Flush()
	}
	return f.err
}

func (f *frameWriter) failed() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err != nil
}
