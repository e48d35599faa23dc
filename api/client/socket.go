package client

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"
)

const (
	// maxSocketMessage limits a message of the node, which sends at most 64 KiB of
	// output in one.
	maxSocketMessage = 1 << 20
	// keepaliveInterval is shorter than the minute after which a node disconnects a silent
	// client, and than the idle timeouts of proxies.
	keepaliveInterval = 15 * time.Second
)

// socket is a WebSocket to a node. Its ctx ends when fail is called.
type socket struct {
	conn     *websocket.Conn
	ctx      context.Context
	fail     context.CancelCauseFunc
	received atomic.Int64 // messages
	busy     atomic.Bool  // with a message, so that no other is read
}

// openSocket connects to a route that is a WebSocket.
func (c *Client) openSocket(ctx context.Context, path string) (*websocket.Conn, error) {
	header := http.Header{}
	c.identify(header)
	conn, resp, err := websocket.Dial(ctx, c.base+path, &websocket.DialOptions{HTTPClient: c.http1, HTTPHeader: header})
	switch {
	case err == nil:
		conn.SetReadLimit(maxSocketMessage)
		return conn, nil
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case resp != nil:
		return nil, readError(resp)
	}
	return nil, c.unreachable(err)
}

func newSocket(ctx context.Context, conn *websocket.Conn) *socket {
	s := &socket{conn: conn}
	s.ctx, s.fail = context.WithCancelCause(ctx)
	return s
}

// explain returns why the connection has failed.
func (s *socket) explain(err error) error {
	if cause := context.Cause(s.ctx); cause != nil {
		return cause
	}
	return err
}

func (s *socket) send(message any) error {
	b, err := json.Marshal(message)
	if err != nil {
		return err
	}
	return s.conn.Write(s.ctx, websocket.MessageText, b)
}

// read reads a message into a buffer.
func (s *socket) read(message *bytes.Buffer) (websocket.MessageType, error) {
	kind, r, err := s.conn.Reader(s.ctx)
	if err == nil {
		message.Reset()
		_, err = message.ReadFrom(r)
	}
	if err == nil {
		s.received.Add(1)
	}
	return kind, err
}

// watch keeps the connection alive, and fails with silent when the node does not respond.
// While the socket is busy, no message is read, not even the pong of a ping: then it calls
// keepalive.
func (s *socket) watch(keepalive func(), silent error) {
	ticker := time.NewTicker(keepaliveInterval)
	defer ticker.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-ticker.C:
		}
		if s.busy.Load() {
			keepalive()
			continue
		}
		before := s.received.Load()
		ctx, cancel := context.WithTimeout(s.ctx, keepaliveInterval)
		err := s.conn.Ping(ctx)
		cancel()
		if err != nil && !s.busy.Load() && s.received.Load() == before {
			s.fail(silent)
		}
	}
}
