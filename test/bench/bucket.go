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
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
)

const (
	bucketRounds = 3
	bucketFile   = 256 << 20
	bucketFiles  = 1000

	// The scripts print how long they took, in ms. They run in the sandbox and, for the peer, on the node.
	writeFile = `import os, sys, time
block = os.urandom(1 << 20)
start = time.monotonic()
with open(sys.argv[1], "wb", buffering=0) as f:
    for _ in range(int(sys.argv[2]) >> 20): f.write(block)
print((time.monotonic() - start) * 1000)`
	readFile = `import sys, time
start = time.monotonic()
size = 0
with open(sys.argv[1], "rb", buffering=0) as f:
    while block := f.read(1 << 20): size += len(block)
assert size == int(sys.argv[2]), size
print((time.monotonic() - start) * 1000)`
	writeFiles = `import os, sys, time
os.mkdir(sys.argv[1])
start = time.monotonic()
for n in range(int(sys.argv[2])):
    with open("%s/%d" % (sys.argv[1], n), "wb") as f: f.write(b"%d" % n)
print((time.monotonic() - start) * 1000)`
	listFiles = `import os, sys, time
start = time.monotonic()
found = [e.stat().st_size for e in os.scandir(sys.argv[1])]
assert len(found) == int(sys.argv[2]), len(found)
print((time.monotonic() - start) * 1000)`
)

// startBucketNode starts a node with a bucket, whose object store is on the same file system.
func startBucketNode(bin string) (*node, error) {
	return startStoreNode(bin, func(s *objectStore) []string {
		return []string{
			"bucket " + backupBucket + " {",
			"endpoint " + s.url, "bucket " + backupBucket, "region us-east-1", "access_key " + s.access, "secret_key " + s.secret,
			"}",
		}
	})
}

// mountedBucket is a bucket as a folder of a sandbox, and as a folder of the node by s3fs.
type mountedBucket struct {
	b      *bench
	id     string
	folder string // of the node
	peer   *exec.Cmd
	names  int
}

// runScript runs a script with a path in the bucket and a number, and returns its time in ms.
type runScript func(ctx context.Context, script, name string, n int) (float64, error)

// inSandbox is a runScript in the sandbox.
func (m *mountedBucket) inSandbox(ctx context.Context, script, name string, n int) (float64, error) {
	result, err := m.b.node.API.Exec(ctx, m.id, client.ExecRequest{Command: types.Command{Argv: []string{"python3", "-c", script, "/data/" + name, fmt.Sprint(n)}}})
	if err != nil {
		return 0, err
	}
	if result.ExitCode != 0 {
		return 0, fmt.Errorf("in the sandbox: exit code %d: %s", result.ExitCode, result.Stderr)
	}
	return strconv.ParseFloat(strings.TrimSpace(result.Stdout), 64)
}

// byPeer is a runScript on the node, with s3fs.
func (m *mountedBucket) byPeer(ctx context.Context, script, name string, n int) (float64, error) {
	out, err := output(exec.CommandContext(ctx, "python3", "-c", script, filepath.Join(m.folder, name), fmt.Sprint(n)))
	if err != nil {
		return 0, err
	}
	return strconv.ParseFloat(strings.TrimSpace(string(out)), 64)
}

// next returns a new name.
func (m *mountedBucket) next() string {
	m.names++
	return fmt.Sprint("n", m.names)
}

// mountPeer mounts the bucket with s3fs, with its defaults. The caller calls unmountPeer.
func (m *mountedBucket) mountPeer(ctx context.Context) error {
	s3fs, err := findPeer("s3fs")
	if err != nil {
		return err
	}
	m.folder = filepath.Join(m.b.node.folder, "s3fs")
	passwords := filepath.Join(m.b.node.folder, "s3fs.passwords")
	s := m.b.node.store
	if err := errors.Join(os.Mkdir(m.folder, 0o700), os.WriteFile(passwords, []byte(s.access+":"+s.secret), 0o600)); err != nil {
		return err
	}
	peer := inSession(exec.Command(s3fs, backupBucket, m.folder, "-f", "-o", "url="+s.url+",endpoint=us-east-1,use_path_request_style,passwd_file="+passwords))
	peer.Stderr = os.Stderr
	if err := peer.Start(); err != nil {
		return err
	}
	m.peer = peer
	ctx, cancel := context.WithTimeout(ctx, startWait)
	defer cancel()
	return poll(ctx, 10*time.Millisecond, func() (bool, error) {
		var inside, outside unix.Stat_t
		err := errors.Join(unix.Stat(m.folder, &inside), unix.Stat(m.b.node.folder, &outside))
		return err == nil && inside.Dev != outside.Dev, nil
	})
}

func (m *mountedBucket) unmountPeer() {
	if m.peer == nil {
		return
	}
	_ = exec.Command("fusermount", "-u", m.folder).Run() // else it ends by the signal
	_ = m.peer.Process.Signal(unix.SIGTERM)
	_ = m.peer.Wait()
}

// measureBucket measures a bucket as a folder of a sandbox, against s3fs on the node.
func measureBucket(ctx context.Context, b *bench) ([]row, error) {
	sb, _, err := b.node.API.Create(ctx, types.CreateSandboxRequest{SleepAfter: new(types.Duration)})
	if err != nil {
		return nil, err
	}
	if _, err := b.node.API.Mount(ctx, sb.ID, types.MountRequest{Bucket: backupBucket, Path: "/data"}); err != nil {
		return nil, err
	}
	m := &mountedBucket{b: b, id: sb.ID}
	defer m.unmountPeer()
	if err := m.mountPeer(ctx); err != nil {
		return nil, err
	}
	size, files := b.count(bucketFile>>20)<<20, b.count(bucketFiles)
	write := func(run runScript, script string, n int) func(context.Context) (float64, error) {
		return func(ctx context.Context) (float64, error) { return run(ctx, script, m.next(), n) }
	}
	// Each reads what the other one has written.
	read := func(run, other runScript, script, prepare string, n int) func(context.Context) (float64, error) {
		return func(ctx context.Context) (float64, error) {
			name := m.next()
			if _, err := other(ctx, prepare, name, n); err != nil {
				return 0, err
			}
			return run(ctx, script, name, n)
		}
	}
	var rows []row
	for _, f := range []struct {
		figure      string
		ours, peers func(context.Context) (float64, error)
	}{
		{fmt.Sprintf("write and close a file of %d MiB in a bucket", size>>20), write(m.inSandbox, writeFile, size), write(m.byPeer, writeFile, size)},
		{
			fmt.Sprintf("read a file of %d MiB from a bucket", size>>20),
			read(m.inSandbox, m.byPeer, readFile, writeFile, size), read(m.byPeer, m.inSandbox, readFile, writeFile, size),
		},
		{fmt.Sprintf("write and close %d small files in a bucket", files), write(m.inSandbox, writeFiles, files), write(m.byPeer, writeFiles, files)},
		{
			fmt.Sprintf("list a folder of %d files in a bucket, with their sizes", files),
			read(m.inSandbox, m.byPeer, listFiles, writeFiles, files), read(m.byPeer, m.inSandbox, listFiles, writeFiles, files),
		},
	} {
		ours, peer := &contender{name: "doze", round: f.ours}, &contender{name: "s3fs", round: f.peers}
		if err := versus(ctx, bucketRounds, ours, peer); err != nil {
			return rows, err
		}
		times, theirs, speed := ours.spread(), peer.spread(), peer.over(ours)
		rows = append(rows, row{
			Figure:   f.figure + ", against s3fs on the node",
			Bar:      "≥ 1.0 of its speed",
			Measured: fmt.Sprintf("%s (%.0f ms, %.0f ms)", speed.text("%.2f"), times.median(), theirs.median()),
			Met:      speed.median() >= 1,
			Values:   values{}.add("speed", speed).add("ms", times).add("peer_ms", theirs),
		})
	}
	return rows, b.node.API.Delete(ctx, sb.ID)
}
