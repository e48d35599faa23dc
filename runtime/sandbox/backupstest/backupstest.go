// Package backupstest is the conformance suite of sandbox.Backups.
package backupstest

import (
	"context"
	"encoding/hex"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/diskstest"
	"github.com/doze-run/doze/testkit"
)

// System is a Backups with the Disks of its snapshots. The object store can have backups of earlier
// tests.
type System struct {
	diskstest.System
	Backups sandbox.Backups
	// RebuildImage replaces the image of Spec on the node by a different one with the same name. No
	// container and no snapshot is based on the former one.
	RebuildImage func(t testing.TB)
	// MoreBackups returns another client of the same object store, as another node would use.
	MoreBackups func(t testing.TB) sandbox.Backups
}

// Run runs the suite. Each test opens a System of its own, which ends by t.Cleanup.
func Run(t *testing.T, open func(t *testing.T) System) {
	for _, c := range []struct {
		name string
		test func(*suite)
	}{
		{"ListHasTheRecordThatCreateReturned", record},
		{"RestoredSnapshotHasTheFilesOfAllSnapshotsBelow", stack},
		{"ContentIsStoredOnce", unchanged},
		{"DeleteRemovesOnlyTheNamedBackups", deletion},
		{"AnotherImageIsAMismatch", otherImage},
		{"ListsAreOfOneOwner", owners},
		{"CacheHasASizeAfterABackup", cache},
		{"AnotherClientHasTheBackups", anotherClient},
		{"ProgressIsMonotonicAndEndsWithTheTotal", progress},
		{"EndedContextLeavesNothing", endedContext},
		{"UnknownSnapshotsAreErrors", unknown},
		{"PartialBackupReplacesOnlyItsPaths", partial},
		{"PartialBackupOfAFolderReplacesAllOfIt", partialFolder},
		{"PathsThatDoNotExistAreInvalid", missingPaths},
		{"ExcludedFilesAreNotInTheBackup", excludes},
		{"IgnoredFilesOfAWorkTreeAreNotInTheBackup", ignored},
		{"RunningDiskIsStoredAsItIsWhileProgramsAreStopped", running},
		{"PartOfARunningDiskIsStored", runningPart},
		{"FailureToStopProgramsLeavesNothing", failedStop},
		{"ReplacedRunningDiskNeedsASnapshot", replaced},
	} {
		t.Run(c.name, func(t *testing.T) {
			on := open(t)
			c.test(&suite{diskstest.Fixture{T: t, Ctx: testkit.Context(t), System: on.System}, on, "owner-" + string(sandbox.NewID())})
		})
	}
}

type suite struct {
	diskstest.Fixture
	on    System
	owner string // has no backups of other tests
}

// snapshotWith returns a snapshot of a new container with a file.
func (s *suite) snapshotWith(name, content string) sandbox.SnapshotID {
	s.Helper()
	id := s.Create("")
	s.Write(s, id, name, content)
	return s.Publish(id)
}

// newBackup returns the argument of Create for a snapshot of a container.
func (s *suite) newBackup() sandbox.Backup {
	id := sandbox.NewID()
	now := time.Now().UTC().Round(0).Truncate(time.Microsecond).Add(7 * time.Nanosecond)
	return sandbox.Backup{
		ID: sandbox.BackupID(sandbox.NewID()), Owner: s.owner, Sandbox: id, CreatedAt: now, Frozen: sandbox.Duration(1_234_567),
		Origin: sandbox.Sandbox{
			ID: id, Name: "shop", Owner: s.owner, Image: "base", ImageRef: s.Spec(s, id).ImageRef, Size: "basic",
			Env: map[string]string{"A": "b", "EMPTY": ""}, Labels: map[string]string{"team": "x"},
			SleepAfter: sandbox.Duration(time.Minute), Persist: sandbox.PersistDisk, CreatedAt: now.Add(-time.Hour),
			Declared: []guest.ProcessSpec{{Command: guest.Command{Argv: []string{"sh", "-c", "echo \"ä\"\n"}}, Name: "web"}},
		},
	}
}

func ignoreProgress(sandbox.BackupProgress) {}

// backUp stores a snapshot.
func (s *suite) backUp(snapshot sandbox.SnapshotID) sandbox.Backup {
	s.Helper()
	b, err := s.on.Backups.Create(s.Ctx, s.newBackup(), snapshot, ignoreProgress)
	s.Must(err)
	return b
}

// restore restores a backup as a snapshot of a container.
func (s *suite) restore(b sandbox.Backup, id sandbox.ID) sandbox.SnapshotID {
	s.Helper()
	snapshot := s.SnapshotID()
	usage, err := s.on.Backups.Restore(s.Ctx, b, snapshot, false, ignoreProgress)
	s.Must(err)
	if usage.Entries == 0 || usage.Bytes == 0 {
		s.Errorf("the restored snapshot has %+v", usage)
	}
	return snapshot
}

// list returns the backups of the owner by id.
func (s *suite) list(backups sandbox.Backups, owner string) map[sandbox.BackupID]sandbox.Backup {
	s.Helper()
	list, err := backups.List(s.Ctx, owner)
	s.Must(err)
	byID := map[sandbox.BackupID]sandbox.Backup{}
	for _, b := range list {
		byID[b.ID] = b
	}
	if len(byID) != len(list) {
		s.Errorf("the list has an id twice: %+v", list)
	}
	return byID
}

func (s *suite) wantFiles(id sandbox.ID, files map[string]string) {
	s.Helper()
	testkit.Diff(s, "files", s.Files(s, id), files)
}

// wantListed fails unless these backups of the owner are listed.
func (s *suite) wantListed(backups ...sandbox.Backup) {
	s.Helper()
	want := []sandbox.BackupID{}
	for _, b := range backups {
		want = append(want, b.ID)
	}
	got := slices.AppendSeq([]sandbox.BackupID{}, maps.Keys(s.list(s.on.Backups, s.owner)))
	testkit.Diff(s, "backups", got, want, cmpopts.SortSlices(func(a, b sandbox.BackupID) bool { return a < b }))
}

// random returns a text of random hexadecimal digits.
func random(bytes int) string {
	content := make([]byte, bytes/2)
	for i := range content {
		content[i] = byte(rand.Uint32())
	}
	return hex.EncodeToString(content)
}

func record(s *suite) {
	content := random(10_000)
	snapshot := s.snapshotWith("a", content)
	given := s.newBackup()
	got, err := s.on.Backups.Create(s.Ctx, given, snapshot, ignoreProgress)
	s.Must(err)
	if got.Usage.Entries < 2 || got.Usage.Bytes < int64(len(content)) || got.Stored == 0 || len(got.Layers) == 0 || got.Duration <= 0 {
		s.Errorf("a file with %d bytes: usage %+v, %d bytes were stored, layers %q, duration %s", len(content), got.Usage, got.Stored, got.Layers, got.Duration)
	}
	listed := s.list(s.on.Backups, s.owner)[given.ID]
	testkit.Diff(s, "the listed backup", listed, got)
	if listed.CreatedAt.Location() != time.UTC {
		s.Errorf("the time is in %s", listed.CreatedAt.Location())
	}
	got.Usage, got.Stored, got.Layers, got.Duration = given.Usage, given.Stored, given.Layers, given.Duration
	testkit.Diff(s, "the rest of the backup", got, given)
}

func stack(s *suite) {
	want := map[string]string{"a": "1", "changed": "2", "c": strings.Repeat("3", 5000), "empty": ""}
	below := s.Create("")
	for name, content := range map[string]string{"a": "1", "changed": "1", "deleted": "1"} {
		s.Write(s, below, name, content)
	}
	middle := s.Create(s.Publish(below))
	s.Write(s, middle, "changed", "2")
	s.Write(s, middle, "deleted too", "2")
	s.DeleteFile(s, middle, "deleted")
	top := s.Create(s.Publish(middle))
	s.Write(s, top, "c", want["c"])
	s.Write(s, top, "empty", "")
	s.DeleteFile(s, top, "deleted too")
	s.wantFiles(top, want)
	b := s.backUp(s.Publish(top))

	other := s.Create("")
	s.Write(s, other, "of the other", "1")
	restored := s.Create(s.restore(b, other))
	s.wantFiles(restored, want)
	s.wantFiles(other, map[string]string{"of the other": "1"})
	// The restored snapshot can be used like any other.
	s.Write(s, restored, "a", "4")
	s.DeleteFile(s, restored, "c")
	again := s.Create(s.restore(s.backUp(s.Publish(restored)), other))
	s.wantFiles(again, map[string]string{"a": "4", "changed": "2", "empty": ""})
}

func unchanged(s *suite) {
	content := random(300_000)
	snapshot := s.snapshotWith("large", content)
	first, second := s.backUp(snapshot), s.backUp(snapshot)
	if first.Stored < int64(len(content))/2 || second.Stored > first.Stored/4 {
		s.Errorf("the first backup stored %d bytes, the second one %d", first.Stored, second.Stored)
	}
	testkit.Diff(s, "the usage of the second backup", second.Usage, first.Usage)
	// The second backup needs the content that the first one stored.
	s.Must(s.on.Backups.Delete(s.Ctx, []sandbox.BackupID{first.ID}))
	s.wantFiles(s.Create(s.restore(second, s.Create(""))), map[string]string{"large": content})
}

func cache(s *suite) {
	s.backUp(s.snapshotWith("a", "1"))
	if bytes, err := s.on.Backups.CacheBytes(s.Ctx); err != nil || bytes <= 0 {
		s.Errorf("%d bytes, %v", bytes, err)
	}
}

func deletion(s *suite) {
	snapshot := s.snapshotWith("a", "1")
	first, second, third := s.backUp(snapshot), s.backUp(snapshot), s.backUp(snapshot)
	s.Must(s.on.Backups.Delete(s.Ctx, nil))
	s.Must(s.on.Backups.Delete(s.Ctx, []sandbox.BackupID{first.ID, sandbox.BackupID(sandbox.NewID()), third.ID, first.ID}))
	s.wantListed(second)
	s.Must(s.on.Backups.Delete(s.Ctx, []sandbox.BackupID{first.ID}))
	id := s.Create("")
	if _, err := s.on.Backups.Restore(s.Ctx, first, s.SnapshotID(), false, ignoreProgress); !errors.Is(err, sandbox.ErrBackupNotFound) {
		s.Errorf("restore of a deleted backup: %v", err)
	}
	s.wantFiles(s.Create(s.restore(second, id)), map[string]string{"a": "1"})
}

func otherImage(s *suite) {
	id := s.Create("")
	s.Write(s, id, "a", "1")
	snapshot := s.Publish(id)
	b := s.backUp(snapshot)
	s.Must(s.Disks.Delete(s.Ctx, snapshot))
	s.Remove(id)
	s.on.RebuildImage(s)
	id, snapshot = s.Create(""), s.SnapshotID()
	_, err := s.on.Backups.Restore(s.Ctx, b, snapshot, false, ignoreProgress)
	if mismatch, ok := errors.AsType[*sandbox.ImageMismatchError](err); !ok || mismatch.Image != b.Origin.Image {
		s.Errorf("restore on another image: %v", err)
	}
	s.Must(s.Disks.Delete(s.Ctx, snapshot))
	snapshot = s.SnapshotID()
	_, err = s.on.Backups.Restore(s.Ctx, b, snapshot, true, ignoreProgress)
	s.Must(err)
	restored := s.Create(snapshot)
	s.wantFiles(restored, map[string]string{"a": "1"})
	// A backup of the restored disk is based on the new image.
	if now := s.backUp(s.Publish(restored)); slices.Equal(now.Layers, b.Layers) {
		s.Errorf("a backup of the restored disk has the layers of the former image: %q", now.Layers)
	}
}

func owners(s *suite) {
	snapshot := s.snapshotWith("a", "1")
	b := s.backUp(snapshot)
	other := s.newBackup()
	other.Owner += "-2" // begins with the name of the first one
	other, err := s.on.Backups.Create(s.Ctx, other, snapshot, ignoreProgress)
	s.Must(err)
	s.wantListed(b)
	testkit.Diff(s, "the list of the other owner", s.list(s.on.Backups, other.Owner), map[sandbox.BackupID]sandbox.Backup{other.ID: other})
	if list := s.list(s.on.Backups, s.owner+"-3"); len(list) != 0 {
		s.Errorf("an owner without backups has %v", list)
	}
}

func anotherClient(s *suite) {
	before := s.backUp(s.snapshotWith("a", "1"))
	other := s.on.MoreBackups(s)
	after := s.backUp(s.snapshotWith("a", "2"))
	want := map[sandbox.BackupID]sandbox.Backup{before.ID: before, after.ID: after}
	testkit.Diff(s, "the list of the other client", s.list(other, s.owner), want)
	s.Must(other.Delete(s.Ctx, []sandbox.BackupID{before.ID}))
	s.wantListed(after)
	snapshot := s.SnapshotID()
	_, err := other.Restore(s.Ctx, after, snapshot, false, ignoreProgress)
	s.Must(err)
	s.wantFiles(s.Create(snapshot), map[string]string{"a": "2"})
}

// recording returns a callback for progress, and a function that checks what it got.
func (s *suite) recording(phase sandbox.BackupPhase) (call func(sandbox.BackupProgress), check func()) {
	var calls []sandbox.BackupProgress // the calls are not concurrent
	return func(p sandbox.BackupProgress) { calls = append(calls, p) }, func() {
		s.Helper()
		if len(calls) == 0 {
			s.Errorf("%s: no progress", phase)
			return
		}
		var last sandbox.BackupProgress
		for _, p := range calls {
			if p.Phase != phase || p.Done.Bytes < last.Done.Bytes || p.Done.Entries < last.Done.Entries {
				s.Errorf("%s: progress %+v after %+v", phase, p, last)
			}
			last = p
		}
		if last.Done != last.Total || last.Total.Entries == 0 || last.Total.Bytes == 0 {
			s.Errorf("%s: the last progress is %+v", phase, last)
		}
	}
}

func progress(s *suite) {
	id := s.Create("")
	for _, name := range []string{"a", "b", "c", "d"} {
		s.Write(s, id, name, random(50_000))
	}
	upload, checkUpload := s.recording(sandbox.BackupUpload)
	b, err := s.on.Backups.Create(s.Ctx, s.newBackup(), s.Publish(id), upload)
	s.Must(err)
	checkUpload()
	download, checkDownload := s.recording(sandbox.BackupDownload)
	_, err = s.on.Backups.Restore(s.Ctx, b, s.SnapshotID(), false, download)
	s.Must(err)
	checkDownload()
}

func endedContext(s *suite) {
	id := s.Create("")
	content := random(200_000)
	s.Write(s, id, "a", content)
	snapshot := s.Publish(id)
	ended, cancel := context.WithCancel(s.Ctx)
	cancel()
	if _, err := s.on.Backups.Create(ended, s.newBackup(), snapshot, ignoreProgress); !errors.Is(err, context.Canceled) {
		s.Errorf("create: %v", err)
	}
	if _, err := s.on.Backups.List(ended, s.owner); !errors.Is(err, context.Canceled) {
		s.Errorf("list: %v", err)
	}
	s.wantListed()
	// The upload may be complete when the context ends.
	ctx, cancel := context.WithCancel(s.Ctx)
	defer cancel()
	b, err := s.on.Backups.Create(ctx, s.newBackup(), snapshot, func(sandbox.BackupProgress) { cancel() })
	if err == nil {
		s.wantListed(b)
	} else {
		if !errors.Is(err, context.Canceled) {
			s.Errorf("create: %v", err)
		}
		s.wantListed()
		b = s.backUp(snapshot)
	}
	if err := s.on.Backups.Delete(ended, []sandbox.BackupID{b.ID}); !errors.Is(err, context.Canceled) {
		s.Errorf("delete: %v", err)
	}
	s.wantListed(b)

	restored := s.SnapshotID()
	ctx, cancel = context.WithCancel(s.Ctx)
	defer cancel()
	if _, err := s.on.Backups.Restore(ctx, b, restored, false, func(sandbox.BackupProgress) { cancel() }); err != nil {
		if !errors.Is(err, context.Canceled) {
			s.Errorf("restore: %v", err)
		}
		spec := s.Spec(s, sandbox.NewID())
		spec.ImageRef = sandbox.SnapshotRef(restored)
		if err := s.Engine.Create(s.Ctx, spec); !errors.Is(err, sandbox.ErrImageMissing) {
			s.Errorf("container of an unfinished snapshot: %v", err)
		}
	}
	s.Must(s.Disks.Delete(s.Ctx, restored))
	usage, err := s.Disks.Measure(s.Ctx, "", restored)
	if err == nil && usage != (sandbox.DiskUsage{}) {
		s.Errorf("the deleted snapshot has %+v", usage)
	}
	s.wantFiles(s.Create(s.restore(b, id)), map[string]string{"a": content})
}

func unknown(s *suite) {
	if _, err := s.on.Backups.Create(s.Ctx, s.newBackup(), sandbox.SnapshotID(sandbox.NewID()), ignoreProgress); err == nil {
		s.Error("stored an unknown snapshot")
	}
	s.wantListed()
}

// backUpPart stores a part of a snapshot.
func (s *suite) backUpPart(snapshot sandbox.SnapshotID, part sandbox.BackupSelection) sandbox.Backup {
	s.Helper()
	b := s.newBackup()
	b.BackupSelection = part
	b, err := s.on.Backups.Create(s.Ctx, b, snapshot, ignoreProgress)
	s.Must(err)
	testkit.Diff(s, "the listed backup", s.list(s.on.Backups, s.owner)[b.ID], b)
	return b
}

// overlay restores a partial backup above a snapshot, and returns a container of the result.
func (s *suite) overlay(b sandbox.Backup, below sandbox.SnapshotID) sandbox.ID {
	s.Helper()
	snapshot := s.SnapshotID()
	usage, err := s.on.Backups.Download(s.Ctx, b, snapshot, ignoreProgress)
	s.Must(err)
	if usage.Entries == 0 || usage.Bytes == 0 {
		s.Errorf("the downloaded paths have %+v", usage)
	}
	s.Must(s.Disks.Overlay(s.Ctx, snapshot, below, b.Paths))
	return s.Create(snapshot)
}

func partial(s *suite) {
	b := s.backUpPart(s.SnapshotOf(map[string]string{"a": "1", "b": "1", "c": "1", "not": "1"}), sandbox.BackupSelection{Paths: []string{"/srv/c", "/srv/a", "/srv/b"}})
	below := s.Create(s.SnapshotOf(map[string]string{"a": "2", "c": "2", "rest": "2"}))
	s.Write(s, below, "new", "3")
	s.DeleteFile(s, below, "c")
	merged := s.overlay(b, s.Publish(below))
	want := map[string]string{"a": "1", "b": "1", "c": "1", "rest": "2", "new": "3"}
	s.wantFiles(merged, want)
	// The result can be used like any other disk.
	s.Write(s, merged, "b", "4")
	s.DeleteFile(s, merged, "a")
	again := s.overlay(b, s.Publish(merged))
	s.wantFiles(again, want)
	s.wantFiles(s.Create(s.restore(s.backUp(s.Publish(again)), again)), want)
	if _, err := s.on.Backups.Restore(s.Ctx, b, s.SnapshotID(), false, ignoreProgress); err == nil {
		s.Error("restored a partial backup as a whole disk")
	}
}

func partialFolder(s *suite) {
	id := s.Create(s.SnapshotOf(map[string]string{"a": "1", "deleted": "1"}))
	s.DeleteFile(s, id, "deleted")
	s.Write(s, id, "b", "2")
	b := s.backUpPart(s.Publish(id), sandbox.BackupSelection{Paths: []string{"/srv"}})
	s.wantFiles(s.overlay(b, s.SnapshotOf(map[string]string{"a": "3", "deleted": "3", "new": "3"})), map[string]string{"a": "1", "b": "2"})
}

func missingPaths(s *suite) {
	snapshot := s.SnapshotOf(map[string]string{"a": "1"})
	for _, path := range []string{"/srv/none", "/srv/" + strings.Repeat("a", 300), "/none", "/none/a", "/srv/a/b"} {
		b := s.newBackup()
		b.Paths = []string{"/srv/a", path}
		if path == "/srv/a/b" {
			b.Paths = b.Paths[1:]
		}
		_, err := s.on.Backups.Create(s.Ctx, b, snapshot, ignoreProgress)
		if invalid, ok := errors.AsType[*sandbox.InvalidError](err); !ok || invalid.Field != "paths" {
			s.Errorf("%.20q: %v", path, err)
		}
	}
	s.wantListed()
}

func excludes(s *suite) {
	snapshot := s.SnapshotOf(map[string]string{"a": "1", "a.log": "1", "keep.log": "1", "cache": "1", "other": "1"})
	whole := s.backUpPart(snapshot, sandbox.BackupSelection{Excludes: []string{"*.log", "!keep.log", "/srv/cache", "/other"}})
	want := map[string]string{"a": "1", "keep.log": "1", "other": "1"}
	s.wantFiles(s.Create(s.restore(whole, s.Create(""))), want)
	part := s.backUpPart(snapshot, sandbox.BackupSelection{Paths: []string{"/srv/a.log", "/srv/a"}, Excludes: []string{"*"}})
	s.wantFiles(s.overlay(part, s.SnapshotOf(map[string]string{"cache": "2"})), map[string]string{"a": "1", "a.log": "1", "cache": "2"})
}

func ignored(s *suite) {
	files := map[string]string{"a": "1", "a.log": "1", "keep.log": "1", "secret": "1", ".gitignore": "*.log\n!keep.log\n.git\nsecret\n"}
	part := sandbox.BackupSelection{Gitignore: true, Excludes: []string{"!secret"}}
	want := map[string]string{"a": "1", "a.log": "1", "keep.log": "1", "secret": "1"}
	s.wantVisible(s.Create(s.restore(s.backUpPart(s.SnapshotOf(files), part), s.Create(""))), want) // not a work tree
	files[".git"] = "gitdir: elsewhere"
	delete(want, "a.log")
	b := s.backUpPart(s.SnapshotOf(files), part)
	s.wantVisible(s.Create(s.restore(b, s.Create(""))), want)
	kept := s.backUpPart(s.SnapshotOf(files), sandbox.BackupSelection{Gitignore: true, Paths: []string{"/srv/.git", "/srv/a.log"}})
	s.wantVisible(s.overlay(kept, s.SnapshotOf(map[string]string{"rest": "2"})), map[string]string{"a.log": "1", "rest": "2"})
}

// wantVisible is wantFiles without files whose names begin with a dot.
func (s *suite) wantVisible(id sandbox.ID, want map[string]string) {
	s.Helper()
	files := s.Files(s, id)
	maps.DeleteFunc(files, func(name, _ string) bool { return strings.HasPrefix(name, ".") })
	testkit.Diff(s, "files", files, want)
}

// stopDoing returns a StopPrograms that calls before and after around the capture.
func stopDoing(frozen sandbox.Duration, origin sandbox.Sandbox, before, after func()) sandbox.StopPrograms {
	return func(ctx context.Context, capture func(context.Context) error) (sandbox.Duration, sandbox.Sandbox, error) {
		before()
		err := capture(ctx)
		after()
		return frozen, origin, err
	}
}

func running(s *suite) {
	below := s.SnapshotOf(map[string]string{"below": "1", "deleted below": "1", "deleted": "1", "changed below": "1"})
	id := s.Create(below)
	kept, replaced := random(100_000), random(50_000)
	for name, content := range map[string]string{"kept": kept, "changed": "1", "deleted too": "1"} {
		s.Write(s, id, name, content)
	}
	s.DeleteFile(s, id, "deleted below")
	given := s.newBackup()
	want := given
	want.Sandbox, want.Frozen, want.Origin.Name = id, 7_654_321, "renamed"
	given.Sandbox, given.Frozen, given.Origin = id, 0, sandbox.Sandbox{}
	upload, checkUpload := s.recording(sandbox.BackupUpload)
	began := time.Now()
	got, err := s.on.Backups.CreateRunning(s.Ctx, given, stopDoing(want.Frozen, want.Origin,
		func() {
			s.Write(s, id, "changed", replaced)
			s.Write(s, id, "changed below", "2")
			s.Write(s, id, "new", "2")
			s.DeleteFile(s, id, "deleted")
			s.DeleteFile(s, id, "deleted too")
		},
		func() {
			s.Write(s, id, "changed", "3")
			s.Write(s, id, "later", "3")
			s.DeleteFile(s, id, "kept")
			s.DeleteFile(s, id, "new")
		}), upload)
	s.Must(err)
	checkUpload()
	testkit.Diff(s, "the listed backup", s.list(s.on.Backups, s.owner)[given.ID], got)
	if got.Usage.Entries < 5 || got.Usage.Bytes < int64(len(kept)+len(replaced)) || got.Stored < got.Usage.Bytes/2 || len(got.Layers) == 0 || got.Duration <= 0 {
		s.Errorf("the backup has %+v, %d bytes were stored, layers %q, duration %s", got.Usage, got.Stored, got.Layers, got.Duration)
	}
	restored := s.Create(s.restore(got, s.Create("")))
	s.wantFiles(restored, map[string]string{"below": "1", "changed below": "2", "kept": kept, "changed": replaced, "new": "2"})
	if got.CreatedAt.Before(began) || got.CreatedAt.Location() != time.UTC {
		s.Errorf("the backup has the disk of %v, before the programs were stopped", got.CreatedAt)
	}
	got.CreatedAt, got.Usage, got.Stored, got.Layers, got.Duration = want.CreatedAt, want.Usage, want.Stored, want.Layers, want.Duration
	testkit.Diff(s, "the rest of the backup", got, want)
}

func runningPart(s *suite) {
	id := s.Create(s.SnapshotOf(map[string]string{"a": "1", "a.log": "1", "not": "1"}))
	s.Write(s, id, "b", "1")
	b := s.newBackup()
	b.Sandbox, b.BackupSelection = id, sandbox.BackupSelection{Paths: []string{"/srv/a", "/srv/b"}}
	b, err := s.on.Backups.CreateRunning(s.Ctx, b, stopDoing(1, b.Origin, func() { s.Write(s, id, "b", "2") }, func() {}), ignoreProgress)
	s.Must(err)
	s.wantFiles(s.overlay(b, s.SnapshotOf(map[string]string{"rest": "3"})), map[string]string{"a": "1", "b": "2", "rest": "3"})
	b = s.newBackup()
	b.Sandbox, b.BackupSelection = id, sandbox.BackupSelection{Excludes: []string{"*.log", "not"}}
	b, err = s.on.Backups.CreateRunning(s.Ctx, b, stopDoing(1, b.Origin, func() { s.Write(s, id, "b.log", "3") }, func() {}), ignoreProgress)
	s.Must(err)
	s.wantFiles(s.Create(s.restore(b, s.Create(""))), map[string]string{"a": "1", "b": "2"})
	b.Paths = []string{"/srv/none"}
	_, err = s.on.Backups.CreateRunning(s.Ctx, b, stopDoing(1, b.Origin, func() { s.Error("stopped programs for a path that does not exist") }, func() {}), ignoreProgress)
	if invalid, ok := errors.AsType[*sandbox.InvalidError](err); !ok || invalid.Field != "paths" {
		s.Errorf("a path that does not exist: %v", err)
	}
}

func failedStop(s *suite) {
	failed := errors.New("it failed")
	for name, stop := range map[string]sandbox.StopPrograms{
		"before": func(context.Context, func(context.Context) error) (sandbox.Duration, sandbox.Sandbox, error) {
			return 0, sandbox.Sandbox{}, failed
		},
		"after": func(ctx context.Context, capture func(context.Context) error) (sandbox.Duration, sandbox.Sandbox, error) {
			s.Must(capture(ctx))
			return 0, sandbox.Sandbox{}, failed
		},
		"canceled": func(ctx context.Context, capture func(context.Context) error) (sandbox.Duration, sandbox.Sandbox, error) {
			ended, cancel := context.WithCancel(ctx)
			cancel()
			err := capture(ended)
			if !errors.Is(err, context.Canceled) {
				s.Errorf("the capture with an ended context: %v", err)
			}
			return 0, sandbox.Sandbox{}, failed
		},
	} {
		id := s.Create("")
		s.Write(s, id, "a", "1")
		b := s.newBackup()
		b.Sandbox = id
		if _, err := s.on.Backups.CreateRunning(s.Ctx, b, stop, ignoreProgress); !errors.Is(err, failed) {
			s.Errorf("%s: %v", name, err)
		}
	}
	b := s.newBackup() // no container has its id
	if _, err := s.on.Backups.CreateRunning(s.Ctx, b, stopDoing(1, b.Origin, func() {}, func() {}), ignoreProgress); !errors.Is(err, sandbox.ErrNoContainer) {
		s.Errorf("an unknown container: %v", err)
	}
	s.wantListed()
}

func replaced(s *suite) {
	b := s.newBackup()
	b.Sandbox = sandbox.NewID()
	spec := s.Spec(s, b.Sandbox)
	s.Must(s.Engine.Create(s.Ctx, spec))
	s.Cleanup(func() { s.Remove(b.Sandbox) })
	s.Write(s, b.Sandbox, "a", "1")
	_, err := s.on.Backups.CreateRunning(s.Ctx, b, stopDoing(1, b.Origin, func() {
		s.Remove(b.Sandbox)
		s.Must(s.Engine.Create(s.Ctx, spec))
	}, func() {}), ignoreProgress)
	if !errors.Is(err, sandbox.ErrNeedsSnapshot) {
		s.Errorf("another container: %v", err)
	}
	s.wantListed()
}
