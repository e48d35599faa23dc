package wakeproxy

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
)

// errTunnelEnded: the container that the connection led to no longer runs, or
// its port is no longer exposed. A tunnel is not notified of the latter: it checks
// with the next byte of either side, which then is not forwarded.
var errTunnelEnded = errors.New("the sandbox has ended the connection")

// closeGrace is how long a server has to end a WebSocket whose visitor has left:
// enough for the visitor's last message to be read. A frozen server never ends it, and
// without a limit abandoned connections would use up the quota.
const closeGrace = 2 * time.Second

// upgrade makes the response's body a tunnel. The lease of the request ends here
// unless the port is set to let upgraded connections hold it.
func (x *exchange) upgrade(res *http.Response) (*http.Response, error) {
	stream := res.Body.(io.ReadWriteCloser) // checkStatus saw that it is
	ctx, cancel := context.WithCancel(context.Background())
	res.Body = &tunnel{
		x: x, stream: stream, ctx: ctx, cancel: cancel,
		webSocket: strings.EqualFold(res.Header.Get("Upgrade"), "websocket"),
	}
	// Otherwise the handler holds it until both ends are closed.
	if x.port.WebSocket != sandbox.WebSocketKeepAwake {
		x.lease.Release()
	}
	return res, nil
}

// tunnel is the sandbox's end of an upgraded connection. It holds a lease only
// while it writes: bytes from the visitor wake the sandbox, and a silent connection
// lets it sleep with its socket open.
type tunnel struct {
	x         *exchange
	stream    io.ReadWriteCloser
	webSocket bool
	frames    frames          // the position in the server's frames; used by Read only
	wentAway  bool            // goAway has ended the WebSocket; used by Read only
	ctx       context.Context // ends with Close; bounds wakes
	cancel    context.CancelFunc
	closer    sync.Once
	err       error // of Close
}

// Read returns bytes from the sandbox, which count as its activity. The last bytes
// of a container that has ended are forwarded.
func (t *tunnel) Read(b []byte) (int, error) {
	if t.wentAway {
		return 0, errTunnelEnded
	}
	n, err := t.stream.Read(b)
	sb, ok := t.x.proxy.sandboxes.ByID(t.x.id)
	if !ok || !t.x.exposed(sb) {
		return t.goAway(b)
	}
	if t.webSocket {
		t.frames.scan(b[:n])
	}
	if n > 0 {
		t.x.proxy.sandboxes.Touch(t.x.id)
	}
	if err != nil && (t.webSocket || !t.x.leadsTo(sb)) {
		// A WebSocket has no half-open state (RFC 6455, section 7.1.1), and a
		// container that has ended will neither read nor write: both ends
		// close now, rather than when the visitor speaks next.
		err = errTunnelEnded
		if n == 0 && t.ending(sb) {
			return t.goAway(b)
		}
	}
	return n, err
}

// goAway ends a WebSocket with a close frame, where one may stand.
func (t *tunnel) goAway(b []byte) (int, error) {
	if !t.webSocket || !t.frames.between() || len(b) < len(goingAway) {
		return 0, errTunnelEnded
	}
	t.wentAway = true
	return copy(b, goingAway), nil
}

// ending reports whether the node or the sandbox ends, rather than the server's
// side of one connection: a sandbox that stops gives no leases.
func (t *tunnel) ending(sb sandbox.Sandbox) bool {
	if !t.x.leadsTo(sb) {
		return true
	}
	if t.ctx.Err() != nil {
		return false // the visitor has left
	}
	if sb.State != sandbox.StateRunning {
		return true // a frozen server ends nothing: it was thawed to be stopped
	}
	return !t.x.runs()
}

// Write wakes the sandbox if it sleeps. A container that was stopped has no
// socket any more, so nothing is woken for it; nor for a visitor who leaves.
func (t *tunnel) Write(b []byte) (int, error) {
	sb, ok := t.x.proxy.sandboxes.ByID(t.x.id)
	if !ok || !t.x.leadsTo(sb) {
		return 0, errTunnelEnded
	}
	if sb.State == sandbox.StateAsleep && t.webSocket && isCloseFrame(b) {
		return t.stream.Write(b) // the kernel keeps it until the sandbox wakes
	}
	lease, err := t.x.resume(t.ctx, sandbox.CauseWebSocket)
	if err != nil {
		return 0, err
	}
	defer lease.Release()
	if !t.x.leadsTo(lease.Sandbox()) { // it was stopped and started between the two
		return 0, errTunnelEnded
	}
	return t.stream.Write(b)
}

// isCloseFrame reports whether b is all of a WebSocket close frame (RFC 6455,
// section 5.5.1), which a browser sends when its page is closed. Visitors'
// frames are masked: 2 bytes of header, 4 of mask, at most 125 of payload.
func isCloseFrame(b []byte) bool {
	return len(b) >= 6 && b[0] == 0x88 && b[1]&0x80 != 0 && len(b) == 6+int(b[1]&0x7f)
}

// CloseWrite forwards the end of the visitor's stream. A client that ends its side
// of a WebSocket does not read either, so the tunnel ends after closeGrace.
func (t *tunnel) CloseWrite() error {
	half, ok := t.stream.(interface{ CloseWrite() error })
	if !ok {
		return http.ErrNotSupported
	}
	if t.webSocket {
		time.AfterFunc(closeGrace, func() { t.Close() })
	}
	return half.CloseWrite()
}

// Close ends the connection and any wake that a Write waits for. It may be
// called more than once.
func (t *tunnel) Close() error {
	t.closer.Do(func() {
		t.cancel()
		t.err = t.stream.Close()
	})
	return t.err
}
