package main

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
)

// trees of the figure snapshot.
var trees = []struct {
	files int
	bytes int64
}{{20_000, 236 << 20}, {100_000, 1 << 30}}

const (
	snapshotRounds = 3
	restores       = 10
	forkCount      = 10
)

// measureSnapshot: the disk of a sandbox with a tree of files as a snapshot, against `podman
// commit` of the same container; restores and forks of it.
func measureSnapshot(ctx context.Context, b *bench) ([]row, error) {
	var rows []row
	for i, t := range trees {
		files := t.files
		if b.quick {
			files = t.files / 20
		}
		if err := b.plant(ctx, files, t.bytes*int64(files)/int64(t.files)); err != nil {
			return nil, err
		}
		what := fmt.Sprintf("%d MB in %d files", t.bytes>>20, files)
		running, err := b.snapshotRunning(ctx, what)
		if err != nil {
			return nil, err
		}
		stopped, err := b.snapshotStopped(ctx, what)
		if err != nil {
			return nil, err
		}
		rows = append(rows, append(running, stopped...)...)
		if i > 0 {
			continue
		}
		forked, err := b.fork(ctx, what)
		if err != nil {
			return nil, err
		}
		rows = append(rows, forked)
	}
	return rows, nil
}

// plant replaces the files of the sandbox by that many, with that size in total.
func (b *bench) plant(ctx context.Context, files int, size int64) error {
	script := fmt.Sprintf(`
import os, shutil
shutil.rmtree("/srv/tree", ignore_errors=True)
data = os.urandom(%d)
for i in range(%d):
    if i %% 100 == 0:
        folder = "/srv/tree/%%d" %% (i // 100)
        os.makedirs(folder)
    with open("%%s/%%d" %% (folder, i), "wb") as f:
        f.write(data)
`, size/int64(files), files)
	return b.do(ctx, "python3", "-c", script)
}

// do runs a command in the sandbox.
func (b *bench) do(ctx context.Context, argv ...string) error {
	result, err := b.node.API.Exec(ctx, b.id, client.ExecRequest{Command: types.Command{Argv: argv}})
	if err == nil && result.ExitCode != 0 {
		err = fmt.Errorf("%s: exit code %d: %s", argv[0], result.ExitCode, result.Stderr)
	}
	return err
}

// deleteAfter creates a snapshot, calls f, and deletes the snapshot.
func (b *bench) deleteAfter(ctx context.Context, f func(types.Snapshot) error) error {
	s, err := b.node.API.CreateSnapshot(ctx, b.id, types.CreateSnapshotRequest{})
	if err != nil {
		return err
	}
	if err := f(s); err != nil {
		return err
	}
	return b.node.API.DeleteSnapshot(ctx, s.ID)
}

func (b *bench) snapshotRunning(ctx context.Context, what string) ([]row, error) {
	var frozen spread
	ours := &contender{name: "doze", round: func(ctx context.Context) (float64, error) {
		var took float64
		err := b.deleteAfter(ctx, func(s types.Snapshot) error {
			took, frozen = s.DurationMS, append(frozen, s.FrozenMS)
			return nil
		})
		return took, err
	}}
	commit := &contender{name: "podman commit", round: func(ctx context.Context) (float64, error) {
		var image []byte
		took, err := timed(func() (err error) {
			image, err = exec.CommandContext(ctx, "podman", "commit", "--quiet", "doze-"+b.id).Output()
			return err
		})
		if err != nil {
			return 0, err
		}
		return took, exec.CommandContext(ctx, "podman", "rmi", strings.TrimSpace(string(image))).Run()
	}}
	if err := versus(ctx, snapshotRounds, ours, commit); err != nil {
		return nil, err
	}
	took, ratio := ours.spread(), commit.over(ours)
	return []row{{
		Figure:   "snapshot of a running sandbox, " + what + "; podman commit for comparison",
		Bar:      "≤ 2 s; ≥ 5 times faster",
		Measured: fmt.Sprintf("%s s; %s times faster", took.times(.001).text("%.2f"), ratio.text("%.1f")),
		Met:      took.median() <= 2000 && ratio.median() >= 5,
		Values:   values{}.add("ms", took).add("ratio", ratio),
	}, atMost("time for which its programs stopped, "+what, "%.0f", " ms", 1000, "frozen_ms", frozen)}, nil
}

func (b *bench) snapshotStopped(ctx context.Context, what string) ([]row, error) {
	var took, restored spread
	for range snapshotRounds {
		if err := b.do(ctx, "touch", "/srv/tree"); err != nil {
			return nil, err
		}
		if _, err := b.node.API.ForceStop(ctx, b.id); err != nil {
			return nil, err
		}
		err := b.deleteAfter(ctx, func(s types.Snapshot) error {
			took = append(took, s.DurationMS)
			for range b.count(restores) {
				// The disk that the restore discards has the files, too.
				began := time.Now()
				if _, err := b.node.API.Restore(ctx, b.id, types.RestoreRequest{SnapshotID: s.ID}, true); err != nil {
					return err
				}
				if err := b.do(ctx, "true"); err != nil {
					return err
				}
				restored = append(restored, ms(time.Since(began)))
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return []row{
		atMost("snapshot of a stopped sandbox, "+what, "%.0f", " ms", 100, "ms", took),
		timesRow("restore of a running sandbox to its first exec, "+what, "p50 ≤ 250 ms", timesBars{p50: 250}, restored, restored),
	}, nil
}

func (b *bench) fork(ctx context.Context, what string) (row, error) {
	var took spread
	for range snapshotRounds {
		began := time.Now()
		forks, err := b.node.API.Fork(ctx, b.id, types.ForkRequest{Count: forkCount})
		if err != nil {
			return row{}, err
		}
		for _, f := range forks {
			if _, err := b.node.API.Exec(ctx, f.ID, client.ExecRequest{Command: types.Command{Argv: []string{"true"}}}); err != nil {
				return row{}, err
			}
		}
		took = append(took, time.Since(began).Seconds())
		for _, f := range forks {
			if err := b.node.API.Delete(ctx, f.ID); err != nil {
				return row{}, err
			}
		}
	}
	return atMost(fmt.Sprintf("fork of a running sandbox × %d, until all have executed a command, %s", forkCount, what), "%.2f", " s", 2, "s", took), nil
}
