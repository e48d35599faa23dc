package wakeproxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
)

var (
	_ http.RoundTripper = (*Proxy)(nil)

	errNoExchange = errors.New("wakeproxy: the request did not come through a Handler")
	errClosing    = errors.New("wakeproxy: the node is closing")
)

const (
	// A refused connection is tried again after this pause, the same as between
	// attempts after a cold wake: long enough for a server that restarts
	// immediately, too short for a person to notice.
	retryPause = 25 * time.Millisecond
	// On a loopback a connection is made immediately; only a server with a full
	// backlog delays it.
	dialTimeout = 10 * time.Second
)

// RoundTrip sends a request, which came through a Handler, into its sandbox. A
// bodyless request whose connection is refused or lost before the first byte of
// the response is sent a second time, over a connection of its own. One that came
// when the container had ended, which the node had not noticed, is sent into the next
// container.
func (p *Proxy) RoundTrip(req *http.Request) (*http.Response, error) {
	x := exchangeOf(req.Context())
	if x == nil {
		closeBody(req)
		return nil, errNoExchange
	}
	res, err := x.roundTrip(req)
	if err != nil && (req.Body == nil || req.Body == http.NoBody) && x.cameTooLate(err) {
		if err = x.acquireNext(req.Context()); err == nil {
			res, err = x.roundTrip(req)
		}
	}
	if err != nil && isLost(err) && x.stoppedOnPurpose(req.Context()) {
		err = sandbox.ErrNotRunning
	}
	if err != nil && p.ctx.Err() != nil {
		// Not the cancellation that Close caused: reverse proxies take that for
		// a visitor who left.
		return nil, errClosing
	}
	return res, err
}

func (x *exchange) roundTrip(req *http.Request) (*http.Response, error) {
	bodyless := req.Body == nil || req.Body == http.NoBody

	if err := x.awaitReady(req.Context()); err != nil {
		closeBody(req)
		return nil, err
	}
	// A body can be sent once only, so the port must be known to accept.
	if x.woke == sandbox.WakeCold || !bodyless && x.starting() {
		if err := x.awaitPort(req.Context()); err != nil {
			closeBody(req)
			return nil, err
		}
	}
	res, err := x.sendUnderName(req, bodyless)
	if err != nil {
		return nil, err
	}
	x.warnOfOrigin(req, res)
	if err := checkStatus(req, res); err != nil {
		res.Body.Close()
		return nil, err
	}
	cleanHeader(res.Header, x.names)
	x.noteWake(res.Header)
	if res.StatusCode == http.StatusSwitchingProtocols {
		return x.upgrade(res)
	}
	x.stream(req.Context(), res)
	return res, nil
}

// attempt sends the request under one of the server's names, and a second time if
// its connection is lost, or if the server speaks HTTP/2 only.
func (x *exchange) attempt(req *http.Request, bodyless bool) (*http.Response, error) {
	h2c := x.speaksH2C(req)
	first, again := x.proxy.pool, x.proxy.unpooled
	if h2c {
		first, again = x.proxy.h2c, x.proxy.h2c
	}
	res, err := x.send(first, req, bodyless)
	before, failed := errors.AsType[*beforeResponseError](err)
	known := h2c || failed && before.reused
	if err != nil && bodyless && isLost(err) {
		if err = x.beforeRetry(req.Context(), err); err == nil {
			res, err = x.send(again, req, bodyless)
		}
	}
	if err == nil || known || !x.foundH2C(req.Context(), err) {
		return res, err
	}
	if x.port.Protocol == sandbox.ProtocolHTTP1 || !bodyless || !repeatable(req) {
		return nil, fmt.Errorf("%w: %w", errHTTP2, err)
	}
	return x.send(x.proxy.h2c, req, bodyless)
}

// errResponseInvalid: the server's status cannot be forwarded.
var errResponseInvalid = errors.New("the server sent an invalid status")

// checkStatus refuses responses that http.Transport returns and a
// http.ResponseWriter cannot write: a status below 100, and a switch to a protocol
// that the request did not name.
func checkStatus(req *http.Request, res *http.Response) error {
	if res.StatusCode < 100 {
		return fmt.Errorf("%w: %03d", errResponseInvalid, res.StatusCode)
	}
	if res.StatusCode == http.StatusSwitchingProtocols {
		asked, protocol := req.Header.Get("Upgrade"), res.Header.Get("Upgrade")
		if _, ok := res.Body.(io.ReadWriteCloser); !ok || asked == "" || !strings.EqualFold(asked, protocol) {
			return fmt.Errorf("%w: 101 to %q for a request to upgrade to %q", errResponseInvalid, protocol, asked)
		}
	}
	return nil
}

func closeBody(req *http.Request) {
	if req.Body != nil {
		req.Body.Close()
	}
}

// send makes one attempt. The request is copied and stays as it is.
func (x *exchange) send(over *http.Transport, req *http.Request, bodyless bool) (*http.Response, error) {
	var reused, answered atomic.Bool
	names := x.names // the request that a 103 belongs to may be over when the next one is sent
	out := req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{
		GotConn:              func(conn httptrace.GotConnInfo) { reused.Store(conn.Reused) },
		GotFirstResponseByte: func() { answered.Store(true) },
		// Called before the reverse proxy's own, which passes the header on.
		Got1xxResponse: func(_ int, header textproto.MIMEHeader) error {
			cleanHeader(http.Header(header), names)
			return nil
		},
	}))
	target := *req.URL
	target.Scheme, target.Host = "http", x.poolKey(bodyless)
	out.URL = &target
	out.Header = req.Header.Clone()
	out.Host = names.toServer(out.Header)
	switch {
	case !bodyless:
		out.Body = &requestBody{body: body{ReadCloser: x.body, x: x, ctx: req.Context()}}
	case over != x.proxy.h2c:
		dontRepeat(out)
	}
	res, err := over.RoundTrip(out)
	if err != nil && !answered.Load() {
		return nil, &beforeResponseError{error: err, reused: reused.Load()}
	}
	return res, err
}

// dontRepeat keeps http.Transport from sending a request again by itself when a
// kept connection is lost, as often as it has kept connections: a request that
// has a body, be it empty, is sent once. Nothing of that is seen on the wire.
// Other methods it repeats only if their Idempotency-Key allows that.
func dontRepeat(out *http.Request) {
	switch out.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		out.Body = io.NopCloser(strings.NewReader(""))
		out.ContentLength = -1
		out.TransferEncoding = []string{"identity"} // or it would try to read a byte first
	}
}

// poolKey names the connections that may serve the request. The container's
// start is part of it: a connection into one that has ended is never used for
// the next. A request with a body cannot be repeated, so it also never gets a
// connection from before the last sleep, which the server may close at the very
// moment that it thaws because its keep-alive time has passed meanwhile.
func (x *exchange) poolKey(bodyless bool) string {
	key := make([]byte, 0, 64)
	key = append(key, x.id...)
	key = append(key, '.')
	key = strconv.AppendInt(key, x.started.UnixNano(), 36)
	if !bodyless {
		key = append(key, '.')
		key = strconv.AppendInt(key, x.awake.UnixNano(), 36)
	}
	key = append(key, ':')
	key = strconv.AppendUint(key, uint64(x.port.Port), 10)
	return string(key)
}

// dialSandbox is the pool's DialContext. The pool may end a dial later than the
// request that began it; the lease's Dial allows that.
func dialSandbox(ctx context.Context, _, _ string) (net.Conn, error) {
	x := exchangeOf(ctx)
	if conn := x.swapSpare(nil); conn != nil {
		return conn, nil
	}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	return x.dial(ctx)
}

// beforeRetry returns nil when the request should be sent again.
func (x *exchange) beforeRetry(ctx context.Context, lost error) error {
	switch {
	case ctx.Err() != nil:
		return lost
	case x.starting(): // the lost connection may have been to a server that probed its port
		return x.awaitPort(ctx)
	case !errors.Is(lost, syscall.ECONNREFUSED):
		return nil
	}
	timer := time.NewTimer(retryPause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return lost
	}
}

// beforeResponseError is an attempt that failed before the first byte of a response.
type beforeResponseError struct {
	error
	reused bool // the connection had served before
}

func (e *beforeResponseError) Unwrap() error { return e.error }

// isLost reports whether the connection was refused or lost before the first
// byte of a response.
func isLost(err error) bool {
	before, ok := errors.AsType[*beforeResponseError](err)
	// net/http has many errors for a reused connection that was lost, most of them not exported.
	return ok && (before.reused || errors.Is(err, syscall.ECONNREFUSED) || hungUp(err))
}

// hungUp reports whether the server closed the connection. net.ErrClosed: net/http closed it
// because the server's end, or bytes, came while it sent the body.
func hungUp(err error) bool {
	ends := []error{syscall.ECONNRESET, syscall.EPIPE, io.EOF, io.ErrUnexpectedEOF, net.ErrClosed}
	return slices.ContainsFunc(ends, func(end error) bool { return errors.Is(err, end) })
}
