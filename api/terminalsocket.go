package api

import (
	"context"
	"encoding/json"
	"errors"
	"io"

	"github.com/coder/websocket"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
)

// terminalSocket is the WebSocket of a client of a terminal. It holds no lease: what is typed and
// printed counts as use of the sandbox, which may sleep while both sides are silent.
type terminalSocket struct {
	socket
	api      *API
	sandbox  sandbox.Sandbox // when the client connected
	terminal string
	stream   *guest.TerminalStream
	cursor   int64
	size     *guest.TerminalSize // of the client's window, to send with the next message
}

// run sends what is printed until the program ends.
func (s *terminalSocket) run() error {
	// Next does not end when the client disconnects; closing the stream ends it.
	defer context.AfterFunc(s.ctx, func() { s.stream.Close() })()
	for {
		ev, err := s.stream.Next()
		if err == nil {
			s.api.cfg.Sandboxes.Touch(s.sandbox.ID)
			err = s.forward(ev)
		}
		switch {
		case err == io.EOF:
			return nil
		case err != nil:
			return s.explain(err)
		}
	}
}

// explain returns the problem of a sandbox that stopped, if that is why the stream failed.
func (s *terminalSocket) explain(err error) error {
	if sb, ok := s.api.cfg.Sandboxes.ByID(s.sandbox.ID); ok {
		if t, missing := sb.Terminal(s.terminal); missing == nil && t.Reason != "" {
			err = &sandbox.TerminalError{Terminal: t.ID, Reason: t.Reason}
		}
	}
	return terminalError(s.sandbox, err)
}

func (s *terminalSocket) forward(ev guest.TerminalEvent) error {
	switch ev.Kind {
	case guest.FrameStdout:
		s.cursor += int64(len(ev.Data))
		return s.write(websocket.MessageBinary, ev.Data)
	case guest.FrameSkipped:
		s.cursor += ev.Bytes
		return s.send(types.TerminalTruncated{Type: types.TerminalMessageTypeTruncated, Cursor: s.cursor})
	case guest.FrameReady:
		s.cursor = ev.Cursor
		return s.send(types.TerminalReady{Type: types.TerminalMessageTypeReady, ID: s.terminal, Cursor: s.cursor})
	}
	return s.send(types.TerminalExit{Type: types.TerminalMessageTypeExit, Code: ev.Result.ExitCode, Signal: ev.Result.Signal})
}

// receive receives a message, which wakes the sandbox. It blocks while the program does not
// read what is typed, without a lease: the sandbox may sleep meanwhile.
func (s *terminalSocket) receive(kind websocket.MessageType, message []byte) error {
	s.waiting.Store(true)
	defer s.waiting.Store(false)
	if kind == websocket.MessageText {
		action, wakes, err := s.parse(message)
		if err != nil {
			return err
		}
		if !wakes {
			return action()
		}
		return s.awake(action)
	}
	for len(message) > 0 {
		part := message[:min(len(message), guest.MaxFrame)]
		message = message[len(part):]
		if s.stream.Reserve(len(part)) != nil {
			return nil // the terminal has ended, which run reports
		}
		if err := s.awake(func() error { return s.stream.WriteReserved(part) }); err != nil {
			return err
		}
	}
	return nil
}

// awake wakes the sandbox and sends something to the terminal. That it has ended is reported
// by run.
func (s *terminalSocket) awake(send func() error) error {
	lease, err := s.api.cfg.Sandboxes.Rouse(s.ctx, s.sandbox.ID, sandbox.CauseTerminal)
	switch {
	case errors.Is(err, sandbox.ErrNotRunning):
		return nil
	case err != nil:
		return s.api.refuse(s.ctx, s.explain(err))
	}
	defer lease.Release()
	s.sendSize()
	send()
	return nil
}

// sendSize sends the size of the client's window if it has changed.
func (s *terminalSocket) sendSize() {
	if s.size != nil {
		s.stream.Resize(*s.size)
		s.size = nil
	}
}

// resize sends the size of the client's window, while the sandbox is asleep with the next
// message: a window changes its size also without a person.
func (s *terminalSocket) resize(size guest.TerminalSize) {
	s.size = &size
	if lease, err := s.api.cfg.Sandboxes.AcquireRunning(s.sandbox.ID); err == nil {
		defer lease.Release()
		s.sendSize()
	}
}

// parse returns what a text message asks for, and whether that wakes the sandbox.
func (s *terminalSocket) parse(message []byte) (action func() error, wakes bool, _ error) {
	var m struct {
		Type types.TerminalMessageType `json:"type"`
	}
	if err := json.Unmarshal(message, &m); err != nil {
		return nil, false, violation("a text message is not a JSON object: %v; send what is typed in binary messages", err)
	}
	schema := s.api.terminalMessages[m.Type]
	switch m.Type {
	case types.TerminalMessageTypeResize:
		var resize types.TerminalResize
		err := s.api.decodeJSON(schema, message, &resize)
		return func() error { s.resize(guest.TerminalSize{Cols: resize.Cols, Rows: resize.Rows}); return nil }, false, err
	case types.TerminalMessageTypeSignal:
		var signal types.TerminalSignal
		if err := s.api.decodeJSON(schema, message, &signal); err != nil {
			return nil, false, err
		}
		if guest.ParseSignal(signal.Signal) == 0 {
			return nil, false, violation("signal: %q is not a known signal; use a name such as SIGINT", clip(signal.Signal))
		}
		return func() error { return s.stream.Signal(signal.Signal) }, true, nil
	}
	return nil, false, violation("unknown type of message %q; use resize or signal", clip(string(m.Type)))
}
