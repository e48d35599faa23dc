package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// settings returns the fields from which a sandbox without a record is rebuilt: its origin.
// The label of its container has them as of its creation, because Podman cannot change the
// labels of an existing container; origins has them as of the last change.
func (sb *Sandbox) settings() Sandbox {
	return Sandbox{
		Name: sb.Name, Owner: sb.Owner, Image: sb.Image, ImageRef: sb.ImageRef, Size: sb.Size, Env: sb.Env, Labels: sb.Labels,
		SleepAfter: sb.SleepAfter, StopAfter: sb.StopAfter, ArchiveAfter: sb.ArchiveAfter, Persist: sb.Persist, TTL: sb.TTL, CreatedAt: sb.CreatedAt, Ports: sb.Ports, Mounts: sb.Mounts, Declared: sb.Declared,
		Snapshot: sb.Snapshot, CreatedFrom: sb.CreatedFrom, Rebase: sb.Rebase,
	}
}

// originOf encodes the origin of a sandbox.
func originOf(sb Sandbox) string {
	b, err := json.Marshal(sb.settings())
	if err != nil {
		return "" // strings, maps and times always encode
	}
	return string(b)
}

// originLabel is the origin for the label of a new container. Ports, which have tokens,
// mounts and declared processes are in origins only.
func originLabel(sb Sandbox) string {
	sb.Ports, sb.Mounts, sb.Declared = nil, nil, nil
	return originOf(sb)
}

// origins has a file for each sandbox that was changed since its container was made, in
// Deps.Origins.
type origins struct{ dir string }

// read returns the origin of a sandbox as of its last change, which is in label if it
// was not changed.
func (o origins) read(id ID, label string) (string, error) {
	b, err := os.ReadFile(filepath.Join(o.dir, string(id)))
	if errors.Is(err, fs.ErrNotExist) {
		return label, nil
	}
	if err == nil && !json.Valid(b) {
		err = errors.New("invalid JSON")
	}
	if err != nil {
		return label, fmt.Errorf("read the sandbox's last settings: %w", err)
	}
	return string(b), nil
}

// write replaces the origin of a sandbox and returns once it is on disk. It must not be
// called concurrently for the same sandbox.
func (o origins) write(id ID, origin string) (err error) {
	path := filepath.Join(o.dir, string(id))
	next := path + ".new"
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("note the sandbox's settings: %w", err), removeFile(next))
		}
	}()
	if err := os.MkdirAll(o.dir, 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(next, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteString(origin)
	if err == nil {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(next, path)
}

// remove is idempotent.
func (o origins) remove(id ID) error {
	path := filepath.Join(o.dir, string(id))
	return errors.Join(removeFile(path), removeFile(path+".new"))
}

// noteOrigin writes the origin of the sandbox if it has changed. After an error it is
// written with the next record: the record itself is on disk. Needs b.saving.
func (b *liveSandbox) noteOrigin(sb Sandbox) {
	if sb.State == StateStarting || sb.State == StateDestroyed {
		return
	}
	current := originOf(sb)
	if current == b.origin {
		return
	}
	if err := b.m.origins.write(b.id, current); err != nil {
		b.m.log.Warn("failed to note a sandbox's settings", "sandbox", b.id, "error", err)
		return
	}
	b.origin = current
}

// removeOrigin removes the note of a sandbox that is being removed.
func (b *liveSandbox) removeOrigin() error {
	b.saving.Lock()
	defer b.saving.Unlock()
	return b.m.origins.remove(b.id)
}

// readOrigins reads, at start, the origins of the sandboxes, and queues those for writing
// that are missing or differ from the record.
func (m *Manager) readOrigins(sandboxes map[ID]*liveSandbox, byID map[ID]Container) {
	for id, b := range sandboxes {
		if b.toRemove() {
			continue
		}
		noted, err := m.origins.read(id, byID[id].Origin)
		if err != nil {
			m.log.Warn("failed to read a sandbox's settings, replacing them by its record's", "sandbox", id, "error", err)
			noted = ""
		}
		b.saving.Lock()
		b.origin = noted
		b.saving.Unlock()
		if noted != originOf(*b.view.Load()) {
			m.journal.dirty(b)
		}
	}
}
