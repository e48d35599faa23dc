package guest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"
)

// StdinWindow limits input that is not acknowledged; ErrStdinWindow refuses more.
var ErrStdinWindow = fmt.Errorf("more than %d bytes of standard input are not acknowledged", StdinWindow)

// input is the direction of an upgraded connection that leads to the guest. One goroutine may
// write and another acknowledge.
type input struct {
	w      io.Writer
	watch  *watchdog
	stall  time.Duration // the longest that one write may take
	header [FrameHeader]byte

	mu      sync.Mutex
	unacked int // bytes of input on their way
}

// upgrade sends a request whose connection carries frames of the protocol in both directions.
func (c *Client) upgrade(ctx context.Context, r request, protocol string) (*response, *input, error) {
	r.header = http.Header{"Connection": {"Upgrade"}, "Upgrade": {protocol}}
	r.upgrade = true
	a, err := c.send(ctx, r)
	if err != nil {
		return nil, nil, err
	}
	w, _ := a.Body.(io.Writer)
	if a.StatusCode != http.StatusSwitchingProtocols || w == nil {
		a.Close()
		return nil, nil, fmt.Errorf("guest responded to %s with status %d and does not read input", r.route, a.StatusCode)
	}
	// The transport does not watch an upgraded connection.
	context.AfterFunc(a.watch.ctx, func() { a.Body.Close() })
	return a, &input{w: w, watch: a.watch, stall: c.stall}, nil
}

// reserve counts n bytes as on their way, unless they exceed the window.
func (in *input) reserve(n int) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.unacked+n > StdinWindow {
		return false
	}
	in.unacked += n
	return true
}

// write sends input that is reserved.
func (in *input) write(p []byte) error {
	for len(p) > 0 {
		n := min(len(p), MaxFrame)
		if err := in.frame(FrameStdin, p[:n]); err != nil {
			return err
		}
		p = p[n:]
	}
	return nil
}

func (in *input) json(t FrameType, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return in.frame(t, b)
}

func (in *input) frame(t FrameType, p []byte) error {
	// The guest always reads.
	timer := time.AfterFunc(in.stall, func() { in.watch.cancel(ErrNoResponse) })
	defer timer.Stop()
	PutFrameHeader(in.header[:], t, len(p))
	_, err := in.w.Write(in.header[:])
	if err == nil && len(p) > 0 {
		_, err = in.w.Write(p)
	}
	if err != nil {
		return in.watch.explain(lost(err))
	}
	return nil
}

// acknowledge counts the bytes of a FrameStdinAck as read by the command.
func (in *input) acknowledge(frame []byte) (n int, err error) {
	var v StdinAck
	if err := DecodePayload(frame, &v); err != nil {
		return 0, err
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if v.Bytes <= 0 || v.Bytes > in.unacked {
		return 0, fmt.Errorf("%w: %d bytes of standard input acknowledged, %d were sent", ErrFrame, v.Bytes, in.unacked)
	}
	in.unacked -= v.Bytes
	return v.Bytes, nil
}
