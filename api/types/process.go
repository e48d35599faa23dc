package types

import "time"

// Process is a background process as last known.
type Process struct {
	ID           string       `json:"id" doc:"Identifies the process across its restarts and cold wakes"`
	PID          int          `json:"pid" doc:"Process id inside the sandbox, since the last start"`
	Name         string       `json:"name" doc:"Unique among running processes" example:"web"`
	Command      string       `json:"command,omitempty" doc:"Command line for /bin/sh -c; missing with argv" example:"npm run dev"`
	Argv         []string     `json:"argv,omitempty" nullable:"false" doc:"Program and arguments; missing with command"`
	Cwd          string       `json:"cwd,omitempty" doc:"Working directory; missing for the image's"`
	Restart      Restart      `json:"restart" doc:"When the process is started again"`
	State        ProcessState `json:"state" doc:"running, exited, or lost: the sandbox ended while the process ran, or has forgotten how it ended, so its exit code is unknown"`
	ExitCode     *int         `json:"exit_code,omitempty" nullable:"false" doc:"Exit code; missing unless the process exited"`
	Signal       string       `json:"signal,omitempty" doc:"Signal that ended the process, such as SIGKILL"`
	RestartCount int          `json:"restart_count" doc:"How many times the process was started again"`
	StartedAt    time.Time    `json:"started_at" doc:"When the process last started"`
	ExitedAt     time.Time    `json:"exited_at,omitzero" doc:"When the process exited; missing while it runs"`
	LogFile      string       `json:"log_file" doc:"Path of the process's log inside the sandbox"`
}

// Restart is when a background process is started again.
type Restart string

const (
	RestartNever  Restart = "never"
	RestartAlways Restart = "always"  // when it exits, and on a cold wake
	RestartOnWake Restart = "on_wake" // on a cold wake only
)

// Values returns all values.
func (Restart) Values() []Restart { return []Restart{RestartNever, RestartAlways, RestartOnWake} }

// ProcessState is the state of a background process.
type ProcessState string

const (
	ProcessStateRunning ProcessState = "running"
	ProcessStateExited  ProcessState = "exited"
	ProcessStateLost    ProcessState = "lost" // its sandbox ended while it ran, or has forgotten how it ended: no exit code
)

// Values returns all states.
func (ProcessState) Values() []ProcessState {
	return []ProcessState{ProcessStateRunning, ProcessStateExited, ProcessStateLost}
}

// ProcessList is the background processes of a sandbox.
type ProcessList struct {
	Processes []Process `json:"processes" nullable:"false" doc:"Processes as last known"`
}

// StartProcessRequest starts a process in the background.
type StartProcessRequest struct {
	Command
	Name    string  `json:"name,omitempty" maxLength:"64" pattern:"^[A-Za-z0-9_][A-Za-z0-9._-]*$" patternDescription:"letters, digits, dots, underscores and hyphens, beginning with neither a dot nor a hyphen" doc:"Unique among running processes; generated if missing" example:"web"`
	Restart Restart `json:"restart,omitempty" default:"never" doc:"When to start the process again. always: when it exits and on a cold wake; on_wake: on a cold wake only"`
	// Ready makes the response wait.
	Ready *ReadyCondition `json:"ready,omitempty" doc:"Respond once this holds. If it does not, the response is process_not_ready or process_exited, and the process stays as it is. With restart always or on_wake, each cold wake awaits it before it starts the next process, and previews of its port wait for it"`
}

// Log is the retained output of a process.
type Log struct {
	Logs      []LogChunk `json:"logs" nullable:"false" doc:"Output in the order in which it was written"`
	Truncated bool       `json:"truncated" doc:"Whether there was more output than fits into a response"`
}

// LogChunk is a part of the output of a process.
type LogChunk struct {
	Stream LogStream `json:"stream" doc:"Where the process wrote it"`
	Output
}

// LogStream is an output stream of a process.
type LogStream string

const (
	LogStreamStdout LogStream = "stdout"
	LogStreamStderr LogStream = "stderr"
)

// Values returns all streams.
func (LogStream) Values() []LogStream { return []LogStream{LogStreamStdout, LogStreamStderr} }

// LogsDropped is the data of the event dropped: a reader of a log was too slow.
type LogsDropped struct {
	Bytes int64 `json:"bytes" doc:"Number of bytes of output that were overwritten before they were sent"`
}
