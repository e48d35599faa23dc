//go:build integration

package e2e

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

func (b *box) archive() types.Sandbox {
	b.t.Helper()
	sb, err := b.node.API.Archive(testkit.Context(b.t), b.id, false, nil)
	b.must(err)
	if sb.State != types.StateArchived {
		b.t.Fatalf("the sandbox is %s", sb.State)
	}
	return sb
}

// awaitOffNode waits until Podman's storage has nothing of an archived sandbox.
func (n *backupNode) awaitOffNode(t *testing.T, b *box, before remains) {
	t.Helper()
	n.awaitRemains(t, before)
	if left := n.podman(t, "ps", "--all", "--format", "{{.Names}}"); strings.Contains(left, b.id) {
		t.Errorf("the container of the archived sandbox is left: %s", left)
	}
}

// TestArchiveLeavesNothingOnTheNode: a wake brings back the disk, also after the node was killed, and a request to a
// preview starts the declared server.
func TestArchiveLeavesNothingOnTheNode(t *testing.T) {
	n := newBackupNode(t)
	before := n.remains(t)
	b := n.newWebBox(t)
	c := n.browser(t, "h2")
	started, _ := b.get(c, "/started", http.StatusOK)
	b.exec(makeKinds)
	want := b.exec(describe)
	b.archive()
	n.awaitOffNode(t, b, before)
	b.must(n.Kill())
	b.must(n.Start())
	if b.state() != types.StateArchived {
		t.Errorf("after the end of the node it is %s", b.state())
	}
	again, header := b.get(c, "/started", http.StatusOK)
	if again == started || header.Get("Doze-Wake") != "cold" {
		t.Errorf("the preview has %q, before %q; headers %v", again, started, header)
	}
	testkit.Diff(t, "files", b.exec(describe), want)
	archived, retrieved := b.awaitEvents(types.EventTypeArchived, 1)[0], b.awaitEvents(types.EventTypeRetrieved, 1)[0]
	if archived.Bytes == 0 || archived.StoredBytes == 0 || archived.DurationMS == 0 || retrieved.Bytes != archived.Bytes || retrieved.DurationMS == 0 {
		t.Errorf("events %+v, %+v", archived, retrieved)
	}
	testkit.Eventually(t, "the archive is deleted", func() bool { return len(n.backups(t)) == 0 })

	b.archive()
	list, err := n.API.Backups(testkit.Context(t), b.id)
	b.must(err)
	if err := n.API.DeleteBackup(testkit.Context(t), list[0].ID); !problem.Has(err, problem.BackupInUse) {
		t.Errorf("deletion of the archive: %v", err)
	}
	b.must(n.API.Delete(testkit.Context(t), b.id))
	testkit.Eventually(t, "the archive of the destroyed sandbox is deleted", func() bool { return len(n.backups(t)) == 0 })
	n.awaitOffNode(t, b, before)
}

// TestArchiveOfAKilledNode kills the node during the upload and during the download.
func TestArchiveOfAKilledNode(t *testing.T) {
	n := newBackupNode(t)
	before := n.remains(t)
	b := n.newBox(t)
	b.exec("mkdir /srv/files; cd /srv/files; for i in $(seq 28); do head -c 1M /dev/urandom >$i; done; sha256sum * >/srv/sums")
	const check = "cd /srv/files && sha256sum --quiet -c /srv/sums && ls | wc -l"
	kill := func(name string, match func(*http.Request) bool, use func() error, want types.State) {
		t.Helper()
		b.must(os.RemoveAll(filepath.Join(n.Home, "backups"))) // the cache
		blocked := n.block(t, match)
		defer blocked.release()
		ended := make(chan error, 1)
		go func() { ended <- use() }()
		testkit.Closed(t, name, blocked.reached)
		b.must(n.Kill())
		if err := <-ended; err == nil {
			t.Errorf("%s: the call of the killed node succeeded", name)
		}
		b.must(n.Start())
		if b.state() != want {
			t.Errorf("%s: the sandbox is %s, want %s", name, b.state(), want)
		}
	}
	archive := func() error {
		_, err := n.API.Archive(testkit.Context(t), b.id, false, nil)
		return err
	}
	for name, match := range map[string]func(*http.Request) bool{
		"first pack": nth(1, isUpload("p")), "second pack": nth(2, isUpload("p")), "last index": nth(2, isUpload("xn")),
	} {
		kill("upload, "+name, match, archive, types.StateStopped)
		if got := b.exec(check); got != "28" {
			t.Errorf("after the upload was cut off: %q", got)
		}
		testkit.Eventually(t, "the incomplete archive is deleted", func() bool { return len(n.backups(t)) == 0 })
		b.exec("cd /srv/files; for i in $(seq 28); do head -c 1M /dev/urandom >$i; done; sha256sum * >/srv/sums") // content that the object store does not have
	}
	b.archive()
	n.awaitOffNode(t, b, before)
	wake := func() error {
		_, err := n.API.Wake(testkit.Context(t), b.id)
		return err
	}
	for name, match := range map[string]func(*http.Request) bool{"list": nth(1, isList), "first pack": nth(1, isPack), "second pack": nth(2, isPack)} {
		kill("download, "+name, match, wake, types.StateArchived)
		n.awaitOffNode(t, b, before)
	}
	if got := b.exec(check); got != "28" {
		t.Errorf("after the download was cut off: %q", got)
	}
}

// Requests of uploads and downloads, in order. The packs have the content of files.
var (
	uploads   = []func() func(*http.Request) bool{atNth(1, isPut), atNth(1, isUpload("p")), atNth(2, isUpload("xn"))}
	downloads = []func() func(*http.Request) bool{atNth(1, isList), atNth(1, isPack), atNth(2, isPack)}
)

// atNth returns a function that returns nth, whose count begins then.
func atNth(n int64, match func(*http.Request) bool) func() func(*http.Request) bool {
	return func() func(*http.Request) bool { return nth(n, match) }
}

// transfers are the operations between disks and the object store, each with the requests during which processes are killed.
var transfers = map[string]struct {
	during []func() func(*http.Request) bool
	// prepare comes before the operation, and returns the id of the backup to restore.
	prepare func(n *backupNode, b *box) (backup string)
	run     func(n *backupNode, b *box, backup string) error
}{
	"archive": {
		uploads, func(*backupNode, *box) string { return "" },
		func(n *backupNode, b *box, _ string) error {
			_, err := n.API.Archive(testkit.Context(b.t), b.id, true, nil)
			return err
		},
	},
	"retrieval": {
		downloads, func(_ *backupNode, b *box) string { b.archive(); return "" },
		func(n *backupNode, b *box, _ string) error {
			_, err := n.API.Wake(testkit.Context(b.t), b.id)
			return err
		},
	},
	"backup": {
		uploads, func(*backupNode, *box) string { return "" },
		func(n *backupNode, b *box, _ string) error {
			_, err := n.API.CreateBackup(testkit.Context(b.t), b.id, types.CreateBackupRequest{}, nil)
			return err
		},
	},
	"restore": {
		downloads, func(_ *backupNode, b *box) string {
			backup := b.backUp().ID
			b.exec("echo changed >/srv/changed")
			return backup
		},
		func(n *backupNode, b *box, backup string) error {
			_, err := n.API.RestoreBackup(testkit.Context(b.t), b.id, types.RestoreRequest{BackupID: backup}, true, nil)
			return err
		},
	},
}

// TestKilledProcessesLeaveWholeArchivesAndBackups kills processes other than the node during transfers. Other tests
// kill the node.
func TestKilledProcessesLeaveWholeArchivesAndBackups(t *testing.T) {
	n := newBackupNode(t)
	before := n.remains(t)
	killBackupHelper := func(*node, *box) int { return signal(n.backupHelpers(), syscall.SIGKILL) }
	for name, o := range transfers {
		processes := []string{"backup helper", "disk helper", "podman"}
		if name == "backup" || name == "restore" { // of a running sandbox
			processes = append(processes, "guest", "monitor")
		}
		for i, victim := range processes {
			request := i % len(o.during)
			t.Run(fmt.Sprintf("%s/%s at request %d", name, victim, request), func(t *testing.T) {
				b := n.newBox(t)
				b.exec("head -c 28M /dev/urandom >/srv/file; sha256sum /srv/file >/srv/sum")
				b.startWriter()
				records := b.acknowledged()
				backup := o.prepare(n, b)
				b.must(os.RemoveAll(filepath.Join(n.Home, "backups"))) // the cache
				kill := victims[victim]
				if victim == "backup helper" {
					kill = killBackupHelper
				}
				blocked := n.block(t, o.during[request]())
				ended := make(chan error, 1)
				go func() { ended <- o.run(n, b, backup) }()
				testkit.Closed(t, "the transfer", blocked.reached)
				if kill(n.node, b) == 0 {
					t.Errorf("no %s was killed", victim)
				}
				blocked.release()
				err := testkit.Receive(t, "the end of the operation", ended)
				if victim == "backup helper" && err == nil {
					t.Error("the operation succeeded without its helper")
				}
				b.exec("sha256sum --quiet -c /srv/sum")
				b.records(records)
				if changed := b.try("cat /srv/changed").ExitCode == 0; name == "restore" && changed != (err != nil) {
					t.Errorf("the restore ended with %v; the disk is the sandbox's own: %t", err, changed)
				}
				b.must(o.run(n, b, backup)) // again
				b.exec("sha256sum --quiet -c /srv/sum")
				b.records(records)
				b.must(n.API.Delete(testkit.Context(t), b.id))
				for _, id := range n.backups(t) {
					b.must(n.API.DeleteBackup(testkit.Context(t), id))
				}
				n.awaitRemains(t, before)
			})
		}
	}
}
