package podman

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/containers/podman/v5/libpod/define"
	"github.com/containers/podman/v5/pkg/bindings/containers"
	"github.com/containers/podman/v5/pkg/domain/entities/types"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/freezer"
	"github.com/doze-run/doze/runtime/sandbox"
)

// Create implements sandbox.Engine.
func (e *Engine) Create(ctx context.Context, c sandbox.ContainerSpec) error {
	err := e.create(ctx, c)
	if !nameInUse(err) {
		return err
	}
	_, err = e.inspect(ctx, c.ID)
	if !errors.Is(err, sandbox.ErrNoContainer) || errors.Is(err, errOtherNode) {
		return err // the container exists, or its existence is unknown
	}
	if !c.New {
		return fmt.Errorf("create %[1]s: podman has a disk of container %[2]s but no record of it, and the disk may have the sandbox's files; "+
			"`podman ps -a --external` lists it, `podman mount %[2]s` shows the files, and `podman rm --storage %[2]s` removes them", c.ID, ContainerName(c.ID))
	}
	// A service that died during the creation left a name and a disk without a container.
	if err := e.remove(ctx, ContainerName(c.ID)); err != nil {
		return fmt.Errorf("remove an incomplete container: %w", err)
	}
	return e.create(ctx, c)
}

func (e *Engine) create(ctx context.Context, c sandbox.ContainerSpec) error {
	if err := e.files.write(c.ID, hostname(c.Name, c.ID)); err != nil {
		return fmt.Errorf("create %s: %w", c.ID, err)
	}
	err := e.do(ctx, createLimit, func(ctx context.Context) error {
		created, err := containers.CreateWithSpec(ctx, generate(e.node, e.profile, e.files, c), nil)
		if err == nil {
			e.owned.Store(c.ID, created.ID)
		}
		return err
	})
	switch {
	case err == nil:
		return nil
	case status(err) == http.StatusNotFound, strings.Contains(err.Error(), "no such image"),
		strings.Contains(err.Error(), "image not known"): // Podman 4 responds 500
		return fmt.Errorf("create %s of %s: %w: %v", c.ID, c.ImageRef, sandbox.ErrImageMissing, err)
	}
	return fmt.Errorf("create %s: %w", c.ID, err)
}

// startTries bounds the attempts of Start. Before each new one it corrects Podman's record
// of the container.
const startTries = 3

// Start implements sandbox.Engine.
func (e *Engine) Start(ctx context.Context, id sandbox.ID, limits sandbox.Limits) (sandbox.Container, error) {
	handle, err := e.handle(ctx, id)
	if err != nil {
		return sandbox.Container{}, err
	}
	if err := e.writeQuotas(id, limits); err != nil {
		return sandbox.Container{}, fmt.Errorf("write the quotas of %s: %w", id, err)
	}
	for try := 1; ; try++ {
		c, err := e.startOnce(ctx, id, handle, limits)
		if err == nil || try == startTries || ctx.Err() != nil || errors.Is(err, sandbox.ErrNoContainer) {
			return c, err
		}
		// Podman's record may be wrong: a container whose conmon was killed counts as
		// running, one whose service was killed during its start as incomplete.
		if serr := e.settle(ctx, id); serr != nil {
			return c, errors.Join(err, serr)
		}
	}
}

func (e *Engine) startOnce(ctx context.Context, id sandbox.ID, handle string, limits sandbox.Limits) (sandbox.Container, error) {
	err := e.do(ctx, callLimit, func(ctx context.Context) error {
		return containers.Start(ctx, handle, nil)
	})
	if err != nil {
		return sandbox.Container{}, fmt.Errorf("start %s: %w", id, errors.Join(e.known(id, err), e.homeless(ctx, id)))
	}
	data, err := e.inspect(ctx, id)
	if err != nil {
		return sandbox.Container{}, err
	}
	c, err := containerOf(id, data)
	if err != nil {
		return sandbox.Container{}, err
	}
	if c.State == sandbox.ContainerRunning {
		if err := limitProcesses(c.PID, limits.PIDs); err != nil {
			return c, fmt.Errorf("limit the processes of %s: %w", id, err)
		}
		return c, nil
	}
	line, _ := e.LastLog(ctx, id)
	return c, fmt.Errorf("start %s: its first process is %s (code %d), its last output: %q", id, c.State, c.ExitCode, line)
}

// homeless returns an error if a container that did not start was created for a cgroup that
// does not exist, else nil. A node that is started in another way, for example by a unit,
// has another subtree, and Podman cannot change the cgroup parent of an existing container.
func (e *Engine) homeless(ctx context.Context, id sandbox.ID) error {
	data, err := e.inspect(ctx, id)
	if err != nil || data.HostConfig == nil || data.HostConfig.CgroupParent == "" {
		return nil // the error of the start suffices
	}
	parent := filepath.Join(freezer.MountPoint, data.HostConfig.CgroupParent)
	if _, err := os.Stat(parent); !errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return fmt.Errorf("it was created for the cgroup %s, which this node does not have; start the node as it was started then (packaging/host/enter and each unit have their own subtrees)", parent)
}

// limitProcesses sets RLIMIT_NPROC of a first process that has no children yet; 0 means no
// limit. Since Linux 5.14 the kernel counts by user and user namespace, so the limit bounds
// each user of this sandbox separately: a fork bomb stops there even if the pids controller
// is not delegated. doze's OCI runtime bounds all users together, but containers of earlier
// versions have another runtime.
func limitProcesses(pid int, limit int64) error {
	if limit == 0 {
		return nil
	}
	var own unix.Rlimit
	if err := unix.Prlimit(pid, unix.RLIMIT_NPROC, nil, &own); err != nil {
		return err
	}
	n := min(uint64(limit), own.Max)
	return unix.Prlimit(pid, unix.RLIMIT_NPROC, &unix.Rlimit{Cur: n, Max: n}, nil)
}

// settleLimit is how long Podman may take to notice the end of a container: conmon first
// removes the runtime's state.
const settleLimit = 10 * time.Second

// settle makes Podman notice that a container has ended which it records as running. It does not change a running container.
// A container that Podman records as about to run is ended: a service was killed during its start, perhaps after its first
// process had been started, which cannot be started again.
func (e *Engine) settle(ctx context.Context, id sandbox.ID) error {
	limited, cancel := context.WithTimeout(ctx, settleLimit)
	defer cancel()
	for {
		data, err := e.inspect(limited, id)
		if err != nil {
			return err
		}
		if stateOf(data.State.Status) != sandbox.ContainerRunning && data.State.Status != initialized {
			return nil
		}
		runs, err := isFirstProcess(data.State.Pid, data.ID)
		switch {
		case err != nil:
			return err
		case runs && data.State.Status != initialized:
			return nil
		case runs:
			if err := killFirstProcess(data.State.Pid, data.ID); err != nil {
				return fmt.Errorf("end the first process of %s, whose start was interrupted: %w", id, err)
			}
		}
		conmon, _ := os.ReadFile("/proc/" + strconv.Itoa(data.State.ConmonPid) + "/comm")
		if string(conmon) != "conmon\n" { // a living conmon is about to report the end
			e.standInForConmon(limited, data.ID)
		}
		wait(limited, 5*time.Millisecond)
		if limited.Err() != nil {
			return fmt.Errorf("podman still records %s as running, which has ended", id)
		}
	}
}

// standInForConmon does what a killed conmon would have done at the container's end: it
// writes the exit code to the file from which Podman reads it. Podman since 4.4 does not
// need the file to stop such a container; 4.3 could only remove it. Failures are only
// logged, because settle tries again.
func (e *Engine) standInForConmon(ctx context.Context, handle string) {
	exits := filepath.Join(os.Getenv("XDG_RUNTIME_DIR"), "libpod", "tmp", "exits")
	if err := os.WriteFile(filepath.Join(exits, handle), []byte(strconv.Itoa(unknownExit)), 0o600); err != nil {
		e.log.Debug("failed to stand in for conmon", "container", handle, "error", err)
	}
	if err := e.stop(ctx, handle, 0); err != nil {
		e.log.Debug("failed to stand in for conmon", "container", handle, "error", err)
	}
}

// Stop implements sandbox.Engine. The grace period is rounded up to seconds.
func (e *Engine) Stop(ctx context.Context, id sandbox.ID, grace time.Duration) error {
	c, err := e.Inspect(ctx, id)
	if err != nil {
		return err
	}
	switch c.State {
	case sandbox.ContainerRunning:
	case sandbox.ContainerPaused:
		if err := e.unpause(ctx, id); err != nil {
			return err
		}
	case sandbox.ContainerCreated:
		return e.settle(ctx, id) // its start may have been interrupted
	default:
		return nil
	}
	handle, err := e.handle(ctx, id)
	if err != nil {
		return err
	}
	if err := e.stop(ctx, handle, grace); err != nil {
		return fmt.Errorf("stop %s: %w", id, e.known(id, err))
	}
	return nil
}

func (e *Engine) stop(ctx context.Context, handle string, grace time.Duration) error {
	return e.do(ctx, callLimit+grace, func(ctx context.Context) error {
		// The API accepts only whole seconds.
		timeout := uint((max(grace, 0) + time.Second - 1) / time.Second)
		return containers.Stop(ctx, handle, new(containers.StopOptions).WithTimeout(timeout))
	})
}

// Remove implements sandbox.Engine.
func (e *Engine) Remove(ctx context.Context, id sandbox.ID) error {
	handle, err := e.handle(ctx, id)
	switch {
	case errors.Is(err, errOtherNode):
		return e.files.remove(id)
	case errors.Is(err, sandbox.ErrNoContainer):
		handle = ContainerName(id) // an incomplete one has a disk and no id
	case err != nil:
		return err
	}
	err = e.remove(ctx, handle)
	if err != nil && improperState(err) { // it ended just when Podman was about to kill it
		if err = e.settle(ctx, id); err == nil {
			err = e.remove(ctx, handle)
		}
	}
	if err == nil {
		e.owned.Delete(id)
		err = e.files.remove(id)
	}
	if err != nil {
		return fmt.Errorf("remove %s: %w", id, err)
	}
	return nil
}

func (e *Engine) remove(ctx context.Context, handle string) error {
	err := e.do(ctx, callLimit, func(ctx context.Context) error {
		options := new(containers.RemoveOptions).WithForce(true).WithVolumes(true).WithTimeout(0)
		reports, err := containers.Remove(ctx, handle, options)
		for _, r := range reports {
			if r.Err != nil {
				return r.Err
			}
		}
		return err
	})
	if status(err) == http.StatusNotFound {
		return nil
	}
	return err
}

// errOtherNode: the container belongs to another node, and must not be changed.
var errOtherNode = fmt.Errorf("%w: it is another node's", sandbox.ErrNoContainer)

// unknownExit is the exit code of a container whose end conmon did not record.
const unknownExit = -1

// Inspect implements sandbox.Engine. It checks Podman's record against the container's first
// process.
func (e *Engine) Inspect(ctx context.Context, id sandbox.ID) (sandbox.Container, error) {
	data, err := e.inspect(ctx, id)
	if err != nil {
		return sandbox.Container{}, err
	}
	return containerOf(id, data)
}

func containerOf(id sandbox.ID, data *define.InspectContainerData) (sandbox.Container, error) {
	return actual(sandbox.Container{
		ID:       id,
		State:    stateOf(data.State.Status),
		PID:      data.State.Pid,
		ExitCode: int(data.State.ExitCode),

		Origin:    data.Config.Labels[labelOrigin],
		ImageRef:  data.ImageName,
		CreatedAt: data.Created.UTC(),
	}, data.ID)
}

func (e *Engine) inspect(ctx context.Context, id sandbox.ID) (*define.InspectContainerData, error) {
	name := ContainerName(id)
	if handle, ok := e.owned.Load(id); ok {
		name = handle.(string)
	}
	data, err := request(ctx, e, func(ctx context.Context) (*define.InspectContainerData, error) {
		return containers.Inspect(ctx, name, nil)
	})
	if err != nil {
		return nil, fmt.Errorf("inspect %s: %w", id, e.known(id, err))
	}
	if data.Config == nil || data.State == nil || data.Config.Labels[labelNode] != e.node {
		return nil, fmt.Errorf("inspect %s: %w", id, errOtherNode)
	}
	e.owned.Store(id, data.ID)
	return data, nil
}

// List implements sandbox.Engine. It returns the containers with this node's label.
func (e *Engine) List(ctx context.Context) ([]sandbox.Container, error) {
	found, err := request(ctx, e, func(ctx context.Context) ([]types.ListContainer, error) {
		return containers.List(ctx, new(containers.ListOptions).WithAll(true).
			WithFilters(map[string][]string{"label": {labelNode + "=" + e.node}}))
	})
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	list := make([]sandbox.Container, 0, len(found))
	for _, f := range found {
		id := sandbox.ID(f.Labels[labelSandbox])
		if f.Labels[labelNode] != e.node || id == "" {
			continue
		}
		e.owned.Store(id, f.ID)
		c, err := actual(sandbox.Container{
			ID:       id,
			State:    stateOf(f.State),
			PID:      f.Pid,
			ExitCode: int(f.ExitCode),

			Origin:    f.Labels[labelOrigin],
			ImageRef:  f.Image,
			CreatedAt: f.Created.UTC(),
		}, f.ID)
		if err != nil {
			return nil, fmt.Errorf("list containers: %w", err)
		}
		list = append(list, c)
	}
	return list, nil
}

// handle returns Podman's id of the container, which is never reused. It returns
// sandbox.ErrNoContainer (wrapped) if this node does not have the container.
func (e *Engine) handle(ctx context.Context, id sandbox.ID) (string, error) {
	if handle, ok := e.owned.Load(id); ok {
		return handle.(string), nil
	}
	data, err := e.inspect(ctx, id)
	if err != nil {
		return "", err
	}
	return data.ID, nil
}

// known wraps sandbox.ErrNoContainer if err reports that the container does not exist, and
// then drops its cached handle.
func (e *Engine) known(id sandbox.ID, err error) error {
	if status(err) != http.StatusNotFound {
		return err
	}
	e.owned.Delete(id)
	return fmt.Errorf("%w: %v", sandbox.ErrNoContainer, err)
}

// initialized is Podman's state of a container whose first process waits for its start.
const initialized = "initialized"

// stateOf converts a state of Podman.
func stateOf(s string) sandbox.ContainerState {
	switch s {
	case "running", "stopping":
		return sandbox.ContainerRunning
	case "paused":
		return sandbox.ContainerPaused
	case "created", "configured", initialized:
		return sandbox.ContainerCreated
	}
	return sandbox.ContainerExited // exited, stopped, removing, dead
}

// actual corrects a record by the process that it names. Podman learns of an exit only from
// conmon, and never if conmon was killed.
func actual(c sandbox.Container, handle string) (sandbox.Container, error) {
	switch c.State {
	case sandbox.ContainerRunning, sandbox.ContainerPaused:
		runs, err := isFirstProcess(c.PID, handle)
		if err != nil {
			return sandbox.Container{}, err
		}
		if runs {
			c.ExitCode = 0
			return c, nil
		}
		c.State, c.ExitCode = sandbox.ContainerExited, unknownExit
	}
	c.PID = 0
	return c, nil
}

// isFirstProcess reports whether pid still is the first process of the container, and not a
// later process with the same pid. It returns an error if it cannot read the process, for
// example without free file descriptors.
func isFirstProcess(pid int, handle string) (bool, error) {
	if pid <= 0 {
		return false, nil
	}
	proc := "/proc/" + strconv.Itoa(pid)
	process, err := os.ReadFile(proc + "/status")
	if err != nil || !isInit(string(process)) {
		return false, unseen(err)
	}
	// The name of a container's own cgroup has Podman's id.
	cgroup, err := os.ReadFile(proc + "/cgroup")
	if err != nil {
		return false, unseen(err)
	}
	return !strings.Contains(string(cgroup), "libpod-") || strings.Contains(string(cgroup), handle), nil
}

// killFirstProcess kills the first process of a container, unless it has ended.
func killFirstProcess(pid int, handle string) error {
	fd, err := unix.PidfdOpen(pid, 0) // pins the process while it is checked
	if err != nil {
		return unseen(err)
	}
	defer unix.Close(fd)
	if runs, err := isFirstProcess(pid, handle); err != nil || !runs {
		return err
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != unix.ESRCH {
		return err
	}
	return nil
}

// unseen returns an error unless err means that the process has ended.
func unseen(err error) error {
	if err == nil || errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return nil
	}
	return fmt.Errorf("read the container's first process: %w", err)
}

// isInit reports whether a /proc/PID/status is of a running process with pid 1 in its own
// PID namespace.
func isInit(status string) bool {
	field := func(key string) string {
		_, after, _ := strings.Cut("\n"+status, "\n"+key+":")
		value, _, _ := strings.Cut(after, "\n")
		return strings.TrimSpace(value)
	}
	pids := strings.Fields(field("NSpid"))
	return len(pids) > 1 && pids[len(pids)-1] == "1" && !strings.HasPrefix(field("State"), "Z")
}

// nameInUse matches the text of Podman's error, too: the API of Podman 4 responds 500.
func nameInUse(err error) bool {
	return err != nil && (status(err) == http.StatusConflict || strings.Contains(err.Error(), "is already in use"))
}
