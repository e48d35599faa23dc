package types

import "time"

// Event is an entry of a sandbox's timeline. Fields from Kind on depend on Type.
type Event struct {
	Seq        uint64         `json:"seq" doc:"Number of the event, rising within a sandbox"`
	Type       EventType      `json:"type" doc:"What happened"`
	Time       time.Time      `json:"time" doc:"When it happened"`
	Sandbox    string         `json:"sandbox" doc:"Id of the sandbox" example:"k3f9x2m7q2az"`
	Kind       WakeKind       `json:"kind,omitempty" doc:"Of woke: warm (resumed from memory) or cold (started from disk)"`
	DurationMS float64        `json:"duration_ms,omitempty" doc:"Of created, woke, snapshotted, restored, forked, backed_up, archived, retrieved, mounted, unmounted and memory_reclaimed: how long it took, in milliseconds"`
	Cause      Cause          `json:"cause,omitempty" doc:"Of woke and wake_failed: what woke the sandbox"`
	Reason     StateReason    `json:"reason,omitempty" doc:"Of slept, stopped, archived and destroyed: why; of woke: recovered if the node finished the wake when it started; of snapshot_deleted and backup_deleted: requested, or retention if max_age or keep_last deleted it"`
	Error      string         `json:"error,omitempty" doc:"Description of what went wrong, for people"`
	Detail     string         `json:"detail,omitempty" doc:"For stopped with the reason memory_pressure, disk_limit or disk_pressure: the measurement as human-readable text" example:"1.1 GiB of 24 GiB of memory were available, 5% are required"`
	Port       uint16         `json:"port,omitempty" doc:"Of port_exposed, port_unexposed, port_opened and port_closed: the port"`
	Listening  *ListeningPort `json:"listening,omitempty" doc:"Of port_opened and port_closed: what listens, or listened"`
	Process    *Process       `json:"process,omitempty" doc:"Of process_started and process_exited: the process"`
	Progress   string         `json:"progress,omitempty" doc:"Of image_pull_progress: a line for people"`
	Snapshot   string         `json:"snapshot,omitempty" doc:"Of snapshotted, snapshot_deleted, and restored from a snapshot: id of the snapshot; of created: of the snapshot that the sandbox began with" example:"s7k2m9x4q3bz"`
	Bytes      int64          `json:"bytes,omitempty" doc:"Of snapshotted, restored, forked and snapshot_deleted: disk space that the snapshot adds to its base; missing if it has not been measured; of backed_up, archived, retrieved and backup_deleted: size of the backup's files" example:"247463936"`
	Forks      int            `json:"forks,omitempty" doc:"Of forked: how many sandboxes were created" example:"2"`
	Until      time.Time      `json:"until,omitzero" doc:"Of held: when the hold ends; missing if it was ended"`

	Backup      string `json:"backup,omitempty" doc:"Of backed_up, archived, retrieved, backup_deleted, and restored from a backup: id of the backup" example:"b4n8r2t6w9xz"`
	StoredBytes int64  `json:"stored_bytes,omitempty" doc:"Of backed_up and archived: how many bytes were sent to the object store" example:"1258291"`

	Bucket string `json:"bucket,omitempty" doc:"Of mounted and unmounted: name of the bucket in the node's configuration" example:"datasets"`
	Path   string `json:"path,omitempty" doc:"Of mounted and unmounted: folder in the sandbox" example:"/data"`

	Disk      *DiskUsage `json:"disk,omitempty" doc:"For stopped with the reason disk_limit or disk_pressure: the disk usage of the sandbox; missing if it could not be measured. Counting stops at the limit"`
	DiskLimit *DiskUsage `json:"disk_limit,omitempty" doc:"For stopped with the reason disk_limit or disk_pressure: the limit that applied"`

	MemoryBefore int64 `json:"memory_before,omitempty" doc:"Of memory_reclaimed: bytes of memory that the sandbox held before" example:"243269632"`
	MemoryAfter  int64 `json:"memory_after,omitempty" doc:"Of memory_reclaimed: bytes of memory that it holds since, while it sleeps" example:"20971520"`
}

// EventType is what happened. The server-sent event of an Event has the same name.
type EventType string

const (
	EventTypeCreated           EventType = "created"
	EventTypeImagePullProgress EventType = "image_pull_progress"
	EventTypeWoke              EventType = "woke"
	EventTypeSlept             EventType = "slept"
	EventTypeMemoryReclaimed   EventType = "memory_reclaimed" // from a sleeping sandbox, to swap
	EventTypeStopped           EventType = "stopped"
	EventTypeWakeFailed        EventType = "wake_failed"
	EventTypeHeld              EventType = "held"
	EventTypeProcessStarted    EventType = "process_started"
	EventTypeProcessExited     EventType = "process_exited"
	EventTypePortExposed       EventType = "port_exposed"
	EventTypePortUnexposed     EventType = "port_unexposed"
	EventTypePortOpened        EventType = "port_opened" // a process began to listen
	EventTypePortClosed        EventType = "port_closed" // it ceased to listen
	EventTypeUpdated           EventType = "updated"
	EventTypeAdopted           EventType = "adopted" // from quarantine
	EventTypeDiskLost          EventType = "disk_lost"
	EventTypeSnapshotted       EventType = "snapshotted"
	EventTypeRestored          EventType = "restored" // from a snapshot or a backup
	EventTypeForked            EventType = "forked"
	EventTypeSnapshotDeleted   EventType = "snapshot_deleted" // a snapshot of it
	EventTypeBackedUp          EventType = "backed_up"
	EventTypeBackupFailed      EventType = "backup_failed"
	EventTypeBackupDeleted     EventType = "backup_deleted" // a backup of it
	EventTypeArchived          EventType = "archived"       // its disk was moved to the object store
	EventTypeRetrieved         EventType = "retrieved"      // its disk was downloaded from the object store
	EventTypeMounted           EventType = "mounted"        // a bucket
	EventTypeUnmounted         EventType = "unmounted"      // a bucket
	EventTypeDestroyed         EventType = "destroyed"
)

// Values returns all types.
func (EventType) Values() []EventType {
	return []EventType{
		EventTypeCreated, EventTypeImagePullProgress, EventTypeWoke, EventTypeSlept, EventTypeMemoryReclaimed, EventTypeStopped, EventTypeWakeFailed, EventTypeHeld,
		EventTypeProcessStarted, EventTypeProcessExited, EventTypePortExposed, EventTypePortUnexposed, EventTypePortOpened, EventTypePortClosed,
		EventTypeUpdated, EventTypeAdopted,
		EventTypeDiskLost, EventTypeSnapshotted, EventTypeRestored, EventTypeForked, EventTypeSnapshotDeleted,
		EventTypeBackedUp, EventTypeBackupFailed, EventTypeBackupDeleted, EventTypeArchived, EventTypeRetrieved,
		EventTypeMounted, EventTypeUnmounted, EventTypeDestroyed,
	}
}

// WakeKind is how a sandbox woke.
type WakeKind string

const (
	WakeKindWarm WakeKind = "warm" // resumed from memory
	WakeKindCold WakeKind = "cold" // started from disk
)

// Values returns all kinds.
func (WakeKind) Values() []WakeKind { return []WakeKind{WakeKindWarm, WakeKindCold} }

// Cause is what woke a sandbox.
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
	CauseEgress    Cause = "egress"    // data on a connection that it made
	CauseRequested Cause = "requested" // a call that wakes it
)

// Values returns all causes.
func (Cause) Values() []Cause {
	return []Cause{CausePreview, CauseExec, CauseFiles, CauseProcess, CauseTerminal, CauseSession, CauseContext, CauseWebSocket, CauseEgress, CauseRequested}
}

// EventList is a page of a sandbox's timeline.
type EventList struct {
	Events     []Event `json:"events" nullable:"false" doc:"Events, oldest first"`
	NextCursor string  `json:"next_cursor,omitempty" doc:"Cursor of the next page; missing on the last page"`
}

// FeedEvent is an event of any of the owner's sandboxes.
type FeedEvent struct {
	Event
	SandboxName string `json:"sandbox_name" doc:"Name of the sandbox when it happened" example:"shop"`
	Cursor      string `json:"cursor" doc:"Cursor or Last-Event-ID for continuing after this event"`
}

// FeedPage is a page of the events of all of the owner's sandboxes.
type FeedPage struct {
	Events     []FeedEvent `json:"events" nullable:"false" doc:"Events, oldest first"`
	Gap        bool        `json:"gap,omitempty" doc:"Whether events between the cursor and the first event of the page are no longer retained; the sandboxes' own timelines have them"`
	NextCursor string      `json:"next_cursor,omitempty" doc:"Cursor of the next page; missing on the last page"`
}

// FeedGap is the data of the event gap: the stream has missed events.
type FeedGap struct {
	Detail string `json:"detail" doc:"Description for people"`
}
