//go:build mounts

package power

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/backup/s3test"
	"github.com/doze-run/doze/test/testnode"
	"github.com/doze-run/doze/testkit"
)

var (
	moments = flag.Int("moments", 3, "how many random moments each file system has")
	kinds   = flag.String("filesystems", "ext4", "file systems for the data of the node: ext4, xfs, btrfs")
	seed    = flag.Uint64("seed", uint64(time.Now().UnixNano()), "seed of the random moments")
)

// longest is the longest time between two moments: ext4 commits its journal every 5 s, and writers are done with
// dirty pages after 30 s.
const longest = 3 * time.Second

// TestPowerLossLosesNothingAcknowledged copies the device of a busy node at random moments. Then it starts a node on each copy.
func TestPowerLossLosesNothingAcknowledged(t *testing.T) {
	t.Logf("-seed %d", *seed)
	random := rand.New(rand.NewPCG(*seed, 0))
	for _, on := range strings.Split(*kinds, ",") {
		t.Run(on, func(t *testing.T) { loseAndCheck(t, on, random) })
	}
}

// loss is a device and an object store as of a moment, with what was acknowledged before.
type loss struct {
	device string
	store  objectStore
	ledger *ledger
}

func loseAndCheck(t *testing.T, on string, random *rand.Rand) {
	m := newMachine(t, on)
	s3 := s3test.Start(t)
	n := startNode(m, s3)

	var losses []loss
	lose := func() {
		var l loss
		l.ledger = n.ledger.copied(func() {
			resume := pause(s3)
			defer resume()
			l.device = m.copyDevice(fmt.Sprint("loss-", len(losses)))
			l.store = copyStore(t, s3.Folder)
		})
		losses = append(losses, l)
	}
	// The node syncs the file system for the first container of an image, but not for others.
	for _, name := range []string{"recorder", "second"} {
		n.create(name)
		n.must(n.run(name, "record", "1"))
		n.ledger.note(func() { n.ledger.sandboxes[name] = disk{records: 1} })
		lose()
	}

	n.must(n.run("recorder", "fill", "recorder"))
	_, err := n.API.StartProcess(n.ctx(), "recorder", types.StartProcessRequest{Name: "recorder", Command: types.Command{Argv: []string{"recorder", "record"}}, Restart: "on_wake"})
	n.must(err)
	ctx, cancel := context.WithCancel(t.Context())
	var working sync.WaitGroup
	end := func() {
		cancel()
		working.Wait()
	}
	defer end()
	for _, work := range []func(i int){n.snapshotRunning, n.snapshotStopped, n.restore, n.fork, n.archive, n.backUp, n.createOne} {
		working.Go(func() {
			for i := 0; ctx.Err() == nil && !t.Failed(); i++ {
				work(i)
			}
		})
	}
	for range *moments {
		time.Sleep(time.Duration(random.Int64N(int64(longest)))) // chooses the moment; the checks hold for each
		lose()
	}
	testkit.Eventually(t, "each operation has been completed", func() (all bool) {
		n.ledger.note(func() { all = len(n.ledger.done) == len(operations) })
		return all || t.Failed()
	})
	lose()
	end()
	testkit.NoError(t, "kill the node", n.Kill())
	m.lose()
	if t.Failed() {
		return
	}
	for i, loss := range losses {
		began := time.Now()
		m.boot(loss.device)
		s3.Stop()
		loss.store.restore(t, s3.Folder)
		s3.Restart()
		after := &node{t: t, Node: n.Node, ledger: loss.ledger}
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			after.t = t
			testkit.NoError(t, "start the node", after.Start())
			after.checkAcknowledged()
			after.removeAll()
			m.checkEmpty(t)
			testkit.NoError(t, "stop the node", after.Stop())
		})
		if n.Runs() {
			testkit.NoError(t, "kill the node", n.Kill())
		}
		m.lose()
		t.Logf("moment %d: checked in %s: %v, %d sandboxes, %d snapshots, %d backups", i, time.Since(began).Round(time.Millisecond), loss.ledger.done,
			len(loss.ledger.sandboxes), len(loss.ledger.snapshots), len(loss.ledger.backups))
	}
}

// node is the machine's node with what it has acknowledged.
type node struct {
	*testnode.Node
	t      *testing.T
	ledger *ledger
}

// startNode starts the machine's node with the image of the recorder and with backups to the S3 server.
func startNode(m *machine, s3 *s3test.Server, options ...string) *node {
	m.t.Helper()
	options = append(options, "image recorder "+image, "default_image recorder",
		fmt.Sprintf("backups {\nendpoint %s\nbucket %s\nprefix doze/\nregion us-east-1\naccess_key %s\nsecret_key %s\npassword correct-horse-battery-staple\n}", s3.URL, s3.Bucket, s3.AccessKey, s3.SecretKey))
	text, err := testnode.ProjectCaddyfile(options...)
	testkit.NoError(m.t, "read the configuration", err)
	n := &node{t: m.t, Node: m.newNode(text), ledger: newLedger()}
	testkit.NoError(m.t, "start the node", n.Start())
	return n
}

func (n *node) ctx() context.Context { return testkit.Context(n.t) }

// must fails the test after an error. Other goroutines than the test's may call it.
func (n *node) must(err error) bool {
	n.t.Helper()
	if err != nil {
		n.t.Error(err)
	}
	return err == nil
}

func (n *node) create(name string) bool {
	n.t.Helper()
	_, created, err := n.API.Create(n.ctx(), types.CreateSandboxRequest{Name: name, Size: "lite", SleepAfter: new(types.Duration)})
	if err == nil && !created {
		err = fmt.Errorf("sandbox %s exists", name)
	}
	return n.must(err)
}

// run runs the recorder in a sandbox.
func (n *node) run(sandbox string, args ...string) error {
	result, err := n.API.Exec(n.ctx(), sandbox, client.ExecRequest{Command: types.Command{Argv: append([]string{"/bin/recorder"}, args...)}, Timeout: types.Duration(testkit.Patience)})
	if err == nil && result.ExitCode != 0 {
		err = fmt.Errorf("%s: recorder %s: exit code %d: %s%s", sandbox, args, result.ExitCode, result.Stdout, result.Stderr)
	}
	return err
}

// acknowledged is the number of records of the sandbox that records all the time.
func (n *node) acknowledged() int {
	body, err := n.API.ReadFile(n.ctx(), "recorder", "/data/acknowledged")
	if !n.must(err) {
		return 0
	}
	defer body.Close()
	text, err := io.ReadAll(body)
	n.must(err)
	records, err := strconv.Atoi(string(bytes.TrimSpace(text)))
	n.must(err)
	n.ledger.note(func() { n.ledger.recorded("recorder", records) })
	return records
}

// ready creates the sandbox of an operation in its first round.
func (n *node) ready(i int, name string) bool { return i > 0 || n.create(name) }

// refill replaces the files of a sandbox, whose disk is not durable then.
func (n *node) refill(sandbox, version string) bool {
	n.ledger.note(func() { n.ledger.sandboxes[sandbox] = disk{} })
	return n.must(n.run(sandbox, "fill", version))
}

// operations are the operations that the ledger counts.
var operations = []string{
	"snapshot of a running sandbox", "snapshot of a stopped sandbox", "restore", "record after a restore", "fork", "archive", "retrieval", "backup",
	"restore of a backup", "creation", "record after a creation", "deletion of a snapshot", "deletion of a sandbox",
}

func (n *node) completed(operation string, f func()) {
	n.t.Helper()
	if !slices.Contains(operations, operation) {
		n.t.Errorf("unknown operation %q", operation)
	}
	n.ledger.note(func() {
		f()
		n.ledger.done[operation]++
	})
}

// retained is how many results of an operation stay.
const retained = 2

func (n *node) snapshotRunning(i int) {
	records := n.acknowledged()
	s, err := n.API.CreateSnapshot(n.ctx(), "recorder", types.CreateSnapshotRequest{Name: fmt.Sprint("running-", i)})
	if !n.must(err) {
		return
	}
	n.completed("snapshot of a running sandbox", func() {
		n.ledger.snapshots[s.ID] = disk{"recorder", records}
		n.ledger.sandboxes["recorder"] = disk{"recorder", n.ledger.sandboxes["recorder"].records}
	})
	n.deleteSnapshot(fmt.Sprint("running-", i-retained), i >= retained)
}

func (n *node) snapshotStopped(i int) {
	version := fmt.Sprint("stopped-", i)
	if !n.ready(i, "stopped") || !n.refill("stopped", version) {
		return
	}
	if _, err := n.API.ForceStop(n.ctx(), "stopped"); !n.must(err) {
		return
	}
	s, err := n.API.CreateSnapshot(n.ctx(), "stopped", types.CreateSnapshotRequest{Name: version})
	if !n.must(err) {
		return
	}
	n.completed("snapshot of a stopped sandbox", func() {
		n.ledger.snapshots[s.ID] = disk{version: version}
		n.ledger.sandboxes["stopped"] = disk{version: version}
	})
	n.deleteSnapshot(fmt.Sprint("stopped-", i-retained), i >= retained)
}

func (n *node) deleteSnapshot(name string, exists bool) {
	if !exists {
		return
	}
	s, err := n.API.Snapshot(n.ctx(), name)
	if !n.must(err) {
		return
	}
	n.ledger.note(func() { delete(n.ledger.snapshots, s.ID) })
	if n.must(n.API.DeleteSnapshot(n.ctx(), s.ID)) {
		n.completed("deletion of a snapshot", func() { n.ledger.deleted[s.ID] = true })
	}
}

func (n *node) restore(i int) {
	version := fmt.Sprint("restored-", i%2)
	if i == 0 {
		for _, version := range []string{"restored-0", "restored-1"} {
			if version == "restored-0" && !n.create("restored") || !n.refill("restored", version) {
				return
			}
			if _, err := n.API.CreateSnapshot(n.ctx(), "restored", types.CreateSnapshotRequest{Name: version}); !n.must(err) {
				return
			}
		}
	}
	if !n.refill("restored", fmt.Sprint("discarded-", i)) {
		return
	}
	if _, err := n.API.Restore(n.ctx(), "restored", types.RestoreRequest{SnapshotID: version}, true); !n.must(err) {
		return
	}
	n.completed("restore", func() { n.ledger.sandboxes["restored"] = disk{version: version} })
	if n.must(n.run("restored", "record", "1")) {
		n.completed("record after a restore", func() { n.ledger.sandboxes["restored"] = disk{version, 1} })
	}
}

func (n *node) fork(i int) {
	names := []string{fmt.Sprint("fork-a-", i), fmt.Sprint("fork-b-", i)}
	records := n.acknowledged()
	if _, err := n.API.Fork(n.ctx(), "recorder", types.ForkRequest{Count: len(names), Names: names}); !n.must(err) {
		return
	}
	n.completed("fork", func() {
		for _, name := range names {
			n.ledger.sandboxes[name] = disk{"recorder", records}
		}
	})
	for _, kind := range []string{"a", "b"} {
		n.delete(fmt.Sprint("fork-", kind, "-", i-1), i >= 1)
	}
}

func (n *node) delete(sandbox string, exists bool) {
	if !exists {
		return
	}
	n.ledger.note(func() { delete(n.ledger.sandboxes, sandbox) })
	if n.must(n.API.Delete(n.ctx(), sandbox)) {
		n.completed("deletion of a sandbox", func() { n.ledger.deleted[sandbox] = true })
	}
}

func (n *node) archive(i int) {
	version := fmt.Sprint("archived-", i)
	if !n.ready(i, "archived") || !n.refill("archived", version) {
		return
	}
	if _, err := n.API.Archive(n.ctx(), "archived", true, nil); !n.must(err) {
		return
	}
	n.completed("archive", func() { n.ledger.sandboxes["archived"] = disk{version: version} })
	if _, err := n.API.Wake(n.ctx(), "archived"); !n.must(err) {
		return
	}
	n.completed("retrieval", func() {})
}

func (n *node) backUp(i int) {
	version := fmt.Sprint("backed-up-", i)
	if !n.ready(i, "backed-up") || !n.refill("backed-up", version) {
		return
	}
	b, err := n.API.CreateBackup(n.ctx(), "backed-up", types.CreateBackupRequest{}, nil)
	if !n.must(err) {
		return
	}
	n.completed("backup", func() { n.ledger.backups[b.ID] = disk{version: version} })
	if !n.refill("backed-up", fmt.Sprint("discarded-", i)) {
		return
	}
	if _, err := n.API.RestoreBackup(n.ctx(), "backed-up", types.RestoreRequest{BackupID: b.ID}, true, nil); !n.must(err) {
		return
	}
	n.completed("restore of a backup", func() { n.ledger.sandboxes["backed-up"] = disk{version: version} })
}

func (n *node) createOne(i int) {
	name := fmt.Sprint("created-", i)
	if !n.create(name) {
		return
	}
	n.completed("creation", func() { n.ledger.sandboxes[name] = disk{} })
	if n.must(n.run(name, "record", "3")) {
		n.completed("record after a creation", func() { n.ledger.sandboxes[name] = disk{records: 3} })
	}
	n.delete(fmt.Sprint("created-", i-retained), i >= retained)
}

// checkAcknowledged fails the test unless the node has all that it acknowledged.
func (n *node) checkAcknowledged() {
	n.t.Helper()
	info, err := n.API.Node(n.ctx())
	testkit.NoError(n.t, "read the node", err)
	if info.DataRestored || len(info.Quarantined) != 0 {
		n.t.Errorf("the node started on older data: %t; in quarantine: %+v", info.DataRestored, info.Quarantined)
	}
	var all sync.WaitGroup
	slots := make(chan struct{}, 4)
	concurrently := func(f func()) {
		all.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			f()
		})
	}
	for name, want := range n.ledger.sandboxes {
		concurrently(func() { n.checkDisk(name, want) })
	}
	for id, want := range n.ledger.snapshots {
		concurrently(func() {
			sb, _, err := n.API.Create(n.ctx(), types.CreateSandboxRequest{Name: "of-" + id, Snapshot: id})
			if n.must(err) {
				n.checkDisk(sb.ID, want)
			}
		})
	}
	for id, want := range n.ledger.backups {
		concurrently(func() {
			name := "of-" + id
			if !n.create(name) {
				return
			}
			if _, err := n.API.RestoreBackup(n.ctx(), name, types.RestoreRequest{BackupID: id}, true, nil); n.must(err) {
				n.checkDisk(name, want)
			}
		})
	}
	all.Wait()
	n.checkDeleted()
}

// checkDeleted fails the test if the node has what it acknowledged to have deleted.
func (n *node) checkDeleted() {
	n.t.Helper()
	sandboxes, err := n.API.List(n.ctx(), client.Filter{})
	testkit.NoError(n.t, "list the sandboxes", err)
	for _, sb := range sandboxes {
		if n.ledger.deleted[sb.Name] {
			n.t.Errorf("the deleted sandbox %s exists", sb.Name)
		}
	}
	snapshots, err := n.API.Snapshots(n.ctx(), "")
	testkit.NoError(n.t, "list the snapshots", err)
	for _, s := range snapshots {
		if n.ledger.deleted[s.ID] {
			n.t.Errorf("the deleted snapshot %s exists", s.ID)
		}
	}
}

func (n *node) checkDisk(sandbox string, want disk) {
	n.t.Helper()
	args := []string{"records", strconv.Itoa(want.records)}
	if want.version != "" {
		args = []string{"check", want.version, strconv.Itoa(want.records)}
	}
	n.must(n.run(sandbox, args...))
}

// removeAll removes everything of the node, through its API.
func (n *node) removeAll() {
	n.t.Helper()
	sandboxes, err := n.API.List(n.ctx(), client.Filter{})
	testkit.NoError(n.t, "list the sandboxes", err)
	for _, sb := range sandboxes {
		if err := n.API.Delete(n.ctx(), sb.ID); !problem.Has(err, problem.SandboxNotFound) {
			n.must(err)
		}
	}
	snapshots, err := n.API.Snapshots(n.ctx(), "")
	testkit.NoError(n.t, "list the snapshots", err)
	for _, s := range snapshots {
		n.must(n.API.DeleteSnapshot(n.ctx(), s.ID))
	}
	testkit.Eventually(n.t, "no operation is pending", func() bool {
		info, err := n.API.Node(n.ctx())
		n.must(err)
		return len(info.PendingOperations) == 0
	})
}

// checkEmpty fails the test if a node without sandboxes and snapshots has left anything but the image.
func (m *machine) checkEmpty(t *testing.T) {
	t.Helper()
	var left inventory
	testkit.Eventually(t, "nothing is left", func() bool {
		left = m.inventory(t)
		return len(left.Containers)+len(left.Unlisted)+len(left.Links)+len(left.Disks)+len(left.Creations)+len(left.Run) == 0 && len(left.Images) == 1 && len(left.Layers) <= 2
	}, func() string { return fmt.Sprintf("%+v", left) })
}
