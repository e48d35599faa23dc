package client

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"net/http"
	"unicode/utf8"
)

// ExecRequest is a command to run to its end.
type ExecRequest struct {
	Command string            // by /bin/sh -c; either this or Argv
	Argv    []string          //
	Cwd     string            // absolute
	Env     map[string]string // added to the sandbox's
	Stdin   []byte            // at most MaxStdin; any size with ExecStream
	Timeout Duration          // 0 means the node's default, NoTimeout none
}

// NoTimeout lets a command run for as long as its caller waits.
const NoTimeout Duration = -1

// MaxStdin is how much a node takes with the request: its JSON may have 1 MiB,
// and base64 makes three bytes four.
const MaxStdin = 700 << 10

// maxText is up to where input is sent as text, for the sake of those who read
// along.
const maxText = 64 << 10

// ExecResult is how a command ended.
type ExecResult struct {
	Stdout         string  `json:"stdout"`
	StdoutEncoding string  `json:"stdout_encoding,omitempty"` // base64 when it is not text
	Stderr         string  `json:"stderr"`
	StderrEncoding string  `json:"stderr_encoding,omitempty"`
	Truncated      bool    `json:"truncated"`
	ExitCode       int     `json:"exit_code"` // 128+n when signal n ended it
	Signal         string  `json:"signal,omitempty"`
	TimedOut       bool    `json:"timed_out"`
	DurationMS     float64 `json:"duration_ms"`
}

// errNoResult: nobody knows how the command ended.
var errNoResult = errors.New("the stream ended before the command did; nobody knows how it ended")

type execBody struct {
	Command       string            `json:"command,omitempty"`
	Argv          []string          `json:"argv,omitempty"`
	Cwd           string            `json:"cwd,omitempty"`
	Env           map[string]string `json:"env,omitempty"`
	Stdin         string            `json:"stdin,omitempty"`
	StdinEncoding string            `json:"stdin_encoding,omitempty"`
	Timeout       *Duration         `json:"timeout,omitempty"`
}

func (r ExecRequest) body() execBody {
	b := execBody{Command: r.Command, Argv: r.Argv, Cwd: r.Cwd, Env: r.Env}
	if len(r.Stdin) > 0 {
		b.Stdin = string(r.Stdin)
		// JSON may write a byte as six; beyond maxText that could be too much.
		if !utf8.Valid(r.Stdin) || len(r.Stdin) > maxText {
			b.Stdin, b.StdinEncoding = base64.StdEncoding.EncodeToString(r.Stdin), "base64"
		}
	}
	b.Timeout = r.timeout()
	return b
}

func (r ExecRequest) timeout() *Duration {
	if r.Timeout == 0 {
		return nil
	}
	timeout := max(r.Timeout, 0)
	return &timeout
}

// Exec runs a command and returns its output when it has ended.
func (c *Client) Exec(ctx context.Context, idOrName string, req ExecRequest) (result ExecResult, err error) {
	_, err = c.call(ctx, request{method: http.MethodPost, path: sandboxPath(idOrName, "exec"), body: req.body()}, &result)
	return result, err
}

// EncodeOutput returns output in the API's form: as it is when it is UTF-8 without
// NUL bytes, else in base64.
func EncodeOutput(b []byte) (text, encoding string) {
	if bytes.IndexByte(b, 0) < 0 && utf8.Valid(b) {
		return string(b), ""
	}
	return base64.StdEncoding.EncodeToString(b), "base64"
}
