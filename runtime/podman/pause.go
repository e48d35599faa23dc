package podman

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/containers/podman/v5/libpod/define"
	"github.com/containers/podman/v5/pkg/bindings/containers"

	"github.com/doze-run/doze/runtime/freezer"
	"github.com/doze-run/doze/runtime/sandbox"
)

// Pauser is the sandbox.Freezer of a host where the node has no cgroup tree of
// its own: Podman pauses the container, which takes 5 ms where the cgroup's own
// switch takes 50 µs. It enforces no limits. A container that starts while its
// sandbox is frozen is not paused.
type Pauser struct {
	engine *Engine

	mu       sync.Mutex
	prepared map[sandbox.ID]*pausable
}

// pausable is one prepared sandbox.
type pausable struct {
	// turn is held by whoever pauses or resumes: a channel, because waiting for
	// it must end with a context.
	turn chan struct{}
	// frozen is what was asked for last, which counts while the sandbox has no
	// running container. Needs the turn.
	frozen bool
}

// NewPauser returns a Freezer for the engine's containers.
func NewPauser(e *Engine) *Pauser {
	return &Pauser{engine: e, prepared: make(map[sandbox.ID]*pausable)}
}

// Prepare leaves the choice of a cgroup to Podman.
func (p *Pauser) Prepare(id sandbox.ID, _ sandbox.Limits) (string, error) {
	if !validID(id) {
		return "", fmt.Errorf("%q is no sandbox id", id)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.prepared[id] == nil {
		p.prepared[id] = &pausable{turn: make(chan struct{}, 1)}
	}
	return "", nil
}

// validID says whether a container can be named after id.
func validID(id sandbox.ID) bool {
	return id != "" && strings.Trim(string(id), "abcdefghijklmnopqrstuvwxyz0123456789") == ""
}

// Freeze pauses the container and returns when all of it stands still.
func (p *Pauser) Freeze(ctx context.Context, id sandbox.ID) error {
	s, err := p.take(ctx, id)
	if err != nil {
		return err
	}
	defer s.leave()
	if err := p.engine.pause(ctx, id); err != nil {
		return err
	}
	if err := p.engine.awaitPaused(ctx, id); err != nil {
		return errors.Join(err, p.engine.unpause(context.WithoutCancel(ctx), id))
	}
	s.frozen = true
	return nil
}

// Thaw resumes the container.
func (p *Pauser) Thaw(ctx context.Context, id sandbox.ID) error {
	s, err := p.take(ctx, id)
	if err != nil {
		return err
	}
	defer s.leave()
	if err := p.engine.unpause(ctx, id); err != nil {
		return err
	}
	s.frozen = false
	return nil
}

// Frozen says whether the container is paused.
func (p *Pauser) Frozen(ctx context.Context, id sandbox.ID) (bool, error) {
	s, err := p.take(ctx, id)
	if err != nil {
		return false, err
	}
	defer s.leave()
	c, err := p.engine.Inspect(ctx, id)
	if errors.Is(err, sandbox.ErrNoContainer) || err == nil && c.PID == 0 {
		return s.frozen, nil
	}
	return c.State == sandbox.ContainerPaused, err
}

// container returns that of a known sandbox, with no PID unless it runs.
func (p *Pauser) container(ctx context.Context, id sandbox.ID) (sandbox.Container, error) {
	if _, err := p.find(id); err != nil {
		return sandbox.Container{}, err
	}
	c, err := p.engine.Inspect(ctx, id)
	if errors.Is(err, sandbox.ErrNoContainer) {
		return sandbox.Container{}, nil
	}
	return c, err
}

// CPUTime is what Podman's statistics say; 0 for a container that does not run.
func (p *Pauser) CPUTime(ctx context.Context, id sandbox.ID) (time.Duration, error) {
	c, err := p.container(ctx, id)
	if err != nil || c.PID == 0 {
		return 0, err
	}
	return p.engine.cpuTime(ctx, id)
}

// Memory is the resident memory of the container's processes; 0 for a container
// that does not run.
func (p *Pauser) Memory(ctx context.Context, id sandbox.ID) (int64, error) {
	c, err := p.container(ctx, id)
	if err != nil || c.PID == 0 {
		return 0, err
	}
	handle, err := p.engine.handle(ctx, id)
	if err != nil {
		return 0, err
	}
	dir, err := cgroupOf(c, handle)
	if err != nil {
		return 0, err
	}
	return freezer.ResidentMemory(dir)
}

// Remove forgets the sandbox.
func (p *Pauser) Remove(id sandbox.ID) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.prepared, id)
	return nil
}

// Enforced names no limits.
func (p *Pauser) Enforced() []string { return nil }

func (p *Pauser) find(id sandbox.ID) (*pausable, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.prepared[id]
	if s == nil {
		return nil, fmt.Errorf("sandbox %s was not prepared", id)
	}
	return s, nil
}

// take returns the sandbox once it is the caller's turn with it; the caller leaves.
func (p *Pauser) take(ctx context.Context, id sandbox.ID) (*pausable, error) {
	s, err := p.find(id)
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	select {
	case s.turn <- struct{}{}:
		return s, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *pausable) leave() { <-s.turn }

// pause pauses a container that runs. One that is paused, does not run or does
// not exist is no error.
func (e *Engine) pause(ctx context.Context, id sandbox.ID) error {
	return e.change(ctx, id, func(ctx context.Context, handle string) error {
		return containers.Pause(ctx, handle, nil)
	})
}

// awaitPaused waits until every process of a container that was paused is
// frozen: the runtime tells the kernel so and does not wait for it.
func (e *Engine) awaitPaused(ctx context.Context, id sandbox.ID) error {
	handle, err := e.handle(ctx, id)
	if errors.Is(err, sandbox.ErrNoContainer) {
		return nil
	}
	if err != nil {
		return err
	}
	c, err := e.Inspect(ctx, id)
	if err != nil || c.State != sandbox.ContainerPaused {
		return err // one that does not run has nothing to wait for
	}
	dir, err := cgroupOf(c, handle)
	if err != nil {
		return err
	}
	if err := freezer.AwaitFrozen(ctx, dir); err != nil {
		return fmt.Errorf("pausing %s: %w", id, err)
	}
	return nil
}

// cgroupOf is the cgroup v2 folder of a container that runs or is paused.
func cgroupOf(c sandbox.Container, handle string) (string, error) {
	line, err := os.ReadFile("/proc/" + strconv.Itoa(c.PID) + "/cgroup")
	if err != nil {
		return "", fmt.Errorf("find the cgroup of %s: %w", c.ID, err)
	}
	dir, err := containerCgroup(string(line), handle)
	if err != nil {
		return "", fmt.Errorf("find the cgroup of %s: %w", c.ID, err)
	}
	return dir, nil
}

// containerCgroup is the cgroup v2 folder of a container, out of /proc/PID/cgroup
// of a process in it. The runtime freezes the one that has the container's handle
// in its name, and the process may be in one below.
func containerCgroup(cgroups, handle string) (string, error) {
	for line := range strings.Lines(cgroups) {
		path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::")
		if !ok {
			continue
		}
		at := strings.Index(path, handle)
		if at < 0 {
			break
		}
		rest := path[at:]
		if below := strings.IndexByte(rest, '/'); below >= 0 {
			rest = rest[:below]
		}
		return freezer.MountPoint + path[:at] + rest, nil
	}
	return "", fmt.Errorf("%q names none of container %s", strings.TrimSpace(cgroups), handle)
}

// unpause resumes a container that is paused. One that is not is no error.
func (e *Engine) unpause(ctx context.Context, id sandbox.ID) error {
	return e.change(ctx, id, func(ctx context.Context, handle string) error {
		return containers.Unpause(ctx, handle, nil)
	})
}

// change makes a request that applies to containers in one state only.
func (e *Engine) change(ctx context.Context, id sandbox.ID, request func(ctx context.Context, handle string) error) error {
	handle, err := e.handle(ctx, id)
	if errors.Is(err, sandbox.ErrNoContainer) {
		return nil
	}
	if err != nil {
		return err
	}
	err = e.do(ctx, callLimit, func(ctx context.Context) error { return request(ctx, handle) })
	if err == nil || improperState(err) || status(err) == http.StatusNotFound {
		return nil
	}
	return fmt.Errorf("pausing or resuming %s: %w", id, err)
}

// improperState says whether a request did not apply to the container's state.
func improperState(err error) bool {
	return status(err) == http.StatusConflict || strings.Contains(err.Error(), define.ErrCtrStateInvalid.Error())
}

// cpuTime asks for the container's statistics once.
func (e *Engine) cpuTime(ctx context.Context, id sandbox.ID) (total time.Duration, err error) {
	handle, err := e.handle(ctx, id)
	if err != nil {
		return 0, err
	}
	err = e.do(ctx, callLimit, func(ctx context.Context) error {
		reports, err := containers.Stats(ctx, []string{handle}, new(containers.StatsOptions).WithStream(false))
		if err != nil {
			return err
		}
		report := <-reports
		for range reports { // to its end: the sender would wait for ever
		}
		if report.Error != nil {
			return report.Error
		}
		for _, s := range report.Stats {
			total = time.Duration(s.CPUNano)
		}
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("CPU time of %s: %w", id, e.known(id, err))
	}
	return total, nil
}

var _ sandbox.Freezer = (*Pauser)(nil)
