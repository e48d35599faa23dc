package wakeproxy

import (
	"context"
	"net"
	"net/http"
	"net/http/httptrace"
	"sync"
	"testing"

	"golang.org/x/net/http2"
)

// closing tells when net/http has closed a connection.
type closing struct {
	net.Conn
	closed chan struct{}
	once   sync.Once
}

func (c *closing) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

// A server of HTTP/2 sends SETTINGS at once, which net/http may read before it has
// sent the request.
func TestSettingsBeforeTheRequestMayBeHTTP2(t *testing.T) {
	ours, theirs := net.Pipe()
	defer theirs.Close()
	conn := &closing{Conn: ours, closed: make(chan struct{})}
	transport := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
		go http2.NewFramer(theirs, theirs).WriteSettings() // ends with the pipe
		return conn, nil
	}}
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { <-conn.closed }})
	req, err := http.NewRequestWithContext(ctx, "GET", "http://sandbox/", nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := transport.RoundTrip(req); err == nil || !maybeHTTP2(err) {
		t.Errorf("got %v", err)
	}
}
