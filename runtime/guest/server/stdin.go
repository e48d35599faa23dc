package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

// stdinAckBytes is how much input is written before an acknowledgement: a quarter of the
// window, so that its sender need not pause.
const stdinAckBytes = guest.StdinWindow / 4

// stdinPipe carries a command's standard input from the connection of its client
// to a pipe. It buffers guest.StdinWindow bytes at most, and always reads the
// connection, so that a client that disconnects is noticed while the command reads
// nothing.
type stdinPipe struct {
	pipe *os.File // our end; nonblocking

	mu      sync.Mutex
	changed sync.Cond // something to write, or the end
	pending []byte    // received, not written yet
	unacked int       // bytes received and not acknowledged
	eof     bool      // the client sends no more
	closed  bool      // the command reads no more
}

// newStdinPipe makes a pipe. The caller closes the returned file, which is the
// command's end, once the command has it.
func newStdinPipe() (*stdinPipe, *os.File, error) {
	own, fd, err := newPipe(writeEnd)
	if err != nil {
		return nil, nil, err
	}
	p := &stdinPipe{pipe: own}
	p.changed.L = &p.mu
	return p, os.NewFile(uintptr(fd), "stdin"), nil
}

// receive reads frames until the connection fails or its client violates the
// protocol; the end of the input does not end the connection.
func (p *stdinPipe) receive(r io.Reader) error {
	buf := make([]byte, execBuffer)
	for {
		t, data, err := guest.ReadFrame(r, buf)
		if err != nil {
			return err
		}
		if cap(data) > cap(buf) {
			buf = data
		}
		switch t {
		case guest.FrameStdin:
			err = p.add(data)
		case guest.FrameStdinEOF:
			p.endInput()
		default:
			err = fmt.Errorf("%w: type %d from the client of an exec", guest.ErrFrame, t)
		}
		if err != nil {
			return err
		}
	}
}

func (p *stdinPipe) add(data []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.closed:
		return nil
	case p.eof:
		return errors.New("input after its end")
	case p.unacked+len(data) > guest.StdinWindow:
		return guest.ErrStdinWindow
	}
	p.unacked += len(data)
	p.pending = append(p.pending, data...)
	p.changed.Signal()
	return nil
}

func (p *stdinPipe) endInput() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.eof = true
	p.changed.Signal()
}

// close ends send. The command, if it still runs, reads the end of its input.
func (p *stdinPipe) close() {
	p.mu.Lock()
	p.closed, p.pending = true, nil
	p.changed.Signal()
	p.mu.Unlock()
	p.pipe.Close()
}

// next waits for input. It returns nil at the end.
func (p *stdinPipe) next() []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.pending) == 0 && !p.eof && !p.closed {
		p.changed.Wait()
	}
	data := p.pending
	p.pending = nil
	return data
}

// send writes the input to the pipe until its end, or until the command reads no
// more, and acknowledges what it wrote.
func (p *stdinPipe) send(out *frameWriter) {
	defer p.close()
	for data := p.next(); len(data) > 0; data = p.next() {
		for len(data) > 0 {
			n, err := p.pipe.Write(data[:min(len(data), stdinAckBytes)])
			if err != nil {
				p.close()
				out.frame(guest.FrameStdinClosed, make([]byte, guest.FrameHeader), true)
				return
			}
			data = data[n:]
			p.mu.Lock()
			p.unacked -= n
			p.mu.Unlock()
			if out.json(guest.FrameStdinAck, guest.StdinAck{Bytes: n}, true) != nil {
				return
			}
		}
	}
}

// serveTunnel is serve over the connection of the request, which also carries the input. The
// HTTP server does not close a connection that was taken over from it.
func (x *execution) serveTunnel(w http.ResponseWriter, timeout time.Duration) error {
	conn, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		x.tree.kill()
		x.wait()
		x.close()
		x.stdin.close()
		return err
	}
	ctx, cancel := context.WithCancel(x.server.tunnels)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	out := &frameWriter{w: conn}
	if _, err := io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+guest.UpgradeExec+"\r\n\r\n"); err != nil {
		cancel() // as if it had disconnected later
	}
	out.json(guest.FrameStart, guest.Started{PID: x.tree.root.pid}, true) // before any acknowledgement
	var carrying sync.WaitGroup
	carrying.Go(func() { // ended by conn.Close
		defer cancel()
		x.stdin.receive(buffered)
	})
	carrying.Go(func() { x.stdin.send(out) }) // ended by x.stdin.close
	x.serve(ctx, timeout, out)
	x.stdin.close()
	stop()
	conn.Close()
	carrying.Wait()
	return nil
}
