package types

import "time"

// Policy is a WebAssembly module for rules, without its code.
type Policy struct {
	Name            string    `json:"name" doc:"Name of the policy" example:"bearer"`
	Digest          string    `json:"digest" doc:"Digest of the module, sha256:HEX"`
	Size            int64     `json:"size" doc:"Size of the module in bytes"`
	BuiltIn         bool      `json:"built_in,omitempty" doc:"Whether the policy comes with doze"`
	UpdatedAt       time.Time `json:"updated_at,omitzero" doc:"When the policy was last pushed; missing for built-in policies"`
	UsedBy          []string  `json:"used_by,omitempty" nullable:"false" doc:"Rules that use the policy, as owner/NAME or sandbox/ID/NAME"`
	ReplacesBuiltIn bool      `json:"replaces_built_in,omitempty" doc:"Whether the policy replaces a built-in one of the same name"`
	Warnings        []Warning `json:"warnings,omitempty" nullable:"false" doc:"What may not work as intended; only in responses to PUT"`
}

// PolicyList is the policies of an owner and the built-in ones.
type PolicyList struct {
	Policies []Policy `json:"policies" nullable:"false" doc:"Policies in the order of their names"`
}

// PolicyLine is a line that a policy logged, or wrote to its output.
type PolicyLine struct {
	Seq         uint64    `json:"seq" doc:"Number of the line, rising within a policy"`
	Time        time.Time `json:"time" doc:"When the line was written"`
	Level       LogLevel  `json:"level" doc:"Level of the line; info for output"`
	Text        string    `json:"text" doc:"The line, without line breaks and at most 1 KiB"`
	Flow        string    `json:"flow,omitempty" doc:"Flow of the request that the policy was handling; missing while the policy starts"`
	Sandbox     string    `json:"sandbox,omitempty" doc:"Id of the sandbox that sent the request"`
	SandboxName string    `json:"sandbox_name,omitempty" doc:"Name of that sandbox"`
	Dropped     uint64    `json:"dropped,omitempty" doc:"Number of lines before this one that a stream lost because its client read too slowly"`
}

// LogLevel is the level of a line.
type LogLevel string

const (
	LogLevelDebug LogLevel = "debug"
	LogLevelInfo  LogLevel = "info"
	LogLevelWarn  LogLevel = "warn"
	LogLevelError LogLevel = "error"
)

// Values returns all levels, in rising order.
func (LogLevel) Values() []LogLevel {
	return []LogLevel{LogLevelDebug, LogLevelInfo, LogLevelWarn, LogLevelError}
}

// PolicyLog is a page of the lines of a policy.
type PolicyLog struct {
	Lines      []PolicyLine `json:"lines" nullable:"false" doc:"Lines, oldest first"`
	NextCursor string       `json:"next_cursor,omitempty" doc:"Cursor of the next page; missing on the last page"`
}
