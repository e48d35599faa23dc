// Package sandbox defines sandboxes and their life cycle. Its Manager is the only
// place that decides a sandbox's state; all other parts acquire a Lease.
package sandbox

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

// ID names a sandbox permanently: 12 characters of [a-z0-9], no hyphen, so that it
// can stand between hyphens in a preview's host name.
type ID string

// State of a sandbox. Each state is entered by one function (such as liveSandbox.sleep),
// left by wakeUp, has its periodic work in doDue, and is restored by recover when the node
// starts.
type State string

const (
	StateStarting  State = "starting"  // being made, or cold-started for the first time
	StateRunning   State = "running"   // has CPU
	StateAsleep    State = "asleep"    // frozen: memory kept, no CPU
	StateStopped   State = "stopped"   // disk kept, no memory
	StateArchived  State = "archived"  // disk in the object store, nothing on the node
	StateDestroyed State = "destroyed" // final
)

// StateReason is why a sandbox entered its state.
type StateReason string

const (
	ReasonIdle              StateReason = "idle"               // not used for sleep_after
	ReasonStopAfter         StateReason = "stop_after"         // asleep for stop_after
	ReasonRequested         StateReason = "requested"          // by a client of the API
	ReasonForced            StateReason = "forced"             // requested although it was in use
	ReasonTTLExpired        StateReason = "ttl_expired"        // destroyed at the end of its ttl
	ReasonNodeShutdown      StateReason = "node_shutdown"      // wakes when the node starts again
	ReasonRecovered         StateReason = "recovered"          // found in this state when the node started
	ReasonContainerExited   StateReason = "container_exited"   // its container ended by itself
	ReasonContainerLost     StateReason = "container_lost"     // its container was removed outside of doze, with its files
	ReasonGuestUnresponsive StateReason = "guest_unresponsive" // doze-guest did not respond, and was killed
	ReasonRecoveryFailed    StateReason = "recovery_failed"    // the node could not take it over when it started
	ReasonStopFailed        StateReason = "stop_failed"        // running: it could neither be stopped nor frozen again
	ReasonCreateFailed      StateReason = "create_failed"      // its creation was not acknowledged
	ReasonAdopted           StateReason = "adopted"            // from quarantine
	ReasonRestored          StateReason = "restored"           // its disk was replaced by a snapshot
	ReasonSlept             StateReason = "slept"              // put to sleep by a call, with its memory not kept
	ReasonMemoryPressure    StateReason = "memory_pressure"    // stopped because the node was short of memory
	ReasonDiskLimit         StateReason = "disk_limit"         // killed: it exceeded its disk limit
	ReasonDiskPressure      StateReason = "disk_pressure"      // killed: the node's disk was nearly full, and this sandbox's disk grew the most
	ReasonArchiveAfter      StateReason = "archive_after"      // stopped for archive_after
	ReasonRetrieved         StateReason = "retrieved"          // stopped: its disk was downloaded from the object store
	ReasonRetention         StateReason = "retention"          // snapshot deleted by its MaxAge or RetainLast
)

// Condition is a fault of a sandbox.
type Condition struct {
	Code    ConditionCode `json:"code"`
	Message string        `json:"message"` // for people
	Since   time.Time     `json:"since"`   // when a condition of this code began
}

// ConditionCode distinguishes conditions.
type ConditionCode string

const (
	ConditionWakeFailed     ConditionCode = "wake_failed"     // its last wake failed
	ConditionSleepFailed    ConditionCode = "sleep_failed"    // its last sleep failed
	ConditionStopFailed     ConditionCode = "stop_failed"     // its last stop failed
	ConditionDestroyFailed  ConditionCode = "destroy_failed"  // destroying it failed and is tried again
	ConditionRecoveryFailed ConditionCode = "recovery_failed" // the node could not take it over, and stopped it
	ConditionDiskLost       ConditionCode = "disk_lost"       // its files are lost with its container
	ConditionStopIncomplete ConditionCode = "stop_incomplete" // stopped, but its container cannot be ended; tried again
	ConditionNetworkLost    ConditionCode = "network_lost"    // it has no network; tried again
	ConditionTrustFailed    ConditionCode = "trust_failed"    // its programs may not trust the node's CA
	ConditionUnresponsive   ConditionCode = "unresponsive"    // it has not responded since the node started
	ConditionMountFailed    ConditionCode = "mount_failed"    // a bucket could not be mounted again; tried again
)

// Duration is a time.Duration that reads and writes as text, such as "60s".
type Duration time.Duration

func (d Duration) String() string { return time.Duration(d).String() }

// MarshalJSON writes the duration as time.Duration.String does.
func (d Duration) MarshalJSON() ([]byte, error) { return json.Marshal(d.String()) }

// UnmarshalJSON accepts the syntax of time.ParseDuration, such as "1h30m".
func (d *Duration) UnmarshalJSON(b []byte) error {
	var text string
	if err := json.Unmarshal(b, &text); err != nil {
		return fmt.Errorf(`a duration is a string such as "60s", not %s`, b)
	}
	v, err := time.ParseDuration(text)
	if err != nil {
		return fmt.Errorf(`invalid duration %q; write it like "60s", "5m" or "1h30m"`, text)
	}
	*d = Duration(v)
	return nil
}

// Sandbox is one named Linux environment: the record that the store keeps and
// the view that readers get. Values handed out are copies; their maps and
// slices are never changed afterwards.
type Sandbox struct {
	ID       ID                `json:"id,omitzero"`
	Name     string            `json:"name"` // unique per owner
	Owner    string            `json:"owner"`
	Image    string            `json:"image"` // as requested, such as "base"
	ImageRef string            `json:"image_ref"`
	Size     string            `json:"size"`
	State    State             `json:"state,omitzero"`
	Env      map[string]string `json:"env,omitempty"`
	// EnvChanges are changes to Env since the creation, which its container does not have: nil
	// removes a variable of Env.
	EnvChanges map[string]*string `json:"env_changes,omitempty"`
	Labels     map[string]string  `json:"labels,omitempty"`
	SleepAfter Duration           `json:"sleep_after"` // 0: never by itself
	StopAfter  Duration           `json:"stop_after"`  // 0: never by itself
	// ArchiveAfter is how long it is stopped before it is archived; 0: never by itself.
	ArchiveAfter Duration `json:"archive_after,omitzero"`
	Persist      Persist  `json:"persist,omitempty"`
	// TTL is how long the sandbox lives from its creation or from the last change
	// of TTL; 0: no limit. ExpiresAt is when that ends, zero without a limit.
	TTL       Duration  `json:"ttl,omitzero"`
	ExpiresAt time.Time `json:"expires_at,omitzero"`
	CreatedAt time.Time `json:"created_at"`
	// LastActiveAt is the last use: a lease, traffic or CPU time.
	LastActiveAt time.Time `json:"last_active_at,omitzero"`
	// StateSince is when State was entered. A wake leaves no StateReason.
	StateSince  time.Time   `json:"state_since,omitzero"`
	StateReason StateReason `json:"state_reason,omitempty"`
	// Condition is a fault, such as the error of the last wake; zero if there is none. A
	// successful change of state ends it.
	Condition Condition `json:"condition,omitzero"`
	// StartedAt is when its container last started: each cold wake changes it,
	// and connections from before it are dead.
	StartedAt time.Time `json:"started_at,omitzero"`
	Limits    Limits    `json:"limits,omitzero"` // of its size when it last started
	// Disk is the disk usage as last measured. DiskAllowance is the maximum usage in this run; 0 means
	// no limit. DiskStops counts how often the sandbox was stopped for exceeding its allowance since
	// its usage was last within the limits of its size.
	Disk          DiskUsage       `json:"disk,omitzero"`
	DiskAllowance DiskUsage       `json:"disk_allowance,omitzero"`
	DiskStops     int             `json:"disk_stops,omitempty"`
	HoldUntil     time.Time       `json:"hold_until,omitzero"`
	Ports         []Port          `json:"ports,omitempty"`
	Mounts        []Mount         `json:"mounts,omitempty"`    // sorted by path
	Processes     []guest.Process `json:"processes,omitempty"` // as last known
	// Terminals are as last known: those that run, and the last ones that ended.
	Terminals []Terminal `json:"terminals,omitempty"`
	// Sessions are as last known: those whose shell runs, that were lost, and the last ones
	// that ended.
	Sessions []Session `json:"sessions,omitempty"`
	// Contexts are as last known: those whose kernel runs, that were lost, and the last ones
	// that ended.
	Contexts []Context `json:"contexts,omitempty"`
	// Warm are the languages for which a cold start also starts a spare interpreter.
	Warm []Language `json:"warm,omitempty"`
	// Listening are the ports on which its processes listen, as last known, in order; none
	// while it is stopped.
	Listening []guest.Listening `json:"listening,omitempty"`
	// Declared are the processes that a cold wake starts again.
	Declared []guest.ProcessSpec `json:"declared,omitempty"`
	// Snapshot is the one that its disk began as; empty: the image.
	Snapshot SnapshotID `json:"snapshot,omitempty"`
	// Archived is the backup that has its disk while it is archived. Its Origin has the image only.
	Archived *Backup `json:"archived,omitempty"`
	// StaleArchives are backups of archives that are not complete, or not needed any more. The node deletes them.
	StaleArchives []BackupID `json:"stale_archives,omitempty"`
	// CreatedFrom is the snapshot that its creation named; empty: none.
	CreatedFrom SnapshotID `json:"created_from,omitempty"`
	// Rebase: the disk of its container is to be discarded, because Snapshot has changed since
	// it was created or because a stop ends it (PersistNone).
	Rebase bool `json:"rebase,omitempty"`
}

// StoppedOnPurpose reports whether its owner stopped it: it did not end by itself.
func (sb *Sandbox) StoppedOnPurpose() bool {
	return sb.State == StateStopped && (sb.StateReason == ReasonRequested || sb.StateReason == ReasonForced)
}

// Persist is the state of a sandbox that a sleep keeps.
type Persist string

const (
	PersistMemory Persist = "memory" // memory and disk: it is frozen; the default
	PersistDisk   Persist = "disk"   // the disk: it stops
	// PersistNone: nothing. It stops, and each stop discards its disk, which begins as its image
	// or snapshot again.
	PersistNone Persist = "none"
)

// Access to a preview.
type Access string

const (
	AccessToken  Access = "token"  // the token stands in the host name; the default
	AccessPublic Access = "public" // any visitor; the id stands in the host name
)

// WakeMode of a preview.
type WakeMode string

const (
	// WakeNavigation is the default: every request except a prefetch wakes a sleeping
	// sandbox. A stopped one is started by people who open a page and by programs, but not
	// by a page that is open already.
	WakeNavigation WakeMode = "navigation"
	WakeAny        WakeMode = "any"   // every request wakes and starts it
	WakeNever      WakeMode = "never" // 410 while it is not running
)

// HostMode is the Host header that the server in the sandbox receives.
type HostMode string

const (
	HostAuto     HostMode = "auto"     // the preview's own unless the server refuses it; the default
	HostRewrite  HostMode = "rewrite"  // localhost:PORT
	HostPreserve HostMode = "preserve" // the preview's own
)

// Protocol is the version of HTTP that the server in the sandbox speaks.
type Protocol string

const (
	ProtocolAuto  Protocol = "auto"  // h2c for gRPC and for servers that respond to HTTP/1.1 with HTTP/2; the default
	ProtocolHTTP1 Protocol = "http1" // HTTP/1.1
	ProtocolH2C   Protocol = "h2c"   // HTTP/2 without TLS, with prior knowledge
)

// WebSocketMode is whether a silent upgraded connection keeps its sandbox awake.
type WebSocketMode string

const (
	WebSocketSleep     WebSocketMode = "sleep"      // it does not; the default
	WebSocketKeepAwake WebSocketMode = "keep_awake" // it does
)

// Port is an exposed TCP port of a sandbox. Exposing it again changes its modes
// and keeps its token.
type Port struct {
	Port      uint16        `json:"port"`
	Access    Access        `json:"access"`
	Token     string        `json:"token,omitempty"` // empty when public
	Wake      WakeMode      `json:"wake"`
	Host      HostMode      `json:"host"`
	Protocol  Protocol      `json:"protocol,omitempty"` // empty in records of earlier versions: auto
	WebSocket WebSocketMode `json:"websocket"`
	CreatedAt time.Time     `json:"created_at"`
}

// Cause is the kind of request that woke a sandbox.
type Cause string

const (
	CausePreview   Cause = "preview"
	CauseExec      Cause = "exec"
	CauseFiles     Cause = "files"
	CauseProcess   Cause = "process"
	CauseTerminal  Cause = "terminal"
	CauseSession   Cause = "session"
	CauseContext   Cause = "context"
	CauseWebSocket Cause = "websocket"
	CauseEgress    Cause = "egress" // data from upstream, on a connection of the sandbox
	CauseRequested Cause = "requested"
)

// WakeKind is how a wake brought the sandbox to StateRunning.
type WakeKind string

const (
	WakeNone WakeKind = ""     // it was running
	WakeWarm WakeKind = "warm" // thawed
	WakeCold WakeKind = "cold" // container started again
)

// WakeInfo describes the wake that a Lease waited for.
type WakeInfo struct {
	Kind WakeKind
	Took time.Duration
}

// EventType of the timeline.
type EventType string

const (
	EventCreated         EventType = "created"
	EventImagePull       EventType = "image_pull_progress"
	EventWoke            EventType = "woke"
	EventSlept           EventType = "slept"
	EventReclaimed       EventType = "memory_reclaimed" // from it, while it sleeps
	EventStopped         EventType = "stopped"
	EventWakeFailed      EventType = "wake_failed"
	EventHeld            EventType = "held"
	EventProcessStart    EventType = "process_started"
	EventProcessExited   EventType = "process_exited"
	EventPortExposed     EventType = "port_exposed"
	EventPortUnexposed   EventType = "port_unexposed"
	EventPortOpened      EventType = "port_opened" // a process began to listen
	EventPortClosed      EventType = "port_closed" // it ceased to listen
	EventUpdated         EventType = "updated"
	EventAdopted         EventType = "adopted" // from quarantine
	EventDiskLost        EventType = "disk_lost"
	EventSnapshotted     EventType = "snapshotted"
	EventRestored        EventType = "restored" // from a snapshot or a backup
	EventForked          EventType = "forked"
	EventSnapshotDeleted EventType = "snapshot_deleted" // a snapshot of it
	EventBackedUp        EventType = "backed_up"
	EventBackupFailed    EventType = "backup_failed"
	EventBackupDeleted   EventType = "backup_deleted" // a backup of it
	EventArchived        EventType = "archived"
	EventRetrieved       EventType = "retrieved" // from the object store
	EventMounted         EventType = "mounted"   // a bucket
	EventUnmounted       EventType = "unmounted"
	EventDestroyed       EventType = "destroyed"
)

// Event is one entry of a sandbox's timeline. Fields beyond Seq, Type, Time
// and Sandbox depend on Type.
type Event struct {
	// Seq increases within a sandbox. When the node is killed, its last events may be
	// lost although subscribers got them; later events then reuse their numbers.
	Seq     uint64    `json:"seq"`
	Type    EventType `json:"type"`
	Time    time.Time `json:"time"`
	Sandbox ID        `json:"sandbox"`
	Kind    WakeKind  `json:"kind,omitempty"` // woke
	// DurationMS is how long it took: woke, created, snapshotted, restored, forked, backed_up, archived, retrieved, mounted, unmounted,
	// memory_reclaimed.
	DurationMS float64          `json:"duration_ms,omitempty"`
	Cause      Cause            `json:"cause,omitempty"`  // woke, wake_failed
	Reason     StateReason      `json:"reason,omitempty"` // woke, slept, stopped, destroyed, snapshot_deleted, backup_deleted
	Error      string           `json:"error,omitempty"`  // stopped, wake_failed, disk_lost, backup_failed: description of the failure, for people
	Detail     string           `json:"detail,omitempty"` // stopped: the measurement that led to it, for people
	Bucket     string           `json:"bucket,omitempty"` // mounted, unmounted
	Path       string           `json:"path,omitempty"`   // mounted, unmounted: in the sandbox
	Port       uint16           `json:"port,omitempty"`
	Listening  *guest.Listening `json:"listening,omitempty"` // port_opened, port_closed
	Process    *guest.Process   `json:"process,omitempty"`
	Progress   string           `json:"progress,omitempty"` // image_pull_progress
	Until      time.Time        `json:"until,omitzero"`     // held
	Snapshot   SnapshotID       `json:"snapshot,omitempty"` // snapshotted, restored, snapshot_deleted; created: that it began with
	Bytes      int64            `json:"bytes,omitempty"`    // snapshotted, restored, forked, snapshot_deleted: what the snapshot adds to its base, if that is known; backed_up, backup_deleted: content of the backup
	Backup     BackupID         `json:"backup,omitempty"`   // backed_up, backup_deleted; restored: from which backup
	Stored     int64            `json:"stored,omitempty"`   // backed_up: what the object store received
	Forks      int              `json:"forks,omitempty"`    // forked: how many sandboxes
	// Disk and DiskLimit are the usage and the allowance of a sandbox that was stopped because of its disk.
	Disk      DiskUsage `json:"disk,omitzero"`
	DiskLimit DiskUsage `json:"disk_limit,omitzero"`
	// MemoryBefore and MemoryAfter are the bytes that the sandbox held: memory_reclaimed.
	MemoryBefore int64 `json:"memory_before,omitempty"`
	MemoryAfter  int64 `json:"memory_after,omitempty"`
}
