package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"

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
	pipe *os.File                 // our end; nonblocking
	open func() (*os.File, error) // opens pipe when the input is sent; nil if it is open

	mu      sync.Mutex
	changed sync.Cond // something to write, or the end
	pending []byte    // received, not written yet
	unacked int       // bytes received and not acknowledged
	eof     bool      // the client sends no more
	closed  bool      // the command reads no more
}

// newStdinPipe returns the stdinPipe that writes to a nonblocking file, which it owns.
func newStdinPipe(f *os.File) *stdinPipe {
	p := &stdinPipe{pipe: f}
	p.changed.L = &p.mu
	return p
}

// receive reads frames until the connection fails or its client violates the
// protocol; the end of the input does not end the connection.
func (p *stdinPipe) receive(r io.Reader) error {
	return receiveFrames(r, func(t guest.FrameType, data []byte) error {
		switch t {
		case guest.FrameStdin:
			return p.add(data)
		case guest.FrameStdinEOF:
			p.endInput()
			return nil
		}
		return fmt.Errorf("%w: type %d from the client of an exec", guest.ErrFrame, t)
	})
}

// receiveFrames calls frame for each frame until it or the connection fails.
func receiveFrames(r io.Reader, frame func(t guest.FrameType, data []byte) error) error {
	buf := make([]byte, execBuffer)
	for {
		t, data, err := guest.ReadFrame(r, buf)
		if err != nil {
			return err
		}
		if cap(data) > cap(buf) {
			buf = data
		}
		if err := frame(t, data); err != nil {
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
	pipe := p.pipe
	p.mu.Unlock()
	if pipe != nil {
		pipe.Close()
	}
}

// ready opens the pipe, unless it is open.
func (p *stdinPipe) ready() bool {
	if p.open == nil {
		return true
	}
	pipe, err := p.open()
	if err != nil {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pipe = pipe
	if p.closed {
		pipe.Close()
	}
	return true
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
	if !p.ready() {
		p.close()
		out.frame(guest.FrameStdinClosed, make([]byte, guest.FrameHeader), true)
		return
	}
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

// tunnel is a connection that was taken over from the HTTP server, which closes it no more.
type tunnel struct {
	ctx   context.Context // ends with the tunnel
	close func()
	in    io.Reader
	out   *frameWriter
}

// openTunnel upgrades the connection of a request to a protocol of frames. buffer is the size in
// bytes of the socket's send buffer, which Linux doubles (socket(7), SO_SNDBUF); 0: the default.
func (s *Server) openTunnel(w http.ResponseWriter, protocol string, buffer int) (*tunnel, error) {
	conn, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return nil, err
	}
	if socket, ok := conn.(*net.UnixConn); ok && buffer > 0 {
		_ = socket.SetWriteBuffer(buffer) // affects how often it is written only
	}
	t := &tunnel{in: buffered, out: &frameWriter{w: conn}}
	var cancel context.CancelFunc
	t.ctx, cancel = context.WithCancel(s.tunnels)
	stop := context.AfterFunc(t.ctx, func() { conn.Close() })
	t.close = func() {
		stop()
		conn.Close()
		cancel()
	}
	if _, err := io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+protocol+"\r\n\r\n"); err != nil {
		cancel() // as if it had disconnected later
	}
	return t, nil
}

// serveTunnel is serve over the connection of the request, which also carries the input.
func (x *execution) serveTunnel(w http.ResponseWriter) error {
	tunnel, err := x.server.openTunnel(w, guest.UpgradeExec, 0)
	if err != nil {
		x.kill()
		x.wait()
		x.outputs.close()
		x.stdin.close()
		return err
	}
	tunnel.out.json(guest.FrameStart, guest.Started{PID: x.pid()}, true) // before any acknowledgement
	var carrying sync.WaitGroup
	carrying.Go(func() { // ended by tunnel.close
		defer tunnel.close()
		x.stdin.receive(tunnel.in)
	})
	carrying.Go(func() { x.stdin.send(tunnel.out) }) // ended by x.stdin.close
	x.serve(tunnel.ctx, tunnel.out)
	x.stdin.close()
	tunnel.close()
	carrying.Wait()
	return nil
}
