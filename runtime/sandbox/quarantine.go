package sandbox

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"

	"github.com/doze-run/doze/runtime/guest"
)

// The node never deletes a container or a folder because its record is missing: a damaged
// disk or a restored, older copy of the data may have lost the record. It keeps such a
// container in quarantine, stopped and without a network, until a client adopts or removes
// it.

// Quarantined is a container without a record, or the run folder of one.
type Quarantined struct {
	ID ID
	// From the label of its container; empty when unknown.
	Name, Owner, Image, Size string
	CreatedAt                time.Time
	// Container: it has a container. Otherwise only the run folder is left, and nothing
	// can be adopted.
	Container bool
	// Problem is the error of the last stop or removal; empty when nothing has failed.
	Problem string
}

// quarantined is an entry of the quarantine in memory.
type quarantined struct {
	id        ID
	origin    Sandbox // its settings; zero when unknown
	imageRef  string
	createdAt time.Time
	lock      *semaphore.Weighted // held during a stop, an adoption or a removal

	// Written with lock and Manager.mu held, read with either of them:
	container    bool
	running      bool   // its container may run, or its cgroup exist
	stopError    string // of the last stop
	removalError string // of the last removal
}

// quarantineUnknown quarantines, at start, the containers and run folders that no
// record names.
func (m *Manager) quarantineUnknown(sandboxes map[ID]*liveSandbox, containers []Container) {
	found := map[ID]*quarantined{}
	for _, c := range containers {
		if sandboxes[c.ID] != nil {
			continue
		}
		q := &quarantined{id: c.ID, imageRef: c.ImageRef, createdAt: c.CreatedAt, container: true, lock: semaphore.NewWeighted(1),
			running: c.State == ContainerRunning || c.State == ContainerPaused}
		noted, err := m.origins.read(c.ID, c.Origin)
		if err != nil {
			m.log.Warn("failed to read a sandbox's last settings, using its first ones", "sandbox", c.ID, "error", err)
		}
		if err := json.Unmarshal([]byte(noted), &q.origin); err != nil {
			q.origin = Sandbox{}
		}
		found[c.ID] = q
	}
	entries, err := os.ReadDir(m.config().RunDir)
	if err != nil {
		m.log.Warn("failed to read the run folder", "error", err)
	}
	for _, e := range entries {
		id := ID(e.Name())
		if e.IsDir() && IsID(e.Name()) && sandboxes[id] == nil && found[id] == nil {
			found[id] = &quarantined{id: id, lock: semaphore.NewWeighted(1)}
		}
	}
	m.mu.Lock()
	m.quarantined = found
	m.mu.Unlock()
	for id, q := range found {
		if q.container {
			m.log.Error("container without a record is in quarantine", "sandbox", id, "sandbox_name", q.origin.Name, "image", q.imageRef,
				"remedy", fmt.Sprintf("`doze adopt %s` makes it a sandbox again, `doze rm --quarantined %s` removes it", id, id))
		} else {
			m.log.Error("run folder without a record and a container is in quarantine", "sandbox", id,
				"remedy", fmt.Sprintf("`doze rm --quarantined %s` removes it", id))
		}
	}
}

func (m *Manager) inQuarantine() []*quarantined {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return slices.Collect(maps.Values(m.quarantined))
}

func (m *Manager) quarantinedByID(id ID) *quarantined {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.quarantined[id]
}

func (m *Manager) listQuarantined() []Quarantined {
	m.mu.RLock()
	defer m.mu.RUnlock()
	list := make([]Quarantined, 0, len(m.quarantined))
	for _, q := range m.quarantined {
		list = append(list, Quarantined{
			ID: q.id, Name: q.origin.Name, Owner: q.origin.Owner, Image: cmp.Or(q.origin.Image, q.imageRef), Size: q.origin.Size,
			CreatedAt: cmp.Or(q.origin.CreatedAt, q.createdAt), Container: q.container, Problem: cmp.Or(q.removalError, q.stopError),
		})
	}
	slices.SortFunc(list, func(a, b Quarantined) int { return cmp.Compare(a.ID, b.ID) })
	return list
}

// stopAllQuarantined begins, at start, to end the containers in quarantine, recoverers at
// the same time. No sandbox waits for them.
func (m *Manager) stopAllQuarantined() {
	m.spawn(func(ctx context.Context) {
		var stops errgroup.Group
		stops.SetLimit(recoverers)
		for _, q := range m.inQuarantine() {
			stops.Go(func() error {
				stop := func(ctx context.Context) error { return m.stopQuarantined(ctx, q) }
				if err := stop(ctx); err != nil {
					m.retry(OperationStop, q.id, err, stop)
				}
				return nil
			})
		}
		_ = stops.Wait()
	})
}

// stopQuarantined ends a container in quarantine and keeps its disk.
func (m *Manager) stopQuarantined(ctx context.Context, q *quarantined) (err error) {
	if err := q.lock.Acquire(ctx, 1); err != nil {
		return err
	}
	defer q.lock.Release(1)
	if m.quarantinedByID(q.id) != q || !q.running {
		return nil // adopted or removed meanwhile
	}
	grace := m.config().StopGrace
	ctx, cancel := context.WithTimeout(ctx, grace+stopSlack)
	defer cancel()
	defer func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		q.stopError = ""
		if err != nil {
			q.stopError = cutText(err.Error(), maxErrorText)
		}
	}()
	m.uplink.Detach(q.id)
	m.deps.Network.Forget(q.id)
	if _, err := m.deps.Freezer.Prepare(q.id, m.limitsOf(q.origin.Size)); err != nil {
		return fmt.Errorf("prepare the cgroup of %s: %w", q.id, err)
	}
	if err := m.deps.Freezer.Thaw(ctx, q.id); err != nil {
		return fmt.Errorf("thaw %s: %w", q.id, err)
	}
	if err := m.deps.Engine.Stop(ctx, q.id, grace); err != nil && !errors.Is(err, ErrNoContainer) {
		return fmt.Errorf("stop %s: %w", q.id, err)
	}
	if err := m.deps.Freezer.Remove(q.id); err != nil {
		return err
	}
	m.mu.Lock()
	q.running = false
	m.mu.Unlock()
	return nil
}

// limitsOf returns the limits of a size, or of the default size when it is not configured.
func (m *Manager) limitsOf(size string) Limits {
	cfg := m.config()
	if limits, ok := cfg.Sizes[size]; ok {
		return limits
	}
	return cfg.Sizes[cfg.DefaultSize]
}

// acquireQuarantined returns the entry with that id, locked; release unlocks it. Another
// owner's is ErrNotQuarantined.
func (m *Manager) acquireQuarantined(ctx context.Context, owner string, id ID) (q *quarantined, release func(), err error) {
	unknown := fmt.Errorf("sandbox %s: %w", clip(string(id)), ErrNotQuarantined)
	m.mu.RLock()
	started := m.started
	q = m.quarantined[id]
	m.mu.RUnlock()
	switch {
	case !started:
		return nil, nil, ErrClosed
	case q == nil, q.origin.Owner != "" && q.origin.Owner != owner:
		return nil, nil, unknown
	}
	if err := q.lock.Acquire(ctx, 1); err != nil {
		return nil, nil, err
	}
	release = func() { q.lock.Release(1) }
	if m.quarantinedByID(id) != q {
		release()
		return nil, nil, unknown
	}
	return q, release, nil
}

// Adopt makes a container in quarantine a sandbox of that owner again: stopped, with its
// files, and with its last settings, ports and declared processes. If name is empty, it gets
// its last name. Its TTL begins again.
//
// Errors: ErrNotQuarantined, *InvalidError when it needs a name or has no container,
// *ConflictError when the name is taken.
func (m *Manager) Adopt(ctx context.Context, owner string, id ID, name string) (Sandbox, error) {
	q, release, err := m.acquireQuarantined(ctx, owner, id)
	if err != nil {
		return Sandbox{}, err
	}
	defer release()
	sb, err := m.rebuild(q, owner, name)
	if err != nil {
		return Sandbox{}, err
	}
	b := m.newLiveSandbox(sb)
	b.transition.TryAcquire(1) // b is not published yet
	defer b.unlockTransition()
	close(b.made)
	b.leftover.Store(q.running)
	if err := m.addAdopted(b); err != nil {
		return Sandbox{}, err
	}
	if err := b.save(ctx); err != nil {
		m.remove(b)
		// The failed write may have reached the disk. Only the container is to stay.
		return Sandbox{}, errors.Join(err, b.deleteRecord(context.WithoutCancel(ctx)))
	}
	m.mu.Lock()
	delete(m.quarantined, id)
	m.mu.Unlock()
	b.emit(Event{Type: EventAdopted})
	m.log.Info("adopted a sandbox from quarantine", "sandbox", id, "sandbox_name", sb.Name)
	b.arm()
	return b.sandbox(), nil
}

// addAdopted adds the sandbox under its name if that is free.
func (m *Manager) addAdopted(b *liveSandbox) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	sb := b.view.Load()
	if m.names[nameKey{sb.Owner, sb.Name}] != nil {
		return &ConflictError{Name: sb.Name, Reason: "exists", Want: "adopt it under another name"}
	}
	m.addLocked(b)
	return nil
}

// rebuild returns the record of a sandbox in quarantine.
func (m *Manager) rebuild(q *quarantined, owner, name string) (Sandbox, error) {
	if !q.container {
		return Sandbox{}, &InvalidError{Field: "id", Reason: fmt.Sprintf("%s has no container, only a run folder", q.id), Want: "it can only be removed"}
	}
	cfg := m.config()
	now := time.Now().UTC()
	sb := q.origin.settings()
	if sb.Name == "" { // nothing is known of it
		sb.SleepAfter, sb.StopAfter, sb.CreatedAt = Duration(cfg.SleepAfter), Duration(cfg.StopAfter), q.createdAt
	}
	sb.ID, sb.Owner, sb.Name = q.id, owner, cmp.Or(name, sb.Name)
	sb.Image, sb.ImageRef = cmp.Or(sb.Image, q.imageRef), cmp.Or(sb.ImageRef, q.imageRef)
	sb.Persist = cmp.Or(sb.Persist, PersistMemory)
	sb.Processes = declaredProcesses(sb.Declared)
	sb.State, sb.StateReason, sb.StateSince, sb.LastActiveAt = StateStopped, ReasonAdopted, now, now
	sb.StartedAt = now // some time before: its container exists
	if sb.Name == "" {
		return Sandbox{}, &InvalidError{Field: "name", Reason: fmt.Sprintf("the container of %s has no name in its label", q.id), Want: "choose one"}
	}
	if _, ok := cfg.Sizes[sb.Size]; !ok {
		sb.Size = cfg.DefaultSize
	}
	sb.setTTL(sb.TTL, now)
	return sb, sb.validate()
}

// declaredProcesses are the declared processes as last known: not how they ended.
func declaredProcesses(declared []guest.ProcessSpec) (list []guest.Process) {
	for _, spec := range declared {
		list = append(list, shorten(guest.Process{
			ID: spec.ID, Name: spec.Name, Command: spec.Command.Command, Argv: spec.Argv, Cwd: spec.Cwd, Restart: spec.Restart, State: guest.ProcessLost,
		}, maxProcessText))
	}
	return newest(list)
}

// RemoveQuarantined removes the entry with that id and its files from quarantine, and
// returns when nothing is left. When ctx ends first, the removal goes on; its error becomes
// the Problem of the entry.
func (m *Manager) RemoveQuarantined(ctx context.Context, owner string, id ID) error {
	return m.do(ctx, func(ctx context.Context) (err error) {
		ctx, cancel := context.WithTimeout(ctx, destroyTimeout)
		defer cancel()
		q, release, err := m.acquireQuarantined(ctx, owner, id)
		if err != nil {
			return err
		}
		defer release()
		defer func() {
			if err != nil {
				m.mu.Lock()
				defer m.mu.Unlock()
				q.removalError = cutText(err.Error(), maxErrorText)
			}
		}()
		m.uplink.Detach(id)
		m.deps.Network.Forget(id)
		if err := m.deps.Engine.Remove(ctx, id); err != nil {
			return fmt.Errorf("remove the container of %s: %w", id, err)
		}
		m.mu.Lock()
		q.container, q.running, q.stopError = false, false, ""
		m.mu.Unlock()
		if err := m.deps.Freezer.Remove(id); err != nil {
			return err
		}
		if err := m.removeRunDir(ctx, id); err != nil {
			return err
		}
		if err := m.origins.remove(id); err != nil {
			return err
		}
		m.uplink.Forget(id)
		m.mu.Lock()
		delete(m.quarantined, q.id)
		m.mu.Unlock()
		m.log.Info("removed a container from quarantine", "sandbox", id, "sandbox_name", q.origin.Name)
		return nil
	})
}
