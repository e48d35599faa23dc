// Package sandboxtest has a Manager for tests: the real one, over a store in memory and
// fakes of the engine, the freezer, the network and the uplink that pass the conformance
// suites of the real ones. Its sandboxes have a real guest, which runs in the test's process
// on the test's files.
package sandboxtest

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/store"
	"github.com/doze-run/doze/runtime/store/storetest"
	"github.com/doze-run/doze/testkit"
)

// Node is a Manager with its dependencies.
type Node struct {
	Manager *sandbox.Manager
	Engine  *Engine
	Freezer *Freezer
	Store   *Store
	Uplink  *Uplink
	Roots   func() ([]byte, error) // of the next Manager
	// Restored: the next Manager's store is an older copy.
	Restored bool
	Log      *testkit.Log // lines of JSON

	config    sandbox.Config
	creations string // folder
	origins   string // folder
}

// New returns a started Manager that is closed with the test.
func New(t testing.TB) *sandbox.Manager { return Open(t, nil).Manager }

// Open returns a started Node that is closed with the test; configure may
// change its configuration and may be nil. Sandboxes do not sleep by
// themselves unless it sets SleepAfter.
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
	if configure != nil {
		configure(&cfg)
	}
	return &Node{Engine: NewEngine(t), Freezer: NewFreezer(), Store: &Store{Badger: storetest.New(t)}, Uplink: NewUplink(t), Log: testkit.NewLog(t), config: cfg, creations: t.TempDir(), origins: t.TempDir()}
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
	return sandbox.Deps{
		Engine: n.Engine, Freezer: n.Freezer, Network: NewNetwork(), Store: n.Store,
		PublicRoots: n.Roots, Restored: n.Restored, Creations: n.creations, Origins: n.origins, Log: slog.New(slog.NewJSONHandler(n.Log, nil)),
	}
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

// Unfinish reverts a sandbox's record and notes to those before its creation was
// acknowledged. Use it in Crash.
func (n *Node) Unfinish(t testing.TB, id sandbox.ID) {
	t.Helper()
	record := n.Store.Record(t, id)
	record.State = sandbox.StateStarting
	if err := errors.Join(n.Store.PutSandbox(t.Context(), record), os.WriteFile(filepath.Join(n.creations, string(id)), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
}

// OriginFile is the path of a sandbox's settings in Deps.Origins.
func (n *Node) OriginFile(id sandbox.ID) string { return filepath.Join(n.origins, string(id)) }

// PendingCreations returns the creations that are noted as under way.
func (n *Node) PendingCreations(t testing.TB) (ids []sandbox.ID) {
	t.Helper()
	files, err := os.ReadDir(n.creations)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		ids = append(ids, sandbox.ID(f.Name()))
	}
	return ids
}

// Store is a store in memory that can report a full disk and refuse events.
type Store struct {
	*store.Badger
	full   atomic.Bool
	puts   atomic.Int64
	refuse atomic.Pointer[func(sandbox.Event) bool]

	before, after atomic.Pointer[func(operation string) error]
}

// Before makes the store call f at the beginning of each operation, "put" or "last". An
// error of f fails the operation; nil ends the calls.
func (s *Store) Before(f func(operation string) error) { s.before.Store(&f) }

// After is like Before, at the end of each operation, when the record is written.
func (s *Store) After(f func(operation string) error) { s.after.Store(&f) }

func call(f *func(string) error, operation string) error {
	if f == nil || *f == nil {
		return nil
	}
	return (*f)(operation)
}

// LastSeq implements sandbox.Store.
func (s *Store) LastSeq(ctx context.Context, id sandbox.ID) (uint64, error) {
	if err := call(s.before.Load(), "last"); err != nil {
		return 0, err
	}
	return s.Badger.LastSeq(ctx, id)
}

// Puts counts the records that were written.
func (s *Store) Puts() int64 { return s.puts.Load() }

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

// Refuse makes the store refuse events as it does if they are too large.
func (s *Store) Refuse(which func(sandbox.Event) bool) { s.refuse.Store(&which) }

// Fill makes the disk full, or not.
func (s *Store) Fill(full bool) { s.full.Store(full) }

// PutSandbox implements sandbox.Store.
func (s *Store) PutSandbox(ctx context.Context, sb sandbox.Sandbox) error {
	if s.full.Load() {
		return sandbox.ErrStoreFull
	}
	s.puts.Add(1)
	if err := call(s.before.Load(), "put"); err != nil {
		return err
	}
	if err := s.Badger.PutSandbox(ctx, sb); err != nil {
		return err
	}
	return call(s.after.Load(), "put")
}

// AppendEvents implements sandbox.Store.
func (s *Store) AppendEvents(ctx context.Context, events []sandbox.Event) error {
	if s.full.Load() {
		return sandbox.ErrStoreFull
	}
	if refuse := s.refuse.Load(); refuse != nil && slices.ContainsFunc(events, *refuse) {
		return &sandbox.InvalidError{Field: "event", Reason: "is too large", Want: "make it smaller"}
	}
	return s.Badger.AppendEvents(ctx, events)
}

// RunDir is the folder with the guest's socket.
func (n *Node) RunDir(id sandbox.ID) string { return filepath.Join(n.config.RunDir, string(id)) }
