package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
)

const (
	// maxSocketMessage limits a message of the node, which sends at most 64 KiB of
	// output in one.
	maxSocketMessage = 1 << 20
	// stdinChunk limits one read of standard input.
	stdinChunk = 32 << 10
	// keepaliveInterval is shorter than the minute after which a node disconnects a silent
	// client, and than the idle timeouts of proxies.
	keepaliveInterval = 15 * time.Second
)

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
	conn.SetReadLimit(maxSocketMessage)
	e := &execSocket{conn: conn, streams: streams, windowOpen: make(chan struct{}, 1)}
	var cancel context.CancelCauseFunc
	e.ctx, cancel = context.WithCancelCause(ctx)
	e.fail = cancel
	var watching sync.WaitGroup
	defer watching.Wait()
	defer cancel(nil)
	watching.Go(e.watch) // ended by cancel
	err = e.send(types.ExecCommand{
		Type: types.ExecMessageTypeExec, Command: req.Command, Timeout: req.timeout(), StreamStdin: streams.Stdin != nil,
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

// openSocket connects to a route that is a WebSocket.
func (c *Client) openSocket(ctx context.Context, path string) (*websocket.Conn, error) {
	header := http.Header{}
	c.identify(header)
	conn, resp, err := websocket.Dial(ctx, c.base+path, &websocket.DialOptions{HTTPClient: c.websocket, HTTPHeader: header})
	switch {
	case err == nil:
		return conn, nil
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case resp != nil:
		return nil, readError(resp)
	}
	return nil, c.unreachable(err)
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
	conn    *websocket.Conn
	streams ExecStreams
	ctx     context.Context
	fail    context.CancelCauseFunc

	mu         sync.Mutex
	window     int           // bytes of input that may be sent
	stdinEnded bool          // no more may be sent
	windowOpen chan struct{} // has an element after either has changed

	received atomic.Int64 // messages
	writing  atomic.Bool  // to Stdout or Stderr, so that no message is read
}

// errNodeSilent means that the connection is open, but the node does not respond.
var errNodeSilent = errors.New("the node does not respond any more; it is unknown how the command ended")

// explain returns why the exec has failed.
func (e *execSocket) explain(err error) error {
	if cause := context.Cause(e.ctx); cause != nil {
		return cause
	}
	return err
}

func (e *execSocket) send(message any) error {
	b, err := json.Marshal(message)
	if err != nil {
		return err
	}
	return e.conn.Write(e.ctx, websocket.MessageText, b)
}

// receive writes output until the command has ended.
func (e *execSocket) receive() (types.ExecExit, error) {
	var message bytes.Buffer
	message.Grow(64 << 10)
	for {
		kind, r, err := e.conn.Reader(e.ctx)
		if err == nil {
			message.Reset()
			_, err = message.ReadFrom(r)
		}
		if err != nil {
			return types.ExecExit{}, fmt.Errorf("%w (%w)", errNoResult, err)
		}
		e.received.Add(1)
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
			if m.Problem == nil {
				m.Problem = &problem.Problem{}
			}
			return types.ExecExit{}, m.Problem
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
	e.writing.Store(true)
	defer e.writing.Store(false)
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

// watch keeps the connection alive, and detects that the node does not respond. While
// output is written, no message is read, not even the pong of a ping.
func (e *execSocket) watch() {
	ticker := time.NewTicker(keepaliveInterval)
	defer ticker.Stop()
	for {
		select {
		case <-e.ctx.Done():
			return
		case <-ticker.C:
		}
		if e.writing.Load() {
			e.send(types.Keepalive{Type: types.ExecMessageTypeKeepalive})
			continue
		}
		before := e.received.Load()
		ctx, cancel := context.WithTimeout(e.ctx, keepaliveInterval)
		err := e.conn.Ping(ctx)
		cancel()
		if err != nil && !e.writing.Load() && e.received.Load() == before {
			e.fail(errNodeSilent)
		}
	}
}
