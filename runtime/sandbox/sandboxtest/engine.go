package sandboxtest

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
)

// LastLog is what every fake container wrote last.
const LastLog = "last words"

// Engine is a sandbox.Engine whose containers are guest servers in the test's
// own process. It can be made to fail and to hang, by operation: "image",
// "create", "start", "stop", "remove", "remove_folder", "inspect", "ping".
type Engine struct {
	Faults

	mu         sync.Mutex
	containers map[sandbox.ID]*container
	missing    map[string]bool // images that cannot be pulled
	snapshots  map[string]*snapshot
	pull       []string     // progress of the next pulls
	guest      http.Handler // instead of a real guest

	created, inspected, trims atomic.Int64
}

type container struct {
	starting sync.Mutex // held through Start, so that one guest comes of many

	spec   sandbox.ContainerSpec
	limits sandbox.Limits // of the last start
	state  sandbox.ContainerState
	pid    int
	run    *guestRun // while running
	made   time.Time
	// files are on its disk, base below it, without those that deleted has.
	files, base map[string]string
	deleted     map[string]bool
	grown       sandbox.DiskUsage // on its disk, beyond files
}

// NewEngine returns an Engine without containers; its guests end with the test.
func NewEngine(t testing.TB) *Engine {
	e := &Engine{containers: map[sandbox.ID]*container{}, missing: map[string]bool{}, snapshots: map[string]*snapshot{}}
	t.Cleanup(e.killAll)
	return e
}

// RemoveImage makes an image missing and impossible to pull.
func (e *Engine) RemoveImage(ref string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.missing[ref] = true
}

// Pulls makes each EnsureImage report these lines of progress.
func (e *Engine) Pulls(lines ...string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.pull = lines
}

// HandleGuest makes h the handler of guests that start from now on, as of a guest
// that was tampered with; nil means real guests.
func (e *Engine) HandleGuest(h http.Handler) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.guest = h
}

// UnknownGuest is the handler of a guest with a protocol that the node does not know.
var UnknownGuest = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
	fmt.Fprintf(w, `{"protocol":%d,"version":"unknown"}`, guest.ProtocolVersion+1)
})

// Created counts the containers that were ever made.
func (e *Engine) Created() int { return int(e.created.Load()) }

// Trims counts how often guests returned memory that they do not need.
func (e *Engine) Trims() int { return int(e.trims.Load()) }

// Inspected counts the calls of Inspect.
func (e *Engine) Inspected() int { return int(e.inspected.Load()) }

// Count counts the existing containers.
func (e *Engine) Count() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.containers)
}

// Limits returns the limits that a container was last started with.
func (e *Engine) Limits(id sandbox.ID) sandbox.Limits {
	e.mu.Lock()
	defer e.mu.Unlock()
	if c := e.containers[id]; c != nil {
		return c.limits
	}
	return sandbox.Limits{}
}

// Kill ends a container as a crash of its first process does.
func (e *Engine) Kill(t testing.TB, id sandbox.ID) {
	t.Helper()
	e.mu.Lock()
	c := e.containers[id]
	e.mu.Unlock()
	if c == nil {
		t.Fatalf("no container %s", id)
	}
	e.exit(c)
}

// ForgetStart makes a container that runs seem to be about to start, as when the engine was killed before it recorded the start.
func (e *Engine) ForgetStart(t testing.TB, id sandbox.ID) {
	t.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	c := e.containers[id]
	if c == nil || c.state != sandbox.ContainerRunning {
		t.Fatalf("container %s does not run", id)
	}
	c.state, c.pid = sandbox.ContainerCreated, 0
}

// Runs reports whether the first process of a container runs, recorded or not.
func (e *Engine) Runs(id sandbox.ID) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	c := e.containers[id]
	return c != nil && c.run != nil
}

func (e *Engine) get(id sandbox.ID) (*container, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	c := e.containers[id]
	if c == nil {
		return nil, fmt.Errorf("container %s: %w", id, sandbox.ErrNoContainer)
	}
	return c, nil
}

func (e *Engine) status(c *container) sandbox.Container {
	e.mu.Lock()
	defer e.mu.Unlock()
	return c.seen()
}

// seen returns the container as an Engine reports it; e.mu is held.
func (c *container) seen() sandbox.Container {
	return sandbox.Container{ID: c.spec.ID, State: c.state, PID: c.pid, Origin: c.spec.Origin, ImageRef: c.spec.ImageRef, CreatedAt: c.made}
}

// EnsureImage implements sandbox.Engine.
func (e *Engine) EnsureImage(ctx context.Context, ref string, progress func(string)) error {
	if err := e.begin(ctx, "image"); err != nil {
		return err
	}
	e.mu.Lock()
	missing, pull := e.isMissing(ref), e.pull
	e.mu.Unlock()
	if missing {
		return fmt.Errorf("image %s: %w", ref, sandbox.ErrImageMissing)
	}
	for _, line := range pull {
		if progress != nil {
			progress(line)
		}
	}
	return nil
}

// Create implements sandbox.Engine.
func (e *Engine) Create(ctx context.Context, spec sandbox.ContainerSpec) error {
	if err := e.begin(ctx, "create"); err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.containers[spec.ID] != nil {
		return nil
	}
	c := &container{spec: spec, state: sandbox.ContainerCreated, made: time.Now().UTC(), files: map[string]string{}, base: map[string]string{}}
	if e.isMissing(spec.ImageRef) {
		return fmt.Errorf("image %s: %w", spec.ImageRef, sandbox.ErrImageMissing)
	}
	if s := e.snapshots[spec.ImageRef]; s != nil {
		c.base = maps.Clone(s.files)
	}
	e.created.Add(1)
	e.containers[spec.ID] = c
	return nil
}

// isMissing reports whether an image cannot be pulled; e.mu is held.
func (e *Engine) isMissing(ref string) bool {
	s := e.snapshots[ref]
	return e.missing[ref] || strings.HasPrefix(ref, sandbox.SnapshotRef("")) && (s == nil || !s.published)
}

// Start implements sandbox.Engine.
func (e *Engine) Start(ctx context.Context, id sandbox.ID, limits sandbox.Limits) (sandbox.Container, error) {
	c, err := e.get(id)
	if err != nil {
		return sandbox.Container{}, err
	}
	if err := e.begin(ctx, "start"); err != nil {
		return sandbox.Container{}, err
	}
	c.starting.Lock()
	defer c.starting.Unlock()
	if e.status(c).State != sandbox.ContainerRunning {
		e.exit(c) // a first process without a record
		run, err := e.startGuest(c.spec.RunDir)
		if err != nil {
			return sandbox.Container{}, err
		}
		e.mu.Lock()
		c.run, c.limits, c.state, c.pid = run, limits, sandbox.ContainerRunning, nextPID()
		e.mu.Unlock()
	}
	return e.status(c), nil
}

// Stop implements sandbox.Engine.
func (e *Engine) Stop(ctx context.Context, id sandbox.ID, _ time.Duration) error {
	c, err := e.get(id)
	if err != nil {
		return err // as the real one does
	}
	if err := e.begin(ctx, "stop"); err != nil {
		return err
	}
	e.exit(c)
	return nil
}

// Remove implements sandbox.Engine.
func (e *Engine) Remove(ctx context.Context, id sandbox.ID) error {
	if err := e.begin(ctx, "remove"); err != nil {
		return err
	}
	c, err := e.get(id)
	if err != nil {
		return nil
	}
	e.exit(c)
	e.mu.Lock()
	delete(e.containers, id)
	e.mu.Unlock()
	return nil
}

// RemoveFolder implements sandbox.Engine.
func (e *Engine) RemoveFolder(ctx context.Context, path string) error {
	if err := e.begin(ctx, "remove_folder"); err != nil {
		return err
	}
	return os.RemoveAll(path)
}

// exit stops the guest of a container that runs. The container has ended before its
// guest's connections break; a real engine may report that later, and the Manager must
// cope with both.
func (e *Engine) exit(c *container) {
	e.mu.Lock()
	run := c.run
	c.run = nil
	if c.state == sandbox.ContainerRunning {
		c.state, c.pid = sandbox.ContainerExited, 0
	}
	e.mu.Unlock()
	if run != nil {
		run.stop()
	}
}

func (e *Engine) killAll() {
	e.mu.Lock()
	all := slices.Collect(maps.Values(e.containers))
	e.mu.Unlock()
	for _, c := range all {
		e.exit(c)
	}
}

// Inspect implements sandbox.Engine.
func (e *Engine) Inspect(ctx context.Context, id sandbox.ID) (sandbox.Container, error) {
	e.inspected.Add(1)
	if err := e.begin(ctx, "inspect"); err != nil {
		return sandbox.Container{}, err
	}
	c, err := e.get(id)
	if err != nil {
		return sandbox.Container{}, err
	}
	return e.status(c), nil
}

// List implements sandbox.Engine.
func (e *Engine) List(context.Context) ([]sandbox.Container, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var list []sandbox.Container
	for _, c := range e.containers {
		list = append(list, c.seen())
	}
	return list, nil
}

// LastLog implements sandbox.Engine.
func (e *Engine) LastLog(ctx context.Context, _ sandbox.ID) (string, error) {
	return LastLog, ctx.Err()
}

// Ping implements sandbox.Engine.
func (e *Engine) Ping(ctx context.Context) error { return e.begin(ctx, "ping") }
