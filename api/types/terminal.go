package types

import (
	"time"

	"github.com/doze-run/doze/problem"
)

// Terminal is a terminal of a sandbox as last known.
type Terminal struct {
	ID        string       `json:"id" doc:"Identifies the terminal among those of its sandbox" example:"main"`
	PID       int          `json:"pid" doc:"Process id of the program inside the sandbox"`
	Command   string       `json:"command" doc:"Program with its arguments, shortened to 256 bytes" example:"bash"`
	Cols      uint16       `json:"cols" doc:"Width in characters, as last known"`
	Rows      uint16       `json:"rows" doc:"Height in characters, as last known"`
	State     ProcessState `json:"state" doc:"running, exited, or lost: the sandbox stopped while the program ran"`
	Reason    StateReason  `json:"reason,omitempty" doc:"Why the sandbox has stopped since, so that the terminal and its output are gone; missing while it can be joined"`
	ExitCode  *int         `json:"exit_code,omitempty" nullable:"false" doc:"Exit code; missing unless the program exited"`
	Signal    string       `json:"signal,omitempty" doc:"Signal that ended the program, such as SIGKILL"`
	StartedAt time.Time    `json:"started_at" doc:"When the program started"`
	ExitedAt  time.Time    `json:"exited_at,omitzero" doc:"When the program exited; missing while it runs"`
}

// TerminalList is the terminals of a sandbox.
type TerminalList struct {
	Terminals []Terminal `json:"terminals" nullable:"false" doc:"Terminals as last known: those that run, and the last ones that have ended"`
}

// SignTerminalURLRequest describes the signed URL to make.
type SignTerminalURLRequest struct {
	ExpiresIn *Duration `json:"expires_in,omitempty" doc:"Time until the URL expires, from 1s to 168h; default: 1h" example:"12h"`
	Origin    string    `json:"origin,omitempty" maxLength:"255" doc:"Origin of the web pages that may use the URL; default: the API's own" example:"https://shop.example.com"`
}

// TerminalMessageType is the type of a text message of the terminal WebSocket.
type TerminalMessageType string

const (
	// Of the client.
	TerminalMessageTypeResize TerminalMessageType = "resize" // TerminalResize
	TerminalMessageTypeSignal TerminalMessageType = "signal" // TerminalSignal

	// Of the node.
	TerminalMessageTypeTruncated TerminalMessageType = "truncated" // TerminalTruncated
	TerminalMessageTypeReady     TerminalMessageType = "ready"     // TerminalReady
	TerminalMessageTypeExit      TerminalMessageType = "exit"      // TerminalExit
	TerminalMessageTypeError     TerminalMessageType = "error"     // TerminalFailed
)

// Values returns all types of messages.
func (TerminalMessageType) Values() []TerminalMessageType {
	return []TerminalMessageType{
		TerminalMessageTypeResize, TerminalMessageTypeSignal,
		TerminalMessageTypeTruncated, TerminalMessageTypeReady, TerminalMessageTypeExit, TerminalMessageTypeError,
	}
}

// TerminalResize is a message of a client: the size of its window.
type TerminalResize struct {
	Type TerminalMessageType `json:"type" enum:"resize" doc:"Type of the message"`
	Cols uint16              `json:"cols" minimum:"1" maximum:"1000" doc:"Width in characters"`
	Rows uint16              `json:"rows" minimum:"1" maximum:"1000" doc:"Height in characters"`
}

// TerminalSignal is a message of a client: a signal for the program in the foreground.
type TerminalSignal struct {
	Type   TerminalMessageType `json:"type" enum:"signal" doc:"Type of the message"`
	Signal string              `json:"signal" maxLength:"16" doc:"Name of the signal" example:"SIGINT"`
}

// TerminalTruncated is a message of the node: output is missing before what follows, because
// the node no longer has it, or because the client read too slowly.
type TerminalTruncated struct {
	Type   TerminalMessageType `json:"type" enum:"truncated" doc:"Type of the message"`
	Cursor int64               `json:"cursor" doc:"Position of the output that follows"`
}

// TerminalReady is a message of the node: the output from before the connection is
// complete, and the terminal accepts input.
type TerminalReady struct {
	Type   TerminalMessageType `json:"type" enum:"ready" doc:"Type of the message"`
	ID     string              `json:"id" doc:"Id of the terminal"`
	Cursor int64               `json:"cursor" doc:"Position in the output. Adding the length of each binary message that follows gives the cursor to resume with"`
}

// TerminalExit is the last message of the node: the program has ended.
type TerminalExit struct {
	Type   TerminalMessageType `json:"type" enum:"exit" doc:"Type of the message"`
	Code   int                 `json:"code" doc:"Exit code; 128+n if signal n ended the program"`
	Signal string              `json:"signal,omitempty" doc:"Signal that ended the program, such as SIGKILL"`
}

// TerminalFailed is the last message of the node: the connection failed.
type TerminalFailed struct {
	Type    TerminalMessageType `json:"type" enum:"error" doc:"Type of the message"`
	Message string              `json:"message" doc:"Description of the failure, for people"`
	Problem *problem.Problem    `json:"problem" doc:"The failure"`
}
