package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/api/types"
)

// tree is a disk that is measured: the number of its files, and the size of each in bytes.
type tree struct {
	name        string
	files, size int
}

var trees = []tree{
	{"236 MB in 20,000 files", 20_000, 11_800},
	{"1 GB in 100,000 files", 100_000, 10_000},
}

const (
	// writeTree writes files of a size into folders of 100: the first and each step-th one, with new content.
	writeTree = `import os, sys
files, size, step = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for n in range(0, files, step):
    folder = "/srv/tree/%04d" % (n // 100)
    os.makedirs(folder, exist_ok=True)
    with open("%s/%d" % (folder, n), "wb") as f: f.write(os.urandom(size))
os.sync()`
	// changeTree changes a file of the tree a hundred times a second.
	changeTree = `import itertools, os, sys, time
files, size = int(sys.argv[1]), int(sys.argv[2])
for n in itertools.count():
    n = n * 7919 % files
    with open("/srv/tree/%04d/%d" % (n // 100, n), "r+b") as f: f.write(os.urandom(size))
    time.sleep(.01)`

	snapshotRounds = 3
	forkCount      = 10
)

// measureSnapshot measures snapshots, restores and forks of disks of two sizes, and Podman's
// commit of the same container. The snapshots stay until the node is removed: their removal would
// disturb what follows.
func measureSnapshot(ctx context.Context, b *bench) (rows []row, err error) {
	on, err := fileSystemOf(b.node.Home)
	if err != nil {
		return nil, err
	}
	for _, tree := range trees {
		measured, err := measureTree(ctx, b, on, tree)
		rows = append(rows, measured...)
		if err != nil {
			return rows, fmt.Errorf("%s: %w", tree.name, err)
		}
	}
	many, err := manySnapshots(ctx, b, on)
	return append(rows, many...), err
}

// manySnapshots measures snapshots of a small disk on a node that has a thousand already, and their deletion.
func manySnapshots(ctx context.Context, b *bench, on fileSystem) ([]row, error) {
	count := b.count(1000)
	sb, _, err := b.node.API.Create(ctx, types.CreateSandboxRequest{SleepAfter: new(types.Duration)})
	if err != nil {
		return nil, err
	}
	var ids []string
	take := func() error {
		s, err := b.node.API.CreateSnapshot(ctx, sb.ID, types.CreateSnapshotRequest{})
		ids = append(ids, s.ID)
		return err
	}
	first, err := repeat(ctx, b.count(40), nil, take)
	if err != nil {
		return nil, err
	}
	if _, err := repeat(ctx, count-len(ids), nil, take); err != nil {
		return nil, err
	}
	last, err := repeat(ctx, b.count(40), nil, take)
	if err != nil {
		return nil, err
	}
	took, err := timed(func() error {
		for _, id := range ids {
			if err := b.node.API.DeleteSnapshot(ctx, id); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return []row{{
		Figure:   fmt.Sprintf("snapshot of a small disk that has %d snapshots, next to the first ones, %s", count, on.name),
		Bar:      "p50 ≤ 1,000 ms",
		Measured: fmt.Sprintf("p50 %.0f ms, p99 %.0f ms (%.0f ms, %.0f ms); each deletion %.1f ms", last.median(), last.p99(), first.median(), first.p99(), took/float64(len(ids))),
		Met:      last.median() <= 1000,
		Values:   values{"deletion_ms": took / float64(len(ids))}.add("ms", last).add("first_ms", first),
	}}, b.node.API.Delete(ctx, sb.ID)
}

// fileSystem is the file system of Podman's storage.
type fileSystem struct {
	name   string
	shares bool // it shares the blocks of copies (FICLONE)
}

// fileSystemOf returns the file system of a folder.
func fileSystemOf(folder string) (fileSystem, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(folder, &st); err != nil {
		return fileSystem{}, err
	}
	on := fileSystem{name: fmt.Sprintf("file system %#x", st.Type)}
	switch st.Type {
	case unix.EXT4_SUPER_MAGIC:
		on.name = "ext4"
	case unix.XFS_SUPER_MAGIC:
		on.name = "XFS"
	case unix.BTRFS_SUPER_MAGIC:
		on.name = "Btrfs"
	}
	from, err := os.CreateTemp(folder, "from")
	if err != nil {
		return on, err
	}
	to, err := os.CreateTemp(folder, "to")
	if err != nil {
		return on, errors.Join(err, from.Close(), os.Remove(from.Name()))
	}
	on.shares = unix.IoctlFileClone(int(to.Fd()), int(from.Fd())) == nil
	return on, errors.Join(from.Close(), to.Close(), os.Remove(from.Name()), os.Remove(to.Name()))
}

// snapshotBar is the bar of snapshots of a running sandbox, in ms.
func (f fileSystem) snapshotBar() (text string, total, frozen float64) {
	if f.shares { // the time that Fly Sprites publishes
		return "≤ 300 ms; frozen ≤ 50 ms; ≥ 5 times faster", 300, 50
	}
	return "≤ 2 s; frozen ≤ 1 s; ≥ 5 times faster", 2000, 1000
}

// arguments returns the first arguments of the scripts.
func (t tree) arguments(b *bench) []string {
	return []string{fmt.Sprint(b.count(t.files)), fmt.Sprint(t.size)}
}

// writeTree writes each step-th file of a tree in a sandbox.
func (b *bench) writeTree(ctx context.Context, id string, t tree, step int) error {
	return b.node.exec(ctx, id, append(append([]string{"python3", "-c", writeTree}, t.arguments(b)...), fmt.Sprint(step))...)
}

func measureTree(ctx context.Context, b *bench, on fileSystem, t tree) ([]row, error) {
	name := t.name + ", " + on.name
	sb, _, err := b.node.API.Create(ctx, types.CreateSandboxRequest{SleepAfter: new(types.Duration)})
	if err != nil {
		return nil, err
	}
	if err := b.writeTree(ctx, sb.ID, t, 1); err != nil {
		return nil, err
	}
	writer, err := b.node.API.StartProcess(ctx, sb.ID, types.StartProcessRequest{
		Command: types.Command{Argv: append([]string{"python3", "-c", changeTree}, t.arguments(b)...)},
	})
	if err != nil {
		return nil, err
	}
	running, err := runningSnapshot(ctx, b, sb.ID, on, name)
	if err != nil {
		return nil, err
	}
	rows := []row{running}
	forks, err := inSpread(snapshotRounds, func() (float64, error) { return b.node.timeForks(ctx, sb.ID) })
	if err != nil {
		return rows, err
	}
	rows = append(rows, atMost(fmt.Sprintf("%d forks that all respond, %s", forkCount, name), "%.0f", " ms", 2000, "ms", forks))
	if _, err := b.node.API.StopProcess(ctx, sb.ID, writer.ID, ""); err != nil {
		return rows, err
	}
	snapshot, err := b.node.API.CreateSnapshot(ctx, sb.ID, types.CreateSnapshotRequest{})
	if err != nil {
		return rows, err
	}
	p50s, all, err := inRounds(func() (spread, error) {
		return repeat(ctx, b.count(20), nil, func() error {
			if _, err := b.node.API.Restore(ctx, sb.ID, types.RestoreRequest{SnapshotID: snapshot.ID}, true); err != nil {
				return err
			}
			return b.node.exec(ctx, sb.ID, "true")
		})
	})
	if err != nil {
		return rows, err
	}
	rows = append(rows, timesRow("restore to the first exec, "+name, "p50 ≤ 250 ms", timesBars{p50: 250}, p50s, all))
	// A snapshot of a stopped sandbox takes its files, so each round writes others.
	stopped, err := inSpread(snapshotRounds, func() (float64, error) {
		if err := b.node.exec(ctx, sb.ID, "rm", "-rf", "/srv/tree"); err != nil {
			return 0, err
		}
		if err := b.writeTree(ctx, sb.ID, t, 1); err != nil {
			return 0, err
		}
		if _, err := b.node.API.ForceStop(ctx, sb.ID); err != nil {
			return 0, err
		}
		return timed(func() error {
			_, err := b.node.API.CreateSnapshot(ctx, sb.ID, types.CreateSnapshotRequest{})
			return err
		})
	})
	if err != nil {
		return rows, err
	}
	rows = append(rows, atMost("snapshot of a stopped sandbox, "+name, "%.0f", " ms", 100, "ms", stopped))
	return rows, b.node.API.Delete(ctx, sb.ID)
}

// runningSnapshot measures snapshots of a sandbox whose programs run, and Podman's commits of
// its container.
func runningSnapshot(ctx context.Context, b *bench, id string, on fileSystem, name string) (row, error) {
	ours := &contender{name: "doze"} // its samples are how long the programs were stopped, in ms
	ours.round = func(ctx context.Context) (float64, error) {
		unix.Sync() // the files of the contender before
		return timed(func() error {
			s, err := b.node.API.CreateSnapshot(ctx, id, types.CreateSnapshotRequest{})
			ours.samples = append(ours.samples, s.FrozenMS)
			return err
		})
	}
	podman := &contender{name: "podman commit", round: func(ctx context.Context) (float64, error) { return podmanCommit(ctx, b, id) }}
	cp := &contender{name: "cp -a", round: func(ctx context.Context) (float64, error) { return copyTree(ctx, b, id) }}
	if err := alternate(ctx, snapshotRounds, ours, podman, cp); err != nil {
		return row{}, err
	}
	for _, peer := range []*contender{podman, cp} {
		if err := peer.missing(snapshotRounds); err != nil {
			return row{}, err
		}
	}
	total, frozen, theirs, ratio := ours.spread(), ours.samples, podman.spread(), podman.over(ours)
	bar, totalBar, frozenBar := on.snapshotBar()
	return row{
		Figure:   "snapshot of a running sandbox, against `podman commit`, " + name,
		Bar:      bar,
		Measured: fmt.Sprintf("%s ms; frozen %s ms; %s times faster (%.0f ms)", total.text("%.0f"), frozen.text("%.0f"), ratio.text("%.1f"), theirs.median()),
		Met:      total.median() <= totalBar && frozen.median() <= frozenBar && ratio.median() >= 5,
		Values:   values{}.add("ms", total).add("frozen_ms", frozen).add("podman_ms", theirs).add("ratio", ratio).add("cp_ms", cp.spread()),
		Note: fmt.Sprintf("a program changes a file every 10 ms; podman commit does not pause it. `cp -a` of the same files and `sync`: %s ms",
			cp.spread().text("%.0f")),
	}, nil
}

// podmanCommit times podman commit of a sandbox's container, and removes the image.
func podmanCommit(ctx context.Context, b *bench, id string) (float64, error) {
	image := "localhost/doze-bench:" + id
	podman := func(args ...string) error {
		cmd := exec.CommandContext(ctx, "podman", args...)
		cmd.Dir = b.node.Home
		_, err := output(cmd)
		return err
	}
	unix.Sync()
	took, err := timed(func() error { return podman("commit", "--quiet", "doze-"+id, image) })
	if err != nil {
		return 0, err
	}
	return took, podman("rmi", image)
}

// copyTree times what any copy of a sandbox's files that survives a loss of power takes on this file
// system: cp -a, and sync.
func copyTree(ctx context.Context, b *bench, id string) (float64, error) {
	target := filepath.Join(b.node.Home, "copy")
	source, err := b.node.upperFolder(ctx, id)
	if err != nil {
		return 0, err
	}
	unix.Sync()
	took, err := b.node.timeUnshared(ctx, `cp -a "$1" "$2"; sync -f "$2"`, source, target)
	_, removed := b.node.unshare(context.WithoutCancel(ctx), `rm -rf "$1"`, target)
	return took, errors.Join(err, removed)
}

// unshare runs a script of bash in Podman's user namespace.
func (n *node) unshare(ctx context.Context, script string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "podman", append([]string{"unshare", "bash", "-eo", "pipefail", "-c", script, "bash"}, args...)...)
	cmd.Dir = n.Home
	out, err := output(cmd)
	return strings.TrimSpace(string(out)), err
}

// timeUnshared is unshare that returns the time of the script alone, without the start of Podman, in ms.
func (n *node) timeUnshared(ctx context.Context, script string, args ...string) (float64, error) {
	out, err := n.unshare(ctx, "start=${EPOCHREALTIME/./}\n"+script+"\necho $((${EPOCHREALTIME/./} - start))", args...)
	if err != nil {
		return 0, err
	}
	microseconds, err := strconv.ParseFloat(out, 64)
	return microseconds / 1000, err
}

// upperFolder returns the folder of a sandbox's disk, without its image.
func (n *node) upperFolder(ctx context.Context, id string) (string, error) {
	return n.unshare(ctx, `podman container inspect --format '{{.GraphDriver.Data.UpperDir}}' "$1"`, "doze-"+id)
}

// timeForks returns how long it takes until the forks of a sandbox have all responded to a
// command, in ms, and deletes them.
func (n *node) timeForks(ctx context.Context, id string) (float64, error) {
	start := time.Now()
	forks, err := n.API.Fork(ctx, id, types.ForkRequest{Count: forkCount})
	if err != nil {
		return 0, err
	}
	errs := make([]error, len(forks))
	var all sync.WaitGroup
	for i, fork := range forks {
		all.Go(func() { errs[i] = n.exec(ctx, fork.ID, "test", "-d", "/srv/tree") })
	}
	all.Wait()
	took := ms(time.Since(start))
	for _, fork := range forks {
		errs = append(errs, n.API.Delete(ctx, fork.ID))
	}
	return took, errors.Join(errs...)
}

// inSpread collects the values of some calls of f.
func inSpread(count int, f func() (float64, error)) (s spread, err error) {
	for range count {
		v, err := f()
		if err != nil {
			return nil, err
		}
		s = append(s, v)
	}
	return s, nil
}
