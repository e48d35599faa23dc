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

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
)

const (
	// maxSocketMessage is the maximum size of a message of a client: a whole window of
	// input, or a command as large as the body of other requests.
	maxSocketMessage = max(guest.StdinWindow+1, maxJSON)
	// lastWrite is how long a client has to read the last message.
	lastWrite = 5 * time.Second
)

func (a *API) registerExecSocket() {
	messages := func(types ...reflect.Type) *huma.Schema {
		s := &huma.Schema{}
		for _, t := range types {
			s.OneOf = append(s.OneOf, a.schema(t))
		}
		return s
	}
	a.execCommand = a.schema(reflect.TypeFor[types.ExecCommand]())
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/exec", id: "exec-stream", tag: "exec", status: http.StatusSwitchingProtocols,
		summary: "Run a command with streamed input and output, over a WebSocket",
		description: "The client's first message is an ExecCommand. Then binary messages carry bytes, after a first byte that names " +
			"the stream: 0 is standard input, 1 standard output, 2 standard error. Text messages are JSON: the client's are ExecStdinEOF and Keepalive, " +
			"the node's are in the response. The node closes the WebSocket after complete or error. " +
			"Wakes the sandbox. When the client disconnects, the whole process tree is killed; the end of the input is a message of its own.",
		codes: slices.Concat(wakeCodes, execCodes, []problem.Code{problem.UpgradeRequired}),
		responses: map[int]*huma.Response{http.StatusSwitchingProtocols: {
			Description: "A WebSocket; the schema describes the text messages of the node and of the client",
			Content: map[string]*huma.MediaType{"application/json": {Schema: &huma.Schema{AnyOf: []*huma.Schema{
				messages(reflect.TypeFor[types.ExecStarted](), reflect.TypeFor[types.ExecStdinAck](), reflect.TypeFor[types.ExecStdinClosed](),
					reflect.TypeFor[types.ExecCompleted](), reflect.TypeFor[types.ExecFailed]()),
				messages(reflect.TypeFor[types.ExecCommand](), reflect.TypeFor[types.ExecStdinEOF](), reflect.TypeFor[types.Keepalive]()),
			}}}},
		}},
	}, a.execSocket)
}

func (a *API) execSocket(ctx context.Context, in *execInput) (*huma.StreamResponse, error) {
	if p := checkUpgrade(in.r); p != nil {
		return nil, p
	}
	sb, err := a.lookup(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	if err := a.streams.acquire(ctx, 1); err != nil {
		return nil, err
	}
	return &huma.StreamResponse{Body: func(huma.Context) { a.serveExecSocket(in, sb.ID) }}, nil
}

// checkUpgrade refuses requests that are not the handshake of a WebSocket (RFC 6455,
// section 4.1) over HTTP/1.1.
func checkUpgrade(r *http.Request) *problem.Problem {
	key, err := base64.StdEncoding.DecodeString(strings.TrimSpace(r.Header.Get("Sec-WebSocket-Key")))
	if r.ProtoMajor == 1 && hasToken(r.Header, "Connection", "upgrade") && hasToken(r.Header, "Upgrade", "websocket") &&
		r.Header.Get("Sec-WebSocket-Version") == "13" && err == nil && len(key) == 16 && len(r.Header.Values("Sec-WebSocket-Key")) == 1 {
		return nil
	}
	return problem.New(problem.UpgradeRequired, "this route is a WebSocket; connect to it over HTTP/1.1 with a WebSocket client, or run the command with POST").
		WithHeader("Upgrade", "websocket")
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

// execSocket is the WebSocket of one command. Its ctx ends when the client disconnects
// or violates the protocol, and when the node shuts down; the cause distinguishes them.
type execSocket struct {
	conn   *websocket.Conn
	ctx    context.Context
	cancel context.CancelCauseFunc
	// writes is the context of all writes. It outlives ctx by lastWrite unless the
	// client has disconnected: when the context of a write ends, the connection is closed.
	writes context.Context
	cut    context.CancelFunc

	command chan types.ExecCommand // the first message
	stdin   atomic.Pointer[guest.ExecStream]
	active  atomic.Int64 // when the client last sent anything, in Unix nanoseconds
	writing atomic.Bool
	buf     []byte // of the goroutine that writes output
}

// violation returns the problem of a client that violated the protocol. No more of its
// messages are read.
func violation(format string, args ...any) *problem.Problem {
	return problem.Newf(problem.RequestInvalid, format, args...)
}

// acceptExecSocket completes the handshake. The caller closes the connection.
func acceptExecSocket(w http.ResponseWriter, r *http.Request) (*execSocket, error) {
	s := &execSocket{command: make(chan types.ExecCommand, 1)}
	s.ctx, s.cancel = context.WithCancelCause(r.Context())
	s.writes, s.cut = context.WithCancel(context.Background())
	var err error
	s.conn, err = websocket.Accept(w, r, &websocket.AcceptOptions{
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
		return nil, err
	}
	s.conn.SetReadLimit(maxSocketMessage)
	s.noteActivity()
	return s, nil
}

func (a *API) serveExecSocket(in *execInput, id sandbox.ID) {
	s, err := acceptExecSocket(in.w, in.r)
	if err != nil {
		a.cfg.Log.Warn("failed to accept a WebSocket", "operation", callOf(in.r.Context()).operation, "sandbox", id, "error", err)
		return
	}
	defer s.cut()
	defer s.cancel(nil)
	var serving sync.WaitGroup
	serving.Go(func() { s.cancel(s.receive(a)) })                              // ended by CloseNow
	serving.Go(func() { s.watch(a.cfg.Limits.Heartbeat, a.cfg.Limits.Stall) }) // ended by ctx
	defer context.AfterFunc(s.ctx, s.limitWrites)()
	code := websocket.StatusNormalClosure
	if err := s.run(a, id); err != nil {
		code = websocket.StatusInternalError
		if p := s.problem(a, err); p != nil {
			s.send(types.ExecFailed{Type: types.ExecMessageTypeError, Problem: p})
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
func (s *execSocket) limitWrites() {
	if s.disconnected() {
		s.cut()
		return
	}
	time.AfterFunc(lastWrite, s.cut)
}

// disconnected reports whether ctx has ended because the client disconnected.
func (s *execSocket) disconnected() bool {
	_, violated := errors.AsType[*problem.Problem](context.Cause(s.ctx))
	return clientGone(s.ctx) && !violated
}

// problem returns the problem to send for an error, or nil if the client has disconnected.
func (s *execSocket) problem(a *API, err error) *problem.Problem {
	if p, ok := errors.AsType[*problem.Problem](context.Cause(s.ctx)); ok {
		return p.For(callOf(s.ctx).id)
	}
	if s.disconnected() {
		return nil
	}
	return a.refuse(s.ctx, err)
}

// run runs the command of the client and sends its output and result.
func (s *execSocket) run(a *API, id sandbox.ID) error {
	var command types.ExecCommand
	select {
	case command = <-s.command:
	case <-s.ctx.Done():
		return s.ctx.Err()
	case <-time.After(a.cfg.Limits.Stall):
		return violation("no command within %s; send it as the first message", a.cfg.Limits.Stall)
	}
	req, err := execRequestOf(types.ExecRequest{Command: command.Command, Timeout: command.Timeout, Stream: true})
	if err != nil {
		return err
	}
	req.StreamStdin = command.StreamStdin
	run, err := a.start(s.ctx, id, req)
	if err != nil {
		return err
	}
	defer a.finish(run)
	// Next does not end when the client disconnects; closing the stream ends it and the
	// command.
	defer context.AfterFunc(s.ctx, func() { run.stream.Close() })()
	if req.StreamStdin {
		s.stdin.Store(run.stream)
	}
	for {
		ev, err := run.next()
		if err == nil {
			err = s.forward(ev, req.StreamStdin)
		}
		if err != nil {
			if s.disconnected() {
				run.outcome = outcomeClient
			}
			return err
		}
		if ev.Kind == guest.FrameComplete {
			return nil
		}
	}
}

// forward sends an event of the command.
func (s *execSocket) forward(ev guest.ExecEvent, stdin bool) error {
	switch ev.Kind {
	case guest.FrameStdout:
		return s.sendOutput(types.StreamStdout, ev.Data)
	case guest.FrameStderr:
		return s.sendOutput(types.StreamStderr, ev.Data)
	case guest.FrameStart:
		started := types.ExecStarted{Type: types.ExecMessageTypeStart, PID: ev.PID}
		if stdin {
			started.StdinWindowBytes = guest.StdinWindow
		}
		return s.send(started)
	case guest.FrameStdinAck:
		return s.send(types.ExecStdinAck{Type: types.ExecMessageTypeStdinAck, Bytes: ev.Bytes})
	case guest.FrameStdinClosed:
		return s.send(types.ExecStdinClosed{Type: types.ExecMessageTypeStdinClosed})
	case guest.FrameComplete:
		return s.send(types.ExecCompleted{Type: types.ExecMessageTypeComplete, ExecExit: execExitOf(ev.Result)})
	}
	return nil
}

func (s *execSocket) sendOutput(stream byte, data []byte) error {
	s.buf = append(append(s.buf[:0], stream), data...)
	return s.write(websocket.MessageBinary, s.buf)
}

func (s *execSocket) send(message any) error {
	b, err := json.Marshal(message)
	if err != nil {
		return err
	}
	return s.write(websocket.MessageText, b)
}

// write blocks while the client does not read, which slows the command down. A failure
// ends ctx.
func (s *execSocket) write(kind websocket.MessageType, b []byte) error {
	s.writing.Store(true)
	defer s.writing.Store(false)
	err := s.conn.Write(s.writes, kind, b)
	if err != nil {
		s.cancel(context.Canceled)
	}
	return err
}

// receive reads the messages of the client and returns the cause with which ctx ends. It
// never waits for the command, so it notices immediately when the client disconnects.
func (s *execSocket) receive(a *API) error {
	// If this context ended, the connection would be closed before its last message.
	ctx := context.Background()
	var buf []byte
	receive := func(kind websocket.MessageType, message []byte) error { return s.receiveCommand(a, kind, message) }
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
		receive = s.receiveInput
	}
}

// receiveCommand receives the first message.
func (s *execSocket) receiveCommand(a *API, kind websocket.MessageType, message []byte) error {
	if kind != websocket.MessageText {
		return violation(`the first message is binary; send the command as text: {"type":"exec","argv":["ls"]}`)
	}
	var command types.ExecCommand
	if err := a.decodeJSON(a.execCommand, message, &command); err != nil {
		return err
	}
	s.command <- command
	return nil
}

// receiveInput receives a message after the first.
func (s *execSocket) receiveInput(kind websocket.MessageType, message []byte) error {
	if kind == websocket.MessageBinary {
		return s.receiveStdin(message)
	}
	return s.receiveText(message)
}

// receiveStdin forwards input. Input that arrives after the end of the command is discarded.
func (s *execSocket) receiveStdin(message []byte) error {
	stream := s.stdin.Load()
	switch {
	case len(message) == 0 || message[0] != types.StreamStdin:
		return violation("a binary message does not begin with the byte 0, the number of standard input")
	case stream == nil:
		return violation(`standard input for a command that has none; send "stream_stdin": true with the command and wait for the message start`)
	}
	err := stream.WriteStdin(message[1:])
	if errors.Is(err, guest.ErrStdinWindow) {
		return violation("%v; wait for the messages stdin_ack", err)
	}
	return nil // other errors show in how the command ends
}

func (s *execSocket) receiveText(message []byte) error {
	var m struct {
		Type types.ExecMessageType `json:"type"`
	}
	if err := json.Unmarshal(message, &m); err != nil {
		return violation("a text message is not a JSON object: %v", err)
	}
	switch m.Type {
	case types.ExecMessageTypeKeepalive:
	case types.ExecMessageTypeStdinEOF:
		stream := s.stdin.Load()
		if stream == nil {
			return violation("stdin_eof for a command without streamed input, or before the message start")
		}
		stream.CloseStdin()
	default:
		return violation("unknown type of message %q; use stdin_eof or keepalive", clip(string(m.Type)))
	}
	return nil
}

func (s *execSocket) noteActivity() { s.active.Store(time.Now().UnixNano()) }

// watch pings a client that is silent for a heartbeat, and closes the connection of one
// that is silent for stall.
func (s *execSocket) watch(heartbeat, stall time.Duration) {
	ticker := time.NewTicker(heartbeat)
	defer ticker.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-ticker.C:
		}
		switch silent := time.Since(time.Unix(0, s.active.Load())); {
		case silent >= stall:
			s.cancel(context.Canceled)
			s.cut()
		case silent >= heartbeat:
			ctx, cancel := context.WithTimeout(s.ctx, heartbeat)
			s.conn.Ping(ctx)
			cancel()
		}
	}
}

// readMessage reads r to its end into buf, growing it as needed.
func (s *execSocket) readMessage(buf []byte, r io.Reader) ([]byte, error) {
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
