package types

import "time"

// Sandbox is a named Linux environment with its own disk, processes and network.
type Sandbox struct {
	ID           string            `json:"id" doc:"12 characters of a-z and 0-9; never changes" example:"k3f9x2m7q2az"`
	Name         string            `json:"name" doc:"Unique per owner; also the host name inside the sandbox" example:"shop"`
	Owner        string            `json:"owner" doc:"Owner of the sandbox"`
	Image        string            `json:"image" doc:"Image as requested at creation" example:"base"`
	ImageRef     string            `json:"image_ref" doc:"Full reference of the image"`
	Snapshot     string            `json:"snapshot,omitempty" doc:"Id of the snapshot as which its disk began; missing if it began as the image" example:"s7k2m9x4q3bz"`
	Size         string            `json:"size" doc:"Name of the sandbox's size" example:"basic"`
	State        State             `json:"state" doc:"Whether the sandbox is starting, running, asleep, stopped, archived or destroyed"`
	StateSince   time.Time         `json:"state_since" doc:"When the sandbox entered its state"`
	StateReason  StateReason       `json:"state_reason,omitempty" doc:"Why the sandbox entered its state; missing if it was created or woken"`
	Env          map[string]string `json:"env,omitempty" doc:"Environment of all its commands and processes, beyond the image's; missing in lists. PATCH …/env changes it"`
	Labels       map[string]string `json:"labels" doc:"The owner's labels"`
	SleepAfter   Duration          `json:"sleep_after" doc:"Idle time after which the sandbox goes to sleep; 0s: never by itself"`
	StopAfter    Duration          `json:"stop_after" doc:"Time asleep after which the sandbox is stopped; 0s: never by itself"`
	ArchiveAfter Duration          `json:"archive_after" doc:"Time stopped after which the sandbox is archived, if the node has an object store; 0s: never by itself"`
	Archived     *ArchivedDisk     `json:"archived,omitempty" doc:"Where the disk of an archived sandbox is; missing in other states"`
	Persist      Persist           `json:"persist" doc:"State that a sleep keeps: memory (and disk), disk, or none"`
	TTL          Duration          `json:"ttl" doc:"Lifetime since the creation or the last change of ttl; 0s: unlimited"`
	ExpiresAt    time.Time         `json:"expires_at,omitzero" doc:"When the sandbox is destroyed with its files; missing without a ttl"`
	CreatedAt    time.Time         `json:"created_at" doc:"When the sandbox was created"`
	LastActiveAt time.Time         `json:"last_active_at" doc:"When the sandbox was last used"`
	HoldUntil    time.Time         `json:"hold_until,omitzero" doc:"Until when the sandbox is kept from sleeping by itself; missing without a hold"`
	Ports        []Port            `json:"ports" nullable:"false" doc:"Exposed ports"`
	Processes    []Process         `json:"processes,omitempty" nullable:"false" doc:"Background processes as last known; missing in lists"`
	Usage        *Usage            `json:"usage,omitempty" doc:"Resources in use; in lists only with usage=true"`
	Condition    *Condition        `json:"condition,omitempty" doc:"What is wrong with the sandbox; missing if nothing is"`
}

// State of a sandbox.
type State string

const (
	StateStarting  State = "starting"  // being created, or in its first start
	StateRunning   State = "running"   // has CPU
	StateAsleep    State = "asleep"    // memory kept, no CPU
	StateStopped   State = "stopped"   // disk kept, no memory
	StateArchived  State = "archived"  // disk in the object store, nothing on the node
	StateDestroyed State = "destroyed" // being removed
)

// Values returns all states.
func (State) Values() []State {
	return []State{StateStarting, StateRunning, StateAsleep, StateStopped, StateArchived, StateDestroyed}
}

// StateReason is why a sandbox changed its state.
type StateReason string

const (
	StateReasonIdle              StateReason = "idle"               // sleep_after passed
	StateReasonStopAfter         StateReason = "stop_after"         // stop_after passed
	StateReasonRequested         StateReason = "requested"          // by a call of the API
	StateReasonForced            StateReason = "forced"             // by a call with force
	StateReasonTTLExpired        StateReason = "ttl_expired"        // ttl passed
	StateReasonNodeShutdown      StateReason = "node_shutdown"      // the node shut down
	StateReasonRecovered         StateReason = "recovered"          // found in this state when the node started
	StateReasonContainerExited   StateReason = "container_exited"   // the container ended by itself
	StateReasonContainerLost     StateReason = "container_lost"     // the container was removed outside of doze
	StateReasonGuestUnresponsive StateReason = "guest_unresponsive" // doze-guest did not respond, and was killed
	StateReasonRecoveryFailed    StateReason = "recovery_failed"    // the node could not take it over when it started
	StateReasonStopFailed        StateReason = "stop_failed"        // running: neither stopping nor freezing it again succeeded
	StateReasonCreateFailed      StateReason = "create_failed"      // the creation failed
	StateReasonAdopted           StateReason = "adopted"            // adopted from quarantine
	StateReasonRestored          StateReason = "restored"           // its disk was replaced by a snapshot
	StateReasonSlept             StateReason = "slept"              // put to sleep by a call, with its memory not kept
	StateReasonMemoryPressure    StateReason = "memory_pressure"    // stopped because the node was short of memory
	StateReasonDiskLimit         StateReason = "disk_limit"         // killed because it exceeded its disk limit
	StateReasonDiskPressure      StateReason = "disk_pressure"      // killed because the node's disk was nearly full and this sandbox's disk grew the most
	StateReasonArchiveAfter      StateReason = "archive_after"      // archive_after passed
	StateReasonRetrieved         StateReason = "retrieved"          // stopped: its disk was downloaded from the object store
	StateReasonRetention         StateReason = "retention"          // of a snapshot: deleted by max_age or keep_last
)

// Values returns all reasons.
func (StateReason) Values() []StateReason {
	return []StateReason{
		StateReasonIdle, StateReasonStopAfter, StateReasonRequested, StateReasonForced, StateReasonTTLExpired, StateReasonNodeShutdown,
		StateReasonRecovered, StateReasonContainerExited, StateReasonContainerLost, StateReasonGuestUnresponsive,
		StateReasonRecoveryFailed, StateReasonStopFailed, StateReasonCreateFailed, StateReasonAdopted, StateReasonRestored, StateReasonSlept,
		StateReasonMemoryPressure, StateReasonDiskLimit, StateReasonDiskPressure, StateReasonArchiveAfter, StateReasonRetrieved, StateReasonRetention,
	}
}

// Persist is the state of a sandbox that a sleep keeps.
type Persist string

const (
	PersistMemory Persist = "memory" // memory and disk
	PersistDisk   Persist = "disk"   // the disk; a sleep stops the sandbox
	PersistNone   Persist = "none"   // nothing; each stop ends the disk
)

// Values returns all values.
func (Persist) Values() []Persist { return []Persist{PersistMemory, PersistDisk, PersistNone} }

// Condition is what is wrong with a sandbox. A successful change of its state ends it.
type Condition struct {
	Code    ConditionCode `json:"code" doc:"Stable identifier of the condition, for programs"`
	Message string        `json:"message" doc:"Description for people" example:"its last wake failed: no such image"`
	Since   time.Time     `json:"since" doc:"When the condition began"`
}

// ConditionCode identifies a condition.
type ConditionCode string

const (
	ConditionCodeWakeFailed     ConditionCode = "wake_failed"     // the last wake failed
	ConditionCodeSleepFailed    ConditionCode = "sleep_failed"    // the last sleep failed
	ConditionCodeStopFailed     ConditionCode = "stop_failed"     // the last stop failed
	ConditionCodeDestroyFailed  ConditionCode = "destroy_failed"  // destroying it failed and is tried again
	ConditionCodeRecoveryFailed ConditionCode = "recovery_failed" // the node could not take it over, and stopped it
	ConditionCodeDiskLost       ConditionCode = "disk_lost"       // its files were lost with its container
	ConditionCodeStopIncomplete ConditionCode = "stop_incomplete" // parts of its container are still to be removed
	ConditionCodeNetworkLost    ConditionCode = "network_lost"    // it has no network
	ConditionCodeTrustFailed    ConditionCode = "trust_failed"    // its programs may not trust the node's CA
	ConditionCodeUnresponsive   ConditionCode = "unresponsive"    // its guest does not respond
	ConditionCodeMountFailed    ConditionCode = "mount_failed"    // a bucket could not be mounted again; tried again
)

// Values returns all codes.
func (ConditionCode) Values() []ConditionCode {
	return []ConditionCode{
		ConditionCodeWakeFailed, ConditionCodeSleepFailed, ConditionCodeStopFailed, ConditionCodeDestroyFailed, ConditionCodeRecoveryFailed,
		ConditionCodeDiskLost, ConditionCodeStopIncomplete, ConditionCodeNetworkLost, ConditionCodeTrustFailed, ConditionCodeUnresponsive, ConditionCodeMountFailed,
	}
}

// ArchivedDisk is the disk of an archived sandbox.
type ArchivedDisk struct {
	BackupID  string `json:"backup_id" doc:"Id of the backup that has the disk" example:"b4n8r2t6w9xz"`
	SizeBytes int64  `json:"size_bytes" doc:"Size of the files that the next use of the sandbox downloads" example:"247463936"`
}

// Usage is the resources that a sandbox uses.
type Usage struct {
	CPUSeconds  float64 `json:"cpu_seconds" doc:"CPU time of all its processes since the host booted; can restart at 0"`
	MemoryBytes int64   `json:"memory_bytes" doc:"Memory in use, also while asleep; 0 when stopped. On hosts without a memory controller: the sum of its processes' resident memory"`
	DiskBytes   int64   `json:"disk_bytes" doc:"Disk space in addition to the image or snapshot, including deleted files that are still open. The measurement can be minutes old; 0 with files 0: not measured yet"`
	Files       int64   `json:"files" doc:"Number of files, folders and links in addition to the image or snapshot, from the same measurement"`
}

// DiskUsage is an amount of disk space and files.
type DiskUsage struct {
	Bytes int64 `json:"bytes,omitempty" doc:"Disk space in bytes; missing in a limit that does not restrict it"`
	Files int64 `json:"files,omitempty" doc:"Number of files, folders and links; missing in a limit that does not restrict it"`
}

// SandboxList is a page of sandboxes.
type SandboxList struct {
	Sandboxes  []Sandbox `json:"sandboxes" nullable:"false" doc:"Sandboxes in the order of their names"`
	NextCursor string    `json:"next_cursor,omitempty" doc:"Cursor of the next page; missing on the last page"`
}

// CreateSandboxRequest creates a sandbox, or finds it by its name.
type CreateSandboxRequest struct {
	Name         string            `json:"name,omitempty" doc:"1 to 63 of a-z, 0-9 and hyphens; generated if missing" example:"shop"`
	Image        string            `json:"image,omitempty" doc:"Short name of an image of the node, or a reference that the node allows; default: the node's" example:"base"`
	Size         string            `json:"size,omitempty" doc:"Size of the sandbox, one of the node's; default: the node's" example:"basic"`
	Env          map[string]string `json:"env,omitempty" doc:"Environment of all commands and processes in the sandbox"`
	Labels       map[string]string `json:"labels,omitempty" doc:"Labels for finding the sandbox"`
	SleepAfter   *Duration         `json:"sleep_after,omitempty" doc:"Idle time after which the sandbox goes to sleep; 0s: never; default: the node's"`
	StopAfter    *Duration         `json:"stop_after,omitempty" doc:"Time asleep after which the sandbox is stopped; 0s: never; default: the node's"`
	ArchiveAfter *Duration         `json:"archive_after,omitempty" doc:"Time stopped after which the sandbox is archived, if the node has an object store; 0s: never; default: the node's"`
	Persist      Persist           `json:"persist,omitempty" doc:"State that a sleep keeps. memory: memory and disk, which is the default; disk: the disk, it stops; none: nothing, each stop ends its disk" example:"disk"`
	TTL          *Duration         `json:"ttl,omitempty" doc:"Time after which the sandbox is destroyed with its files, even if it is in use; 0s: never, which is the default" example:"24h"`
	Snapshot     string            `json:"snapshot,omitempty" maxLength:"63" doc:"Id or name of a snapshot, whose disk the sandbox begins with, or whose paths on its image, and whose size, environment, times, persist and declared processes it gets where the request has none; excludes image" example:"before-upgrade"`
	Warm         []Language        `json:"warm,omitempty" nullable:"false" maxItems:"3" doc:"Languages for which an interpreter starts with the sandbox, so that the first code of a context does not wait for it; each takes memory"`
}

// UpdateSandboxRequest changes a sandbox. Missing fields stay as they are.
type UpdateSandboxRequest struct {
	Name         *string            `json:"name,omitempty" nullable:"false" doc:"New name, 1 to 63 of a-z, 0-9 and hyphens"`
	Labels       *map[string]string `json:"labels,omitempty" doc:"Replaces all labels"`
	SleepAfter   *Duration          `json:"sleep_after,omitempty" doc:"Idle time after which the sandbox goes to sleep; 0s: never"`
	StopAfter    *Duration          `json:"stop_after,omitempty" doc:"Time asleep after which the sandbox is stopped; 0s: never"`
	ArchiveAfter *Duration          `json:"archive_after,omitempty" doc:"Time stopped after which the sandbox is archived, if the node has an object store; 0s: never"`
	Persist      *Persist           `json:"persist,omitempty" doc:"State that a sleep keeps, from the next one on: memory (and disk), disk, or none" example:"disk"`
	TTL          *Duration          `json:"ttl,omitempty" doc:"Time from now after which the sandbox is destroyed; 0s: never"`
}

// ArchiveSandboxRequest archives a sandbox.
type ArchiveSandboxRequest struct {
	Stream bool `json:"stream,omitempty" doc:"Respond with server-sent events while the sandbox is archived"`
}

// HoldRequest keeps a sandbox from sleeping by itself.
type HoldRequest struct {
	Duration Duration `json:"duration" doc:"Length of the hold from now; 0s ends the hold" example:"30m"`
}

// Environment is the environment of the commands of a sandbox.
type Environment struct {
	Env map[string]string `json:"env" nullable:"false" doc:"Variables beyond the image's"`
}

// UpdateEnvironmentRequest changes the environment of a sandbox.
type UpdateEnvironmentRequest struct {
	Env map[string]*string `json:"env" nullable:"false" doc:"Variables to set; null removes one. Others stay"`
}
