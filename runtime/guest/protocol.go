// Package guest is the protocol between the node and doze-guest, the process
// that is PID 1 in every sandbox, and the node's client for it.
//
// The guest serves HTTP/1.1 on a Unix socket in a folder that is bind-mounted
// into its sandbox alone. Requests and responses are JSON, raw bytes (files), tar
// (archives) or frames (output of commands, see frame.go). The node does not trust the
// guest: every response is bounded in size and time, and no path of the host is ever
// derived from one.
package guest

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ProtocolVersion is raised whenever node and guest of different builds could
// misunderstand each other. The node refuses a guest with another version.
const ProtocolVersion = 5

// Where things are inside a sandbox. The node mounts BinaryPath read-only and
// RunDir writable; both folders belong to doze alone.
const (
	BinaryPath = "/.doze/bin/doze-guest"
	RunDir     = "/.doze/run"
	// SocketName is the guest's socket in RunDir. Only processes outside the
	// sandbox's PID namespace may use it: the guest checks SO_PEERCRED.
	SocketName = "guest.sock"
	// SandboxSocketName is the socket in RunDir for processes in the sandbox, which may
	// request a hold and nothing else.
	SandboxSocketName = "inside.sock"
	// LogDir holds one file per process, bounded in size, inside the sandbox.
	LogDir = "/var/log/doze"
)

// Limits that both ends enforce.
const (
	MaxJSON    = 4 << 20  // bytes of one JSON request or response
	MaxFrame   = 64 << 10 // bytes of payload in one frame
	MaxArgs    = 4096     // arguments of one command
	MaxEntries = 100_000  // entries in one directory listing
	MaxCAs     = 16       // certificates in one Trust.CA
	// MaxFileSize bounds the offsets of ranges that are written: far beyond the disk of a
	// sandbox, but a file may have holes.
	MaxFileSize = 1 << 40
	// StdinWindow bounds the standard input of one command that the guest buffers:
	// bytes that were sent and are not in the command's pipe yet. A client that is 50 ms
	// away still sends 20 MB/s.
	StdinWindow = 1 << 20
	// MaxHold is the longest duration of one hold.
	MaxHold = 24 * time.Hour
)

// Hello is the guest's response to RouteHello.
type Hello struct {
	Protocol int    `json:"protocol"`
	Version  string `json:"version"` // build of doze-guest
	PID      int    `json:"pid"`     // its own, inside the sandbox: 1
	// Trust is the TrustDigest of the CAs of the last Trust; empty before.
	Trust string `json:"trust,omitempty"`
}

// Trust makes the programs of a sandbox trust the node's CAs in addition to the public ones.
// It replaces the CAs of an earlier Trust; all others stay trusted.
type Trust struct {
	CA string `json:"ca"` // PEM of 1 to MaxCAs certificates
	// Roots is the PEM of the public CAs, for an image that has none; empty: none.
	// An image that has its own keeps those.
	Roots string `json:"roots,omitempty"`
}

// TrustResult is the guest's response to RouteTrust.
type TrustResult struct {
	// NeedsRoots: neither the image nor the Trust had public CAs, so that clients trust
	// only the node's. The node should send them.
	NeedsRoots bool `json:"needs_roots,omitempty"`
}

// TrustDigest returns the digest of a Trust.CA.
func TrustDigest(ca []byte) string {
	sum := sha256.Sum256(ca)
	return hex.EncodeToString(sum[:])
}

// Command is a command to run. Exactly one of Command and Argv is set.
type Command struct {
	Command string   `json:"command,omitempty"` // for /bin/sh -c
	Argv    []string `json:"argv,omitempty"`
	// Cwd is absolute; empty means the image's working directory.
	Cwd string `json:"cwd,omitempty"`
	// Env is added to the environment of the sandbox.
	Env map[string]string `json:"env,omitempty"`
	// Changes are changes to the environment of the sandbox: nil removes a variable. The
	// Client sets them, see SetChanges. Env prevails over them.
	Changes map[string]*string `json:"changes,omitempty"`
	// Defaults are variables that apply where neither Env nor the sandbox's own environment
	// has them. The Client sets them, see SetDefaults. They stay the same when the guest
	// restarts a process.
	Defaults map[string]string `json:"defaults,omitempty"`
}

// ExecRequest runs one command to its end.
type ExecRequest struct {
	Command
	// Session is the id of the session that executes the command, which has neither Cwd nor
	// Env then; empty: none.
	Session string `json:"session,omitempty"`
	// Stdin is the whole standard input. With StreamStdin it is sent while the
	// command runs instead, see ExecStream.WriteStdin. With neither it is empty.
	Stdin       []byte `json:"stdin,omitempty"`
	StreamStdin bool   `json:"stream_stdin,omitempty"`
	// Timeout in nanoseconds ends the whole process tree; 0 means none. In a session it includes
	// the time for which the command waits for others, and interrupts the command: the session
	// goes on.
	Timeout time.Duration `json:"timeout,omitempty"`
}

// ExecResult is how a command ended.
type ExecResult struct {
	// ExitCode is the command's own, or 128+n when signal n ended it.
	ExitCode int `json:"exit_code"`
	// Signal is the name of the signal that ended it, such as "SIGKILL".
	Signal   string        `json:"signal,omitempty"`
	TimedOut bool          `json:"timed_out,omitempty"`
	Duration time.Duration `json:"duration"`
}

// Restart is whether a process that ended is started again.
type Restart string

const (
	RestartNever  Restart = "never"   // stays ended; the default
	RestartAlways Restart = "always"  // started again when it exits, and on a cold wake
	RestartOnWake Restart = "on_wake" // started again on a cold wake only
)

// Restarts are the values of Restart.
var Restarts = []Restart{RestartNever, RestartAlways, RestartOnWake}

// ProcessSpec is a process that runs in the background.
type ProcessSpec struct {
	Command
	// ID names the process permanently; see NewProcessID. If it is empty, the guest
	// generates one.
	ID string `json:"id,omitempty"`
	// Name is unique among the running processes of a sandbox. If it is empty, the guest
	// generates one.
	Name    string  `json:"name,omitempty"`
	Restart Restart `json:"restart,omitempty"`
	// Ready is what the node awaits after it has started the process again, nil for nothing.
	// The guest does not receive it.
	Ready *Wait `json:"ready,omitempty"`
}

// ProcessState of a background process.
type ProcessState string

const (
	ProcessRunning ProcessState = "running"
	ProcessExited  ProcessState = "exited"
	// ProcessLost: its sandbox ended while it ran, or its guest has forgotten how it ended. It has no
	// exit code.
	ProcessLost ProcessState = "lost"
)

// Process is a background process as last seen.
type Process struct {
	ID      string       `json:"id"`  // of this process alone, over its restarts and cold wakes
	PID     int          `json:"pid"` // inside the sandbox, of its latest life
	Name    string       `json:"name"`
	Command string       `json:"command,omitempty"`
	Argv    []string     `json:"argv,omitempty"`
	Cwd     string       `json:"cwd,omitempty"`
	Restart Restart      `json:"restart"`
	State   ProcessState `json:"state"`
	// ExitCode is nil until the process was reaped; it is never invented.
	ExitCode     *int       `json:"exit_code,omitempty"`
	Signal       string     `json:"signal,omitempty"`
	RestartCount int        `json:"restart_count"`
	StartedAt    time.Time  `json:"started_at"`
	ExitedAt     *time.Time `json:"exited_at,omitempty"`
	LogFile      string     `json:"log_file"` // path inside the sandbox
}

// Ending describes how a process ended, such as "exited with code 1".
func (p Process) Ending() string {
	switch {
	case p.State == ProcessExited && p.Signal != "":
		return "was ended by " + p.Signal
	case p.State == ProcessExited && p.ExitCode != nil:
		return fmt.Sprintf("exited with code %d", *p.ExitCode)
	}
	return "is " + string(p.State)
}

// ParseSignal accepts "SIGHUP" and "HUP". It returns 0 for an unknown signal.
func ParseSignal(name string) syscall.Signal {
	return unix.SignalNum("SIG" + strings.TrimPrefix(strings.ToUpper(name), "SIG"))
}

// FileInfo is one entry of a listing.
type FileInfo struct {
	Name       string    `json:"name"`
	Path       string    `json:"path"`
	Type       string    `json:"type"` // file, directory, symlink, other
	Size       int64     `json:"size"`
	Mode       string    `json:"mode"` // octal permission bits, such as "0644"
	ModifiedAt time.Time `json:"modified_at"`
	Target     string    `json:"target,omitempty"` // of a symlink
	UID        uint32    `json:"uid"`              // in the sandbox
	GID        uint32    `json:"gid"`
	// ETag of a regular file after Stat and writes. It is weak if the file was changing.
	ETag   string `json:"etag,omitempty"`
	SHA256 string `json:"sha256,omitempty"` // of the content, in hexadecimal digits, if requested
}

// ListOptions for a directory listing.
type ListOptions struct {
	Recursive bool
	Hidden    bool // include names that begin with a dot
}

// EventType is the type of an Event.
type EventType string

const (
	EventProcess   EventType = "process"   // a process started, exited or was restarted
	EventTerminal  EventType = "terminal"  // a terminal was opened or closed, or its program has ended
	EventTerminals EventType = "terminals" // the ids of all terminals, for a reader that may have missed events
	EventSession   EventType = "session"   // a session was opened or closed, or its shell has ended
	EventSessions  EventType = "sessions"  // the ids of all sessions, for a reader that may have missed events
	EventPorts     EventType = "ports"     // processes listen on other ports than before
	EventHold      EventType = "hold"      // a process in the sandbox requests a hold
)

// Event is one line of the guest's event stream, newline-delimited JSON. On
// connection the guest first sends an event for every process, terminal and session that it knows,
// and one with the ports. Readers after the first one also get EventTerminals and EventSessions:
// the guest drops a reader that is too slow, which then learns of those that were closed meanwhile.
type Event struct {
	Type      EventType     `json:"type"`
	Process   *Process      `json:"process,omitempty"`
	Terminal  *Terminal     `json:"terminal,omitempty"`
	Terminals []string      `json:"terminals,omitempty"`
	Session   *Session      `json:"session,omitempty"`
	Sessions  []string      `json:"sessions,omitempty"`
	Ports     []Listening   `json:"ports,omitempty"` // all of them, in order
	Hold      time.Duration `json:"hold,omitempty"`  // from now
}

// Error is the body of a refusal or failure: JSON, with a status of 400 (bad request), 403,
// 404, 409, 410, 412, 413, 429 (on SandboxSocketName), 500 or 507 (no space left).
type Error struct {
	Status  int    `json:"-"`
	Code    string `json:"code"`
	Message string `json:"message"`
	ETag    string `json:"etag,omitempty"` // of the present file, with CodeChanged
}

func (e *Error) Error() string { return e.Message }

// Codes of Error.
const (
	CodeInvalid       = "invalid_request"
	CodeNotFound      = "path_not_found"
	CodeNoProcess     = "process_not_found"
	CodeNoTerminal    = "terminal_not_found"
	CodeNoSession     = "session_not_found"
	CodeSessionLost   = "session_lost"
	CodeSessionBusy   = "session_busy"
	CodeExists        = "already_exists"
	CodeNotEmpty      = "directory_not_empty"
	CodeTooMany       = "too_many_processes"
	CodeNotDirectory  = "not_a_directory"
	CodeIsDirectory   = "is_a_directory"
	CodeNotPermitted  = "not_permitted"
	CodeNoSpace       = "no_space_left"
	CodeNoCommand     = "command_not_found"
	CodeNotExecutable = "command_not_executable"
	CodeNoShell       = "no_shell"
	CodeUnsafeArchive = "unsafe_archive"
	CodeTooLarge      = "too_large"
	CodePortNotReady  = "port_not_ready"
	CodeWatchLimit    = "too_many_watches"
	CodeChanged       = "changed_file"
	CodeDigest        = "wrong_digest"
	CodeInternal      = "guest_error"
)
