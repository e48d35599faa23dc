package api

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"reflect"
	"slices"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"
	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
)

func (a *API) registerExecSocket() {
	a.execCommand = a.schema(reflect.TypeFor[types.ExecCommand]())
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/exec", id: "exec-stream", tag: "exec", status: http.StatusSwitchingProtocols,
		summary: "Run a command with streamed input and output, over a WebSocket",
		description: "The client's first message is an ExecCommand. Then binary messages carry bytes, after a first byte that names " +
			"the stream: 0 is standard input, 1 standard output, 2 standard error. Text messages are JSON: the client's are ExecStdinEOF and Keepalive, " +
			"the node's are in the response. The node closes the WebSocket after complete or error. " +
			"Wakes the sandbox. When the client disconnects, the whole process tree is killed; the end of the input is a message of its own.",
		codes: slices.Concat(wakeCodes, execCodes, []problem.Code{problem.UpgradeRequired}),
		responses: a.socketResponse(
			[]any{types.ExecStarted{}, types.ExecStdinAck{}, types.ExecStdinClosed{}, types.ExecCompleted{}, types.ExecFailed{}},
			[]any{types.ExecCommand{}, types.ExecStdinEOF{}, types.Keepalive{}},
		),
	}, a.execSocket)
}

func (a *API) execSocket(ctx context.Context, in *sandboxExchange) (*huma.StreamResponse, error) {
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

// execSocket is the WebSocket of one command.
type execSocket struct {
	socket
	api     *API
	begun   bool                   // the first message was received
	command chan types.ExecCommand // the first message
	stdin   atomic.Pointer[guest.ExecStream]
	buf     []byte // of the goroutine that writes output
}

func (a *API) serveExecSocket(in *sandboxExchange, id sandbox.ID) {
	s := &execSocket{api: a, command: make(chan types.ExecCommand, 1)}
	if s.accept(a, in.Exchange) != nil {
		return
	}
	s.serve(a, s.receive, func() error { return s.run(a, id) }, func(p *problem.Problem) any {
		return types.ExecFailed{Type: types.ExecMessageTypeError, Problem: p}
	})
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
	req, err := execRequestOf(types.ExecRequest{Command: command.Command, Session: command.Session, Timeout: command.Timeout, Stream: true})
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

// receive receives a message. It never waits for the command, so that the disconnect of the
// client is noticed immediately.
func (s *execSocket) receive(kind websocket.MessageType, message []byte) error {
	switch {
	case !s.begun:
		s.begun = true
		return s.receiveCommand(kind, message)
	case kind == websocket.MessageBinary:
		return s.receiveStdin(message)
	}
	return s.receiveText(message)
}

// receiveCommand receives the first message.
func (s *execSocket) receiveCommand(kind websocket.MessageType, message []byte) error {
	if kind != websocket.MessageText {
		return violation(`the first message is binary; send the command as text: {"type":"exec","argv":["ls"]}`)
	}
	var command types.ExecCommand
	if err := s.api.decodeJSON(s.api.execCommand, message, &command); err != nil {
		return err
	}
	s.command <- command
	return nil
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
