package server

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

// execBuffer is the size of one read from a command's pipe: half of the pipe's capacity, so
// that the command fills one half while the other is sent.
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
	if req.StreamStdin && (len(req.Stdin) > 0 || r.Header.Get("Upgrade") != guest.UpgradeExec) {
		return refuse(guest.CodeInvalid, "stream_stdin needs the upgrade to %s and no stdin", guest.UpgradeExec)
	}
	if req.Session != "" {
		return s.execInSession(w, r, req)
	}
	cmd, err := s.command(req.Command)
	if err != nil {
		return err
	}
	x := &execution{server: s, timeout: req.Timeout, began: time.Now()}
	var in *os.File
	if req.StreamStdin {
		var own *os.File
		var fd int
		if own, fd, err = newPipe(writeEnd); err == nil {
			x.stdin, in = newStdinPipe(own), os.NewFile(uintptr(fd), "stdin")
		}
	} else {
		in, err = stdin(req.Stdin)
	}
	if err != nil {
		return err
	}
	run, err := s.start(cmd, in)
	in.Close()
	if err != nil {
		if x.stdin != nil {
			x.stdin.close()
		}
		return err
	}
	x.program, x.outputs = run.tree, run.outputs
	return x.respond(w, r)
}

// program is what an execution runs.
type program interface {
	pid() int
	done() <-chan struct{} // closed when it has ended
	running() bool
	kill()               // ends it with all that it started, and returns when it has ended
	exit() (int, string) // exit code and signal, once it has ended
}

// execution is a command whose output goes to one client.
type execution struct {
	program
	outputs
	server  *Server
	stdin   *stdinPipe    // nil when the input is not streamed
	timeout time.Duration // since began; 0: none
	endures bool          // when the client disconnects; its output is read to the end then, which saves it from SIGPIPE
	began   time.Time
}

// respond responds to a request with the output of the command.
func (x *execution) respond(w http.ResponseWriter, r *http.Request) error {
	if x.stdin != nil {
		return x.serveTunnel(w)
	}
	out := &frameWriter{w: w, flush: http.NewResponseController(w).Flush}
	w.Header().Set("Content-Type", "application/octet-stream")
	out.json(guest.FrameStart, guest.Started{PID: x.pid()}, true)
	if x.serve(r.Context(), out) != nil {
		panic(http.ErrAbortHandler)
	}
	return nil
}

// wait waits for the command itself and then begins to drain its outputs.
func (x *execution) wait() {
	<-x.done()
	x.commandEnded()
}

// serve sends the command's output until the command has ended and its output is drained, and
// then how it ended. It kills the tree at the timeout, when the client is gone and when the
// output cannot be sent.
func (x *execution) serve(ctx context.Context, out *frameWriter) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var copying sync.WaitGroup
	for i, p := range x.outputs {
		copying.Go(func() { // ended by the end of the command, see outputPipe.copy
			if x.copy(p, guest.FrameStdout+guest.FrameType(i), out) != nil {
				cancel()
			}
		})
	}
	var expired <-chan time.Time
	if x.timeout > 0 {
		expired = time.After(x.timeout - time.Since(x.began))
	}
	var res guest.ExecResult
	select {
	case <-x.done():
	case <-expired:
		// A command that has ended by itself at the same moment was in time.
		if res.TimedOut = x.running(); res.TimedOut {
			x.kill()
		}
	case <-ctx.Done():
		x.kill()
	}
	x.wait()
	res.Duration = time.Since(x.began)
	res.ExitCode, res.Signal = x.exit()
	copying.Wait()
	return out.json(guest.FrameComplete, res, false)
}

// copy sends one output of the command.
func (x *execution) copy(p *outputPipe, t guest.FrameType, out *frameWriter) error {
	buf := execBuffers.Get().(*[guest.FrameHeader + execBuffer]byte)
	defer execBuffers.Put(buf)
	open, err := p.copy(buf[guest.FrameHeader:], func(data []byte) error {
		return out.frame(t, buf[:guest.FrameHeader+len(data)], true)
	})
	if open && (err == nil || x.endures) {
		x.server.spill.drain(p.file)
	} else {
		p.file.Close()
	}
	return err
}

// frameWriter writes frames for several goroutines. Writing blocks while the
// client does not read; that is how the command is slowed down.
type frameWriter struct {
	flush func() error // nil when w does not buffer

	mu  sync.Mutex
	w   io.Writer
	err error
}

// frame sends a frame whose first bytes are reserved for its header.
func (f *frameWriter) frame(t guest.FrameType, frame []byte, flush bool) error {
	guest.PutFrameHeader(frame, t, len(frame)-guest.FrameHeader)
	return f.write(frame, flush)
}

func (f *frameWriter) json(t guest.FrameType, v any, flush bool) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return f.frame(t, append(make([]byte, guest.FrameHeader, guest.FrameHeader+len(b)), b...), flush)
}

func (f *frameWriter) write(b []byte, flush bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err != nil {
		return f.err
	}
	_, f.err = f.w.Write(b)
	if flush && f.err == nil && f.flush != nil {
		f.err = f.flush()
	}
	return f.err
}
