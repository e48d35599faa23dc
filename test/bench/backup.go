package main

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/api/types"
)

const (
	backupRounds = 3
	// everyHundredth changes 1 % of the files, one in each folder.
	everyHundredth = 100

	backupBucket = "backups"
)

// objectStore is an S3 server with one bucket, in a process of its own.
type objectStore struct {
	url, access, secret string
	cmd                 *exec.Cmd
}

// startObjectStore starts a server on a new folder. The caller ends it.
func startObjectStore(program, folder string) (*objectStore, error) {
	if err := os.MkdirAll(filepath.Join(folder, backupBucket), 0o755); err != nil {
		return nil, err
	}
	s := &objectStore{access: "bench", secret: rand.Text()}
	s.cmd = inSession(exec.Command(program, "-folder", folder, "-access", s.access, "-secret", s.secret))
	s.cmd.Stderr = os.Stderr
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if _, err := s.cmd.StdinPipe(); err != nil { // it ends when this is closed, as by our death
		return nil, err
	}
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		s.kill()
		return nil, fmt.Errorf("start the S3 server: %w", err)
	}
	s.url = strings.TrimSpace(line)
	return s, nil
}

func (s *objectStore) kill() {
	_ = s.cmd.Process.Kill() // it may have ended
	_ = s.cmd.Wait()
}

// startStoreNode starts a node with an object store, which is on the same file system, and with options for it.
func startStoreNode(bin string, options func(*objectStore) []string) (_ *node, err error) {
	home, err := os.UserHomeDir()
	if err != nil {
		return nil, err
	}
	n := new(node)
	if n.folder, err = os.MkdirTemp(home, "bench"); err != nil {
		return n, err
	}
	if n.store, err = startObjectStore(filepath.Join(bin, "doze-s3server"), filepath.Join(n.folder, "s3")); err != nil {
		return n, err
	}
	return n, n.start(bin, options(n.store)...)
}

// startBackupNode starts a node that makes backups.
func startBackupNode(bin string) (*node, error) {
	return startStoreNode(bin, func(s *objectStore) []string {
		return []string{
			"backups {",
			"endpoint " + s.url, "bucket " + backupBucket, "region us-east-1",
			"access_key " + s.access, "secret_key " + s.secret, "password " + rand.Text(),
			"}",
		}
	})
}

// backupSandbox is a sandbox whose disk is backed up and restored.
type backupSandbox struct {
	b       *bench
	id      string
	tree    tree
	archive string // of the peer
	full    []types.Backup

	// Of each round, the uncounted first one included: how long the programs were stopped, in ms;
	// the second backup, in ms; and its bytes as a part of the first one's.
	frozen, again, stored spread
}

// measureBackup measures backups of a running sandbox and their restores, against tar and zstd with
// a local file.
func measureBackup(ctx context.Context, b *bench) (rows []row, err error) {
	for _, program := range []string{"zstd", "tar"} {
		if _, err := findPeer(program); err != nil {
			return nil, err
		}
	}
	for _, tree := range trees {
		measured, err := measureTreeBackup(ctx, b, tree)
		rows = append(rows, measured...)
		if err != nil {
			return rows, fmt.Errorf("%s: %w", tree.name, err)
		}
	}
	return rows, nil
}

func measureTreeBackup(ctx context.Context, b *bench, tree tree) ([]row, error) {
	sb, _, err := b.node.API.Create(ctx, types.CreateSandboxRequest{SleepAfter: new(types.Duration)})
	if err != nil {
		return nil, err
	}
	s := &backupSandbox{b: b, id: sb.ID, tree: tree, archive: filepath.Join(b.node.folder, "archive")}
	if err := b.writeTree(ctx, s.id, tree, 1); err != nil {
		return nil, err
	}
	// A program of the sandbox runs during backups.
	if _, err := b.node.API.StartProcess(ctx, s.id, types.StartProcessRequest{Command: types.Command{Argv: []string{"sleep", "infinity"}}}); err != nil {
		return nil, err
	}
	ours := &contender{name: "doze", round: s.backUp}
	tar := &contender{name: "tar | zstd -T0", round: s.pack}
	if err := versus(ctx, backupRounds, ours, tar); err != nil {
		return nil, err
	}
	total := versusTar("backup of a running sandbox to an S3 server on the machine, against `tar | zstd -T0` to a file, "+tree.name, ours, tar)
	frozen := s.frozen[1:]
	total.Values.add("frozen_ms", frozen)
	total.Note = fmt.Sprintf("of that, the programs were stopped for %s ms", frozen.text("%.0f"))
	rows := []row{total}
	percent := s.stored[1:].times(100)
	rows = append(rows, row{
		Figure:   "bytes of a second backup, after a change of 1 % of the files, one in each folder, " + tree.name,
		Bar:      "≤ 10 % of the first",
		Measured: percent.text("%.1f") + " %",
		Met:      percent.median() <= 10,
		Values:   values{}.add("percent", percent).add("ms", s.again[1:]),
		Note:     fmt.Sprintf("it takes %s ms", s.again[1:].text("%.0f")),
	})
	restores := &contender{name: "doze", round: s.restore}
	untar := &contender{name: "zstd -d | tar -x", round: s.unpack}
	err = versus(ctx, backupRounds, restores, untar)
	if err = errors.Join(err, s.removeUnpacked(context.WithoutCancel(ctx))); err != nil {
		return rows, err
	}
	rows = append(rows, versusTar("restore of a backup, against `zstd -d | tar -x`, "+tree.name, restores, untar))
	return rows, b.node.API.Delete(ctx, s.id)
}

// versusTar is the row of times against a peer's.
func versusTar(figure string, ours, peer *contender) row {
	total, theirs, speed := ours.spread(), peer.spread(), peer.over(ours)
	return row{
		Figure:   figure,
		Bar:      "≥ 0.6 of its speed",
		Measured: fmt.Sprintf("%s (%.0f ms, %.0f ms)", speed.text("%.2f"), total.median(), theirs.median()),
		Met:      speed.median() >= .6,
		Values:   values{}.add("speed", speed).add("ms", total).add("peer_ms", theirs),
	}
}

// backUp times a backup of content that the object store does not have. It also makes a second one,
// after a change.
func (s *backupSandbox) backUp(ctx context.Context) (float64, error) {
	if err := s.b.writeTree(ctx, s.id, s.tree, 1); err != nil {
		return 0, err
	}
	first, took, err := s.create(ctx)
	if err != nil {
		return 0, err
	}
	if err := s.b.writeTree(ctx, s.id, s.tree, everyHundredth); err != nil {
		return 0, err
	}
	second, again, err := s.create(ctx)
	if err != nil {
		return 0, err
	}
	s.full = append(s.full, first)
	s.frozen = append(s.frozen, first.FrozenMS)
	s.again = append(s.again, again)
	s.stored = append(s.stored, float64(second.StoredBytes)/float64(first.StoredBytes))
	return took, nil
}

// create makes a backup, and returns how long that took, in ms.
func (s *backupSandbox) create(ctx context.Context) (backup types.Backup, took float64, err error) {
	unix.Sync() // the files of the round before
	took, err = timed(func() error {
		backup, err = s.b.node.API.CreateBackup(ctx, s.id, types.CreateBackupRequest{}, nil)
		return err
	})
	return backup, took, err
}

// restore times a restore of a backup that has not been restored before: the node would have a part of
// it in its cache.
func (s *backupSandbox) restore(ctx context.Context) (float64, error) {
	backup := s.full[0]
	s.full = s.full[1:]
	unix.Sync()
	return timed(func() error {
		_, err := s.b.node.API.RestoreBackup(ctx, s.id, types.RestoreRequest{BackupID: backup.ID}, true, nil)
		return err
	})
}

// pack times tar and zstd of the sandbox's disk, without its image.
func (s *backupSandbox) pack(ctx context.Context) (float64, error) {
	source, err := s.b.node.upperFolder(ctx, s.id)
	if err != nil {
		return 0, err
	}
	unix.Sync()
	return s.b.node.timeUnshared(ctx, `tar -C "$1" --xattrs -c . | zstd -q -f -T0 -o "$2"`, source, s.archive)
}

// unpack times the extraction of what pack wrote, into a new folder. removeUnpacked removes it: ext4
// creates files slowly after many others were deleted.
func (s *backupSandbox) unpack(ctx context.Context) (float64, error) {
	target, err := os.MkdirTemp(s.b.node.folder, unpacked)
	if err != nil {
		return 0, err
	}
	unix.Sync()
	return s.b.node.timeUnshared(ctx, `zstd -q -d -c -T0 "$2" | tar -C "$1" --xattrs -x`, target, s.archive)
}

// unpacked begins the names of the folders of unpack.
const unpacked = "unpacked"

func (s *backupSandbox) removeUnpacked(ctx context.Context) error {
	folders, err := filepath.Glob(filepath.Join(s.b.node.folder, unpacked+"*"))
	if err != nil {
		return err
	}
	_, err = s.b.node.unshare(ctx, `rm -rf "$@"`, folders...)
	return err
}
