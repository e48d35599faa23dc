package sandbox

import (
	"context"
	"io"
	"net"
	"time"
)

// The Manager's dependencies. Engine, Disks, Freezer, Memory, Network and Uplink have a conformance
// suite each (packages enginetest, diskstest, freezertest, memorytest, networktest and uplinktest)
// that the real implementation and the fake both pass. Tests use the real Store, in memory.

// Limits of a sandbox. Zero means no limit.
type Limits struct {
	CPUs   float64 `json:"cpus,omitempty"`   // cores, such as 0.25
	Memory int64   `json:"memory,omitempty"` // bytes
	PIDs   int64   `json:"pids,omitempty"`   // processes and threads
	Disk   int64   `json:"disk,omitempty"`   // bytes beyond its image or snapshot
	Files  int64   `json:"files,omitempty"`  // files, folders and links beyond these
	Quotas
}

// ContainerSpec describes a container for Engine.Create.
type ContainerSpec struct {
	ID           ID
	Name         string // of the sandbox; becomes the host name if it can
	ImageRef     string
	Env          map[string]string
	CgroupParent string // absolute, as Freezer.Prepare returned it; empty: the engine's own choice
	GuestBinary  string // host path, mounted read-only at guest.BinaryPath
	RunDir       string // host path, mounted at guest.RunDir
	// New: the sandbox has never had a container. Remains that the engine has under its id
	// are from an interrupted Create and may be removed. Otherwise such remains may have
	// the sandbox's files, and Create returns an error.
	New bool
	// Origin is stored with the container as it is; it is opaque to the Engine.
	Origin string
}

// ContainerState as an Engine sees it.
type ContainerState string

const (
	ContainerCreated ContainerState = "created"
	ContainerRunning ContainerState = "running"
	ContainerPaused  ContainerState = "paused" // by the engine, not by a Freezer
	ContainerExited  ContainerState = "exited"
)

// Container is one container of this node.
type Container struct {
	ID       ID
	State    ContainerState
	PID      int // of its first process, on the host; 0 when not running
	ExitCode int // valid when exited

	Origin    string // as in its ContainerSpec; empty for a container of an earlier version
	ImageRef  string // as the engine names it
	CreatedAt time.Time
}

// Engine makes containers. All methods are safe for concurrent use. An engine that does
// not respond returns ErrEngineDown (wrapped).
type Engine interface {
	// EnsureImage makes ref usable by Create, pulling it when it is missing.
	// Callers with the same ref share one pull. progress gets human-readable
	// lines and may be nil. Returns ErrImageMissing (wrapped) with the reason.
	EnsureImage(ctx context.Context, ref string, progress func(line string)) error
	// Create makes the container, not started. An existing one with this id is left
	// unchanged.
	Create(ctx context.Context, spec ContainerSpec) error
	// Start starts a created or exited container, sets the limits that are the
	// processes' own and not of their cgroup, and returns it running. It does nothing
	// for one that runs already.
	Start(ctx context.Context, id ID, limits Limits) (Container, error)
	// Stop asks the first process to end, kills it after grace, and returns when the
	// container has exited. It returns nil for a container that does not run, and nil or
	// ErrNoContainer (wrapped) for one that does not exist. The caller has thawed it.
	Stop(ctx context.Context, id ID, grace time.Duration) error
	// Remove kills and removes the container with its disk, frozen or not. Idempotent.
	Remove(ctx context.Context, id ID) error
	// RemoveFolder removes a folder of the host with all that removed containers have
	// put there, of any owner and depth. Idempotent.
	RemoveFolder(ctx context.Context, path string) error
	// Inspect returns ErrNoContainer (wrapped) for an unknown id.
	Inspect(ctx context.Context, id ID) (Container, error)
	// List returns every container of this node and of no other.
	List(ctx context.Context) ([]Container, error)
	// LastLog returns the last line that the container wrote, without its
	// newline and at most 1,000 bytes; empty when it wrote none.
	LastLog(ctx context.Context, id ID) (string, error)
	// Ping returns nil when the engine responds.
	Ping(ctx context.Context) error
}

// Freezer stops and resumes all processes of a sandbox together, and accounts for their
// CPU time. Methods for an id that was not prepared return an error.
type Freezer interface {
	// Prepare makes the sandbox's cgroup with its limits, or sets the limits of the
	// existing one, and returns the parent for the container.
	Prepare(id ID, limits Limits) (cgroupParent string, err error)
	// Freeze returns when every process is frozen. Idempotent.
	Freeze(ctx context.Context, id ID) error
	// Thaw returns once the processes may run. Idempotent.
	Thaw(ctx context.Context, id ID) error
	// Frozen reports whether Freeze is in force.
	Frozen(ctx context.Context, id ID) (bool, error)
	// CPUTime returns the total user and system time of the sandbox since its cgroup was
	// made, including processes that have ended.
	CPUTime(ctx context.Context, id ID) (time.Duration, error)
	// Memory returns the bytes that the sandbox holds: its cgroup's charge where that is
	// counted, otherwise the sum of its processes' resident memory, which counts a shared
	// page once for each process.
	Memory(ctx context.Context, id ID) (int64, error)
	// Reclaim moves as much as it can of the sandbox's memory to swap, and drops its cached
	// files. The memory returns page by page when the processes use it. It does not wait for a
	// Freeze or Thaw, nor they for it. When ctx ends, it returns soon with what it has reclaimed
	// by then, without an error. Where the kernel cannot do that, it returns
	// errors.ErrUnsupported (wrapped) and has changed nothing.
	Reclaim(ctx context.Context, id ID) (Reclaimed, error)
	// Remove forgets the sandbox and removes its cgroup, which must be empty
	// of processes. Idempotent.
	Remove(id ID) error
	// Enforced names the limits that are enforced: "cpu", "memory", "pids".
	Enforced() []string
}

// Reclaimed are the bytes that a sandbox held before and after its memory was reclaimed.
type Reclaimed struct{ Before, After int64 }

// Memory reads how much memory is left to the node and its sandboxes. Its method may be called
// concurrently, and takes microseconds.
type Memory interface {
	Read() (MemoryState, error)
}

// MemoryState is what is left of the memory that the node and its sandboxes share.
type MemoryState struct {
	At time.Time
	// Total and Available are the bytes of the machine, or of a cgroup around the node whose
	// limit leaves it a smaller share.
	Total, Available int64
	// Swap are the bytes that may still be moved to swap, zram included.
	Swap int64
	// Stalled is for how long, since some time before, one program or more waited for memory. It
	// is valid if Stalls: not every kernel counts it.
	Stalled time.Duration
	Stalls  bool
}

// Disks makes snapshots of the disks of an Engine's containers. The Engine creates containers
// from a snapshot as from the image SnapshotRef. All methods are safe for concurrent use, but
// concurrent calls are never for the same snapshot. An unknown container returns ErrNoContainer
// (wrapped), a full disk ErrStoreFull (wrapped).
type Disks interface {
	// Repair repairs what a loss of power has damaged in the storage. It is called once, before
	// containers are created and removed. Of the other methods, only Space may be called before.
	Repair(ctx context.Context) error
	// Sync makes the creation or the removal of a container durable. A loss of power leaves the disk of a new container usable,
	// with all that its programs have synced, and does not bring back a removed one.
	Sync(ctx context.Context, id ID) error
	// Prefetch copies the disk of a container whose programs run, so that Capture has less to
	// do. The copy is not consistent yet. paths are as for Capture. If one of them does not exist, Prefetch returns
	// *InvalidError.
	Prefetch(ctx context.Context, id ID, snapshot SnapshotID, paths []string) error
	// Capture copies what Prefetch has not, or what has changed since. The container does not
	// run, or is frozen. If paths are given, which are valid and the same as for Prefetch, the snapshot is partial.
	Capture(ctx context.Context, id ID, snapshot SnapshotID, paths []string) (DiskUsage, error)
	// Publish makes what was captured a snapshot, which is on the disk when Publish returns. With flatten, the
	// snapshot is based on the image only, and has the files of all snapshots on which the container is based. A
	// partial snapshot is always based on the image. It has the merged files of the disk and the image at its paths, and
	// the folders that contain them. If one of the paths does not exist, Publish returns *InvalidError. The caller must
	// prevent the deletion of the snapshots that the container is based on until Publish returns.
	Publish(ctx context.Context, id ID, snapshot SnapshotID, flatten bool) error
	// Stage copies the files of a partial snapshot for Overlay. The caller must prevent the deletion of that snapshot until
	// Stage returns. After an error, Delete removes the incomplete copy.
	Stage(ctx context.Context, from, snapshot SnapshotID) (DiskUsage, error)
	// Overlay creates the snapshot for which Stage or Backups.Download has prepared the files at paths. Its disk is the disk
	// of the snapshot below, with these files instead of its own at the paths. The snapshot is durable when Overlay returns. If
	// below has an entry that is not a folder where a folder contains one of the paths, Overlay returns ErrNotFolder
	// (wrapped).
	Overlay(ctx context.Context, snapshot, below SnapshotID, paths []string) error
	// Move makes the disk of a container that does not run a snapshot, without a copy, which is
	// on the disk when Move returns. The container is left an empty disk.
	Move(ctx context.Context, id ID, snapshot SnapshotID) error
	// Moved reports whether a Move that failed, or was interrupted by the end of the node, has
	// moved files into the snapshot, which is on the disk then.
	Moved(ctx context.Context, snapshot SnapshotID) (bool, error)
	// Discard empties the disk of a container that does not run. It does not wait until the
	// files have been deleted.
	Discard(ctx context.Context, id ID) error
	// Delete deletes a snapshot, or what failed calls have left of one. While a container is
	// based on it, it returns ErrSnapshotInUse (wrapped) and changes nothing. Files that other
	// snapshots are based on stay until those are deleted. Idempotent.
	Delete(ctx context.Context, snapshot SnapshotID) error
	// Export exports a snapshot as a container image with this name, in the format that package
	// ociimage describes. It returns when the first byte is available. If ctx ends, reads fail. The
	// caller must close the archive to release its resources, and must prevent the deletion of the
	// snapshot until then. If an image cannot represent a file of the snapshot, Export returns
	// ErrUnexportable (wrapped).
	Export(ctx context.Context, snapshot SnapshotID, name string) (io.ReadCloser, error)
	// Measure returns the usage of a snapshot without its parents, or of the disk of a
	// container if id is not empty.
	Measure(ctx context.Context, id ID, snapshot SnapshotID) (DiskUsage, error)
	// Usage returns the total usage of a container on the node's file systems: its disk, its run
	// folder, and deleted files that its processes have open. pid is its first process, or 0 if it
	// is not running. Counting stops at the limit, 0 for none; the returned usage then exceeds the
	// limit. The measurement runs at the lowest priority. It returns ErrTooDeep (wrapped) if folders
	// are nested too deep.
	Usage(ctx context.Context, id ID, pid int, limit DiskUsage) (DiskUsage, error)
	// Space returns the space of each file system that containers write to, always in the same
	// order. A call takes microseconds.
	Space() ([]DiskSpace, error)
}

// DiskSpace is the space of a file system. Entries are inodes; all are 0 if the file system does not
// limit their number.
type DiskSpace struct {
	Path              string // a folder of the node on the file system
	Roots             bool   // the root file systems of sandboxes are on it
	Total, Used, Free DiskUsage
	// Written is a lower bound of the bytes that programs have written to all file systems since
	// boot. It never decreases. 0 means unknown.
	Written int64
}

// Network reaches into a sandbox.
type Network interface {
	// Dial connects to a TCP port on the loopback of the sandbox whose first
	// process has this pid on the host. The connection is a kernel TCP socket.
	// A port without a listener returns syscall.ECONNREFUSED (wrapped).
	Dial(ctx context.Context, id ID, pid int, port uint16) (net.Conn, error)
	// Forget releases the resources of the sandbox. Idempotent.
	Forget(id ID)
}

// Uplink is the sandboxes' network. The Manager never calls Attach, Detach and Forget
// concurrently for the same sandbox. Calls for different sandboxes, and of the other
// methods, are concurrent.
type Uplink interface {
	// Attach connects a sandbox to its network; pid is the first process of its
	// container, which runs or is frozen. It replaces an earlier attachment, also of an
	// earlier container or run of the node. Once it has returned, the sandbox's programs
	// may send. On an error nothing is attached.
	Attach(ctx context.Context, sb Sandbox, pid int) error
	// Detach disconnects the sandbox: its container is gone, or about to be. It
	// returns soon, and nothing is sent or received any more. Idempotent; the id may
	// be unknown. State that must outlive a container, such as the addresses assigned to
	// names, stays. Detach must not wait for a Rouse or another wait for the sandbox, which
	// cannot finish before Detach returns: it ends their contexts.
	Detach(id ID)
	// Forget deletes the state of a destroyed sandbox, which is detached.
	// Idempotent; the id may be unknown.
	Forget(id ID)
	// Known returns each sandbox that has state, once: those that were never forgotten, or
	// not completely, as when the disk was full. At start the Manager forgets those that no
	// longer exist.
	Known() []ID
	// Trust returns the PEM of the CAs that sandboxes should trust from now on, or nil.
	// It is called often, and returns from memory.
	Trust() []byte
	// Environment returns variables for the commands and processes of a sandbox that
	// start now. The environment of the sandbox and of the command take precedence. It
	// returns from memory; the caller must not change the map.
	Environment(id ID) map[string]string
}

// A Store retains the newest MaxEvents of each sandbox's timeline by Seq, each until
// EventRetention after its Time.
const (
	MaxEvents      = 1000
	EventRetention = 30 * 24 * time.Hour
)

// Store persists records and timelines. A write has reached the disk when it returns,
// except AppendEvents. All methods are safe for concurrent use. A full disk returns
// ErrStoreFull (wrapped); then nothing of the write is stored.
type Store interface {
	// PutSandbox writes the record, replacing an older one of the same ID.
	PutSandbox(ctx context.Context, sb Sandbox) error
	// DeleteSandbox removes the record; its events go in their own time.
	// Idempotent.
	DeleteSandbox(ctx context.Context, id ID) error
	// Sandboxes calls yield for every record until it returns an error, which
	// Sandboxes then returns.
	Sandboxes(ctx context.Context, yield func(Sandbox) error) error
	// AppendEvents adds to the timelines. It need not be on disk on return:
	// the last moments before a crash may be missing.
	AppendEvents(ctx context.Context, events []Event) error
	// Events returns up to limit events of a sandbox with Seq > after, oldest
	// first.
	Events(ctx context.Context, id ID, after uint64, limit int) ([]Event, error)
	// PutSnapshot writes the record, replacing an older one of the same ID.
	PutSnapshot(ctx context.Context, s Snapshot) error
	// DeleteSnapshot removes the record. Idempotent.
	DeleteSnapshot(ctx context.Context, id SnapshotID) error
	// Snapshots calls yield for every record until it returns an error, which Snapshots then
	// returns.
	Snapshots(ctx context.Context, yield func(Snapshot) error) error
	// LastSeq is the highest Seq of a sandbox's events, 0 without any.
	LastSeq(ctx context.Context, id ID) (uint64, error)
	// NodeID is made when the store is made and never changes: 12 characters
	// of [a-z0-9].
	NodeID() string
	// DiskBytes returns the disk space of the store in bytes; 0 if it is in memory.
	DiskBytes() (int64, error)
	Close() error
}
