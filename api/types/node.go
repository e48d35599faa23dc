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

// NodeDiskUsage is the disk usage of a node, and the space that deletions would free.
type NodeDiskUsage struct {
	FileSystems      []FileSystem  `json:"file_systems" nullable:"false" doc:"File systems that sandboxes write to; the first one has their disks and snapshots, the last one the node's own data"`
	Sandboxes        DiskTotal     `json:"sandboxes" doc:"Disks of sandboxes as last measured, without their images, snapshots and bases"`
	Snapshots        DiskTotal     `json:"snapshots" doc:"Snapshots without their parents and images"`
	UnusedSnapshots  DiskTotal     `json:"unused_snapshots" doc:"Snapshots that no sandbox is based on; bytes is the space that deleting all of them frees, including their bases"`
	Bases            DiskTotal     `json:"bases" doc:"Deleted snapshots, and temporary ones such as those of forks and backups, that sandboxes or snapshots are based on"`
	StoreBytes       int64         `json:"store_bytes" doc:"Records and events of the node"`
	BackupCacheBytes int64         `json:"backup_cache_bytes" doc:"Cache of the repository of backups, as of at most a minute ago; 0 without an object store"`
	LargestSandboxes []SandboxDisk `json:"largest_sandboxes" nullable:"false" doc:"Sandboxes with the largest disks, largest first, up to max_sandboxes"`
}

// DiskTotal is a sum of disk space.
type DiskTotal struct {
	Count int   `json:"count" doc:"Number of sandboxes or snapshots"`
	Bytes int64 `json:"bytes" doc:"Disk space in bytes"`
}

// FileSystem is the space of a file system.
type FileSystem struct {
	Path         string `json:"path" doc:"A folder of the node on the file system" example:"/var/lib/doze/.local/share/containers/storage"`
	TotalBytes   int64  `json:"total_bytes" doc:"Size of the file system in bytes"`
	UsedBytes    int64  `json:"used_bytes" doc:"Used space in bytes"`
	FreeBytes    int64  `json:"free_bytes" doc:"Space that the node's user can use, in bytes"`
	ReserveBytes int64  `json:"reserve_bytes" doc:"The node refuses new sandboxes and snapshots if less than this is free"`
	OtherBytes   int64  `json:"other_bytes" doc:"Used space that the other fields do not count: images, sandboxes in quarantine and other programs; 0 if files share more blocks than that"`
}

// SandboxDisk is the disk of a sandbox.
type SandboxDisk struct {
	ID         string    `json:"id" doc:"Id of the sandbox" example:"k3f9x2m7q2az"`
	Name       string    `json:"name" doc:"Name of the sandbox" example:"shop"`
	State      State     `json:"state" doc:"State of the sandbox"`
	DiskBytes  int64     `json:"disk_bytes" doc:"Disk space as last measured, without its image, snapshot and bases; includes deleted files that its programs have open and the logs of its processes"`
	MeasuredAt time.Time `json:"measured_at,omitzero" doc:"When the disk was last measured; missing if it was not since the node started"`
	LimitBytes int64     `json:"limit_bytes,omitempty" doc:"Maximum of disk_bytes; missing without a limit"`
	FreedBytes int64     `json:"freed_bytes" doc:"Space that deleting the sandbox frees: disk_bytes, and the bases that only it is based on"`
}

// PendingOperation is an operation that has failed and is retried until it succeeds.
type PendingOperation struct {
	Operation     Operation `json:"operation" doc:"destroy: remove the remains of a destroyed sandbox; stop: stop a container in quarantine; delete_archive: delete the backup that has the disk of a destroyed sandbox"`
	Sandbox       string    `json:"sandbox" doc:"Id of the sandbox"`
	Since         time.Time `json:"since" doc:"When it first failed"`
	Attempts      int       `json:"attempts" doc:"Number of attempts so far"`
	NextAttemptAt time.Time `json:"next_attempt_at" doc:"When it is tried again"`
	Error         string    `json:"error" doc:"Error of the last attempt"`
}

// Operation is an operation on a sandbox.
type Operation string

const (
	OperationDestroy       Operation = "destroy"        // remove the remains of a destroyed sandbox
	OperationStop          Operation = "stop"           // stop a container in quarantine
	OperationDeleteArchive Operation = "delete_archive" // delete the backup that has the disk of a destroyed sandbox
)

// Values returns all operations.
func (Operation) Values() []Operation {
	return []Operation{OperationDestroy, OperationStop, OperationDeleteArchive}
}

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
