//go:build mounts

package power

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/backup/s3test"
	"github.com/doze-run/doze/testkit"
)

const (
	large     = "/data/large"
	largeSize = 300 << 20
	// enough is free space with which the node's store accepts changes, but a copy of the large file does not fit.
	enough = 230 << 20
)

// fullDisk is a node whose device can be filled.
type fullDisk struct {
	*node
	snapshot types.Snapshot // of "recorder"
	backup   types.Backup   // of "backed-up"
	records  int            // of "recorder"
	restored string         // version of the files of "restored"
}

// attempt is how the disk is filled for an operation.
type attempt struct {
	free  int64         // bytes
	delay time.Duration // after the operation has begun, or before
}

// before is the delay of an attempt whose disk is full before the operation begins.
const before time.Duration = -1

// operation runs while the disk is full. If it succeeds, check checks the result, and undoes it with space.
type operation struct {
	name   string
	copies bool // the large file
	do     func() error
	check  func()
}

// TestFullDiskLosesNothing fills the node's device before and during each operation, which then completes or is refused. A
// refused one has changed nothing and leaves nothing.
func TestFullDiskLosesNothing(t *testing.T) {
	m := newMachine(t, "ext4")
	f := &fullDisk{node: startNode(m, s3test.Start(t), "disk_reserve 1MiB")} // the disk refuses the copies, not the node's check
	f.prepare()
	for _, op := range f.operations() {
		t.Run(op.name, func(t *testing.T) {
			f.t = t
			defer func() { f.t = m.t }()
			for _, a := range []attempt{{0, before}, {enough, before}, {0, 30 * time.Millisecond}, {enough, 150 * time.Millisecond}} {
				f.try(op, a)
			}
			if f.must(op.do()) {
				op.check()
			}
			f.checkLarge("recorder")
		})
	}
	f.removeAll()
	m.checkEmpty(t)
	testkit.NoError(t, "stop the node", f.Stop())
}

func (f *fullDisk) prepare() {
	for _, name := range []string{"recorder", "stopped", "archived", "backed-up", "restored"} {
		f.create(name)
		f.must(f.run(name, "fill", name))
		if name == "restored" {
			continue
		}
		_, err := f.API.WriteFile(f.ctx(), name, large, 0, largeContent())
		f.must(err)
	}
	f.restored = "restored"
	var err error
	f.snapshot, err = f.API.CreateSnapshot(f.ctx(), "recorder", types.CreateSnapshotRequest{})
	testkit.NoError(f.t, "make the snapshot", err)
	f.backup, err = f.API.CreateBackup(f.ctx(), "backed-up", types.CreateBackupRequest{}, nil)
	testkit.NoError(f.t, "make the backup", err)
	_, err = f.API.Archive(f.ctx(), "archived", true, nil)
	testkit.NoError(f.t, "archive the sandbox", err)
	_, err = f.API.ForceStop(f.ctx(), "stopped")
	testkit.NoError(f.t, "stop the sandbox", err)
}

func (f *fullDisk) operations() []operation {
	var snapshot types.Snapshot
	var backup types.Backup
	create := func(sandbox string) func() error {
		return func() (err error) {
			snapshot, err = f.API.CreateSnapshot(f.ctx(), sandbox, types.CreateSnapshotRequest{})
			return err
		}
	}
	removeSnapshot := func() { f.must(f.API.DeleteSnapshot(f.ctx(), snapshot.ID)) }
	fork := func(name string) {
		f.checkDisk(name, disk{version: "recorder"})
		f.checkLarge(name)
		f.must(f.API.Delete(f.ctx(), name))
	}
	checkRestored := func(version string) func() {
		return func() {
			f.restored = version
			f.checkDisk("restored", disk{version: version})
			f.checkLarge("restored")
		}
	}
	return []operation{
		{"snapshot of a running sandbox", true, create("recorder"), func() {
			_, _, err := f.API.Create(f.ctx(), types.CreateSandboxRequest{Name: "fork", Snapshot: snapshot.ID})
			if f.must(err) {
				fork("fork")
			}
			removeSnapshot()
		}},
		{"snapshot of a stopped sandbox", false, create("stopped"), removeSnapshot},
		{"fork", true, func() error {
			_, err := f.API.Fork(f.ctx(), "recorder", types.ForkRequest{Count: 2, Names: []string{"fork-a", "fork-b"}})
			return err
		}, func() { fork("fork-a"); fork("fork-b") }},
		{"creation", false, func() error {
			_, _, err := f.API.Create(f.ctx(), types.CreateSandboxRequest{Name: "created"})
			return err
		}, func() { f.must(f.API.Delete(f.ctx(), "created")) }},
		{"backup", false, func() (err error) {
			backup, err = f.API.CreateBackup(f.ctx(), "recorder", types.CreateBackupRequest{}, nil)
			return err
		}, func() { f.must(f.API.DeleteBackup(f.ctx(), backup.ID)) }},
		{"restore", false, func() error {
			_, err := f.API.Restore(f.ctx(), "restored", types.RestoreRequest{SnapshotID: f.snapshot.ID}, true)
			return err
		}, checkRestored("recorder")},
		{"restore of a backup", true, func() error {
			_, err := f.API.RestoreBackup(f.ctx(), "restored", types.RestoreRequest{BackupID: f.backup.ID}, true, nil)
			return err
		}, checkRestored("backed-up")},
		{"retrieval", true, func() error {
			_, err := f.API.Wake(f.ctx(), "archived")
			return err
		}, func() {
			f.checkLarge("archived")
			_, err := f.API.Archive(f.ctx(), "archived", true, nil)
			f.must(err)
		}},
		{"archive", false, func() error {
			_, err := f.API.Archive(f.ctx(), "backed-up", true, nil)
			return err
		}, func() { f.checkLarge("backed-up") }},
		{"sleep", false, func() error {
			_, err := f.API.ForceSleep(f.ctx(), "recorder")
			return err
		}, func() {}},
		{"stop", false, func() error {
			_, err := f.API.ForceStop(f.ctx(), "recorder")
			return err
		}, func() {}},
	}
}

// try runs an operation while the disk is full.
func (f *fullDisk) try(op operation, a attempt) {
	f.t.Helper()
	f.must(f.run("recorder", "record", "1"))
	f.records++
	names := f.names()
	ctx, cancel := context.WithCancel(f.t.Context())
	full := make(chan error, 1)
	if a.delay == before {
		f.must(fillTo(a.free))
	}
	time.AfterFunc(a.delay, func() { full <- fillRepeatedly(ctx, a.free) })
	err := op.do()
	cancel()
	f.must(cmp.Or(<-full, os.Remove(filler)))
	switch {
	case err == nil && op.copies && a == attempt{enough, before}:
		f.t.Errorf("%+v: succeeded", a)
	case err == nil:
		op.check()
	case !problem.Has(err, problem.NodeDiskFull):
		f.t.Errorf("%+v: %v", a, err)
	default:
		testkit.Diff(f.t, "sandboxes and snapshots after "+err.Error(), f.names(), names)
	}
	f.t.Logf("%+v: %v", a, err)
	f.checkDisk("recorder", disk{"recorder", f.records})
	f.checkDisk("restored", disk{version: f.restored})
}

// names are the sandboxes and snapshots.
func (f *fullDisk) names() (names []string) {
	sandboxes, err := f.API.List(f.ctx(), client.Filter{})
	f.must(err)
	for _, sb := range sandboxes {
		names = append(names, sb.Name)
	}
	snapshots, err := f.API.Snapshots(f.ctx(), "")
	f.must(err)
	for _, s := range snapshots {
		names = append(names, s.ID)
	}
	slices.Sort(names)
	return names
}

func largeContent() io.Reader {
	return io.LimitReader(rand.NewChaCha8([32]byte([]byte(strings.Repeat("large", 7))[:32])), largeSize)
}

func (f *fullDisk) checkLarge(sandbox string) {
	f.t.Helper()
	body, err := f.API.ReadFile(f.ctx(), sandbox, large)
	if !f.must(err) {
		return
	}
	defer body.Close()
	got, want := sha256.New(), sha256.New()
	_, err = io.Copy(got, body)
	f.must(err)
	_, err = io.Copy(want, largeContent())
	f.must(err)
	if !slices.Equal(got.Sum(nil), want.Sum(nil)) {
		f.t.Errorf("sandbox %s: the large file has changed", sandbox)
	}
}

// filler is the file that fills the disk.
var filler = filepath.Join(home, "filler")

// fillTo fills the disk until this much is free.
func fillTo(free int64) error {
	file, err := os.OpenFile(filler, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return err
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(file.Fd()), &st); err != nil {
		return err
	}
	more := int64(st.Bavail)*st.Bsize - free
	if more <= 0 {
		return nil
	}
	err = unix.Fallocate(int(file.Fd()), 0, info.Size(), more)
	if errors.Is(err, unix.ENOSPC) { // others were faster
		err = nil
	}
	return err
}

// fillRepeatedly fills the disk repeatedly until the context ends.
func fillRepeatedly(ctx context.Context, free int64) error {
	for {
		if err := fillTo(free); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(10 * time.Millisecond):
		}
	}
}
