package client

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/coder/websocket"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
)

// stdinChunk limits one read of standard input.
const stdinChunk = 32 << 10

// ExecStreams are the standard streams of a command.
type ExecStreams struct {
	// Stdin is read while the command runs, as far as the command's pipe and the node's
	// buffer of 1 MiB accept it. nil is an empty input. ExecStream does not wait for a
	// Read that blocks when the command ends.
	Stdin io.Reader
	// Stdout and Stderr get the output while the command runs, from one goroutine; nil
	// discards it. While a Write blocks, the command blocks when it writes more.
	Stdout, Stderr io.Writer
}

// ExecStream runs a command with streamed input and output. When ctx ends before
// the command, the node kills its process tree.
func (c *Client) ExecStream(ctx context.Context, idOrName string, req ExecRequest, streams ExecStreams) (types.ExecExit, error) {
	if streams.Stdin == nil && len(req.Stdin) > 0 {
		streams.Stdin = bytes.NewReader(req.Stdin)
	}
	conn, err := c.openSocket(ctx, sandboxPath(idOrName, "exec"))
	if err != nil {
		return types.ExecExit{}, err
	}
	defer conn.CloseNow()
	e := &execSocket{socket: newSocket(ctx, conn), streams: streams, windowOpen: make(chan struct{}, 1)}
	var watching sync.WaitGroup
	defer watching.Wait()
	defer e.fail(nil)
	watching.Go(func() { // ended by fail
		e.watch(func() { e.send(types.Keepalive{Type: types.ExecMessageTypeKeepalive}) }, errNodeSilent)
	})
	err = e.send(types.ExecCommand{
		Type: types.ExecMessageTypeExec, Command: req.Command, Session: req.Session, Timeout: timeoutOf(req.Timeout), StreamStdin: streams.Stdin != nil,
	})
	if err != nil {
		return types.ExecExit{}, e.explain(err)
	}
	result, err := e.receive()
	if err != nil {
		return types.ExecExit{}, e.explain(err)
	}
	return result, nil
}

// execMessage is a text message of the node, of any type.
type execMessage struct {
	Type             types.ExecMessageType `json:"type"`
	StdinWindowBytes int                   `json:"stdin_window_bytes"`
	Bytes            int                   `json:"bytes"`
	Problem          *problem.Problem      `json:"problem"`
	types.ExecExit
}

// execSocket is the WebSocket of one command.
type execSocket struct {
	*socket
	streams ExecStreams

	mu         sync.Mutex
	window     int           // bytes of input that may be sent
	stdinEnded bool          // no more may be sent
	windowOpen chan struct{} // has an element after either has changed
}

// errNodeSilent means that the connection is open, but the node does not respond.
var errNodeSilent = errors.New("the node does not respond any more; it is unknown how the command ended")

// receive writes output until the command has ended.
func (e *execSocket) receive() (types.ExecExit, error) {
	var message bytes.Buffer
	message.Grow(64 << 10)
	for {
		kind, err := e.read(&message)
		if err != nil {
			return types.ExecExit{}, fmt.Errorf("%w (%w)", errNoResult, err)
		}
		buf := message.Bytes() // until the next message
		if kind == websocket.MessageBinary {
			if err := e.writeOutput(buf); err != nil {
				return types.ExecExit{}, err
			}
			continue
		}
		var m execMessage
		if err := json.Unmarshal(buf, &m); err != nil {
			return types.ExecExit{}, fmt.Errorf("unexpected message: %w", err)
		}
		switch m.Type {
		case types.ExecMessageTypeStart:
			if e.streams.Stdin != nil {
				e.updateWindow(m.StdinWindowBytes, false)
				go e.sendStdin() // ended by ctx, but for a Read that blocks
			}
		case types.ExecMessageTypeStdinAck:
			e.updateWindow(m.Bytes, false)
		case types.ExecMessageTypeStdinClosed:
			e.updateWindow(0, true)
		case types.ExecMessageTypeComplete:
			return m.ExecExit, nil
		case types.ExecMessageTypeError:
			return types.ExecExit{}, cmp.Or(m.Problem, &problem.Problem{})
		}
	}
}

// writeOutput writes a binary message to the writer of its stream.
func (e *execSocket) writeOutput(message []byte) error {
	var w io.Writer
	switch {
	case len(message) == 0:
		return nil
	case message[0] == types.StreamStdout:
		w = e.streams.Stdout
	case message[0] == types.StreamStderr:
		w = e.streams.Stderr
	}
	if w == nil {
		return nil
	}
	e.busy.Store(true)
	defer e.busy.Store(false)
	_, err := w.Write(message[1:])
	return err
}

// sendStdin sends input until it ends or the command reads no more of it.
func (e *execSocket) sendStdin() {
	buf := make([]byte, 1+stdinChunk)
	buf[0] = types.StreamStdin
	for {
		n := e.waitWindow()
		if n == 0 {
			return
		}
		n, readErr := e.streams.Stdin.Read(buf[1 : 1+min(n, stdinChunk)])
		if n > 0 {
			e.updateWindow(-n, false)
			if e.conn.Write(e.ctx, websocket.MessageBinary, buf[:1+n]) != nil {
				return // receive returns the cause
			}
		}
		switch {
		case readErr == io.EOF:
			e.send(types.ExecStdinEOF{Type: types.ExecMessageTypeStdinEOF})
			return
		case readErr != nil:
			e.fail(fmt.Errorf("read standard input: %w", readErr))
			return
		}
	}
}

// waitWindow waits until input may be sent, and returns how many bytes: 0 means that no
// more may be sent.
func (e *execSocket) waitWindow() int {
	for {
		e.mu.Lock()
		window, ended := e.window, e.stdinEnded
		e.mu.Unlock()
		switch {
		case ended:
			return 0
		case window > 0:
			return window
		}
		select {
		case <-e.ctx.Done():
			return 0
		case <-e.windowOpen:
		}
	}
}

// updateWindow changes the window by n bytes, or ends the input.
func (e *execSocket) updateWindow(n int, end bool) {
	e.mu.Lock()
	e.window += n
	e.stdinEnded = e.stdinEnded || end
	e.mu.Unlock()
	select {
	case e.windowOpen <- struct{}{}:
	default:
	}
}
