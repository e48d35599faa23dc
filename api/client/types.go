package client

import (
	"fmt"
	"strconv"
	"time"
)

// Duration is a time.Duration in the API's form, such as "60s".
type Duration time.Duration

// MarshalText writes seconds, as the API does.
func (d Duration) MarshalText() ([]byte, error) {
	return []byte(strconv.FormatFloat(time.Duration(d).Seconds(), 'f', -1, 64) + "s"), nil
}

// UnmarshalText reads what time.ParseDuration does.
func (d *Duration) UnmarshalText(text []byte) error {
	v, err := time.ParseDuration(string(text))
	if err != nil {
		return fmt.Errorf("invalid duration %q", text)
	}
	*d = Duration(v)
	return nil
}

// States of a sandbox.
const (
	StateStarting = "starting"
	StateRunning  = "running"
	StateAsleep   = "asleep"
	StateStopped  = "stopped"
)

// Sandbox is one named Linux environment.
type Sandbox struct {
	ID           string            `json:"id"`
	Name         string            `json:"name"`
	Owner        string            `json:"owner"`
	Image        string            `json:"image"`
	ImageRef     string            `json:"image_ref"`
	Size         string            `json:"size"`
	State        string            `json:"state"`
	StateSince   time.Time         `json:"state_since"`
	StateReason  string            `json:"state_reason,omitempty"`
	Env          map[string]string `json:"env,omitempty"` // not in lists
	Labels       map[string]string `json:"labels"`
	SleepAfter   Duration          `json:"sleep_after"`
	StopAfter    Duration          `json:"stop_after"`
	TTL          Duration          `json:"ttl"`
	ExpiresAt    time.Time         `json:"expires_at,omitzero"`
	CreatedAt    time.Time         `json:"created_at"`
	LastActiveAt time.Time         `json:"last_active_at"`
	HoldUntil    time.Time         `json:"hold_until,omitzero"`
	Ports        []Port            `json:"ports"`
	Processes    []Process         `json:"processes,omitempty"` // as last known; not in lists

	Usage *Usage `json:"usage,omitempty"` // in lists only when asked for

	Condition *Condition `json:"condition,omitempty"` // what is wrong with it; nil when nothing is
}

// Condition is what is wrong with a sandbox.
type Condition struct {
	Code    string    `json:"code"`    // for programs, such as "wake_failed"
	Message string    `json:"message"` // for people
	Since   time.Time `json:"since"`
}

// Usage is what a sandbox uses of the machine.
type Usage struct {
	CPUSeconds  float64 `json:"cpu_seconds"`
	MemoryBytes int64   `json:"memory_bytes"`
}

// Port is an exposed port.
type Port struct {
	Port      uint16    `json:"port"`
	URL       string    `json:"url"`
	Access    string    `json:"access"`
	Wake      string    `json:"wake"`
	Host      string    `json:"host"`
	Protocol  string    `json:"protocol"`
	WebSocket string    `json:"websocket"`
	CreatedAt time.Time `json:"created_at"`
}

// Process is a background process as last seen.
type Process struct {
	ID           string     `json:"id"`  // of this process alone
	PID          int        `json:"pid"` // inside the sandbox
	Name         string     `json:"name"`
	Command      string     `json:"command,omitempty"`
	Argv         []string   `json:"argv,omitempty"`
	Cwd          string     `json:"cwd,omitempty"`
	Restart      string     `json:"restart"`
	State        string     `json:"state"`
	ExitCode     *int       `json:"exit_code,omitempty"` // nil while unknown
	Signal       string     `json:"signal,omitempty"`
	RestartCount int        `json:"restart_count"`
	StartedAt    time.Time  `json:"started_at"`
	ExitedAt     *time.Time `json:"exited_at,omitempty"`
	LogFile      string     `json:"log_file"`
}

// ProcessRunning is the state of a process that runs.
const ProcessRunning = "running"

// Event is one entry of a sandbox's timeline.
type Event struct {
	Seq        uint64    `json:"seq"`
	Type       string    `json:"type"`
	Time       time.Time `json:"time"`
	Sandbox    string    `json:"sandbox"`
	Kind       string    `json:"kind,omitempty"`
	DurationMS float64   `json:"duration_ms,omitempty"`
	Cause      string    `json:"cause,omitempty"`
	Reason     string    `json:"reason,omitempty"`
	Error      string    `json:"error,omitempty"` // what went wrong, for people
	Port       uint16    `json:"port,omitempty"`
	Process    *Process  `json:"process,omitempty"`
	Progress   string    `json:"progress,omitempty"`
	Until      time.Time `json:"until,omitzero"`
}

// FeedEvent is an event of any sandbox.
type FeedEvent struct {
	Event
	SandboxName string `json:"sandbox_name"` // when it happened
	Cursor      string `json:"cursor"`       // to go on after it
}

// Limits of a size.
type Limits struct {
	CPUs   float64 `json:"cpus,omitempty"`
	Memory int64   `json:"memory,omitempty"`
	PIDs   int64   `json:"pids,omitempty"`

	UserNamespaces    int64 `json:"user_namespaces,omitempty"`
	InotifyInstances  int64 `json:"inotify_instances,omitempty"`
	InotifyWatches    int64 `json:"inotify_watches,omitempty"`
	PendingSignals    int64 `json:"pending_signals,omitempty"`
	MessageQueueBytes int64 `json:"message_queue_bytes,omitempty"`
}

// Node is what a node says of itself.
type Node struct {
	NodeID         string            `json:"node_id"`
	Version        string            `json:"version"`
	StartedAt      time.Time         `json:"started_at"`
	Engine         EngineStatus      `json:"engine"`
	Sandboxes      map[string]int    `json:"sandboxes"`
	Leases         int64             `json:"leases"`
	Waiters        int64             `json:"waiters"`
	Sizes          map[string]Limits `json:"sizes"`
	Images         []string          `json:"images"`
	AllowedImages  []string          `json:"allowed_images"`
	LimitsEnforced []string          `json:"limits_enforced"`
	// PendingOperations are tried again until they are done.
	PendingOperations []PendingOperation `json:"pending_operations"`
	// DataRestored says that the node started on an older copy of its data.
	DataRestored bool `json:"data_restored"`
	// Quarantined are containers without a record, which the node keeps stopped.
	Quarantined []QuarantinedSandbox `json:"quarantined"`
}

// PendingOperation is something that a node tries again until it is done.
type PendingOperation struct {
	Operation string    `json:"operation"`
	Sandbox   string    `json:"sandbox"`
	Since     time.Time `json:"since"`
	Attempts  int       `json:"attempts"`
	NextAt    time.Time `json:"next_at"`
	Error     string    `json:"error"`
}

// QuarantinedSandbox is a container of which a node has no record. Name, Image and
// Size are those that it had last, as far as they are known.
type QuarantinedSandbox struct {
	ID        string    `json:"id"`
	Name      string    `json:"name,omitempty"`
	Image     string    `json:"image,omitempty"`
	Size      string    `json:"size,omitempty"`
	CreatedAt time.Time `json:"created_at,omitzero"`
	Container bool      `json:"container"`
	Problem   string    `json:"problem,omitempty"`
}

// EngineStatus says whether the container engine answers.
type EngineStatus struct {
	OK    bool   `json:"ok"`
	Error string `json:"error,omitempty"`
}
