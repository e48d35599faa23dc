package client

import (
	"context"
	"errors"
	"net/http"
	"net/url"

	"github.com/doze-run/doze/api/types"
)

// OpenContext wakes the sandbox and opens a context: an interpreter that executes code and
// retains its state. The contexts "python", "javascript" and "typescript" need not be opened:
// their first code does.
func (c *Client) OpenContext(ctx context.Context, idOrName string, req types.OpenContextRequest) (types.Context, error) {
	return fetch[types.Context](ctx, c, request{method: http.MethodPost, path: sandboxPath(idOrName, "contexts"), body: req})
}

// Contexts returns the contexts as last known. It never wakes the sandbox.
func (c *Client) Contexts(ctx context.Context, idOrName string) ([]types.Context, error) {
	page, err := fetch[types.ContextList](ctx, c, request{path: sandboxPath(idOrName, "contexts")})
	return page.Contexts, err
}

// Context returns a context as last known. It never wakes the sandbox.
func (c *Client) Context(ctx context.Context, idOrName, id string) (types.Context, error) {
	return fetch[types.Context](ctx, c, request{path: contextPath(idOrName, id)})
}

// InterruptContext interrupts the code that the context executes, if any.
func (c *Client) InterruptContext(ctx context.Context, idOrName, id string) (types.Context, error) {
	return fetch[types.Context](ctx, c, request{method: http.MethodPost, path: contextPath(idOrName, id, "interrupt")})
}

// RestartContext starts the interpreter of a context again, without its state.
func (c *Client) RestartContext(ctx context.Context, idOrName, id string) (types.Context, error) {
	return fetch[types.Context](ctx, c, request{method: http.MethodPost, path: contextPath(idOrName, id, "restart")})
}

// CloseContext ends the interpreter of a context.
func (c *Client) CloseContext(ctx context.Context, idOrName, id string) (types.Context, error) {
	return fetch[types.Context](ctx, c, request{method: http.MethodDelete, path: contextPath(idOrName, id)})
}

func contextPath(idOrName, id string, more ...string) string {
	return sandboxPath(idOrName, append([]string{"contexts", url.PathEscape(id)}, more...)...)
}

// RunCodeRequest is code to execute in a context.
type RunCodeRequest struct {
	Context string // id; "python", "javascript" and "typescript" are the default contexts
	Code    string
	Timeout types.Duration // 0 means the node's default, NoTimeout none
	// MaxOutputBytes is the limit of the output; 0 means the node's default.
	MaxOutputBytes int
}

func (r RunCodeRequest) body(stream bool) types.RunCodeRequest {
	return types.RunCodeRequest{Code: r.Code, Timeout: timeoutOf(r.Timeout), Stream: stream, MaxOutputBytes: r.MaxOutputBytes}
}

// RunCode executes code and returns its output when it has ended. An exception is a part of
// the result. When ctx ends before the code, the node interrupts it.
func (c *Client) RunCode(ctx context.Context, idOrName string, req RunCodeRequest) (types.CodeResult, error) {
	return fetch[types.CodeResult](ctx, c, request{method: http.MethodPost, path: contextPath(idOrName, req.Context, "run"), body: req.body(false)})
}

// CodeEvents get the output of code while it is executed, from one goroutine. Nil functions
// ignore it. An error of a function ends the call, and the node interrupts the code.
type CodeEvents struct {
	Stdout, Stderr func([]byte) error
	Result         func(types.CodeValue) error
	Clear          func(types.CodeClear) error
	Error          func(types.CodeError) error
}

// RunCodeStream executes code and reports its output while it is executed.
func (c *Client) RunCodeStream(ctx context.Context, idOrName string, req RunCodeRequest, events CodeEvents) (types.CodeEnd, error) {
	var end *types.CodeComplete
	r := request{method: http.MethodPost, path: contextPath(idOrName, req.Context, "run"), body: req.body(true)}
	err := c.stream(ctx, r, func(m message) error {
		switch m.event {
		case "stdout":
			return yieldOutput(m, events.Stdout)
		case "stderr":
			return yieldOutput(m, events.Stderr)
		case "result":
			return yieldIf(m, events.Result)
		case "clear":
			return yieldIf(m, events.Clear)
		case "error":
			return yieldIf(m, events.Error)
		case "complete":
			return yieldData(m, func(data types.CodeComplete) error {
				end = &data
				return nil
			})
		}
		return nil // of a later version
	})
	switch {
	case err != nil:
		return types.CodeEnd{}, err
	case end == nil:
		return types.CodeEnd{}, errors.New("the stream ended before the code; it is unknown how the code ended")
	}
	return end.CodeEnd, nil
}

func yieldIf[T any](m message, yield func(T) error) error {
	if yield == nil {
		return nil
	}
	return yieldData(m, yield)
}

func yieldOutput(m message, yield func([]byte) error) error {
	return yieldIf(m, func(o types.Output) error {
		if yield == nil {
			return nil
		}
		b, err := o.Encoding.Decode(o.Data)
		if err != nil {
			return err
		}
		return yield(b)
	})
}
