package server

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sockets"
)

const (
	// The pauses between requests begin with firstProbe and double up to maxProbe.
	firstProbe = 10 * time.Millisecond
	maxProbe   = 250 * time.Millisecond
	// probeTimeout bounds one request: some development servers compile a page at its first
	// request.
	probeTimeout = 30 * time.Second
	// maxProbeHeader bounds the header of a response.
	maxProbeHeader = 64 << 10
)

// httpCondition: a GET request to a port on which the process listens has a response with a
// status.
type httpCondition struct {
	port    portCondition
	ctx     context.Context // ends the request under way
	request guest.WaitHTTP

	responded chan struct{} // closed at the end of the request under way; nil without one
	status    int           // of its response, valid once responded is closed
	err       error         // without a response
	detail    string        // of the last request
	pause     time.Duration
	due       time.Time // of the next request
}

func (c *httpCondition) close() {
	if c.responded != nil {
		<-c.responded
	}
	c.port.close()
}

func (c *httpCondition) holds(_ watchedProcess, r *guest.WaitResult) (bool, <-chan struct{}, time.Duration) {
	own, changed := c.port.listening(r)
	if c.responded != nil {
		select {
		case <-c.responded:
		default:
			r.Detail = c.detail
			return false, c.responded, 0
		}
		c.responded = nil
		if c.err == nil && matchesStatus(c.status, c.request.Status) && r.Listening != nil {
			r.Status = c.status
			return true, nil, 0
		}
		c.detail = fmt.Sprintf("%s responds %d, not %s", c.name(), c.status, c.request.Status)
		if c.err != nil {
			c.detail = fmt.Sprintf("%s: %v", c.name(), c.err)
		}
		c.pause = min(max(2*c.pause, firstProbe), maxProbe)
		c.due = time.Now().Add(c.pause)
	}
	if r.Listening == nil {
		return false, changed, 0
	}
	if c.detail == "" {
		c.detail = c.name() + " has no response yet"
	}
	r.Detail = c.detail
	if left := time.Until(c.due); left > 0 {
		return false, nil, left
	}
	c.responded = make(chan struct{})
	address := own[0].Addr
	go func(responded chan struct{}) { // ended by c.ctx
		defer close(responded)
		c.status, c.err = probe(c.ctx, netip.AddrPortFrom(sockets.Reachable(address.Addr()), address.Port()), c.request.Path)
	}(c.responded)
	return false, c.responded, 0
}

func (c *httpCondition) name() string {
	return fmt.Sprintf("GET http://localhost:%d%s", c.request.Port, c.request.Path)
}

// matchesStatus reports whether a status is the wanted one, such as "204", or of the wanted
// class, such as "2xx".
func matchesStatus(status int, want string) bool {
	text := strconv.Itoa(status)
	return text == want || len(want) == 3 && want[1:] == "xx" && len(text) == 3 && text[0] == want[0]
}

// probe sends a GET request and returns the status of the response, whose body it ignores.
func probe(ctx context.Context, to netip.AddrPort, path string) (status int, err error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", to.String())
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if _, err := fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: localhost:%d\r\nUser-Agent: doze\r\nAccept: */*\r\nConnection: close\r\n\r\n", path, to.Port()); err != nil {
		return 0, err
	}
	for in := bufio.NewReader(io.LimitReader(conn, maxProbeHeader)); ; {
		resp, err := http.ReadResponse(in, &http.Request{Method: http.MethodGet})
		if err != nil {
			return 0, err
		}
		if resp.StatusCode >= 200 { // else it is informational
			return resp.StatusCode, nil
		}
	}
}
