// Package diskstest is the conformance suite of sandbox.Disks.
package diskstest

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/archive/ociimage/imagetest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// System is a Disks with the Engine of its containers.
type System struct {
	Engine sandbox.Engine
	Disks  sandbox.Disks
	// Spec describes a container, and makes the folder and the cgroup that it needs. The id is
	// new.
	Spec func(t testing.TB, id sandbox.ID) sandbox.ContainerSpec
	// Write writes a file into the folder /srv of a container that does not run.
	Write func(t testing.TB, id sandbox.ID, name, content string)
	// DeleteFile deletes a file in that folder.
	DeleteFile func(t testing.TB, id sandbox.ID, name string)
	// Files returns the files in that folder by name.
	Files func(t testing.TB, id sandbox.ID) map[string]string
}

// Run runs the suite. Each test opens a System of its own, which ends by t.Cleanup.
func Run(t *testing.T, open func(t *testing.T) System) {
	for _, c := range []struct {
		name string
		test func(*suite)
	}{
		{"PublishedSnapshotHasTheFilesAtItsCapture", capture},
		{"CaptureHasWhatChangedSincePrefetch", prefetch},
		{"MovedDiskIsTheSnapshotAndTheContainerIsEmpty", move},
		{"SnapshotsOfSnapshotsHaveTheFilesOfAll", stack},
		{"FlatSnapshotHasTheFilesOfAll", flatten},
		{"PartialSnapshotHasTheMergedFilesAtItsPaths", partial},
		{"PartialSnapshotHasWhatChangedSincePrefetch", partialPrefetch},
		{"PartialSnapshotOfAFolderHasAllOfIt", partialFolder},
		{"OverlayReplacesOnlyThePaths", overlay},
		{"OverlayOfAFolderReplacesAllOfIt", overlayFolder},
		{"PathsThatDoNotExistAreInvalid", missingPaths},
		{"DiscardEmptiesTheDisk", discard},
		{"DeleteSparesSnapshotsInUse", deletion},
		{"DeleteRemovesUnfinishedSnapshots", unfinished},
		{"UsageGrowsWithTheDiskAndStopsBeyondALimit", usage},
		{"SpaceIsOfFileSystems", space},
		{"ExportIsAnImageWithTheFiles", export},
		{"EndOfAnExportIsAnError", endedExport},
		{"UnknownContainersAreErrors", unknown},
		{"EndedContextEndsTheCall", endedContext},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.test(&suite{Fixture{T: t, Ctx: testkit.Context(t), System: open(t)}})
		})
	}
}

// Fixture has the operations that tests on a System share. Its methods end the test on an error.
type Fixture struct {
	*testing.T
	Ctx context.Context
	System
}

// Must ends the test on an error.
func (f *Fixture) Must(err error) {
	f.Helper()
	if err != nil {
		f.Fatal(err)
	}
}

// Create creates a container, from a snapshot if one is named, and removes it with the test.
func (f *Fixture) Create(from sandbox.SnapshotID) sandbox.ID {
	f.Helper()
	id := sandbox.NewID()
	spec := f.Spec(f, id)
	if from != "" {
		spec.ImageRef = sandbox.SnapshotRef(from)
	}
	f.Must(f.Engine.Create(f.Ctx, spec))
	f.Cleanup(func() { f.Remove(id) })
	f.Must(f.Disks.Sync(f.Ctx, id))
	return id
}

// Remove removes a container. Idempotent.
func (f *Fixture) Remove(id sandbox.ID) {
	f.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	defer cancel()
	f.Must(f.Engine.Remove(ctx, id))
	f.Must(f.Disks.Sync(ctx, id))
}

// SnapshotID returns a new id, and deletes its snapshot with the test, before the containers that
// were created earlier.
func (f *Fixture) SnapshotID() sandbox.SnapshotID {
	id := sandbox.SnapshotID(sandbox.NewID())
	f.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
		defer cancel()
		f.Must(f.Disks.Delete(ctx, id))
	})
	return id
}

// Publish returns a snapshot of a container, which is partial if paths are given.
func (f *Fixture) Publish(id sandbox.ID, paths ...string) sandbox.SnapshotID {
	f.Helper()
	snapshot := f.SnapshotID()
	_, err := f.Disks.Capture(f.Ctx, id, snapshot, paths)
	f.Must(err)
	f.Must(f.Disks.Publish(f.Ctx, id, snapshot, false))
	return snapshot
}

// SnapshotOf returns a snapshot of a new container with files.
func (f *Fixture) SnapshotOf(files map[string]string) sandbox.SnapshotID {
	f.Helper()
	id := f.Create("")
	for name, content := range files {
		f.Write(f, id, name, content)
	}
	return f.Publish(id)
}

type suite struct{ Fixture }

func (s *suite) want(id sandbox.ID, files map[string]string) {
	s.Helper()
	testkit.Diff(s, "files", s.Files(s, id), files)
}

func capture(s *suite) {
	id := s.Create("")
	s.Write(s, id, "a", "1")
	snapshot := s.SnapshotID()
	usage, err := s.Disks.Capture(s.Ctx, id, snapshot, nil)
	s.Must(err)
	if usage.Entries == 0 {
		s.Error("the disk with a file has no entries")
	}
	s.Write(s, id, "a", "2")
	s.Must(s.Disks.Publish(s.Ctx, id, snapshot, false))
	s.Write(s, id, "b", "2")
	s.want(s.Create(snapshot), map[string]string{"a": "1"})
	s.want(id, map[string]string{"a": "2", "b": "2"})
	measured, err := s.Disks.Measure(s.Ctx, "", snapshot)
	s.Must(err)
	if measured != usage {
		s.Errorf("the snapshot has %+v, %+v were captured", measured, usage)
	}
}

func prefetch(s *suite) {
	id := s.Create("")
	s.Write(s, id, "same", "1")
	s.Write(s, id, "changed", "1")
	snapshot := s.SnapshotID()
	s.Must(s.Disks.Prefetch(s.Ctx, id, snapshot, nil))
	s.Write(s, id, "changed", "2")
	s.Write(s, id, "new", "2")
	_, err := s.Disks.Capture(s.Ctx, id, snapshot, nil)
	s.Must(err)
	s.Must(s.Disks.Publish(s.Ctx, id, snapshot, false))
	s.want(s.Create(snapshot), map[string]string{"same": "1", "changed": "2", "new": "2"})
}

func move(s *suite) {
	id := s.Create("")
	s.Write(s, id, "a", "1")
	snapshot := s.SnapshotID()
	if moved, err := s.Disks.Moved(s.Ctx, snapshot); moved || err != nil {
		s.Errorf("before the move: %t, %v", moved, err)
	}
	s.Must(s.Disks.Move(s.Ctx, id, snapshot))
	if moved, err := s.Disks.Moved(s.Ctx, snapshot); !moved || err != nil {
		s.Errorf("after the move: %t, %v", moved, err)
	}
	s.want(id, map[string]string{})
	s.want(s.Create(snapshot), map[string]string{"a": "1"})
}

func stack(s *suite) {
	var snapshot sandbox.SnapshotID
	want := map[string]string{}
	for i, name := range []string{"a", "b", "c", "d"} {
		id := s.Create(snapshot)
		s.Write(s, id, name, name)
		s.Write(s, id, "last", name)
		want[name], want["last"] = name, name
		if i%2 == 0 {
			snapshot = s.Publish(id)
			continue
		}
		snapshot = s.SnapshotID()
		s.Must(s.Disks.Move(s.Ctx, id, snapshot))
	}
	s.want(s.Create(snapshot), want)
}

func flatten(s *suite) {
	want := map[string]string{}
	var below []sandbox.SnapshotID
	for _, name := range []string{"a", "b", "c"} {
		var from sandbox.SnapshotID
		if len(below) > 0 {
			from = below[len(below)-1]
		}
		id := s.Create(from)
		s.Write(s, id, name, name)
		s.Write(s, id, "last", name)
		want[name], want["last"] = name, name
		snapshot := s.SnapshotID()
		_, err := s.Disks.Capture(s.Ctx, id, snapshot, nil)
		s.Must(err)
		s.Must(s.Disks.Publish(s.Ctx, id, snapshot, name == "c"))
		s.want(id, want)
		s.Remove(id)
		below = append(below, snapshot)
	}
	// The flat snapshot does not need the others.
	s.Must(s.Disks.Delete(s.Ctx, below[1]))
	s.Must(s.Disks.Delete(s.Ctx, below[0]))
	s.want(s.Create(below[2]), want)
}

func partial(s *suite) {
	below := s.SnapshotOf(map[string]string{"below": "1", "changed": "1", "not": "1"})
	id := s.Create(below)
	s.Write(s, id, "changed", "2")
	s.Write(s, id, "new", "2")
	s.Write(s, id, "not too", "2")
	part := s.Publish(id, "/srv/new", "/srv/below", "/srv/changed")
	s.Write(s, id, "changed", "3")
	s.Remove(id)
	s.Must(s.Disks.Delete(s.Ctx, below)) // the partial snapshot does not need it
	want := map[string]string{"below": "1", "changed": "2", "new": "2"}
	created := s.Create(part)
	s.want(created, want)
	// Its disk can be used like any other.
	s.DeleteFile(s, created, "below")
	s.Write(s, created, "more", "4")
	s.want(s.Create(s.Publish(created)), map[string]string{"changed": "2", "new": "2", "more": "4"})
	s.want(s.Create(part), want)
}

func partialPrefetch(s *suite) {
	id := s.Create(s.SnapshotOf(map[string]string{"below": "1", "below too": "1"}))
	for _, name := range []string{"same", "changed", "not"} {
		s.Write(s, id, name, "1")
	}
	snapshot, paths := s.SnapshotID(), []string{"/srv/same", "/srv/changed", "/srv/below", "/srv/below too"}
	s.Must(s.Disks.Prefetch(s.Ctx, id, snapshot, paths))
	s.Write(s, id, "changed", "2")
	s.Write(s, id, "below", "2")
	s.Write(s, id, "new", "2")
	_, err := s.Disks.Capture(s.Ctx, id, snapshot, paths)
	s.Must(err)
	s.Write(s, id, "changed", "3")
	s.Must(s.Disks.Publish(s.Ctx, id, snapshot, false))
	s.want(s.Create(snapshot), map[string]string{"same": "1", "changed": "2", "below": "2", "below too": "1"})
	measured, err := s.Disks.Measure(s.Ctx, "", snapshot)
	s.Must(err)
	if measured.Entries < 4 {
		s.Errorf("the partial snapshot has %+v", measured)
	}
}

func partialFolder(s *suite) {
	id := s.Create(s.SnapshotOf(map[string]string{"a": "1", "deleted": "1"}))
	s.DeleteFile(s, id, "deleted")
	s.Write(s, id, "b", "2")
	s.want(s.Create(s.Publish(id, "/srv")), map[string]string{"a": "1", "b": "2"})
}

// overlaid returns a container whose disk is a snapshot's with the paths of a partial one.
func (s *suite) overlaid(part, below sandbox.SnapshotID, paths ...string) sandbox.ID {
	s.Helper()
	snapshot := s.SnapshotID()
	usage, err := s.Disks.Stage(s.Ctx, part, snapshot)
	s.Must(err)
	if usage.Entries == 0 || usage.Bytes == 0 {
		s.Errorf("the copy of the paths has %+v", usage)
	}
	s.Must(s.Disks.Overlay(s.Ctx, snapshot, below, paths))
	return s.Create(snapshot)
}

func overlay(s *suite) {
	part := s.Publish(s.Create(s.SnapshotOf(map[string]string{"a": "1", "b": "1", "c": "1", "not": "1"})), "/srv/c", "/srv/a", "/srv/b")
	below := s.Create(s.SnapshotOf(map[string]string{"a": "2", "c": "2", "rest": "2"}))
	s.Write(s, below, "new", "3")
	s.DeleteFile(s, below, "c")
	merged := s.overlaid(part, s.Publish(below), "/srv/c", "/srv/a", "/srv/b")
	want := map[string]string{"a": "1", "b": "1", "c": "1", "rest": "2", "new": "3"}
	s.want(merged, want)
	s.Write(s, merged, "b", "4")
	s.DeleteFile(s, merged, "a")
	s.want(s.overlaid(part, s.Publish(merged), "/srv/a", "/srv/b", "/srv/c"), want)
	s.want(s.Create(part), map[string]string{"a": "1", "b": "1", "c": "1"}) // it is unchanged
}

func overlayFolder(s *suite) {
	id := s.Create(s.SnapshotOf(map[string]string{"a": "1", "deleted": "1"}))
	s.DeleteFile(s, id, "deleted")
	below := s.SnapshotOf(map[string]string{"a": "3", "deleted": "3", "new": "3"})
	s.want(s.overlaid(s.Publish(id, "/srv"), below, "/srv"), map[string]string{"a": "1"})
}

func missingPaths(s *suite) {
	id := s.Create(s.SnapshotOf(map[string]string{"a": "1", "b": "1", "deleted": "1"}))
	s.DeleteFile(s, id, "deleted")
	for _, path := range []string{"/srv/none", "/srv/deleted", "/srv/" + strings.Repeat("a", 300), "/none", "/none/a", "/srv/a/b"} {
		paths := []string{"/srv/b", path}
		s.wantMissing("prefetch", s.Disks.Prefetch(s.Ctx, id, s.SnapshotID(), paths), paths)
		snapshot := s.SnapshotID()
		_, err := s.Disks.Capture(s.Ctx, id, snapshot, paths)
		s.Must(err)
		s.wantMissing("publish", s.Disks.Publish(s.Ctx, id, snapshot, false), paths)
		spec := s.Spec(s, sandbox.NewID())
		spec.ImageRef = sandbox.SnapshotRef(snapshot)
		if err := s.Engine.Create(s.Ctx, spec); !errors.Is(err, sandbox.ErrImageMissing) {
			s.Errorf("container of a snapshot without its path: %v", err)
		}
	}
}

// wantMissing fails unless the error names the second path.
func (s *suite) wantMissing(operation string, err error, paths []string) {
	s.Helper()
	if invalid, ok := errors.AsType[*sandbox.InvalidError](err); !ok || invalid.Field != "paths[1]" {
		s.Errorf("%s of %.50q: %v", operation, paths, err)
	}
}

func discard(s *suite) {
	base := s.Create("")
	s.Write(s, base, "base", "1")
	snapshot := s.Publish(base)
	id := s.Create(snapshot)
	s.Write(s, id, "a", "1")
	s.Must(s.Disks.Discard(s.Ctx, id))
	s.want(id, map[string]string{"base": "1"})
}

func deletion(s *suite) {
	source := s.Create("")
	s.Write(s, source, "a", "1")
	snapshot := s.Publish(source)
	id := s.Create(snapshot)
	if err := s.Disks.Delete(s.Ctx, snapshot); !errors.Is(err, sandbox.ErrSnapshotInUse) {
		s.Errorf("delete of a snapshot in use: %v", err)
	}
	s.want(id, map[string]string{"a": "1"})
	s.Write(s, id, "b", "2")
	child := s.Publish(id)
	s.Remove(id)
	for range 2 {
		s.Must(s.Disks.Delete(s.Ctx, snapshot))
	}
	spec := s.Spec(s, sandbox.NewID())
	spec.ImageRef = sandbox.SnapshotRef(snapshot)
	if err := s.Engine.Create(s.Ctx, spec); !errors.Is(err, sandbox.ErrImageMissing) {
		s.Errorf("container of a deleted snapshot: %v", err)
	}
	s.want(s.Create(child), map[string]string{"a": "1", "b": "2"})
}

func unfinished(s *suite) {
	id := s.Create("")
	s.Write(s, id, "a", "1")
	for _, call := range []func(context.Context, sandbox.ID, sandbox.SnapshotID) error{
		func(ctx context.Context, id sandbox.ID, snapshot sandbox.SnapshotID) error {
			return s.Disks.Prefetch(ctx, id, snapshot, nil)
		},
		func(ctx context.Context, id sandbox.ID, snapshot sandbox.SnapshotID) error {
			_, err := s.Disks.Capture(ctx, id, snapshot, nil)
			return err
		},
	} {
		snapshot := s.SnapshotID()
		s.Must(call(s.Ctx, id, snapshot))
		s.Must(s.Disks.Delete(s.Ctx, snapshot))
		if err := s.Disks.Publish(s.Ctx, id, snapshot, false); err == nil {
			s.Error("published a snapshot that was deleted")
		}
	}
}

func usage(s *suite) {
	id := s.Create("")
	measure := func(limit sandbox.DiskUsage) sandbox.DiskUsage {
		s.Helper()
		u, err := s.Disks.Usage(s.Ctx, id, 0, limit)
		s.Must(err)
		return u
	}
	none := measure(sandbox.DiskUsage{})
	for _, name := range []string{"a", "b", "c"} {
		s.Write(s, id, name, name)
	}
	all := measure(sandbox.DiskUsage{})
	if all.Entries < none.Entries+3 || all.Bytes < none.Bytes+3*512 {
		s.Errorf("an empty disk has %s, one with three files %s", none, all)
	}
	if got := measure(all); got != all {
		s.Errorf("with a limit that it does not exceed: %s, want %s", got, all)
	}
	if got := measure(sandbox.DiskUsage{Entries: 2}); got.Entries <= 2 {
		s.Errorf("limit 2 files: %s", got)
	}
	if got := measure(sandbox.DiskUsage{Bytes: 1}); got.Bytes <= 1 {
		s.Errorf("limit 1 byte: %s", got)
	}
	snapshot := s.Publish(id)
	if u, err := s.Disks.Usage(s.Ctx, s.Create(snapshot), 0, sandbox.DiskUsage{}); err != nil || u.Entries > none.Entries {
		s.Errorf("a new disk based on a snapshot: %s, %v; want %s", u, err, none)
	}
}

func space(s *suite) {
	spaces, err := s.Disks.Space()
	s.Must(err)
	if len(spaces) == 0 {
		s.Error("no file system")
	}
	for _, space := range spaces {
		if space.Path == "" || space.Total.Bytes <= 0 || space.Free.Bytes > space.Total.Bytes || space.Used.Bytes > space.Total.Bytes ||
			space.Free.Bytes < 0 || space.Used.Bytes < 0 || space.Free.Entries > space.Total.Entries || space.Used.Entries < 0 {
			s.Errorf("%+v", space)
		}
	}
}

func export(s *suite) {
	base := s.Create("")
	s.Write(s, base, "a", "1")
	s.Write(s, base, "b", "1")
	id := s.Create(s.Publish(base))
	s.Write(s, id, "b", "2")
	snapshot := s.Publish(id)
	archive, err := s.Disks.Export(s.Ctx, snapshot, "localhost/name:tag")
	s.Must(err)
	defer archive.Close()
	image := imagetest.Read(s, archive)
	testkit.Diff(s, "names", image.Names, []string{"localhost/name:tag"})
	files := map[string]string{}
	for name, file := range image.Files {
		if name, ok := strings.CutPrefix(name, "srv/"); ok && file.Typeflag == tar.TypeReg {
			files[name] = file.Content
		}
	}
	testkit.Diff(s, "files", files, map[string]string{"a": "1", "b": "2"})
}

func endedExport(s *suite) {
	id := s.Create("")
	s.Write(s, id, "a", "1")
	snapshot := s.Publish(id)
	if _, err := s.Disks.Export(s.Ctx, sandbox.SnapshotID(sandbox.NewID()), "localhost/name:tag"); err == nil {
		s.Error("exported an unknown snapshot")
	}
	ctx, cancel := context.WithCancel(s.Ctx)
	defer cancel()
	archive, err := s.Disks.Export(ctx, snapshot, "localhost/name:tag")
	s.Must(err)
	cancel()
	if _, err := io.Copy(io.Discard, archive); !errors.Is(err, context.Canceled) {
		s.Errorf("read after the end of the context: %v", err)
	}
	for range 2 {
		s.Must(archive.Close())
	}
	archive, err = s.Disks.Export(s.Ctx, snapshot, "localhost/name:tag")
	s.Must(err)
	s.Must(archive.Close())
	if _, err := io.Copy(io.Discard, archive); err == nil {
		s.Error("read the whole archive after Close")
	}
}

func unknown(s *suite) {
	id, snapshot := sandbox.NewID(), s.SnapshotID()
	_, captured := s.Disks.Capture(s.Ctx, id, snapshot, nil)
	_, measured := s.Disks.Measure(s.Ctx, id, "")
	_, used := s.Disks.Usage(s.Ctx, id, 0, sandbox.DiskUsage{})
	for name, err := range map[string]error{
		"usage": used, "prefetch": s.Disks.Prefetch(s.Ctx, id, snapshot, nil), "capture": captured, "measure": measured,
		"move": s.Disks.Move(s.Ctx, id, snapshot), "discard": s.Disks.Discard(s.Ctx, id),
	} {
		if !errors.Is(err, sandbox.ErrNoContainer) {
			s.Errorf("%s: %v", name, err)
		}
	}
}

func endedContext(s *suite) {
	id, snapshot := s.Create(""), s.SnapshotID()
	ctx, cancel := context.WithCancel(s.Ctx)
	cancel()
	if err := s.Disks.Prefetch(ctx, id, snapshot, nil); !errors.Is(err, context.Canceled) {
		s.Errorf("prefetch: %v", err)
	}
	if _, err := s.Disks.Usage(ctx, id, 0, sandbox.DiskUsage{}); !errors.Is(err, context.Canceled) {
		s.Errorf("usage: %v", err)
	}
	expired, cancel := context.WithDeadline(s.Ctx, time.Now().Add(-time.Second))
	defer cancel()
	if _, err := s.Disks.Capture(expired, id, snapshot, nil); !errors.Is(err, context.DeadlineExceeded) {
		s.Errorf("capture: %v", err)
	}
}
