package sandbox

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/doze-run/doze/quota"
	"github.com/doze-run/doze/runtime/guest"
)

// Deps are the dependencies of a Manager. The caller closes them after the Manager.
type Deps struct {
	Engine  Engine
	Disks   Disks // of the Engine's containers
	Freezer Freezer
	Backups Backups // of the Disks' snapshots; nil: the node has no object store
	Buckets Buckets // nil: the node has no buckets
	Memory  Memory  // nil: no memory is reclaimed, and no sandbox is stopped for want of it
	Network Network
	Store   Store
	// PublicRoots returns the PEM of the public CAs for images that have none. If it is nil,
	// those images get none.
	PublicRoots func() ([]byte, error)
	// Creations is a folder for notes of the creations under way. It belongs to the
	// Engine's containers and is not part of a copy of the Store. Required.
	Creations string
	// Origins is a folder for the settings of sandboxes as of their last change, from
	// which sandboxes without a record are rebuilt. It belongs to the Engine's containers,
	// too. Required.
	Origins string
	// Restored: the Store is a restored, older copy. A creation that is unfinished in it
	// may have been finished since.
	Restored bool
	Log      *slog.Logger
}

// Manager owns every sandbox of the node and alone decides their states. It is safe for
// concurrent use.
type Manager struct {
	cfg     atomic.Pointer[Config]
	deps    Deps
	uplink  Uplink // set by Start
	log     *slog.Logger
	journal *journal
	metrics *metrics
	feed    *feed

	creations creations
	origins   origins
	retries   retries

	snapshots snapshots

	memory       atomic.Pointer[MemoryState] // as last read; nil before
	memoryFailed atomic.Bool                 // the last read failed
	reclaims     reclaims
	pressure     pressure
	disks        diskWatch

	messages *quota.Pool // memory for messages of kernels

	waiting   atomic.Int64 // callers that wait for a wake
	startedAt time.Time

	// ctx ends when the Manager closes; running counts its goroutines.
	ctx     context.Context
	cancel  context.CancelCauseFunc
	closing sync.RWMutex // held for reading while a goroutine is added
	closed  bool
	running sync.WaitGroup

	mu        sync.RWMutex
	started   bool
	sandboxes map[ID]*liveSandbox
	names     map[nameKey]*liveSandbox
	// quarantined are containers and run folders without a record, see quarantine.go.
	quarantined map[ID]*quarantined
}

// New returns a Manager that Start makes usable.
func New(cfg Config, deps Deps) (*Manager, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if deps.Creations == "" || deps.Origins == "" {
		return nil, errors.New("sandbox: Deps has no Creations or no Origins")
	}
	m := &Manager{
		deps:      deps,
		log:       deps.Log,
		journal:   newJournal(deps.Store, deps.Log),
		metrics:   newMetrics(),
		feed:      newFeed(),
		messages:  quota.New(maxMessages),
		startedAt: time.Now().UTC(),
		sandboxes: map[ID]*liveSandbox{},
		snapshots: snapshots{byID: map[SnapshotID]Snapshot{}, pins: map[SnapshotID]int{}, unwanted: map[SnapshotID]struct{}{}},
		names:     map[nameKey]*liveSandbox{},

		quarantined: map[ID]*quarantined{},
		creations:   creations{deps.Creations},
		origins:     origins{deps.Origins},
		retries:     retries{pending: map[pendingKey]*pendingRetry{}},
	}
	if deps.Buckets == nil {
		m.deps.Buckets = noBuckets{}
	}
	m.deps.Engine = countedEngine{deps.Engine, m.metrics.engineErrors}
	m.cfg.Store(&cfg)
	m.reclaims.possible.Store(slices.Contains(deps.Freezer.Enforced(), "memory"))
	m.readMemory()
	m.ctx, m.cancel = context.WithCancelCause(context.Background())
	m.spawn(m.journal.run)
	return m, nil
}

// Configure replaces the configuration of a running Manager. RunDir cannot
// change. Sandboxes keep the times and the image that they were created with. A changed
// size applies from their next cold wake; sandboxes of a removed size keep its limits.
func (m *Manager) Configure(cfg Config) error {
	if err := cfg.Validate(); err != nil {
		return err
	}
	before := m.config()
	if have := before.RunDir; cfg.RunDir != have {
		return &InvalidError{Field: "data", Reason: "cannot change while the node runs", Want: "keep " + have + ", or restart the node"}
	}
	m.cfg.Store(&cfg)
	if cfg.ReclaimAfter != before.ReclaimAfter {
		m.armSleeping()
	}
	return nil
}

func (m *Manager) config() *Config { return m.cfg.Load() }

func (m *Manager) runDir(id ID) string { return filepath.Join(m.config().RunDir, string(id)) }

func (m *Manager) socketPath(id ID) string { return filepath.Join(m.runDir(id), guest.SocketName) }

// Close puts the running sandboxes to sleep and ends the Manager's goroutines. The next
// Start resumes the sandboxes that it put to sleep.
func (m *Manager) Close(ctx context.Context) error {
	m.closing.Lock()
	if m.closed {
		m.closing.Unlock()
		return nil
	}
	m.closed = true
	m.closing.Unlock()

	m.mu.Lock()
	started := m.started
	m.started = false
	sandboxes := slices.Collect(maps.Values(m.sandboxes))
	m.mu.Unlock()
	if started { // else Start may still wait for unresponsive ones
		m.sleepAll(ctx, sandboxes)
	}
	m.cancel(ErrClosed)
	for _, b := range sandboxes {
		b.unwatch()
	}
	m.running.Wait()
	m.sleepAll(ctx, sandboxes) // the ones that were being woken or adopted
	for _, b := range sandboxes {
		b.disarm()
		b.dropListeners()
		b.dropKernels()
		b.guest.Close()
	}
	m.feed.close()
	// The queue is short, and must not be lost when ctx has ended.
	m.journal.flush(context.WithoutCancel(ctx))
	return ctx.Err()
}

// sleepAll puts the running sandboxes to sleep, with or without leases.
func (m *Manager) sleepAll(ctx context.Context, sandboxes []*liveSandbox) {
	var wg sync.WaitGroup
	for _, b := range sandboxes {
		if b.state() != StateRunning {
			continue
		}
		wg.Go(func() {
			if err := b.sleep(ctx, modeShutdown, ReasonNodeShutdown); err != nil && !errors.Is(err, ErrDestroyed) {
				m.log.Error("failed to put a sandbox to sleep at shutdown", "sandbox", b.id, "error", err)
			}
		})
	}
	wg.Wait()
}

// spawn runs f in a goroutine of the Manager with a context that ends when it
// closes. It reports false, and runs nothing, when it has closed.
func (m *Manager) spawn(f func(context.Context)) bool {
	m.closing.RLock()
	defer m.closing.RUnlock()
	if m.closed {
		return false
	}
	m.running.Go(func() { f(m.ctx) })
	return true
}

// do runs f to its end in a goroutine of the Manager and returns its error,
// or ctx.Err() when ctx ends first.
func (m *Manager) do(ctx context.Context, f func(context.Context) error) error {
	done := make(chan error, 1)
	if !m.spawn(func(ctx context.Context) { done <- f(ctx) }) {
		return ErrClosed
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}
