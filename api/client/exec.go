package client

import (
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
	Stdin   []byte            // at most MaxStdin
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
	StdoutEncoding string  `json:"stdout_encoding,omitempty"` // base64 when it is not UTF-8
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
	Stream        bool              `json:"stream,omitempty"`
}

func (r ExecRequest) body(stream bool) execBody {
	b := execBody{Command: r.Command, Argv: r.Argv, Cwd: r.Cwd, Env: r.Env, Stream: stream}
	if len(r.Stdin) > 0 {
		b.Stdin = string(r.Stdin)
		// JSON may write a byte as six; beyond maxText that could be too much.
		if !utf8.Valid(r.Stdin) || len(r.Stdin) > maxText {
			b.Stdin, b.StdinEncoding = base64.StdEncoding.EncodeToString(r.Stdin), "base64"
		}
	}
	if r.Timeout != 0 {
		timeout := max(r.Timeout, 0)
		b.Timeout = &timeout
	}
	return b
}

// Exec runs a command and returns its output when it has ended.
func (c *Client) Exec(ctx context.Context, idOrName string, req ExecRequest) (result ExecResult, err error) {
	_, err = c.call(ctx, request{method: http.MethodPost, path: sandboxPath(idOrName, "exec"), body: req.body(false)}, &result)
	return result, err
}

// ExecOutput is where the output of a streamed command goes, as it comes.
type ExecOutput struct {
	Stdout func([]byte) error
	Stderr func([]byte) error
}

// ExecStream runs a command and passes on its output while it runs. When ctx ends
// before the command, the node kills its process tree.
func (c *Client) ExecStream(ctx context.Context, idOrName string, req ExecRequest, out ExecOutput) (result ExecResult, err error) {
	stream, err := c.openStream(ctx, request{method: http.MethodPost, path: sandboxPath(idOrName, "exec"), body: req.body(true)})
	if err != nil {
		return ExecResult{}, err
	}
	defer stream.Close()
	complete := false
	err = stream.each(func(m message) error {
		write := out.Stdout
		switch m.event {
		case "stdout":
		case "stderr":
			write = out.Stderr
		case "complete":
			complete = true
			if err := m.decode(&result); err != nil {
				return err
			}
			return errEnd
		default:
			return nil
		}
		data, err := m.output()
		if err != nil {
			return err
		}
		return write(data)
	})
	if err == nil && !complete {
		err = errNoResult
	}
	return result, err
}
