package intercept

import (
	"context"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/doze-run/doze/problem"
)

// closeGrace is how long an upstream has to end a WebSocket whose client has sent its last
// byte: enough for a response.
const closeGrace = 2 * time.Second

// upgrade turns the client's connection into a WebSocket with the upstream.
func (o *outbound) upgrade(res *http.Response) {
	host, ok := res.Body.(io.ReadWriteCloser)
	if !ok || !isWebSocket(upgradeOf(res.Header)) || !isWebSocket(upgradeOf(o.r.Header)) {
		o.fail(&Failure{Code: problem.UpstreamResponseInvalid, Reason: o.to.host + " switched to a protocol that was not requested"})
		return
	}
	if _, compressed := res.Header["Sec-Websocket-Extensions"]; compressed && o.filter != nil {
		o.fail(unreadable(o.to.host, "negotiated WebSocket extensions that were not requested"))
		return
	}
	o.holdWindows(0)
	o.clean(res.Header)
	res.Header["Connection"], res.Header["Upgrade"] = []string{"Upgrade"}, []string{"websocket"}
	conn, buffered, err := http.NewResponseController(o.w).Hijack()
	if err != nil {
		o.fail(&Failure{Code: problem.UpgradeFailed, Reason: "this connection cannot become a WebSocket", Err: err})
		return
	}
	o.status = res.StatusCode
	t := &tunnel{client: conn, host: host}
	defer t.Close()
	defer context.AfterFunc(o.r.Context(), t.Close)()

	conn.SetDeadline(time.Time{}) // clears the deadline of net/http's server
	head := &http.Response{StatusCode: res.StatusCode, ProtoMajor: 1, ProtoMinor: 1, Header: res.Header}
	if err := head.Write(buffered); err == nil {
		err = buffered.Flush()
	}
	if err != nil {
		o.failure = disconnected(err)
		return
	}
	down := io.Reader(&counted{host, &o.received})
	if o.filter != nil {
		down = newMessages(down, o.filter)
	}
	if err := t.run(&counted{buffered.Reader, &o.sent}, down); err != nil {
		o.failure = failed(o.r.Context(), o.to.host, err)
	}
}

// tunnel is a WebSocket between a client and an upstream.
type tunnel struct {
	client net.Conn
	host   io.ReadWriteCloser
	left   atomic.Bool // the client ended it, so the upstream has not failed
}

// Close ends both connections. It may be called more than once.
func (t *tunnel) Close() {
	t.client.Close()
	t.host.Close()
}

// run copies both ways until the upstream has ended its side. It returns the error of
// that direction, or nil if the client ended the WebSocket.
func (t *tunnel) run(up, down io.Reader) error {
	done := make(chan struct{})
	go func() { // ends with Close, at the latest
		defer close(done)
		t.up(up)
	}()
	_, err := t.pass(t.client, down)
	if t.left.Load() {
		err = nil
	}
	t.Close()
	<-done
	return err
}

// up forwards the client's data, and its end.
func (t *tunnel) up(from io.Reader) {
	_, err := t.pass(t.host, from)
	t.left.Store(true)
	if half, ok := t.host.(interface{ CloseWrite() error }); err == nil && ok && half.CloseWrite() == nil {
		time.AfterFunc(closeGrace, t.Close)
		return
	}
	t.Close()
}

func (t *tunnel) pass(to io.Writer, from io.Reader) (int64, error) {
	buffer := buffers.Get().(*[2 * recordSize]byte)
	defer buffers.Put(buffer)
	return io.CopyBuffer(struct{ io.Writer }{to}, from, buffer[:]) // a ReadFrom would allocate a buffer of its own
}
