package guest

import (
	"bufio"
	"context"
	"io"
	"math"
	"net"
	"net/http"
)

// dedicated makes each request over a connection of its own, in the goroutine of its
// caller. http.Transport has two goroutines for every connection, which would wait as
// long as the sandbox lives for its event stream.
type dedicated struct {
	dial func(context.Context) (net.Conn, error)
}

// RoundTrip implements http.RoundTripper. The end of the request's context closes the
// connection, as does the body's Close.
func (d dedicated) RoundTrip(req *http.Request) (_ *http.Response, err error) {
	conn, err := d.dial(req.Context())
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(req.Context(), func() { conn.Close() })
	defer func() {
		if err != nil {
			stop()
			conn.Close()
		}
	}()
	if err := req.Write(conn); err != nil {
		return nil, err
	}
	limited := &io.LimitedReader{R: conn, N: maxHeader}
	resp, err := http.ReadResponse(bufio.NewReader(limited), req)
	if err != nil {
		return nil, err
	}
	limited.N = math.MaxInt64
	resp.Body = &dedicatedBody{resp.Body, conn, stop}
	return resp, nil
}

type dedicatedBody struct {
	io.Reader
	conn net.Conn
	stop func() bool
}

// Close may be called while Read waits. The rest of the body is not read.
func (b *dedicatedBody) Close() error {
	b.stop()
	return b.conn.Close()
}
