package sandboxtest

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/doze-run/doze/archive/ociimage"
	"github.com/doze-run/doze/runtime/sandbox"
)

// Disks is a sandbox.Disks of an Engine's containers, whose disks are maps. It can be made to
// fail and to hang, by operation: "repair", "sync", "prefetch", "capture", "publish", "stage", "overlay", "move",
// "end_move", which fails after the move, "moved", "discard", "delete", "export", "measure", "usage", "space". It has one file system, of 1 TiB and 100 million inodes, where
// nothing but its containers uses any unless a test changes that.
type Disks struct {
	Faults
	engine *Engine
	used   sandbox.DiskUsage // by others; guarded by engine.mu
	usages int               // calls of Usage; guarded by engine.mu
	wrote  int64             // guarded by engine.mu
	apart  bool              // guarded by engine.mu
	noMax  bool              // guarded by engine.mu
}

// UnlimitInodes makes the file system one that does not limit the number of inodes.
func (d *Disks) UnlimitInodes() {
	d.engine.mu.Lock()
	defer d.engine.mu.Unlock()
	d.noMax = true
}

// SetApart makes the file system one without the root file systems of containers.
func (d *Disks) SetApart() {
	d.engine.mu.Lock()
	defer d.engine.mu.Unlock()
	d.apart = true
}

// Wrote increases the number of bytes that programs have written.
func (d *Disks) Wrote(bytes int64) {
	d.engine.mu.Lock()
	defer d.engine.mu.Unlock()
	d.wrote += bytes
}

// Use increases the usage by programs outside the containers.
func (d *Disks) Use(u sandbox.DiskUsage) {
	d.engine.mu.Lock()
	defer d.engine.mu.Unlock()
	d.used.Bytes += u.Bytes
	d.used.Entries += u.Entries
}

// Usages returns the number of calls to Usage.
func (d *Disks) Usages() int {
	d.engine.mu.Lock()
	defer d.engine.mu.Unlock()
	return d.usages
}

// Grow increases the disk usage of a container.
func (e *Engine) Grow(id sandbox.ID, u sandbox.DiskUsage) {
	e.mu.Lock()
	defer e.mu.Unlock()
	c := e.containers[id]
	c.grown.Bytes += u.Bytes
	c.grown.Entries += u.Entries
}

// snapshot is a disk; published ones are images of the Engine.
type snapshot struct {
	files     map[string]string
	published bool
	paths     []string // of a partial one
}

// Disks returns the disks of the engine's containers.
func (e *Engine) Disks() *Disks { return &Disks{engine: e} }

// Write writes a file on the disk of a container.
func (e *Engine) Write(id sandbox.ID, name, content string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.containers[id].files[name] = content
}

// DeleteFile deletes a file on the disk of a container.
func (e *Engine) DeleteFile(id sandbox.ID, name string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	c := e.containers[id]
	delete(c.files, name)
	if c.deleted == nil {
		c.deleted = map[string]bool{}
	}
	c.deleted[name] = true
}

// Files returns the files on the disk of a container.
func (e *Engine) Files(id sandbox.ID) map[string]string {
	e.mu.Lock()
	defer e.mu.Unlock()
	c := e.containers[id]
	if c == nil {
		return nil
	}
	return c.disk()
}

// disk returns the files of a container; the engine's lock is held.
func (c *container) disk() map[string]string {
	files := maps.Clone(c.base)
	maps.DeleteFunc(files, func(name, _ string) bool { return c.deleted[name] })
	maps.Copy(files, c.files)
	return files
}

// empty empties the disk of a container; the engine's lock is held.
func (c *container) empty() {
	c.files, c.deleted, c.grown = map[string]string{}, nil, sandbox.DiskUsage{}
}

// Snapshots counts the snapshots, published or not.
func (e *Engine) Snapshots() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.snapshots)
}

// onDisk calls f with a container, with the engine's lock held.
func (d *Disks) onDisk(ctx context.Context, operation string, id sandbox.ID, f func(*container) error) error {
	if err := d.begin(ctx, operation); err != nil {
		return err
	}
	d.engine.mu.Lock()
	defer d.engine.mu.Unlock()
	c := d.engine.containers[id]
	if c == nil {
		return fmt.Errorf("disk of %s: %w", id, sandbox.ErrNoContainer)
	}
	return f(c)
}

// onIdleDisk is onDisk of a container that does not run, as a Manager has to ensure.
func (d *Disks) onIdleDisk(ctx context.Context, operation string, id sandbox.ID, f func(*container) error) error {
	return d.onDisk(ctx, operation, id, func(c *container) error {
		if c.state == sandbox.ContainerRunning {
			return fmt.Errorf("%s of the disk of %s, which runs", operation, id)
		}
		return f(c)
	})
}

// add makes the disk of a container a snapshot; the engine's lock is held.
func (d *Disks) add(c *container, id sandbox.SnapshotID, published bool) sandbox.DiskUsage {
	files := c.disk()
	d.engine.snapshots[sandbox.SnapshotRef(id)] = &snapshot{files: files, published: published}
	return usageOf(files)
}

func (c *container) usage() sandbox.DiskUsage {
	u := usageOf(c.files)
	return sandbox.DiskUsage{Bytes: u.Bytes + c.grown.Bytes, Entries: u.Entries + c.grown.Entries}
}

func usageOf(files map[string]string) sandbox.DiskUsage {
	return sandbox.DiskUsage{Bytes: int64(len(files)) * 4096, Entries: 1 + int64(len(files))} // with the root folder
}

// Prefetch implements sandbox.Disks.
func (d *Disks) Prefetch(ctx context.Context, id sandbox.ID, snapshot sandbox.SnapshotID, paths []string) error {
	return d.onDisk(ctx, "prefetch", id, func(c *container) error {
		_, err := d.addPart(c, snapshot, paths)
		if err != nil {
			return err
		}
		return checkPaths(c.disk(), paths)
	})
}

// addPart makes a part of the disk of a container an unpublished snapshot; the engine's lock is held.
func (d *Disks) addPart(c *container, id sandbox.SnapshotID, paths []string) (sandbox.DiskUsage, error) {
	if have := d.engine.snapshots[sandbox.SnapshotRef(id)]; have != nil && !slices.Equal(have.paths, paths) {
		return sandbox.DiskUsage{}, fmt.Errorf("capture of the paths %q after a prefetch of %q", paths, have.paths)
	}
	usage := d.add(c, id, false)
	d.engine.snapshots[sandbox.SnapshotRef(id)].paths = paths
	return usage, nil
}

// checkPaths returns *sandbox.InvalidError if a disk does not have one of the paths.
func checkPaths(files map[string]string, paths []string) error {
	if i := missingPath(files, paths); i >= 0 {
		return sandbox.MissingPath(fmt.Sprintf("paths[%d]", i), fmt.Sprintf("%q does not exist", paths[i]))
	}
	return nil
}

// Capture implements sandbox.Disks.
func (d *Disks) Capture(ctx context.Context, id sandbox.ID, snapshot sandbox.SnapshotID, paths []string) (usage sandbox.DiskUsage, err error) {
	err = d.onDisk(ctx, "capture", id, func(c *container) error {
		usage, err = d.addPart(c, snapshot, paths)
		return err
	})
	return usage, err
}

// Publish implements sandbox.Disks. The fake's snapshots always have all files.
func (d *Disks) Publish(ctx context.Context, _ sandbox.ID, snapshot sandbox.SnapshotID, _ bool) error {
	if err := d.begin(ctx, "publish"); err != nil {
		return err
	}
	d.engine.mu.Lock()
	defer d.engine.mu.Unlock()
	s := d.engine.snapshots[sandbox.SnapshotRef(snapshot)]
	if s == nil {
		return errors.New("nothing was captured")
	}
	if len(s.paths) > 0 {
		if err := checkPaths(s.files, s.paths); err != nil {
			return err
		}
		maps.DeleteFunc(s.files, func(file, _ string) bool { return !atPath(s.paths, folder+"/"+file) })
	}
	s.published = true
	return nil
}

// Stage implements sandbox.Disks.
func (d *Disks) Stage(ctx context.Context, from, snapshotID sandbox.SnapshotID) (sandbox.DiskUsage, error) {
	if err := d.begin(ctx, "stage"); err != nil {
		return sandbox.DiskUsage{}, err
	}
	d.engine.mu.Lock()
	defer d.engine.mu.Unlock()
	s := d.engine.snapshots[sandbox.SnapshotRef(from)]
	if s == nil || !s.published {
		return sandbox.DiskUsage{}, fmt.Errorf("snapshot %s: not known", from)
	}
	d.engine.snapshots[sandbox.SnapshotRef(snapshotID)] = &snapshot{files: maps.Clone(s.files)}
	return usageOf(s.files), nil
}

// Overlay implements sandbox.Disks.
func (d *Disks) Overlay(ctx context.Context, id, below sandbox.SnapshotID, paths []string) error {
	if err := d.begin(ctx, "overlay"); err != nil {
		return err
	}
	d.engine.mu.Lock()
	defer d.engine.mu.Unlock()
	s, lower := d.engine.snapshots[sandbox.SnapshotRef(id)], d.engine.snapshots[sandbox.SnapshotRef(below)]
	if s == nil || lower == nil || !lower.published {
		return fmt.Errorf("snapshot %s on %s: not known", id, below)
	}
	files := maps.Clone(lower.files)
	maps.DeleteFunc(files, func(file, _ string) bool { return atPath(paths, folder+"/"+file) })
	maps.Copy(files, s.files)
	d.engine.snapshots[sandbox.SnapshotRef(id)] = &snapshot{files: files, published: true}
	return nil
}

// Move implements sandbox.Disks.
func (d *Disks) Move(ctx context.Context, id sandbox.ID, snapshot sandbox.SnapshotID) error {
	return d.onIdleDisk(ctx, "move", id, func(c *container) error {
		d.add(c, snapshot, true)
		c.empty()
		return d.begin(ctx, "end_move")
	})
}

// Moved implements sandbox.Disks.
func (d *Disks) Moved(ctx context.Context, snapshot sandbox.SnapshotID) (bool, error) {
	if err := d.begin(ctx, "moved"); err != nil {
		return false, err
	}
	d.engine.mu.Lock()
	defer d.engine.mu.Unlock()
	s := d.engine.snapshots[sandbox.SnapshotRef(snapshot)]
	return s != nil && s.published, nil
}

// Repair implements sandbox.Disks.
func (d *Disks) Repair(ctx context.Context) error { return d.begin(ctx, "repair") }

// Sync implements sandbox.Disks.
func (d *Disks) Sync(ctx context.Context, _ sandbox.ID) error { return d.begin(ctx, "sync") }

// Discard implements sandbox.Disks.
func (d *Disks) Discard(ctx context.Context, id sandbox.ID) error {
	return d.onIdleDisk(ctx, "discard", id, func(c *container) error {
		c.empty()
		return nil
	})
}

// Delete implements sandbox.Disks.
func (d *Disks) Delete(ctx context.Context, snapshot sandbox.SnapshotID) error {
	if err := d.begin(ctx, "delete"); err != nil {
		return err
	}
	d.engine.mu.Lock()
	defer d.engine.mu.Unlock()
	for _, c := range d.engine.containers {
		if c.spec.ImageRef == sandbox.SnapshotRef(snapshot) {
			return fmt.Errorf("snapshot %s: %w", snapshot, sandbox.ErrSnapshotInUse)
		}
	}
	delete(d.engine.snapshots, sandbox.SnapshotRef(snapshot))
	return nil
}

// Export implements sandbox.Disks. The image has one layer.
func (d *Disks) Export(ctx context.Context, snapshot sandbox.SnapshotID, name string) (io.ReadCloser, error) {
	if err := d.begin(ctx, "export"); err != nil {
		return nil, err
	}
	d.engine.mu.Lock()
	s := d.engine.snapshots[sandbox.SnapshotRef(snapshot)]
	d.engine.mu.Unlock()
	if s == nil || !s.published {
		return nil, fmt.Errorf("export snapshot %s: image not known", snapshot)
	}
	layer, err := ociimage.Measure(func(w io.Writer) error {
		out := tar.NewWriter(w)
		for _, name := range slices.Sorted(maps.Keys(s.files)) {
			content := s.files[name]
			if err := out.WriteHeader(&tar.Header{Name: "srv/" + name, Mode: 0o644, Size: int64(len(content))}); err != nil {
				return err
			}
			if _, err := io.WriteString(out, content); err != nil {
				return err
			}
		}
		return out.Close()
	})
	if err != nil {
		return nil, err
	}
	r, w := io.Pipe()
	go func() { // ends when the archive is read or the other end of the pipe closes
		w.CloseWithError(ociimage.Write(w, ociimage.Image{Name: name, Config: []byte("{}"), Layers: []ociimage.Layer{layer}}))
	}()
	stop := context.AfterFunc(ctx, func() { w.CloseWithError(ctx.Err()) })
	return exported{r, stop}, nil
}

type exported struct {
	*io.PipeReader
	stop func() bool
}

func (e exported) Close() error {
	e.stop()
	return e.PipeReader.Close()
}

// Measure implements sandbox.Disks.
func (d *Disks) Measure(ctx context.Context, id sandbox.ID, snapshot sandbox.SnapshotID) (usage sandbox.DiskUsage, err error) {
	if id != "" {
		err = d.onDisk(ctx, "measure", id, func(c *container) error {
			usage = c.usage()
			return nil
		})
		return usage, err
	}
	if err := d.begin(ctx, "measure"); err != nil {
		return usage, err
	}
	d.engine.mu.Lock()
	defer d.engine.mu.Unlock()
	if s := d.engine.snapshots[sandbox.SnapshotRef(snapshot)]; s != nil {
		usage = usageOf(s.files)
	}
	return usage, nil
}

// Usage implements sandbox.Disks.
func (d *Disks) Usage(ctx context.Context, id sandbox.ID, _ int, limit sandbox.DiskUsage) (usage sandbox.DiskUsage, err error) {
	d.engine.mu.Lock()
	d.usages++
	d.engine.mu.Unlock()
	err = d.onDisk(ctx, "usage", id, func(c *container) error {
		usage = c.usage()
		if limit.Bytes > 0 && usage.Bytes > limit.Bytes { // it stops counting
			usage.Bytes = limit.Bytes + 1
		}
		if limit.Entries > 0 && usage.Entries > limit.Entries {
			usage.Entries = limit.Entries + 1
		}
		return nil
	})
	return usage, err
}

// Space implements sandbox.Disks.
func (d *Disks) Space() ([]sandbox.DiskSpace, error) {
	if err := d.begin(context.Background(), "space"); err != nil {
		return nil, err
	}
	d.engine.mu.Lock()
	defer d.engine.mu.Unlock()
	used := d.used
	for _, c := range d.engine.containers {
		u := c.usage()
		used.Bytes += u.Bytes
		used.Entries += u.Entries
	}
	total := sandbox.DiskUsage{Bytes: 1 << 40, Entries: 100_000_000}
	if d.noMax {
		total.Entries, used.Entries = 0, 0
	}
	return []sandbox.DiskSpace{{
		Path: "/disks", Roots: !d.apart, Written: d.wrote, Total: total, Used: used, Free: sandbox.DiskUsage{Bytes: total.Bytes - used.Bytes, Entries: total.Entries - used.Entries},
	}}, nil
}

var _ sandbox.Disks = (*Disks)(nil)
