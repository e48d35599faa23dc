package client

import (
	"context"
	"encoding/base64"
	"errors"
	"net/http"

	"github.com/doze-run/doze/api/types"
)

// ExecRequest is a command to run to its end.
type ExecRequest struct {
	types.Command
	Session string         // id of the session that runs it; empty: none
	Stdin   []byte         // at most MaxStdin; any size with ExecStream
	Timeout types.Duration // 0 means the node's default, NoTimeout none
}

// NoTimeout lets a command run for as long as its caller waits.
const NoTimeout types.Duration = -1

// MaxStdin limits the input in a request, in bytes: its JSON has at most 1 MiB, and base64
// makes four bytes of three.
const MaxStdin = 700 << 10

// maxText limits input that is sent as text, which is readable in traces.
const maxText = 64 << 10

var errNoResult = errors.New("the stream ended before the command; it is unknown how the command ended")

func (r ExecRequest) body() types.ExecRequest {
	b := types.ExecRequest{Command: r.Command, Session: r.Session, Timeout: timeoutOf(r.Timeout)}
	b.Stdin, b.StdinEncoding = types.Encode(r.Stdin)
	if len(r.Stdin) > maxText { // JSON may write each byte as six
		b.Stdin, b.StdinEncoding = base64.StdEncoding.EncodeToString(r.Stdin), types.EncodingBase64
	}
	return b
}

// timeoutOf returns the timeout in the API's form: nil for 0, and 0 for NoTimeout.
func timeoutOf(timeout types.Duration) *types.Duration {
	if timeout == 0 {
		return nil
	}
	return new(max(timeout, 0))
}

// Exec runs a command and returns its output when it has ended.
func (c *Client) Exec(ctx context.Context, idOrName string, req ExecRequest) (types.ExecResult, error) {
	return fetch[types.ExecResult](ctx, c, request{method: http.MethodPost, path: sandboxPath(idOrName, "exec"), body: req.body()})
}
