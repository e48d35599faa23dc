package sandbox

import (
	"context"
	"net"
	"time"
)

// What the Manager needs from outside. Each interface has one conformance suite
// (packages enginetest, freezertest, networktest, storetest and uplinktest beside
// this one) that the real thing and the fake both pass.

// Limits of a sandbox. Zero means no limit.
type Limits struct {
	CPUs   float64 `json:"cpus,omitempty"`   // cores, such as 0.25
	Memory int64   `json:"memory,omitempty"` // bytes
	PIDs   int64   `json:"pids,omitempty"`   // processes and threads
	Quotas
}

// ContainerSpec is what an Engine makes a container of.
type ContainerSpec struct {
	ID           ID
	Name         string // of the sandbox; becomes the host name if it can
	ImageRef     string
	Env          map[string]string
	CgroupParent string // absolute, as Freezer.Prepare gave it; empty: the engine's own choice
	GuestBinary  string // host path, mounted read-only at guest.BinaryPath
	RunDir       string // host path, mounted at guest.RunDir
	// New says that the sandbox has never had a container: what an engine may have
	// under its id is of a Create that was cut off, and may be removed. Without it, such
	// remains may have the sandbox's files, and Create returns an error.
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

	Origin    string // as in its ContainerSpec; empty for one made before there was such a field
	ImageRef  string // as the engine names it
	CreatedAt time.Time
}

// Engine makes containers. All methods may be called at once from many
// goroutines. An engine that does not answer returns ErrEngineDown (wrapped).
type Engine interface {
	// EnsureImage makes ref usable by Create, pulling it when it is missing.
	// Callers with the same ref share one pull. progress gets human-readable
	// lines and may be nil. Returns ErrImageMissing (wrapped) with the reason.
	EnsureImage(ctx context.Context, ref string, progress func(line string)) error
	// Create makes the container, not started. One that exists already with
	// this id is left as it is and is no error.
	Create(ctx context.Context, spec ContainerSpec) error
	// Start starts a created or exited container, sets the limits that are the
	// processes' own and not of their cgroup, and returns it running.
	// One that runs already is no error.
	Start(ctx context.Context, id ID, limits Limits) (Container, error)
	// Stop asks the first process to end, kills it after grace, and returns
	// when the container has exited. One that does not run is no error; one that
	// does not exist is either no error or ErrNoContainer (wrapped).
	// The caller has thawed it.
	Stop(ctx context.Context, id ID, grace time.Duration) error
	// Remove kills and removes the container with its disk, frozen or not.
	// One that does not exist is no error.
	Remove(ctx context.Context, id ID) error
	// RemoveFolder removes a folder of the host with all that containers, which
	// are no more, have put there: whoever owns it, and however deep it is. One
	// that does not exist is no error.
	RemoveFolder(ctx context.Context, path string) error
	// Inspect returns ErrNoContainer (wrapped) for an unknown id.
	Inspect(ctx context.Context, id ID) (Container, error)
	// List returns every container of this node and of no other.
	List(ctx context.Context) ([]Container, error)
	// LastLog returns the last line that the container wrote, without its
	// newline and at most 1,000 bytes; empty when it wrote none.
	LastLog(ctx context.Context, id ID) (string, error)
	// Ping returns nil when the engine answers.
	Ping(ctx context.Context) error
}

// Freezer stops and resumes all processes of a sandbox at once, and accounts
// for their CPU time. Methods for an id that was not prepared return an error.
type Freezer interface {
	// Prepare makes the sandbox's cgroup with its limits, or sets the limits
	// of the one that is there, and returns the parent for the container.
	Prepare(id ID, limits Limits) (cgroupParent string, err error)
	// Freeze returns when every process is frozen. Idempotent.
	Freeze(ctx context.Context, id ID) error
	// Thaw returns once the processes may run. Idempotent.
	Thaw(ctx context.Context, id ID) error
	// Frozen says whether Freeze is in force.
	Frozen(ctx context.Context, id ID) (bool, error)
	// CPUTime is the total user and system time of the sandbox since its cgroup was
	// made, that of processes that have ended included.
	CPUTime(ctx context.Context, id ID) (time.Duration, error)
	// Memory is what the sandbox holds, in bytes: what its cgroup is charged for
	// where that is counted, else the sum of its processes' resident memory, in
	// which pages that processes share count once for each.
	Memory(ctx context.Context, id ID) (int64, error)
	// Remove forgets the sandbox and removes its cgroup, which must be empty
	// of processes. Idempotent.
	Remove(id ID) error
	// Enforced names the limits that are enforced: "cpu", "memory", "pids".
	Enforced() []string
}

// Network reaches into a sandbox.
type Network interface {
	// Dial connects to a TCP port on the loopback of the sandbox whose first
	// process has this pid on the host. The connection is a kernel TCP socket.
	// A port on which nobody listens returns syscall.ECONNREFUSED (wrapped).
	Dial(ctx context.Context, id ID, pid int, port uint16) (net.Conn, error)
	// Forget drops what is kept for the sandbox. Idempotent.
	Forget(id ID)
}

// Uplink is the sandboxes' way out. The Manager calls Attach, Detach and Forget of
// one sandbox one after another, never two at once; those of several sandboxes, and
// the other methods, come from many goroutines at once.
type Uplink interface {
	// Attach gives a sandbox its network; pid is the first process of its
	// container, which runs or is frozen. It replaces what was attached before, also
	// that of an earlier container or of an earlier run of the node. Once it has
	// returned, the sandbox's programs may send. On an error nothing is attached.
	Attach(ctx context.Context, sb Sandbox, pid int) error
	// Detach takes the network away: the container is gone, or about to be. It
	// returns soon, and nothing is sent or received any more. Idempotent; the id may
	// be unknown. What must outlive a container, such as the addresses that stand for
	// names, is kept. No Rouse, and no other wait for the sandbox, may hold it up:
	// they wait for what goes on once it has returned. Their contexts end with it.
	Detach(id ID)
	// Forget drops all that is kept of a sandbox that is destroyed. It is detached.
	// Idempotent; the id may be unknown.
	Forget(id ID)
	// Kept are the sandboxes of which something is kept, each once: those that were
	// not forgotten, or not wholly, as when the disk was full. At start the Manager
	// forgets those that are no more.
	Known() []ID
	// Trust is the PEM of the CAs that sandboxes should trust from now on, nil if
	// there are none. It is asked often, and answers from memory.
	Trust() []byte
	// Environment are variables for the commands and processes of a sandbox that
	// start now. What the sandbox's own environment or the command sets wins. It
	// answers from memory; the caller changes nothing in it.
	Environment(id ID) map[string]string
}

// What a Store keeps of each sandbox's timeline: the newest MaxEvents by Seq, each
// until KeepEvents after its At.
const (
	MaxEvents      = 1000
	EventRetention = 30 * 24 * time.Hour
)

// Store keeps what must outlive the node. A write has reached the disk when it
// returns, except AppendEvents. All methods may be called at once. A full disk
// returns ErrStoreFull (wrapped); nothing of the write is then kept.
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
	// LastSeq is the highest Seq of a sandbox's events, 0 without any.
	LastSeq(ctx context.Context, id ID) (uint64, error)
	// NodeID is made when the store is made and never changes: 12 characters
	// of [a-z0-9].
	NodeID() string
	Close() error
}
