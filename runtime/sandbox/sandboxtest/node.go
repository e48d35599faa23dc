// Package sandboxtest has a Manager for tests: the real one, over a store in memory and
// fakes of the engine, the freezer, the network and the uplink that pass the conformance
// suites of the real ones. Its sandboxes have a real guest, which runs in the test's process
// on the test's files.
package sandboxtest

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/store"
	"github.com/doze-run/doze/runtime/store/storetest"
	"github.com/doze-run/doze/testkit"
)

// Node is a Manager with its dependencies.
type Node struct {
	Manager *sandbox.Manager
	Engine  *Engine
	Disks   *Disks
	Backups *Backups // nil: the next Manager has no object store
	Buckets *Buckets
	Freezer *Freezer
	Memory  *Memory
	Store   *Store
	Uplink  *Uplink
	Roots   func() ([]byte, error) // of the next Manager
	// Restored: the next Manager's store is an older copy.
	Restored bool
	Log      *testkit.Log // lines of JSON

	Creations, Origins string // folders, as in sandbox.Deps

	config sandbox.Config
}

// New returns a started Manager that is closed with the test.
func New(t testing.TB) *sandbox.Manager { return Open(t, nil).Manager }

// Open returns a started Node that is closed with the test; configure may
// change its configuration and may be nil. Sandboxes do not sleep by
// themselves unless it sets SleepAfter. Memory, disks and the age of snapshots are not checked by themselves
// unless it sets their intervals.
func Open(t testing.TB, configure func(*sandbox.Config)) *Node {
	t.Helper()
	n := Prepare(t, configure)
	n.Restart(t)
	t.Cleanup(func() {
		if err := n.Manager.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return n
}

// Prepare returns a Node without a Manager; configure is as for Open.
func Prepare(t testing.TB, configure func(*sandbox.Config)) *Node {
	t.Helper()
	// A Unix socket's path must be short; t.TempDir has the test's name in it.
	runDir, err := os.MkdirTemp("", "doze")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(runDir) })
	cfg := sandbox.DefaultConfig()
	cfg.RunDir = runDir
	cfg.Images.Names = map[string]string{"base": "localhost/doze/base:latest", "other": "localhost/doze/other:latest"}
	cfg.SleepAfter, cfg.StopAfter = 0, 0
	cfg.MemoryInterval = time.Hour // see Manager.Relieve
	cfg.DiskInterval = time.Hour   // see Manager.WatchDisks
	cfg.SnapshotInterval = time.Hour
	if configure != nil {
		configure(&cfg)
	}
	engine := NewEngine(t)
	return &Node{Engine: engine, Disks: engine.Disks(), Backups: engine.Backups(), Buckets: NewBuckets(), Freezer: NewFreezer(), Memory: NewMemory(), Store: &Store{Badger: storetest.New(t)}, Uplink: NewUplink(t), Log: testkit.NewLog(t), config: cfg, Creations: t.TempDir(), Origins: t.TempDir()}
}

// Reconfigure changes the configuration, as a reload does.
func (n *Node) Reconfigure(t testing.TB, change func(*sandbox.Config)) {
	t.Helper()
	n.config.Sizes = maps.Clone(n.config.Sizes)
	change(&n.config)
	testkit.NoError(t, "Configure", n.Manager.Configure(n.config))
}

// Restart starts a new Manager with the dependencies of the previous one.
func (n *Node) Restart(t testing.TB) {
	t.Helper()
	m := n.Unstarted(t)
	if err := m.Start(t.Context(), n.Uplink); err != nil {
		t.Fatal(err)
	}
	n.Manager = m
}

// Unstarted returns a new Manager with the dependencies of the previous one; the caller
// closes it.
func (n *Node) Unstarted(t testing.TB) *sandbox.Manager {
	t.Helper()
	m, err := sandbox.New(n.config, n.Deps(t))
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// Deps returns the dependencies of a new Manager.
func (n *Node) Deps(t testing.TB) sandbox.Deps {
	n.Uplink.Restart()
	deps := sandbox.Deps{
		Engine: n.Engine, Disks: n.Disks, Buckets: n.Buckets, Freezer: n.Freezer, Memory: n.Memory, Network: NewNetwork(), Store: n.Store,
		PublicRoots: n.Roots, Restored: n.Restored, Creations: n.Creations, Origins: n.Origins, Log: slog.New(slog.NewJSONHandler(n.Log, nil)),
	}
	if n.Backups != nil {
		deps.Backups = n.Backups
	}
	return deps
}

// Crash ends the Manager without letting it put anything to sleep, as a
// SIGKILL does, runs meanwhile, and starts a new one.
func (n *Node) Crash(t testing.TB, meanwhile func()) {
	t.Helper()
	n.Freezer.Fail("freeze", errors.New("the node is dead"))
	if err := n.Manager.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.Freezer.Fail("freeze", nil)
	meanwhile()
	n.Restart(t)
}

// Store is a store in memory that can report a full disk and fail.
type Store struct {
	*store.Badger
	full atomic.Bool
	hook atomic.Pointer[func(operation string, events []sandbox.Event) error]
}

// Hook makes the store call f at the beginning of each operation, "put", "put_snapshot", "delete",
// "delete_snapshot", "last" or "append", and "after_put" and "after_put_snapshot", when the record is written. events are
// those to append. An error of f fails the operation; nil ends the calls.
func (s *Store) Hook(f func(operation string, events []sandbox.Event) error) { s.hook.Store(&f) }

func (s *Store) call(operation string, events []sandbox.Event) error {
	if f := s.hook.Load(); f != nil && *f != nil {
		return (*f)(operation, events)
	}
	return nil
}

// LastSeq implements sandbox.Store.
func (s *Store) LastSeq(ctx context.Context, id sandbox.ID) (uint64, error) {
	if err := s.call("last", nil); err != nil {
		return 0, err
	}
	return s.Badger.LastSeq(ctx, id)
}

// Record returns the stored record of a sandbox.
func (s *Store) Record(t testing.TB, id sandbox.ID) (record sandbox.Sandbox) {
	t.Helper()
	err := s.Sandboxes(context.Background(), func(sb sandbox.Sandbox) error {
		if sb.ID == id {
			record = sb
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return record
}

// Fill makes the disk full, or not.
func (s *Store) Fill(full bool) { s.full.Store(full) }

// PutSandbox implements sandbox.Store.
func (s *Store) PutSandbox(ctx context.Context, sb sandbox.Sandbox) error {
	if s.full.Load() {
		return sandbox.ErrStoreFull
	}
	if err := s.call("put", nil); err != nil {
		return err
	}
	if err := s.Badger.PutSandbox(ctx, sb); err != nil {
		return err
	}
	return s.call("after_put", nil)
}

// PutSnapshot implements sandbox.Store.
func (s *Store) PutSnapshot(ctx context.Context, snapshot sandbox.Snapshot) error {
	if s.full.Load() {
		return sandbox.ErrStoreFull
	}
	if err := s.call("put_snapshot", nil); err != nil {
		return err
	}
	if err := s.Badger.PutSnapshot(ctx, snapshot); err != nil {
		return err
	}
	return s.call("after_put_snapshot", nil)
}

// DeleteSandbox implements sandbox.Store.
func (s *Store) DeleteSandbox(ctx context.Context, id sandbox.ID) error {
	if err := s.call("delete", nil); err != nil {
		return err
	}
	return s.Badger.DeleteSandbox(ctx, id)
}

// DeleteSnapshot implements sandbox.Store.
func (s *Store) DeleteSnapshot(ctx context.Context, id sandbox.SnapshotID) error {
	if err := s.call("delete_snapshot", nil); err != nil {
		return err
	}
	return s.Badger.DeleteSnapshot(ctx, id)
}

// AppendEvents implements sandbox.Store.
func (s *Store) AppendEvents(ctx context.Context, events []sandbox.Event) error {
	if s.full.Load() {
		return sandbox.ErrStoreFull
	}
	if err := s.call("append", events); err != nil {
		return err
	}
	return s.Badger.AppendEvents(ctx, events)
}

// RunDir is the folder with the guest's socket.
func (n *Node) RunDir(id sandbox.ID) string { return filepath.Join(n.config.RunDir, string(id)) }
