package types

import "time"

// Node is the state of a node.
type Node struct {
	ID                string               `json:"id" doc:"12 characters of a-z and 0-9; never changes"`
	Version           string               `json:"version" doc:"Version of doze on the node"`
	StartedAt         time.Time            `json:"started_at" doc:"When the node started"`
	Engine            EngineStatus         `json:"engine" doc:"State of the container engine"`
	Sandboxes         map[State]int        `json:"sandboxes" doc:"Number of sandboxes by state"`
	Leases            int64                `json:"leases" doc:"Number of uses of sandboxes in progress"`
	Waiters           int64                `json:"waiters" doc:"Number of requests waiting for a wake"`
	Sizes             map[string]Limits    `json:"sizes" doc:"Sizes of sandboxes by name"`
	Images            []string             `json:"images" nullable:"false" doc:"Short names of images for new sandboxes"`
	AllowedImages     []string             `json:"allowed_images" nullable:"false" doc:"Patterns of other images that new sandboxes can have"`
	EnforcedLimits    []string             `json:"enforced_limits" nullable:"false" doc:"Limits of sizes that the host enforces: cpu, memory, pids"`
	PendingOperations []PendingOperation   `json:"pending_operations" nullable:"false" doc:"Operations that have failed and are retried until they succeed, oldest first"`
	DataRestored      bool                 `json:"data_restored" doc:"Whether the node started on an older copy of its data; until its next start"`
	Quarantined       []QuarantinedSandbox `json:"quarantined" nullable:"false" doc:"Containers without a record, which the node keeps stopped"`
}

// EngineStatus is the state of the container engine.
type EngineStatus struct {
	OK    bool   `json:"ok" doc:"Whether the engine responds"`
	Error string `json:"error,omitempty" doc:"Why it does not respond; missing if it does"`
}

// Limits of a size. A missing limit is none.
type Limits struct {
	CPUs              float64 `json:"cpus,omitempty" doc:"CPU cores" example:"0.5"`
	MemoryBytes       int64   `json:"memory_bytes,omitempty" doc:"Memory in bytes"`
	PIDs              int64   `json:"pids,omitempty" doc:"Processes and threads"`
	DiskBytes         int64   `json:"disk_bytes,omitempty" doc:"Maximum disk space in addition to the image or snapshot, in bytes"`
	Files             int64   `json:"files,omitempty" doc:"Maximum number of files, folders and links in addition to the image or snapshot"`
	UserNamespaces    int64   `json:"user_namespaces,omitempty" doc:"User namespaces that programs can create, nested ones included"`
	InotifyInstances  int64   `json:"inotify_instances,omitempty" doc:"Inotify instances, such as one for each program that watches files"`
	InotifyWatches    int64   `json:"inotify_watches,omitempty" doc:"Files and directories watched with inotify"`
	PendingSignals    int64   `json:"pending_signals,omitempty" doc:"Queued signals and POSIX timers"`
	MessageQueueBytes int64   `json:"message_queue_bytes,omitempty" doc:"Bytes of POSIX message queues"`
}

// PendingOperation is an operation that has failed and is retried until it succeeds.
type PendingOperation struct {
	Operation     Operation `json:"operation" doc:"destroy: remove the remains of a destroyed sandbox; stop: stop a container in quarantine"`
	Sandbox       string    `json:"sandbox" doc:"Id of the sandbox"`
	Since         time.Time `json:"since" doc:"When it first failed"`
	Attempts      int       `json:"attempts" doc:"Number of attempts so far"`
	NextAttemptAt time.Time `json:"next_attempt_at" doc:"When it is tried again"`
	Error         string    `json:"error" doc:"Error of the last attempt"`
}

// Operation is an operation on a sandbox.
type Operation string

const (
	OperationDestroy Operation = "destroy" // remove the remains of a destroyed sandbox
	OperationStop    Operation = "stop"    // stop a container in quarantine
)

// Values returns all operations.
func (Operation) Values() []Operation { return []Operation{OperationDestroy, OperationStop} }

// QuarantinedSandbox is a container without a record in the node's data.
type QuarantinedSandbox struct {
	ID           string    `json:"id" doc:"Id of the sandbox"`
	Name         string    `json:"name,omitempty" doc:"Last name of the sandbox; missing if unknown" example:"shop"`
	Image        string    `json:"image,omitempty" doc:"Image of the sandbox; missing if unknown"`
	Size         string    `json:"size,omitempty" doc:"Last size of the sandbox; missing if unknown"`
	CreatedAt    time.Time `json:"created_at,omitzero" doc:"When the container was created; missing if unknown"`
	HasContainer bool      `json:"has_container" doc:"Whether the container exists and can be adopted; otherwise only its run directory is left"`
	Error        string    `json:"error,omitempty" doc:"Why stopping or removing it has failed; missing if it has not"`
}

// AdoptRequest makes a container in quarantine a sandbox again.
type AdoptRequest struct {
	Name string `json:"name,omitempty" doc:"Name of the sandbox; default: its last name" example:"shop"`
}
