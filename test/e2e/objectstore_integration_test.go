//go:build integration

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/backup/s3test"
	"github.com/doze-run/doze/test/testnode"
	"github.com/doze-run/doze/testkit"
)

// backupNode is a node of one test with an object store.
type backupNode struct {
	*node
	s3 *s3test.Server
}

const backupPassword = "correct horse battery staple"

// backupsBlock is the option backups of a node that uses the server.
func backupsBlock(s *s3test.Server, secret, password string) string {
	return fmt.Sprintf("backups {\nendpoint %s\nbucket %s\nprefix doze/\nregion us-east-1\naccess_key %s\nsecret_key %s\npassword %q\n}", s.URL, s.Bucket, s.AccessKey, secret, password)
}

func newBackupNode(t *testing.T) *backupNode {
	t.Helper()
	s := s3test.Start(t)
	return &backupNode{&node{testnode.Start(t, testnode.Config{Caddyfile: caddyfile(t, backupsBlock(s, s.SecretKey, backupPassword))})}, s}
}

// restart restarts the node with another option backups.
func (n *backupNode) restart(t *testing.T, block string) {
	t.Helper()
	testkit.NoError(t, "stop", n.Stop())
	testkit.NoError(t, "configure", n.Configure(caddyfile(t, block)))
	testkit.NoError(t, "start", n.Start())
}

func (b *box) backUp() types.Backup {
	b.t.Helper()
	backup, err := b.node.API.CreateBackup(testkit.Context(b.t), b.id, types.CreateBackupRequest{}, nil)
	b.must(err)
	return backup
}

func (b *box) restoreBackup(id string) types.Sandbox {
	b.t.Helper()
	sb, err := b.node.API.RestoreBackup(testkit.Context(b.t), b.id, types.RestoreRequest{BackupID: id}, false, nil)
	b.must(err)
	return sb
}

// backups returns the ids of all backups, newest first.
func (n *backupNode) backups(t *testing.T) []string {
	t.Helper()
	list, err := n.API.Backups(testkit.Context(t), "")
	testkit.NoError(t, "list backups", err)
	ids := make([]string, 0, len(list))
	for _, b := range list {
		ids = append(ids, b.ID)
	}
	return ids
}

// enter brings the sandbox into a state.
func (b *box) enter(state types.State) {
	b.t.Helper()
	switch state {
	case types.StateAsleep:
		b.sleep()
	case types.StateStopped:
		b.stop()
	default:
		b.exec("true")
	}
}

// block is a request of the object store that does not get its response.
type block struct {
	reached chan struct{} // closed when a request is blocked
	release func()        // idempotent; ends with the test
}

// block blocks the requests for which match returns true. match is called concurrently.
func (n *backupNode) block(t *testing.T, match func(*http.Request) bool) *block {
	t.Helper()
	blocked, released := make(chan struct{}), make(chan struct{})
	var once sync.Once
	b := &block{reached: blocked, release: sync.OnceFunc(func() {
		n.s3.Fail(nil)
		close(released)
	})}
	t.Cleanup(b.release)
	n.s3.Fail(func(r *http.Request) s3test.Fault {
		if match(r) {
			once.Do(func() { close(blocked) })
			select {
			case <-released:
			case <-r.Context().Done():
			}
		}
		return s3test.Fault{}
	})
	return b
}

func isPut(r *http.Request) bool  { return r.Method == http.MethodPut }
func isList(r *http.Request) bool { return r.URL.Query().Has("list-type") }

// isUpload returns a function that is true for uploads of a kind of Kopia's objects.
func isUpload(prefix string) func(*http.Request) bool {
	return func(r *http.Request) bool { return isPut(r) && strings.HasPrefix(r.URL.Path, "/backups/doze/"+prefix) }
}

// isPack reports whether a request gets content of files.
func isPack(r *http.Request) bool {
	return r.Method == http.MethodGet && strings.HasPrefix(r.URL.Path, "/backups/doze/p")
}

// nth returns a function that is true for the nth matching request.
func nth(n int64, match func(*http.Request) bool) func(*http.Request) bool {
	var count atomic.Int64
	return func(r *http.Request) bool { return match(r) && count.Add(1) == n }
}

// TestBackups runs the tests that neither kill the node nor restart it.
func TestBackups(t *testing.T) {
	n := newBackupNode(t)
	for _, c := range []struct {
		name string
		run  func(*testing.T, *backupNode)
	}{
		{"in each state", testBackupInEachState},
		{"commands", testBackupCommands},
		{"writer", testBackupHasWholeRecordsOfAWriter},
		{"other operations", testBackupDuringOtherOperations},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(t, n) })
	}
}

// testBackupInEachState: a backup does not wake a sandbox, and a restore preserves all but its disk.
func testBackupInEachState(t *testing.T, n *backupNode) {
	for _, state := range []types.State{types.StateRunning, types.StateAsleep, types.StateStopped} {
		t.Run(string(state), func(t *testing.T) {
			b := n.newBox(t)
			ctx := testkit.Context(t)
			_, err := n.API.Expose(ctx, b.id, types.ExposePortRequest{Port: webPort})
			b.must(err)
			_, err = n.API.SetRules(ctx, b.id, client.RulesUpdate{Rules: json.RawMessage(`[{"name":"kept","hosts":["api.example.com"],"action":"allow"}]`)})
			b.must(err)
			rules, err := n.API.Rules(ctx, b.id)
			b.must(err)
			b.exec(makeKinds)
			want := b.exec(describe)

			b.enter(state)
			before := b.show()
			var progress []types.BackupProgress
			backup, err := n.API.CreateBackup(ctx, b.id, types.CreateBackupRequest{}, func(p types.BackupProgress) { progress = append(progress, p) })
			b.must(err)
			after := b.show()
			if after.State != state || !after.StateSince.Equal(before.StateSince) {
				t.Errorf("the backup of a sandbox that was %s since %v left it %s since %v", state, before.StateSince, after.State, after.StateSince)
			}
			if running := state == types.StateRunning; running != (backup.FrozenMS > 0) {
				t.Errorf("programs were stopped for %v ms", backup.FrozenMS)
			}
			if state == types.StateStopped {
				checkProgress(t, progress, types.BackupPhaseSnapshot, types.BackupPhaseUpload)
			} else {
				checkProgress(t, progress, types.BackupPhaseUpload)
			}
			if last := progress[len(progress)-1]; last.Bytes != backup.SizeBytes || last.Entries != backup.Entries || backup.StoredBytes == 0 || backup.SandboxName != before.Name || backup.Sandbox != b.id {
				t.Errorf("the backup is %+v, its last progress %+v", backup, last)
			}

			b.exec("echo changed >/srv/kinds/a/first; rm /srv/kinds/link; echo new >/srv/new")
			b.enter(state)
			progress = nil
			restored, err := n.API.RestoreBackup(ctx, b.id, types.RestoreRequest{BackupID: backup.ID}, false, func(p types.BackupProgress) { progress = append(progress, p) })
			b.must(err)
			checkProgress(t, progress, types.BackupPhaseDownload)
			wantState := types.StateStopped
			if state == types.StateRunning {
				wantState = state
			}
			if restored.State != wantState || restored.Name != before.Name {
				t.Errorf("restored: %s is %s", restored.Name, restored.State)
			}
			testkit.Diff(t, "ports", restored.Ports, before.Ports)
			rulesAfter, err := n.API.Rules(ctx, b.id)
			b.must(err)
			testkit.Diff(t, "rules", string(rulesAfter.Rules), string(rules.Rules))
			testkit.Diff(t, "files", b.exec(describe), want)
			if b.try("test -e /srv/new").ExitCode == 0 {
				t.Error("the restored sandbox has a file from after the backup")
			}
			if state != types.StateRunning {
				return
			}
			other := n.newBox(t)
			other.restoreBackup(backup.ID)
			testkit.Diff(t, "files of another sandbox", other.exec(describe), want)

			b.must(n.API.DeleteBackup(ctx, backup.ID))
			if _, err := n.API.Backup(ctx, backup.ID); !problem.Has(err, problem.BackupNotFound) {
				t.Errorf("after its deletion: %v", err)
			}
			backedUp, restoredEvents, deleted := b.awaitEvents(types.EventTypeBackedUp, 1)[0], b.awaitEvents(types.EventTypeRestored, 1)[0], b.awaitEvents(types.EventTypeBackupDeleted, 1)[0]
			if backedUp.Backup != backup.ID || backedUp.Bytes != backup.SizeBytes || backedUp.StoredBytes != backup.StoredBytes || restoredEvents.Backup != backup.ID || restoredEvents.Bytes == 0 ||
				deleted.Backup != backup.ID || deleted.Bytes != backup.SizeBytes || deleted.Reason != types.StateReasonRequested {
				t.Errorf("events %+v, %+v, %+v", backedUp, restoredEvents, deleted)
			}
		})
	}
}

// checkProgress compares the phases, and checks that the progress increases to the total.
func checkProgress(t *testing.T, list []types.BackupProgress, phases ...types.BackupPhase) {
	t.Helper()
	var have []types.BackupPhase
	var last types.BackupProgress
	for _, p := range list {
		if p.Phase != last.Phase {
			have, last = append(have, p.Phase), types.BackupProgress{}
		}
		if p.Bytes < last.Bytes || p.Entries < last.Entries || p.Bytes > p.TotalBytes || p.Entries > p.TotalEntries {
			t.Errorf("after %+v came %+v", last, p)
		}
		last = p
	}
	testkit.Diff(t, "phases", have, phases)
	if last.Bytes != last.TotalBytes || last.Entries != last.TotalEntries || last.Entries == 0 {
		t.Errorf("the last progress is %+v", last)
	}
}

// cli runs a command that must succeed, and returns what it printed.
func (n *node) cli(t *testing.T, args ...string) string {
	t.Helper()
	out, err := n.Command(args...).CombinedOutput()
	if err != nil {
		t.Fatalf("doze %v: %v: %s", args, err, out)
	}
	return string(out)
}

// refused runs a command that must fail, and returns the message.
func (n *node) refused(t *testing.T, args ...string) string {
	t.Helper()
	out, err := n.Command(args...).CombinedOutput()
	if failed, ok := errors.AsType[*exec.ExitError](err); !ok || failed.ExitCode() != 1 {
		t.Errorf("doze %v: %v", args, err)
	}
	return string(out)
}

// testBackupCommands: the commands do what they print.
func testBackupCommands(t *testing.T, n *backupNode) {
	b := n.newBox(t, func(req *types.CreateSandboxRequest) { req.Name = "shop" })
	b.exec("echo old >/srv/page; head -c 100000 /dev/urandom >/srv/random")
	first := strings.TrimSpace(n.cli(t, "backup", "create", "shop"))
	b.exec("echo new >/srv/page; echo later >/srv/later")
	if out := n.cli(t, "backup", "restore", "shop", first); out != "shop  running\n" {
		t.Errorf("restore printed %q", out)
	}
	if got := b.exec("cat /srv/page; ls /srv/later 2>/dev/null || true"); got != "old" {
		t.Errorf("the restored sandbox has %q", got)
	}
	second := strings.TrimSpace(n.cli(t, "backup", "create", "shop", "--keep-last", "1"))
	if out := n.cli(t, "backup", "ls", "shop"); !regexp.MustCompile(`^ID .*\n` + second + ` +shop +base +\d+s +\d+\.\d KiB +\d+\.\d KiB +\S+ +/\n$`).MatchString(out) {
		t.Errorf("ls printed %s", out)
	}
	if out := n.cli(t, "backup", "rm", second); out != second+"  deleted\n" {
		t.Errorf("rm printed %q", out)
	}
	if out := n.refused(t, "backup", "restore", "shop", second); !strings.HasPrefix(out, "doze: backup_not_found: ") {
		t.Errorf("restore of a deleted backup printed %s", out)
	}
	var history string
	testkit.Eventually(t, "the history is complete", func() bool {
		history = n.cli(t, "history", "shop")
		return strings.Count(history, "backup_deleted") == 2
	})
	for _, line := range []string{
		`backed_up +\S+ +\S+ KiB +backup ` + first + `, \S+ KiB sent`,
		`restored +\S+ +\S+ \S+ +backup ` + first,
		`backup_deleted +- +\S+ KiB +retention, backup ` + first,
		`backup_deleted +- +\S+ KiB +requested, backup ` + second,
	} {
		if !regexp.MustCompile(line).MatchString(history) {
			t.Errorf("the history has no line %q:\n%s", line, history)
		}
	}
}

// TestBackupSurvivesTheNode: another node with the same object store restores the backup of a node
// that has ended.
func TestBackupSurvivesTheNode(t *testing.T) {
	n := newBackupNode(t)
	b := n.newBox(t, func(req *types.CreateSandboxRequest) { req.Name = "lost" })
	b.exec(makeKinds)
	want := b.exec(describe)
	backup := b.backUp()
	info, err := n.API.Node(testkit.Context(t))
	b.must(err)
	b.must(n.API.Delete(testkit.Context(t), b.id))
	testkit.Diff(t, "backups of the destroyed sandbox", n.backups(t), []string{backup.ID})
	b.must(n.Stop())

	second := &backupNode{&node{testnode.Start(t, testnode.Config{Caddyfile: caddyfile(t, backupsBlock(n.s3, n.s3.SecretKey, backupPassword))})}, n.s3}
	about, err := second.API.Node(testkit.Context(t))
	b.must(err)
	if about.ID == info.ID {
		t.Error("the second node has the id of the first")
	}
	list, err := second.API.Backups(testkit.Context(t), "")
	b.must(err)
	testkit.Diff(t, "backups on the second node", list, []types.Backup{backup})
	restored := second.newBox(t)
	restored.restoreBackup(backup.ID)
	testkit.Diff(t, "files", restored.exec(describe), want)
	if next := restored.backUp(); next.StoredBytes > backup.StoredBytes {
		t.Errorf("a backup of the same files sent %d bytes, the first %d", next.StoredBytes, backup.StoredBytes)
	}
	// It belongs to a sandbox that this node does not know.
	b.must(second.API.DeleteBackup(testkit.Context(t), backup.ID))
	b.must(n.Start())
	if left := n.backups(t); len(left) != 1 || left[0] == backup.ID {
		t.Errorf("the first node lists %v", left)
	}
}

// writeRecords appends and syncs numbered records to /srv/log.
const writeRecords = `exec python3 -c '
import os
f = os.open("/srv/log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
n = 0
while True:
    os.write(f, b"%08d\n" % n); os.fsync(f); n += 1
'`

// testBackupHasWholeRecordsOfAWriter: each backup has all records that were synced before it began,
// and no part of another.
func testBackupHasWholeRecordsOfAWriter(t *testing.T, n *backupNode) {
	b, of := n.newBox(t), n.newBox(t)
	_, err := n.API.StartProcess(testkit.Context(t), b.id, types.StartProcessRequest{Command: types.Command{Command: writeRecords}})
	b.must(err)
	written := func() int {
		count, _ := strconv.Atoi(strings.TrimSpace(b.try("cat /srv/log | wc -l").Stdout))
		return count
	}
	synced := map[string]int{}
	for range 2 {
		least := written()
		testkit.Eventually(t, "the writer writes", func() bool { return written() > least })
		least = written()
		backup := b.backUp()
		synced[backup.ID] = least - 1 // the last may not be synced yet
	}
	for id, least := range synced {
		of.restoreBackup(id)
		of.records(least)
	}
}

// remains is what operations on disks leave on the node.
type remains struct {
	Containers, Layers, Images int      // of snapshots, in Podman's storage
	Files                      []string // in the folder of the disk helper
	Snapshots                  int      // in the list of the API
	Pending, Quarantined       int
	// Of sandboxes that the API does not list, or that are archived:
	Orphans    []string // containers
	RunFolders []string
	Mounts     []string // of containers and of buckets
}

func (n *node) remains(t *testing.T) remains {
	t.Helper()
	info, err := n.API.Node(testkit.Context(t))
	testkit.NoError(t, "node", err)
	snapshots, err := n.API.Snapshots(testkit.Context(t), "")
	testkit.NoError(t, "snapshots", err)
	root := graphRoot(t, n)
	type item struct {
		ID, Layer string
		Names     []string
	}
	read := func(kind string) (list []item) {
		text, err := os.ReadFile(filepath.Join(root, "overlay-"+kind, kind+".json"))
		testkit.NoError(t, "read "+kind, err)
		testkit.NoError(t, "decode "+kind, json.Unmarshal(text, &list))
		return list
	}
	prefix := "doze-snapshot-" + info.ID + "-"
	ours := func(i item) bool {
		return slices.ContainsFunc(i.Names, func(name string) bool { return strings.HasPrefix(name, prefix) })
	}
	r := remains{Snapshots: len(snapshots), Pending: len(info.PendingOperations), Quarantined: len(info.Quarantined)}
	layers := map[string]bool{}
	for _, l := range read("layers") {
		if ours(l) {
			r.Layers++
			layers[l.ID] = true
		}
	}
	for _, c := range read("containers") {
		if ours(c) {
			r.Containers++
		}
	}
	for _, i := range read("images") {
		if layers[i.Layer] {
			r.Images++
		}
	}
	list, err := n.API.List(testkit.Context(t), client.Filter{})
	testkit.NoError(t, "list", err)
	known, onNode := map[string]bool{}, map[string]bool{}
	for _, sb := range list {
		known[sb.ID], onNode[sb.ID] = true, sb.State != types.StateArchived
	}
	r.RunFolders = unknown(t, n, known)
	orphans := map[string]bool{} // by id
	for line := range strings.Lines(n.podman(t, "ps", "--all", "--no-trunc", "--filter", "label=doze.node="+info.ID, "--format", `{{.ID}} {{index .Labels "doze.sandbox"}}`)) {
		if id, sandbox, _ := strings.Cut(strings.TrimSpace(line), " "); !onNode[sandbox] {
			orphans[id] = true
			r.Orphans = append(r.Orphans, sandbox)
		}
	}
	inUse := map[string]bool{} // containers and their layers, also other nodes'
	for _, c := range read("containers") {
		if !orphans[c.ID] {
			inUse[c.ID], inUse[c.Layer] = true, true
		}
	}
	files, mounts, _ := strings.Cut(n.podman(t, "unshare", "sh", "-c", `find "$1" -mindepth 3 -path "*/$2.disks/*" && echo mounts: && cat /proc/self/mounts`,
		"sh", filepath.Join(root, "doze"), info.ID), "mounts:\n")
	r.Files = strings.Fields(files)
	for line := range strings.Lines(mounts) {
		path := strings.Fields(line)[1]
		at, stored := strings.CutPrefix(path, root+"/overlay")
		parts := strings.Split(at, "/") // -containers/ID/…, or /LAYER/merged
		if stored && len(parts) > 2 && !inUse[parts[1]] || strings.HasPrefix(path, n.Home+"/") {
			r.Mounts = append(r.Mounts, path)
		}
	}
	return r
}

var graphRoots struct {
	sync.Once
	root string
}

// graphRoot is the folder of Podman's storage.
func graphRoot(t *testing.T, n *node) string {
	t.Helper()
	graphRoots.Do(func() { graphRoots.root = strings.TrimSpace(n.podman(t, "info", "--format", "{{.Store.GraphRoot}}")) })
	return graphRoots.root
}

// backupHelpers are the running helpers of the tests' nodes.
func (n *node) backupHelpers() []int {
	return processes("doze-backup", n.Program("doze-backup")+"\x00run\x00")
}

// awaitRemains waits until the node has what it had before.
func (n *node) awaitRemains(t *testing.T, before remains) {
	t.Helper()
	testkit.Eventually(t, "the helpers have ended", func() bool { return len(n.backupHelpers()) == 0 })
	var now remains
	testkit.Eventually(t, "nothing is left", func() bool {
		now = n.remains(t)
		return fmt.Sprint(now) == fmt.Sprint(before)
	}, func() string { return fmt.Sprintf("before %+v, now %+v", before, now) })
}

// TestBackupOfAKilledNode kills the node at each step of a backup, beginning with the first in an object
// store.
func TestBackupOfAKilledNode(t *testing.T) {
	n := newBackupNode(t)
	running, asleep := n.newBox(t), n.newBox(t)
	before := n.remains(t)
	content := map[string]string{} // of /srv/round by backup
	round := 0
	// killed kills the node when a request that matches is blocked, and reports whether there was one.
	// The object store does not respond until all is checked.
	killed := func(match func(*http.Request) bool) bool {
		round++
		b, state := running, types.StateRunning
		if round%2 == 0 {
			b, state = asleep, types.StateAsleep
		}
		text := fmt.Sprint("round ", round)
		b.exec("echo " + text + " >/srv/round; head -c 10000 /dev/urandom >/srv/random")
		b.enter(state)
		blocked := n.block(t, match)
		defer blocked.release()
		made := make(chan types.Backup, 1)
		go func() {
			backup, err := n.API.CreateBackup(testkit.Context(t), b.id, types.CreateBackupRequest{}, nil)
			if err == nil {
				content[backup.ID] = text
			}
			made <- backup
		}()
		select {
		case <-blocked.reached:
		case backup := <-made:
			if backup.ID == "" {
				t.Fatal("the backup failed")
			}
			return false
		case <-testkit.Context(t).Done():
			t.Fatal("the backup did not reach the request")
		}
		b.must(n.Kill())
		<-made
		b.must(n.Start())
		if now := b.show(); now.State != state {
			t.Errorf("round %d: the sandbox is %s, want %s", round, now.State, state)
		}
		n.awaitRemains(t, before)
		if got := b.exec("cat /srv/round"); got != text {
			t.Errorf("round %d: the sandbox has %q", round, got)
		}
		blocked.release()
		for _, id := range n.backups(t) {
			if content[id] == "" {
				content[id] = text // complete, but not acknowledged
			}
		}
		return true
	}
	for _, step := range []struct {
		name  string
		match func(*http.Request) bool
	}{
		{"list", nth(1, isList)},
		{"creation of the repository", nth(2, isPut)},
		{"content of files", nth(1, isUpload("p"))},
		{"first index", nth(1, isUpload("xn"))},
		{"last index", nth(2, isUpload("xn"))},
	} {
		if !killed(step.match) {
			t.Errorf("the backup ended without the step: %s", step.name)
		}
	}
	last := running.backUp()
	content[last.ID] = running.exec("cat /srv/round")
	listed := n.backups(t)
	if len(listed) != len(content) {
		t.Errorf("listed are %v, acknowledged or complete %v", listed, content)
	}
	of := n.newBox(t)
	for _, id := range listed {
		of.restoreBackup(id)
		if got := of.exec("cat /srv/round"); got != content[id] {
			t.Errorf("backup %s has %q, want %q", id, got, content[id])
		}
	}
	// The disk of a stopped sandbox has become the temporary snapshot.
	of.exec("echo own >/srv/own")
	of.stop()
	blocked := n.block(t, nth(2, isPut))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		n.API.CreateBackup(testkit.Context(t), of.id, types.CreateBackupRequest{}, nil)
	}()
	testkit.Closed(t, "upload", blocked.reached)
	of.must(n.Kill())
	testkit.Closed(t, "the request ends", ended)
	of.must(n.Start())
	if of.state() != types.StateStopped {
		t.Errorf("the stopped sandbox is %s", of.state())
	}
	if got := of.exec("cat /srv/own"); got != "own" {
		t.Errorf("the stopped sandbox has %q", got)
	}
	blocked.release()
	of.must(n.API.Delete(testkit.Context(t), of.id))
	n.awaitRemains(t, before)
}

// TestBackupRestoreOfAKilledNode kills the node during downloads of a restore, and after them.
func TestBackupRestoreOfAKilledNode(t *testing.T) {
	n := newBackupNode(t)
	b := n.newBox(t)
	b.exec("mkdir /srv/files; cd /srv/files; for i in $(seq 28); do head -c 1M /dev/urandom >$i; done; echo backup >/srv/which; sha256sum * >/srv/sums")
	backup := b.backUp()
	b.restoreBackup(backup.ID)
	const check = "cd /srv/files && sha256sum --quiet -c /srv/sums && ls | wc -l && cat /srv/which"
	if got := b.exec(check); got != "28\nbackup" {
		t.Fatalf("the restored sandbox has %q", got)
	}
	before := n.remains(t)              // with the base of the disk
	var hook func(types.BackupProgress) // of the running restore
	kill := func(name string, prepare func() (due <-chan struct{}), complete bool) {
		b.exec("rm /srv/files/7; head -c 1k /dev/urandom >/srv/files/own; cd /srv/files; sha256sum * >/srv/sums; echo own >/srv/which")
		b.must(os.RemoveAll(filepath.Join(n.Home, "backups"))) // the cache
		hook = func(types.BackupProgress) {}
		due := prepare()
		ended := make(chan error, 1)
		go func() {
			_, err := n.API.RestoreBackup(testkit.Context(t), b.id, types.RestoreRequest{BackupID: backup.ID}, false, hook)
			ended <- err
		}()
		select {
		case <-due:
		case err := <-ended:
			t.Fatalf("%s: the restore ended: %v", name, err)
		case <-testkit.Context(t).Done():
			t.Fatalf("%s: the restore did not come so far", name)
		}
		b.must(n.Kill())
		err := <-ended
		b.must(n.Start())
		got := b.exec(check)
		if got != "28\nown" && (!complete || got != "28\nbackup") || err == nil && got != "28\nbackup" {
			t.Errorf("%s: the sandbox has %q; the restore ended with %v", name, got, err)
		}
		n.awaitRemains(t, before)
		testkit.Diff(t, "backups", n.backups(t), []string{backup.ID})
	}
	atRequest := func(match func(*http.Request) bool) func() <-chan struct{} {
		return func() <-chan struct{} { return n.block(t, match).reached }
	}
	kill("first list", atRequest(nth(1, isList)), false)
	kill("second pack", atRequest(nth(2, isPack)), false)
	kill("downloaded", func() <-chan struct{} {
		due := make(chan struct{})
		hook = func(p types.BackupProgress) {
			if p.TotalBytes > 0 && p.Bytes == p.TotalBytes {
				select {
				case <-due:
				default:
					close(due)
				}
			}
		}
		n.s3.Fail(nil)
		return due
	}, true)
	kill("stopped", func() <-chan struct{} {
		due := make(chan struct{})
		ctx, cancel := context.WithCancel(t.Context())
		t.Cleanup(cancel)
		await(ctx, func() { close(due) }, func() bool {
			sb, err := n.API.Get(ctx, b.id)
			return err == nil && sb.State == types.StateStopped
		})
		n.s3.Fail(nil)
		return due
	}, true)
	b.restoreBackup(backup.ID)
	if got := b.exec(check); got != "28\nbackup" {
		t.Errorf("the restored sandbox has %q", got)
	}
	n.awaitRemains(t, before)
}

// TestFaultsOfTheObjectStore: each fault has a message with a remedy, and the sandboxes stay as they are.
func TestFaultsOfTheObjectStore(t *testing.T) {
	n := newBackupNode(t)
	b, archived := n.newBox(t), n.newBox(t)
	b.exec("echo own >/srv/own; head -c 1M /dev/urandom >/srv/random")
	good := b.backUp()
	b.exec("echo later >/srv/later") // a backup has to send it
	archived.exec("echo kept >/srv/kept; head -c 1M /dev/urandom >/srv/random")
	archived.archive()
	pid := b.hostPID()
	bucket := filepath.Join(n.s3.Folder, n.s3.Bucket)
	fail := func(f s3test.Fault) func() {
		return func() { n.s3.Fail(func(*http.Request) s3test.Fault { return f }) }
	}
	recover := func() { n.s3.Fail(nil) }
	// The node has what it has sent in its cache.
	forget := func() {
		b.must(n.Stop())
		b.must(os.RemoveAll(filepath.Join(n.Home, "backups")))
		b.must(n.Start())
	}
	corrupt := func() {
		forget()
		b.must(exec.Command("cp", "--archive", bucket, bucket+"-good").Run())
		for _, key := range n.s3.Objects(t) {
			if strings.HasPrefix(key, "doze/p") {
				n.s3.Corrupt(t, key)
			}
		}
	}
	mend := func() {
		b.must(os.RemoveAll(bucket))
		b.must(os.Rename(bucket+"-good", bucket))
	}
	const unreachable, tryAgain = "object_store_failed: the object store is unreachable or fails", "try again; if that fails, the operator checks endpoint"
	for _, c := range []struct {
		name          string
		begin, end    func()
		failure, hint string
		reads         bool // the fault concerns only what is read
	}{
		{"stopped server", n.s3.Stop, n.s3.Restart, unreachable, tryAgain, false},
		{"500", fail(s3test.Fault{Status: http.StatusInternalServerError}), recover, unreachable, tryAgain, false},
		{"503", fail(s3test.Fault{Status: http.StatusServiceUnavailable}), recover, unreachable, tryAgain, false},
		{"connections that end", fail(s3test.Fault{Cut: true}), recover, unreachable, tryAgain, false},
		{"missing bucket", func() { b.must(os.Rename(bucket, bucket+"-moved")) }, func() { b.must(os.Rename(bucket+"-moved", bucket)) },
			"object_store_failed: the object store does not have the bucket", "the operator creates the bucket, or checks bucket and region", false},
		{"corrupt objects", corrupt, mend, "backup_unreadable: an object in the object store is missing or damaged", "use another backup", true},
		{"wrong secret", func() { n.restart(t, backupsBlock(n.s3, "wrong", backupPassword)) }, func() {},
			"object_store_failed: the object store refuses the node's credentials", "the operator checks access_key and secret_key", false},
		{"wrong password", func() { n.restart(t, backupsBlock(n.s3, n.s3.SecretKey, "another password")) }, func() {},
			"object_store_failed: the repository in the object store has another password", "the operator sets password", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.begin()
			defer c.end()
			b, archived := &box{t: t, node: n.node, id: b.id}, &box{t: t, node: n.node, id: archived.id}
			b.exec("true")
			since, failed := b.show().StateSince, len(b.events(types.EventTypeBackupFailed))
			commands := [][]string{{"backup", "restore", b.id, good.ID}, {"wake", archived.id}}
			if !c.reads {
				commands = append(commands, []string{"backup", "create", b.id}, []string{"archive", "--force", b.id})
			}
			for _, args := range commands {
				out := n.refused(t, args...)
				message, _, _ := strings.Cut(out, "\n")
				if !strings.HasPrefix(message, "doze: "+c.failure) || !strings.Contains(message, "; "+c.hint) {
					t.Errorf("doze %v printed %s", args, out)
				}
			}
			if now := b.show(); now.State != types.StateRunning || !now.StateSince.Equal(since) || b.hostPID() != pid || b.exec("cat /srv/own /srv/later") != "own\nlater" {
				t.Errorf("the sandbox has changed: %+v", now)
			}
			if archived.state() != types.StateArchived {
				t.Errorf("the archived sandbox is %s", archived.state())
			}
			if c.reads {
				return
			}
			if events := b.awaitEvents(types.EventTypeBackupFailed, failed+1); events[failed].Error == "" {
				t.Errorf("event %+v", events[failed])
			}
		})
	}
	n.restart(t, backupsBlock(n.s3, n.s3.SecretKey, backupPassword))
	if got := archived.exec("cat /srv/kept"); got != "kept" {
		t.Errorf("the retrieved sandbox has %q", got)
	}
	b.backUp()
	b.restoreBackup(good.ID)
}

func TestBackupNeedsAnObjectStore(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	for _, args := range [][]string{{"create", b.id}, {"restore", b.id, "b4n8r2t6w9xz"}, {"ls"}, {"rm", "b4n8r2t6w9xz"}} {
		const want = "doze: object_store_required: the node has no object store for backups; the operator configures one with the block backups in the Caddyfile\n"
		if out := n.refused(t, append([]string{"backup"}, args...)...); !strings.HasPrefix(out, want) {
			t.Errorf("doze backup %v printed %s", args, out)
		}
	}
	if b.state() != types.StateRunning {
		t.Errorf("the sandbox is %s", b.state())
	}
}

// testBackupDuringOtherOperations: other operations of the sandbox do not wait for an upload or a download.
func testBackupDuringOtherOperations(t *testing.T, n *backupNode) {
	b := n.newBox(t)
	b.exec("echo first >/srv/which; head -c 1M /dev/urandom >/srv/random")
	good := b.backUp()
	ctx := testkit.Context(t)
	type result struct {
		backup types.Backup
		err    error
	}
	begin := func(b *box, match func(*http.Request) bool) (<-chan result, *block) {
		blocked := n.block(t, nth(1, match))
		ended := make(chan result, 1)
		go func() {
			backup, err := n.API.CreateBackup(ctx, b.id, types.CreateBackupRequest{}, nil)
			ended <- result{backup, err}
		}()
		testkit.Closed(t, "an upload is blocked", blocked.reached)
		return ended, blocked
	}

	b.exec("echo second >/srv/which")
	ended, blocked := begin(b, isUpload("p")) // after the capture: the content is small
	_, err := n.API.CreateBackup(ctx, b.id, types.CreateBackupRequest{}, nil)
	if !problem.Has(err, problem.SandboxBusy) {
		t.Errorf("a second backup: %v", err)
	}
	b.exec("echo third >/srv/which")
	s := b.snapshot(types.CreateSnapshotRequest{})
	forks, err := n.API.Fork(ctx, b.id, types.ForkRequest{Count: 1})
	b.must(err)
	fork := n.boxOf(t, forks[0].ID)
	if got := fork.exec("cat /srv/which"); got != "third" {
		t.Errorf("the fork has %q", got)
	}
	b.sleep()
	b.exec("true")
	b.stop()
	b.restore(s.ID)
	other := n.newBox(t)
	otherBackup := make(chan result, 1)
	go func() {
		backup, err := n.API.CreateBackup(ctx, other.id, types.CreateBackupRequest{}, nil)
		otherBackup <- result{backup, err}
	}()
	if r := testkit.Receive(t, "backup of another sandbox", otherBackup); r.err != nil {
		t.Errorf("backup of another sandbox: %v", r.err)
	}
	b.restoreBackup(good.ID)
	if got := b.exec("cat /srv/which"); got != "first" {
		t.Errorf("restored during a backup: %q", got)
	}
	blocked.release()
	r := testkit.Receive(t, "backup", ended)
	b.must(r.err)
	b.restoreBackup(r.backup.ID)
	if got := b.exec("cat /srv/which"); got != "second" {
		t.Errorf("the backup has %q", got)
	}

	// A sandbox that is destroyed before the capture, and one that is destroyed after it.
	gone := n.newBox(t)
	gone.exec("head -c 1M /dev/urandom >/srv/random; sleep .2") // older than the clock of file times needs for an upload before the capture
	ended, blocked = begin(gone, isPut)
	gone.must(n.API.Delete(ctx, gone.id))
	blocked.release()
	if r = testkit.Receive(t, "backup of the destroyed sandbox", ended); !problem.Has(r.err, problem.SandboxDestroyed) {
		t.Errorf("a backup of a sandbox that was destroyed before the capture: %v", r.err)
	}
	gone = n.newBox(t)
	gone.exec("echo gone >/srv/which")
	ended, blocked = begin(gone, isUpload("p"))
	gone.must(n.API.Delete(ctx, gone.id))
	blocked.release()
	r = testkit.Receive(t, "backup of the destroyed sandbox", ended)
	gone.must(r.err)
	b.restoreBackup(r.backup.ID)
	if got := b.exec("cat /srv/which"); got != "gone" {
		t.Errorf("the backup of the destroyed sandbox has %q", got)
	}

	// A restore during which the sandbox is stopped, backed up, or destroyed.
	target := n.newBox(t)
	for _, destroyed := range []bool{false, true} {
		b.must(os.RemoveAll(filepath.Join(n.Home, "backups"))) // the cache
		blocked = n.block(t, nth(1, isPack))
		restored := make(chan error, 1)
		go func() {
			_, err := n.API.RestoreBackup(ctx, target.id, types.RestoreRequest{BackupID: good.ID}, false, nil)
			restored <- err
		}()
		testkit.Closed(t, "a download is blocked", blocked.reached)
		if destroyed {
			target.must(n.API.Delete(ctx, target.id))
			blocked.release()
			if err := testkit.Receive(t, "restore of the destroyed sandbox", restored); !problem.Has(err, problem.SandboxDestroyed) && !problem.Has(err, problem.SandboxNotFound) {
				t.Errorf("restore of a sandbox that was destroyed: %v", err)
			}
			continue
		}
		target.backUp()
		target.snapshot(types.CreateSnapshotRequest{})
		target.stop()
		blocked.release()
		target.must(testkit.Receive(t, "restore", restored))
		if target.state() != types.StateStopped || target.exec("cat /srv/which") != "first" {
			t.Errorf("the sandbox that was stopped during its restore is %s", target.state())
		}
	}
	for _, of := range []*box{b, fork, other} {
		of.must(n.API.Delete(ctx, of.id))
	}
	snapshots, err := n.API.Snapshots(ctx, "")
	b.must(err)
	for _, s := range snapshots {
		b.must(n.API.DeleteSnapshot(ctx, s.ID))
	}
	n.awaitRemains(t, remains{})
}

// A backup of paths contains the image's files there, and a restore replaces only the paths, in any sandbox.
func TestBackupOfPaths(t *testing.T) {
	n := newBackupNode(t)
	b := n.newBox(t)
	b.exec(`mkdir -p /srv/app/.git /srv/app/node_modules && cd /srv/app && echo 1 >page && echo 1 >node_modules/module && echo 1 >debug.log && echo 1 >gone && echo node_modules >.gitignore && echo 1 >/etc/doze-test && rm /etc/issue && chown 1000:1000 page && chmod 750 /srv`)
	before := b.exec(`stat -c '%n %u %g %a' /etc/passwd /etc/shadow /etc/doze-test /srv/app/page | tr '\n' ','`)
	ctx := testkit.Context(t)
	backup, err := n.API.CreateBackup(ctx, b.id, types.CreateBackupRequest{Paths: []string{"/srv/app", "/etc"}, Excludes: []string{"*.log"}, Gitignore: true}, nil)
	b.must(err)
	testkit.Diff(t, "paths", backup.Paths, []string{"/srv/app", "/etc"})
	if _, err := n.API.CreateBackup(ctx, b.id, types.CreateBackupRequest{Paths: []string{"/srv/none"}}, nil); !problem.Has(err, problem.RequestInvalid) || !strings.Contains(err.Error(), `"/srv/none" does not exist`) {
		t.Errorf("a path that does not exist: %v", err)
	}
	testkit.Diff(t, "the backups", n.backups(t), []string{backup.ID})

	const files = `cat /srv/app/page /srv/app/new /srv/rest /root/rest /etc/doze-test 2>/dev/null | tr '\n' ' '; ls -A /srv/app /etc/issue /etc/doze-new 2>/dev/null | tr '\n' ' '; stat -c %a /srv`
	b.exec(`cd /srv/app && echo 2 >page && echo 2 >new && rm gone && echo 2 >/srv/rest && echo 2 >/root/rest && rm -r /etc/doze-test && echo 2 >/etc/issue && echo 2 >/etc/doze-new && chmod 711 /srv`)
	b.restoreBackup(backup.ID)
	const want = "1 2 2 1 /srv/app: .git .gitignore gone page 711"
	if got := strings.Join(strings.Fields(b.exec(files)), " "); got != want {
		t.Errorf("the sandbox has %q", got)
	}
	if after := b.exec(`stat -c '%n %u %g %a' /etc/passwd /etc/shadow /etc/doze-test /srv/app/page | tr '\n' ','`); after != before {
		t.Errorf("the attributes are %q, and were %q", after, before)
	}

	// Into another sandbox, and again into that disk after a restart.
	other := n.newBox(t)
	other.exec("mkdir -p /srv/app/old && echo 3 >/srv/rest")
	for range 2 {
		other.stop()
		other.restoreBackup(backup.ID)
		if got := strings.Join(strings.Fields(other.exec("cat /srv/app/page /srv/rest; ls /srv/app")), " "); got != "1 3 gone page" {
			t.Errorf("the other sandbox has %q", got)
		}
		other.exec("echo 4 >/srv/app/page; rm /srv/app/gone")
	}
	// A folder of a path that is a file now.
	other.exec("rm -r /srv && echo file >/srv")
	if _, err := n.API.RestoreBackup(ctx, other.id, types.RestoreRequest{BackupID: backup.ID}, false, nil); !problem.Has(err, problem.RequestInvalid) || !strings.Contains(err.Error(), "not a folder") {
		t.Errorf("restore below a file: %v", err)
	}
	if got := other.exec("cat /srv"); got != "file" {
		t.Errorf("the refused restore left %q", got)
	}
}
