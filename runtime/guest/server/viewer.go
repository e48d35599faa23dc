package server

import (
	"context"
	"os"
	"sync"

	"github.com/doze-run/doze/runtime/guest"
)

// viewerBuffer is the send buffer of a viewer's connection. A full Unix socket reports space only
// when three quarters of the buffer are free: larger ones make the clients of many terminals wait
// longer for one another.
const viewerBuffer = 32 << 10

// viewer is a client of a terminal. terminal.mu guards it.
type viewer struct {
	terminal *terminal
	cursor   int64 // the end of the bytes that it has read
	ready    int64 // where the replay ends
	sent     bool  // ready was sent
	closed   bool

	waiting bool // for output
	lagging bool // it holds nothing up until it has read everything
	delays  delays

	// Of the last call of awaitViewers:
	slow bool  // the program waited for it
	from int64 // its cursor before
}

// join adds a viewer, which begins at the position since; negative: with the oldest output.
func (t *terminal) join(since int64) (*viewer, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.viewers) >= maxViewers {
		return nil, refuse(guest.CodeTooMany, "the terminal has %d viewers already, which is the limit", maxViewers)
	}
	v := &viewer{terminal: t, cursor: since, ready: t.screen.end, from: t.screen.end, delays: fullDelays}
	switch {
	case since < 0:
		v.cursor = t.screen.clean()
	case since > t.screen.end:
		return nil, refuse(guest.CodeInvalid, "since %d is more than the %d bytes that the terminal %s has printed", since, t.screen.end, t.view.ID)
	}
	t.viewers[v] = true
	return v, nil
}

// remove removes the viewer.
func (v *viewer) remove() {
	v.terminal.mu.Lock()
	defer v.terminal.mu.Unlock()
	v.closed = true
	delete(v.terminal.viewers, v)
	v.terminal.changed.Broadcast()
}

// terminalPart is what a viewer gets next, in this order.
type terminalPart struct {
	skipped int64
	n       int // bytes of output
	ready   *guest.TerminalReady
	exit    *guest.ExecResult
}

// next waits for output and reads it into b. It returns false once the viewer has left.
func (v *viewer) next(b []byte) (p terminalPart, ok bool) {
	t := v.terminal
	t.mu.Lock()
	defer t.mu.Unlock()
	for v.cursor == t.screen.end && v.sent && !t.ended && !v.closed {
		if !v.waiting && t.held {
			t.changed.Broadcast() // from now on the slower viewers hold this one up
		}
		v.waiting = true
		t.changed.Wait()
	}
	v.waiting = false
	if v.closed {
		return p, false
	}
	if v.cursor < t.screen.start {
		clean := t.screen.clean()
		p.skipped, v.cursor = clean-v.cursor, clean
	}
	end := t.screen.end
	if !v.sent && v.cursor < v.ready {
		end = min(end, v.ready)
	}
	end = min(end, v.cursor+int64(len(b)))
	p.n = len(t.screen.appendTo(b[:0], v.cursor, end))
	v.cursor = end
	if v.cursor == t.screen.end {
		v.lagging, v.delays.stall = false, maxStall
	}
	t.changed.Broadcast()
	if !v.sent && v.cursor >= v.ready {
		v.sent, p.ready = true, &guest.TerminalReady{Cursor: v.cursor}
	}
	if t.ended && v.cursor == t.screen.end {
		p.exit = &guest.ExecResult{ExitCode: *t.view.ExitCode, Signal: t.view.Signal, Duration: t.view.ExitedAt.Sub(t.view.StartedAt)}
	}
	return p, true
}

// serve sends the output to the client and its input to the terminal until the program has
// ended or the client is gone.
func (v *viewer) serve(tunnel *tunnel) {
	input, err := v.terminal.pty.dup()
	if err != nil { // it has ended
		if input, err = os.OpenFile(os.DevNull, os.O_WRONLY, 0); err != nil {
			return
		}
	}
	keys := newStdinPipe(input)
	var carrying sync.WaitGroup
	defer carrying.Wait()
	defer tunnel.close()
	defer keys.close()
	defer context.AfterFunc(tunnel.ctx, v.remove)()
	carrying.Go(func() { // ended by tunnel.close
		defer tunnel.close()
		v.terminal.receive(tunnel.in, keys)
	})
	carrying.Go(func() { keys.send(tunnel.out) }) // ended by keys.close
	buf := execBuffers.Get().(*[guest.FrameHeader + execBuffer]byte)
	defer execBuffers.Put(buf)
	for {
		p, ok := v.next(buf[guest.FrameHeader:])
		if !ok || p.send(tunnel.out, buf[:]) != nil || p.exit != nil {
			return
		}
	}
}

// send sends the part, whose output is in the frame.
func (p *terminalPart) send(out *frameWriter, frame []byte) error {
	var err error
	if p.skipped > 0 {
		err = out.json(guest.FrameSkipped, guest.Skipped{Bytes: p.skipped}, true)
	}
	if p.n > 0 && err == nil {
		err = out.frame(guest.FrameStdout, frame[:guest.FrameHeader+p.n], true)
	}
	if p.ready != nil && err == nil {
		err = out.json(guest.FrameReady, p.ready, true)
	}
	if p.exit != nil && err == nil {
		err = out.json(guest.FrameComplete, p.exit, true)
	}
	return err
}
