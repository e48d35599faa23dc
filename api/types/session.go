package types

import "time"

// OpenSessionRequest opens a session.
type OpenSessionRequest struct {
	ID  string            `json:"id,omitempty" maxLength:"64" pattern:"^[A-Za-z0-9_][A-Za-z0-9._-]*$" patternDescription:"letters, digits, dots, underscores and hyphens, beginning with neither a dot nor a hyphen" doc:"Unique among the sessions of the sandbox whose shell runs; generated if missing" example:"dev"`
	Cwd string            `json:"cwd,omitempty" maxLength:"4096" doc:"Working directory at the start, an absolute path; default: the image's" example:"/srv/shop"`
	Env map[string]string `json:"env,omitempty" doc:"Variables to add to the sandbox's environment"`
}

// Session is a session of a sandbox as last known: a shell that runs one command after the
// other.
type Session struct {
	ID        string       `json:"id" doc:"Identifies the session among those of its sandbox" example:"dev"`
	PID       int          `json:"pid" doc:"Process id of the shell inside the sandbox"`
	Shell     string       `json:"shell" doc:"bash, or sh if the image has no bash" example:"bash"`
	Cwd       string       `json:"cwd" doc:"Working directory when the session was opened"`
	State     ProcessState `json:"state" doc:"running; exited: the shell has ended; or lost: the sandbox stopped"`
	ExitCode  *int         `json:"exit_code,omitempty" nullable:"false" doc:"Exit code of the shell; missing unless it exited"`
	Signal    string       `json:"signal,omitempty" doc:"Signal that ended the shell, such as SIGKILL"`
	Command   string       `json:"command,omitempty" doc:"Command during which the shell ended, shortened to 256 bytes" example:"exit 1"`
	Reason    StateReason  `json:"reason,omitempty" doc:"Why the sandbox stopped; missing unless the state is lost"`
	StartedAt time.Time    `json:"started_at" doc:"When the session was opened"`
	ExitedAt  time.Time    `json:"exited_at,omitzero" doc:"When the shell exited; missing while it runs"`
}

// SessionList is the sessions of a sandbox.
type SessionList struct {
	Sessions []Session `json:"sessions" nullable:"false" doc:"Sessions as last known: those whose shell runs, that were lost, and the last 16 whose shell exited"`
}
