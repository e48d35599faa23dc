package podman

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/containers/podman/v5/pkg/bindings"
	"github.com/containers/podman/v5/pkg/errorhandling"

	"github.com/doze-run/doze/runtime/sandbox"
)

// connection is a client of the API service behind a socket. It remains usable if another
// process takes over the socket: a request without an idle connection dials again.
type connection struct {
	socket string
	client *http.Client
	values context.Context // carries the bindings' client
}

// dial connects to the service behind socket, which must respond within limit. The caller
// closes the connection.
func dial(ctx context.Context, socket string, limit time.Duration) (*connection, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	c := &connection{socket: socket, client: &http.Client{Transport: &transport{unixTransport(socket)}}}
	// Without a service, the bindings would take 600 ms to fail.
	if err := ping(ctx, c.client); err != nil {
		return nil, err
	}
	// The bindings dial once themselves, to ping the service.
	err := shortPath(socket, func(path string) (err error) {
		c.values, err = bindings.NewConnection(ctx, "unix://"+path)
		return err
	})
	if err != nil {
		c.close()
		return nil, err
	}
	client, err := bindings.GetClient(c.values)
	if err != nil {
		c.close()
		return nil, err
	}
	client.Client.CloseIdleConnections()
	client.Client = c.client
	return c, nil
}

func (c *connection) close() { c.client.CloseIdleConnections() }

// ping checks that the service responds.
func ping(ctx context.Context, client *http.Client) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://d/_ping", nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 1<<10))
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("the service responded %s", resp.Status)
	}
	return nil
}

// call runs f, which must pass the context that it receives to the bindings. It returns a
// *lostError if the service ended, ctx's error if ctx did, and otherwise the error of f, as a
// sandbox.ErrStoreFull (wrapped) if the service or the OCI runtime had no disk space.
func (c *connection) call(ctx context.Context, f func(ctx context.Context) error) error {
	cc := &callContext{Context: ctx, values: c.values}
	err := f(cc)
	switch {
	case ctx.Err() != nil && (cc.lost != nil || err != nil):
		return ctx.Err()
	case cc.lost != nil:
		return &lostError{cc.lost}
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET): // in the middle of a response
		return &lostError{err}
	case noSpace(err):
		return fmt.Errorf("%w: %w", sandbox.ErrStoreFull, err)
	}
	return err
}

// noSpace reports whether an error of the service has the text of ENOSPC or EDQUOT. The service, in Go, and crun, in C,
// write them differently.
func noSpace(err error) bool {
	if status(err) < http.StatusInternalServerError {
		return false
	}
	text := strings.ToLower(err.Error())
	return strings.Contains(text, syscall.ENOSPC.Error()) || strings.Contains(text, syscall.EDQUOT.Error())
}

// lostError: the service did not respond, or not completely. It wraps
// sandbox.ErrEngineDown.
type lostError struct{ err error }

func (e *lostError) Error() string { return fmt.Sprintf("%v: %v", sandbox.ErrEngineDown, e.err) }
func (e *lostError) Unwrap() error { return sandbox.ErrEngineDown }

// callContext has the bindings' client from one context and the caller's deadline from
// another.
type callContext struct {
	context.Context
	values context.Context
	lost   error // set by transport, in the goroutine of the call
}

type callKey struct{}

func (c *callContext) Value(key any) any {
	if _, ok := key.(callKey); ok {
		return c
	}
	if v := c.values.Value(key); v != nil {
		return v
	}
	return c.Context.Value(key)
}

// transport responds with 503 for a service that cannot be reached. The bindings repeat a
// request without a response, and sleep 600 ms in total regardless of the context; they
// return any response immediately, even this one.
type transport struct{ *http.Transport }

func (t *transport) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := t.Transport.RoundTrip(req)
	if err == nil {
		return resp, nil
	}
	call, ok := req.Context().Value(callKey{}).(*callContext)
	if !ok {
		return nil, err
	}
	call.lost = err
	return &http.Response{
		Status:     "503 Service Unavailable",
		StatusCode: http.StatusServiceUnavailable,
		Proto:      "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header:  http.Header{},
		Body:    io.NopCloser(strings.NewReader(err.Error())),
		Request: req,
	}, nil
}

// unixTransport returns a transport for HTTP over a Unix socket.
func unixTransport(socket string) *http.Transport {
	return &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dialUnix(ctx, socket)
		},
		DisableCompression: true,
		// With more concurrent requests than these, each dials, which costs 50 µs.
		MaxIdleConnsPerHost: 16,
		IdleConnTimeout:     30 * time.Second,
	}
}

func dialUnix(ctx context.Context, socket string) (conn net.Conn, err error) {
	err = shortPath(socket, func(path string) (err error) {
		var d net.Dialer
		conn, err = d.DialContext(ctx, "unix", path)
		return err
	})
	return conn, err
}

// shortPath calls f with a path to the socket that is valid during the call and shorter
// than the 107 bytes that the address of a Unix socket may have.
func shortPath(socket string, f func(path string) error) error {
	folder, err := os.Open(filepath.Dir(socket))
	if err != nil {
		return err
	}
	defer folder.Close()
	return f(fmt.Sprintf("/proc/self/fd/%d/%s", folder.Fd(), filepath.Base(socket)))
}

// status returns the HTTP status of an error response of the service, or 0.
func status(err error) int {
	var m *errorhandling.ErrorModel
	if errors.As(err, &m) {
		return m.ResponseCode
	}
	return 0
}
