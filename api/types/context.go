package types

import "time"

// Language of a context.
type Language string

const (
	LanguagePython     Language = "python"
	LanguageJavaScript Language = "javascript"
	LanguageTypeScript Language = "typescript"
)

// Values returns all languages.
func (Language) Values() []Language {
	return []Language{LanguagePython, LanguageJavaScript, LanguageTypeScript}
}

// OpenContextRequest opens a context.
type OpenContextRequest struct {
	ID       string            `json:"id,omitempty" maxLength:"64" pattern:"^[A-Za-z0-9_][A-Za-z0-9._-]*$" patternDescription:"letters, digits, dots, underscores and hyphens, beginning with neither a dot nor a hyphen" doc:"Unique among the contexts of the sandbox; generated if missing" example:"analysis"`
	Language Language          `json:"language" doc:"Language of the code"`
	Cwd      string            `json:"cwd,omitempty" maxLength:"1000" doc:"Working directory at the start, an absolute path; default: the image's" example:"/srv/shop"`
	Env      map[string]string `json:"env,omitempty" doc:"Variables to add to the sandbox's environment"`
}

// Context is a context of a sandbox as last known: an interpreter that executes code and
// retains its state.
type Context struct {
	ID        string       `json:"id" doc:"Identifies the context among those of its sandbox" example:"analysis"`
	Language  Language     `json:"language" doc:"Language of the code"`
	Cwd       string       `json:"cwd,omitempty" doc:"Working directory at the start; missing: the image's"`
	State     ProcessState `json:"state" doc:"running; exited: the interpreter has ended; or lost: the sandbox stopped, or it is unknown how the interpreter ended"`
	ExitCode  *int         `json:"exit_code,omitempty" nullable:"false" doc:"Exit code of the interpreter; missing unless it exited"`
	Signal    string       `json:"signal,omitempty" doc:"Signal that ended the interpreter, such as SIGKILL"`
	Reason    StateReason  `json:"reason,omitempty" doc:"Why the sandbox stopped; missing unless the state is lost because of that"`
	Process   string       `json:"process" doc:"Id of the interpreter among the processes of the sandbox" example:"p-k3f9x2m7"`
	StartedAt time.Time    `json:"started_at" doc:"When the interpreter was started"`
	ExitedAt  time.Time    `json:"exited_at,omitzero" doc:"When the interpreter exited; missing while it runs"`
}

// ContextList is the contexts of a sandbox.
type ContextList struct {
	Contexts []Context `json:"contexts" nullable:"false" doc:"Contexts as last known: those whose interpreter runs, and up to 32 with those that have ended"`
}

// RunCodeRequest executes code in a context.
type RunCodeRequest struct {
	Code           string    `json:"code" doc:"Code to execute; the value of its last expression is a result" example:"1 + 1"`
	Timeout        *Duration `json:"timeout,omitempty" doc:"Time after which the code is interrupted. It includes the time for which the code waits for other code of the context. At most 24h; 0s: none; default: 10m without stream, none with it"`
	Stream         bool      `json:"stream,omitempty" doc:"Respond with server-sent events while the code is executed"`
	MaxOutputBytes int       `json:"max_output_bytes,omitempty" minimum:"1" maximum:"16777216" default:"4194304" doc:"Maximum number of bytes of output, results and exceptions to return; with stream, to hold for a client that reads slowly"`
}

// CodeValue is a value in every form that it offers.
type CodeValue struct {
	Data      map[string]any `json:"data" nullable:"false" doc:"The value by MIME type: text, base64 for binary types such as image/png, or JSON for types of JSON"`
	Metadata  map[string]any `json:"metadata,omitempty" doc:"What the interpreter adds to the value, such as the size of a picture"`
	Main      bool           `json:"main" doc:"Whether it is the value of the last expression; otherwise the code displayed it"`
	DisplayID string         `json:"display_id,omitempty" doc:"Names a value that the code may update"`
	Update    bool           `json:"update,omitempty" doc:"Whether it replaces the earlier value with the same display_id"`
}

// CodeError is an exception that ended code.
type CodeError struct {
	Name      string   `json:"name" doc:"Type of the exception; Interrupted if the interpreter does not name one" example:"ZeroDivisionError"`
	Message   string   `json:"message" doc:"Its message" example:"division by zero"`
	Traceback []string `json:"traceback" nullable:"false" doc:"Lines of the traceback, without colors"`
}

// CodeClear is the data of the event clear.
type CodeClear struct {
	Wait bool `json:"wait" doc:"Whether the output stays until the next output"`
}

// CodeEnd is how the execution of code ended.
type CodeEnd struct {
	ExecutionCount int     `json:"execution_count" doc:"Number of the execution in its context, from 1; 0 if it is unknown"`
	TimedOut       bool    `json:"timed_out" doc:"Whether the code was interrupted because of timeout"`
	Truncated      bool    `json:"truncated" doc:"Whether output was dropped because of max_output_bytes, because one value has more than 16 MiB, or because the interpreter sent too many messages"`
	DurationMS     float64 `json:"duration_ms" doc:"Time of the execution in milliseconds"`
}

// CodeResult is how the execution of code ended, with its output.
type CodeResult struct {
	Stdout  string      `json:"stdout" doc:"Standard output"`
	Stderr  string      `json:"stderr" doc:"Standard error"`
	Results []CodeValue `json:"results" nullable:"false" doc:"Values that the code displayed, and the value of its last expression"`
	Error   *CodeError  `json:"error,omitempty" nullable:"false" doc:"Exception that ended the code; missing if there was none"`
	CodeEnd
}

// CodeComplete is the data of the event complete, the last one.
type CodeComplete struct {
	CodeEnd
}
