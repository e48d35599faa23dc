package api

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"
	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/guest"
)

const (
	// maxSocketMessage is the maximum size of a message of a client: a whole window of
	// input, or a command as large as the body of other requests.
	maxSocketMessage = max(guest.StdinWindow+1, maxJSON)
	// lastWrite is how long a client has to read the last message.
	lastWrite = 5 * time.Second
)

// socketResponse describes a WebSocket: the text messages of the node and of the client.
func (a *API) socketResponse(node, client []any) map[int]*huma.Response {
	oneOf := func(messages []any) *huma.Schema {
		s := &huma.Schema{}
		for _, m := range messages {
			s.OneOf = append(s.OneOf, a.schema(reflect.TypeOf(m)))
		}
		return s
	}
	return map[int]*huma.Response{http.StatusSwitchingProtocols: {
		Description: "A WebSocket; the schema describes the text messages of the node and of the client",
		Content:     map[string]*huma.MediaType{"application/json": {Schema: &huma.Schema{AnyOf: []*huma.Schema{oneOf(node), oneOf(client)}}}},
	}}
}

// checkUpgrade refuses requests that are not the handshake of a WebSocket (RFC 6455,
// section 4.1) over HTTP/1.1.
func checkUpgrade(r *http.Request) *problem.Problem {
	key, err := base64.StdEncoding.DecodeString(strings.TrimSpace(r.Header.Get("Sec-WebSocket-Key")))
	if r.Method == http.MethodGet && r.ProtoMajor == 1 && r.ProtoMinor == 1 && hasToken(r.Header, "Connection", "upgrade") && hasToken(r.Header, "Upgrade", "websocket") &&
		r.Header.Get("Sec-WebSocket-Version") == "13" && err == nil && len(key) == 16 && len(r.Header.Values("Sec-WebSocket-Key")) == 1 {
		return nil
	}
	p := problem.New(problem.UpgradeRequired, "this route is a WebSocket; connect to it over HTTP/1.1 with a WebSocket client")
	if r.ProtoMajor > 1 {
		return p // the header is not permitted in HTTP/2, RFC 9113 section 8.2.2, and curl refuses the response
	}
	return p.WithHeader("Upgrade", "websocket")
}

func hasToken(h http.Header, name, token string) bool {
	return slices.ContainsFunc(h.Values(name), func(value string) bool {
		for part := range strings.SplitSeq(value, ",") {
			if strings.EqualFold(strings.TrimSpace(part), token) {
				return true
			}
		}
		return false
	})
}

// socket is a WebSocket of a client. Its ctx ends when the client disconnects
// or violates the protocol, and when the node shuts down; the cause distinguishes them.
type socket struct {
	conn   *websocket.Conn
	ctx    context.Context
	cancel context.CancelCauseFunc
	// writes is the context of all writes. It outlives ctx by lastWrite unless the
	// client has disconnected: when the context of a write ends, the connection is closed.
	writes context.Context
	cut    context.CancelFunc

	active  atomic.Int64 // when the client last sent anything, in Unix nanoseconds
	writing atomic.Bool
	waiting atomic.Bool // for the sandbox, so that no message is read
}

// violation returns the problem of a client that violated the protocol. No more of its
// messages are read.
func violation(format string, args ...any) *problem.Problem {
	return problem.Newf(problem.RequestInvalid, format, args...)
}

// accept completes the handshake. The caller calls serve.
func (s *socket) accept(a *API, x Exchange) error {
	s.ctx, s.cancel = context.WithCancelCause(x.r.Context())
	s.writes, s.cut = context.WithCancel(context.Background())
	var err error
	s.conn, err = websocket.Accept(x.w, x.r, &websocket.AcceptOptions{
		// Pages of other origins cannot send the token that this request had.
		InsecureSkipVerify: true,
		OnPingReceived: func(context.Context, []byte) bool {
			s.noteActivity()
			// The library closes the connection when a pong is delayed for long; a client
			// that is being written to needs no pong.
			return !s.writing.Load()
		},
		OnPongReceived: func(context.Context, []byte) { s.noteActivity() },
	})
	if err != nil {
		s.cut()
		s.cancel(nil)
		c := callOf(x.r.Context())
		a.cfg.Log.Warn("failed to accept a WebSocket", "operation", c.operation, "sandbox", c.sandbox(), "error", err)
		return err
	}
	s.conn.SetReadLimit(maxSocketMessage)
	s.noteActivity()
	return nil
}

// serve calls receive for each message of the client until run returns, and closes the
// connection. An error of either is sent as the message that failed returns.
func (s *socket) serve(a *API, receive func(websocket.MessageType, []byte) error, run func() error, failed func(*problem.Problem) any) {
	defer s.cut()
	defer s.cancel(nil)
	var serving sync.WaitGroup
	serving.Go(func() { s.cancel(s.receiveAll(receive)) })                     // ended by CloseNow
	serving.Go(func() { s.watch(a.cfg.Limits.Heartbeat, a.cfg.Limits.Stall) }) // ended by ctx
	defer context.AfterFunc(s.ctx, s.limitWrites)()
	code := websocket.StatusNormalClosure
	if err := run(); err != nil {
		code = websocket.StatusInternalError
		if p := s.problem(a, err); p != nil {
			s.send(failed(p))
		}
	}
	if s.disconnected() {
		s.conn.CloseNow()
	}
	s.conn.Close(code, "")
	s.cancel(nil)
	serving.Wait()
}

// limitWrites is called when ctx has ended.
func (s *socket) limitWrites() {
	if s.disconnected() {
		s.cut()
		return
	}
	time.AfterFunc(lastWrite, s.cut)
}

// disconnected reports whether ctx has ended because the client disconnected.
func (s *socket) disconnected() bool {
	_, violated := errors.AsType[*problem.Problem](context.Cause(s.ctx))
	return clientGone(s.ctx) && !violated
}

// problem returns the problem to send for an error, or nil if the client has disconnected.
func (s *socket) problem(a *API, err error) *problem.Problem {
	if p, ok := errors.AsType[*problem.Problem](context.Cause(s.ctx)); ok {
		return p.For(callOf(s.ctx).id)
	}
	if s.disconnected() {
		return nil
	}
	return a.refuse(s.ctx, err)
}

func (s *socket) send(message any) error {
	b, err := json.Marshal(message)
	if err != nil {
		return err
	}
	return s.write(websocket.MessageText, b)
}

// write blocks while the client does not read, which slows the command down. A failure
// ends ctx.
func (s *socket) write(kind websocket.MessageType, b []byte) error {
	s.writing.Store(true)
	defer s.writing.Store(false)
	err := s.conn.Write(s.writes, kind, b)
	if err != nil {
		s.cancel(context.Canceled)
	}
	return err
}

// receiveAll reads the messages of the client and returns the cause with which ctx ends.
func (s *socket) receiveAll(receive func(websocket.MessageType, []byte) error) error {
	// If this context ended, the connection would be closed before its last message.
	ctx := context.Background()
	var buf []byte
	for {
		kind, r, err := s.conn.Reader(ctx)
		if err != nil {
			return context.Canceled
		}
		s.noteActivity()
		if buf, err = s.readMessage(buf, r); err != nil {
			return context.Canceled
		}
		if err := receive(kind, buf); err != nil {
			return err
		}
	}
}

func (s *socket) noteActivity() { s.active.Store(time.Now().UnixNano()) }

// watch pings a client that is silent for a heartbeat, and closes the connection of one
// that is silent for stall. While a message waits, nothing is read, so that only a ping that
// cannot be sent shows that the client has disconnected.
func (s *socket) watch(heartbeat, stall time.Duration) {
	ticker := time.NewTicker(heartbeat)
	defer ticker.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-ticker.C:
		}
		waiting := s.waiting.Load()
		if waiting {
			s.noteActivity()
		}
		switch silent := time.Since(time.Unix(0, s.active.Load())); {
		case waiting:
			if err := s.ping(heartbeat); err != nil && !errors.Is(err, context.DeadlineExceeded) {
				s.cancel(context.Canceled)
				s.cut()
			}
		case silent >= stall:
			s.cancel(context.Canceled)
			s.cut()
		case silent >= heartbeat:
			s.ping(heartbeat)
		}
	}
}

func (s *socket) ping(timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(s.ctx, timeout)
	defer cancel()
	return s.conn.Ping(ctx)
}

// readMessage reads r to its end into buf, growing it as needed.
func (s *socket) readMessage(buf []byte, r io.Reader) ([]byte, error) {
	buf = buf[:0]
	for {
		if len(buf) == cap(buf) {
			buf = append(buf, 0)[:len(buf)]
		}
		n, err := r.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		s.noteActivity()
		if err == io.EOF {
			return buf, nil
		}
		if err != nil {
			return buf, err
		}
	}
}
