package types

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"unicode/utf8"

	"github.com/doze-run/doze/problem"
)

// Command is a command to run: exactly one of Command and Argv is set.
type Command struct {
	Command string            `json:"command,omitempty" doc:"Command line for /bin/sh -c; use either this or argv" example:"ls -l"`
	Argv    []string          `json:"argv,omitempty" nullable:"false" maxItems:"4096" doc:"Program and arguments, run without a shell; use either this or command"`
	Cwd     string            `json:"cwd,omitempty" maxLength:"4096" doc:"Working directory, an absolute path; default: the image's" example:"/root"`
	Env     map[string]string `json:"env,omitempty" doc:"Variables to add to the sandbox's environment"`
}

// Encoding of bytes in a JSON string.
type Encoding string

const (
	EncodingUTF8   Encoding = "utf-8"
	EncodingBase64 Encoding = "base64"
)

// Values returns all encodings.
func (Encoding) Values() []Encoding { return []Encoding{EncodingUTF8, EncodingBase64} }

// ExecRequest runs a command to its end.
type ExecRequest struct {
	Command
	Session        string    `json:"session,omitempty" maxLength:"64" doc:"Id of the session that runs the command; it has neither cwd nor env then. Commands of a session run one after the other" example:"dev"`
	Stdin          string    `json:"stdin,omitempty" doc:"Standard input"`
	StdinEncoding  Encoding  `json:"stdin_encoding,omitempty" default:"utf-8" doc:"Encoding of stdin"`
	Timeout        *Duration `json:"timeout,omitempty" doc:"Time after which the whole process tree is killed. In a session it includes the time for which the command waits for others, and interrupts the command: SIGINT, and SIGKILL after 2 s. At most 24h; 0s: none; default: 10m without stream, none with it"`
	Stream         bool      `json:"stream,omitempty" doc:"Respond with server-sent events while the command runs"`
	MaxOutputBytes int       `json:"max_output_bytes,omitempty" minimum:"1" maximum:"10485760" default:"1048576" doc:"Maximum number of bytes to return of stdout and of stderr; ignored with stream"`
}

// ExecExit is how a command ended.
type ExecExit struct {
	ExitCode   int     `json:"exit_code" doc:"Exit code; 128+n if signal n ended the command"`
	Signal     string  `json:"signal,omitempty" doc:"Signal that ended the command, such as SIGKILL"`
	TimedOut   bool    `json:"timed_out" doc:"Whether the command was killed because of timeout"`
	DurationMS float64 `json:"duration_ms" doc:"Run time in milliseconds"`
}

// ExecResult is how a command ended, with its output.
type ExecResult struct {
	Stdout         string   `json:"stdout" doc:"Standard output"`
	StdoutEncoding Encoding `json:"stdout_encoding,omitempty" enum:"base64" doc:"base64 if stdout is not UTF-8 or has NUL bytes; missing otherwise"`
	Stderr         string   `json:"stderr" doc:"Standard error"`
	StderrEncoding Encoding `json:"stderr_encoding,omitempty" enum:"base64" doc:"base64 if stderr is not UTF-8 or has NUL bytes; missing otherwise"`
	Truncated      bool     `json:"truncated" doc:"Whether there was more output than max_output_bytes"`
	ExecExit
}

// ExecStart is the data of the event start.
type ExecStart struct {
	PID int `json:"pid" doc:"Process id inside the sandbox"`
}

// Encode returns bytes as text: unchanged if they are UTF-8 without NUL bytes, which take
// six bytes each in JSON, and in base64 otherwise.
func Encode(b []byte) (text string, encoding Encoding) {
	if bytes.IndexByte(b, 0) < 0 && utf8.Valid(b) {
		return string(b), ""
	}
	return base64.StdEncoding.EncodeToString(b), EncodingBase64
}

// Decode is the inverse of Encode.
func (e Encoding) Decode(text string) ([]byte, error) {
	switch e {
	case "", EncodingUTF8:
		return []byte(text), nil
	case EncodingBase64:
		return base64.StdEncoding.DecodeString(text)
	}
	return nil, fmt.Errorf("unknown encoding %.40q", string(e))
}

// NewOutput encodes output.
func NewOutput(b []byte) Output {
	data, encoding := Encode(b)
	return Output{data, encoding}
}

// Output is the data of the events stdout and stderr.
type Output struct {
	Data     string   `json:"data" doc:"Output"`
	Encoding Encoding `json:"encoding,omitempty" enum:"base64" doc:"base64 if data is not UTF-8 or has NUL bytes; missing otherwise"`
}

// ExecComplete is the data of the event complete, the last one.
type ExecComplete struct {
	ExecExit
}

// First bytes of the binary messages of the exec WebSocket: the stream that the other
// bytes belong to.
const (
	StreamStdin  byte = 0 // from the client
	StreamStdout byte = 1 // from the node
	StreamStderr byte = 2 // from the node
)

// ExecMessageType is the type of a text message of the exec WebSocket.
type ExecMessageType string

const (
	// Of the client.
	ExecMessageTypeExec      ExecMessageType = "exec"      // ExecCommand
	ExecMessageTypeStdinEOF  ExecMessageType = "stdin_eof" // ExecStdinEOF
	ExecMessageTypeKeepalive ExecMessageType = "keepalive" // Keepalive

	// Of the node.
	ExecMessageTypeStart       ExecMessageType = "start"        // ExecStarted
	ExecMessageTypeStdinAck    ExecMessageType = "stdin_ack"    // ExecStdinAck
	ExecMessageTypeStdinClosed ExecMessageType = "stdin_closed" // ExecStdinClosed
	ExecMessageTypeComplete    ExecMessageType = "complete"     // ExecCompleted
	ExecMessageTypeError       ExecMessageType = "error"        // ExecFailed
)

// Values returns all types of messages.
func (ExecMessageType) Values() []ExecMessageType {
	return []ExecMessageType{
		ExecMessageTypeExec, ExecMessageTypeStdinEOF, ExecMessageTypeKeepalive,
		ExecMessageTypeStart, ExecMessageTypeStdinAck, ExecMessageTypeStdinClosed, ExecMessageTypeComplete, ExecMessageTypeError,
	}
}

// ExecCommand is the first message of a client: the command to run.
type ExecCommand struct {
	Type ExecMessageType `json:"type" enum:"exec" doc:"Type of the message"`
	Command
	Session     string    `json:"session,omitempty" maxLength:"64" doc:"Id of the session that runs the command; it has neither cwd nor env then" example:"dev"`
	Timeout     *Duration `json:"timeout,omitempty" doc:"Time after which the whole process tree is killed, or the command of a session is interrupted. At most 24h; default: none"`
	StreamStdin bool      `json:"stream_stdin,omitempty" doc:"Whether standard input follows in binary messages; otherwise it is empty"`
}

// ExecStdinEOF is a message of a client: the end of the input.
type ExecStdinEOF struct {
	Type ExecMessageType `json:"type" enum:"stdin_eof" doc:"Type of the message"`
}

// Keepalive is a message of a client that is not reading and so cannot respond to pings.
type Keepalive struct {
	Type ExecMessageType `json:"type" enum:"keepalive" doc:"Type of the message"`
}

// ExecStarted is a message of the node: the command has started.
type ExecStarted struct {
	Type             ExecMessageType `json:"type" enum:"start" doc:"Type of the message"`
	PID              int             `json:"pid" doc:"Process id inside the sandbox"`
	StdinWindowBytes int             `json:"stdin_window_bytes,omitempty" doc:"Maximum number of bytes of input that may be sent without being acknowledged by stdin_ack; only with stream_stdin"`
}

// ExecStdinAck is a message of the node: it acknowledges input.
type ExecStdinAck struct {
	Type  ExecMessageType `json:"type" enum:"stdin_ack" doc:"Type of the message"`
	Bytes int             `json:"bytes" doc:"Number of bytes that were written to the command since the last acknowledgement"`
}

// ExecStdinClosed is a message of the node: the command reads no more input. Further
// input is discarded.
type ExecStdinClosed struct {
	Type ExecMessageType `json:"type" enum:"stdin_closed" doc:"Type of the message"`
}

// ExecCompleted is the node's last message: how the command ended.
type ExecCompleted struct {
	Type ExecMessageType `json:"type" enum:"complete" doc:"Type of the message"`
	ExecExit
}

// ExecFailed is the node's last message: why the command did not start, or why it is
// unknown how it ended.
type ExecFailed struct {
	Type    ExecMessageType  `json:"type" enum:"error" doc:"Type of the message"`
	Problem *problem.Problem `json:"problem" doc:"The error"`
}
