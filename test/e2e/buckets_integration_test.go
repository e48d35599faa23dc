//go:build integration

package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/backup/s3test"
	"github.com/doze-run/doze/test/testnode"
	"github.com/doze-run/doze/testkit"
)

// newBucketNode returns a node with the buckets data and frozen, which is read-only, of an object store, which also has
// the backups.
func newBucketNode(t *testing.T) *backupNode {
	t.Helper()
	s := s3test.Start(t)
	block := func(name, prefix, options string) string {
		return fmt.Sprintf("bucket %s {\nendpoint %s\nbucket %s\nregion us-east-1\naccess_key %s\nsecret_key %s\nprefix %s\n%s}\n", name, s.URL, s.Bucket, s.AccessKey, s.SecretKey, prefix, options)
	}
	config := block("data", "data/", "") + block("frozen", "frozen/", "read_only\n") + backupsBlock(s, s.SecretKey, backupPassword)
	return &backupNode{&node{testnode.Start(t, testnode.Config{Caddyfile: caddyfile(t, config)})}, s}
}

func (b *box) mount(req types.MountRequest) types.Mount {
	b.t.Helper()
	m, err := b.node.API.Mount(testkit.Context(b.t), b.id, req)
	b.must(err)
	return m
}

// mounted returns how many buckets are mounted in the sandbox.
func (b *box) mounted() int {
	b.t.Helper()
	return strings.Count(b.exec("cat /proc/self/mountinfo"), " fuse.doze-bucket ")
}

func TestBucketIsAFolderOfTheSandbox(t *testing.T) {
	n := newBucketNode(t)
	b, other := n.newBox(t), n.newBox(t)
	b.mount(types.MountRequest{Bucket: "data", Path: "/data"})
	other.mount(types.MountRequest{Bucket: "data", Prefix: "a", Path: "/srv/a", ReadOnly: true})
	b.exec("mkdir -p /data/a/b && seq 1000 >/data/a/b/numbers && head -c 20M /dev/zero >/data/a/large && echo x >/data/top")
	b.exec("useradd -m user && su user -c 'echo from user >/data/a/user'")
	if objects := strings.Join(n.s3.Objects(t), " "); !strings.Contains(objects, "data/a/b/numbers") || !strings.Contains(objects, "data/top") {
		t.Errorf("the object store has %s", objects)
	}
	if got := other.exec("sha256sum </srv/a/b/numbers; stat -c %s /srv/a/large; cat /srv/a/user; ls /srv/a"); got != b.exec("seq 1000 | sha256sum; echo 20971520; echo from user; ls /data/a") {
		t.Errorf("the other sandbox reads %q", got)
	}
	for what, command := range map[string]string{
		"a read-only mount":  "echo x >/srv/a/new",
		"a read-only bucket": "echo x >/frozen/new",
	} {
		if what == "a read-only bucket" {
			other.mount(types.MountRequest{Bucket: "frozen", Path: "/frozen"})
		}
		if out := other.exec("(" + command + ") 2>&1; true"); !strings.Contains(out, "Read-only file system") {
			t.Errorf("a write to %s: %q", what, out)
		}
	}
	b.exec("mv /data/top /data/moved && rm /data/a/large && cd /data && git init -q repository && cd repository && echo a >f && git add f && git -c user.name=a -c user.email=a@example.com commit -qm a && git fsck")
	if out := b.exec("env; cat /proc/self/mountinfo /proc/mounts"); strings.Contains(out, n.s3.SecretKey) {
		t.Error("the sandbox sees the secret")
	}
	b.must(n.API.Unmount(testkit.Context(t), b.id, "/data"))
	if out := b.exec("ls -A /data"); out != "" || b.mounted() != 0 {
		t.Errorf("unmounted, the folder has %q", out)
	}
}

// The sandbox renames the folder above a mount, and puts a link to another mount in its place.
func TestSandboxCannotPreventAnUnmount(t *testing.T) {
	n := newBucketNode(t)
	b := n.newBox(t)
	b.mount(types.MountRequest{Bucket: "data", Prefix: "a", Path: "/a/data"})
	b.mount(types.MountRequest{Bucket: "data", Prefix: "b", Path: "/b/data"})
	b.exec("echo a >/a/data/f && echo b >/b/data/f && mv /a /moved && ln -s /b /a && cat /moved/data/f")
	b.must(n.API.Unmount(testkit.Context(t), b.id, "/a/data"))
	if out := b.exec("ls -A /moved/data; cat /b/data/f"); out != "b" || b.mounted() != 1 {
		t.Errorf("after the unmount: %q, %d mounts", out, b.mounted())
	}
}

func TestBucketsOutliveSleepStopAndNode(t *testing.T) {
	n := newBucketNode(t)
	b := n.newBox(t)
	b.mount(types.MountRequest{Bucket: "data", Path: "/data"})
	b.exec("echo first >/data/f")
	check := func(when string) {
		t.Helper()
		if out := b.exec("cat /data/f"); out != "first" || b.mounted() != 1 {
			t.Errorf("%s: %q, %d mounts", when, out, b.mounted())
		}
	}
	b.sleep()
	check("after a sleep")
	b.stop()
	check("after a stop")
	for _, state := range []types.State{types.StateRunning, types.StateAsleep} {
		b.enter(state)
		testkit.NoError(t, "stop", n.Stop())
		testkit.NoError(t, "start", n.Start())
		check("after a restart of the node while it was " + string(state))
	}
	b.enter(types.StateRunning)
	testkit.NoError(t, "kill", n.Kill())
	testkit.NoError(t, "start", n.Start())
	check("after the node was killed")

	// The helper is killed: the node starts another one.
	testkit.NoError(t, "kill", syscall.Kill(n.child(t, "doze-bucket"), syscall.SIGKILL))
	testkit.Eventually(t, "the bucket is mounted again", func() bool { return b.exec("cat /data/f 2>/dev/null; true") == "first" })
	check("after the helper was killed")

	forks, err := n.API.Fork(testkit.Context(t), b.id, types.ForkRequest{Count: 1})
	b.must(err)
	if out, err := n.API.Exec(testkit.Context(t), string(forks[0].ID), client.ExecRequest{Command: types.Command{Command: "cat /data/f"}}); err != nil || out.Stdout != "first\n" {
		t.Errorf("the fork reads %+v, %v", out, err)
	}
	b.must(n.API.Delete(testkit.Context(t), b.id))
	if objects := n.s3.Objects(t); len(objects) != 1 {
		t.Errorf("the object store has %v", objects)
	}
}

func TestBucketsOutliveArchiveAndRestore(t *testing.T) {
	n := newBucketNode(t)
	b := n.newBox(t)
	b.exec("echo disk >/srv/f")
	mounted := b.mount(types.MountRequest{Bucket: "data", Path: "/data"})
	b.exec("echo bucket >/data/f")
	snapshot := b.snapshot(types.CreateSnapshotRequest{})
	backup := b.backUp()
	for what, act := range map[string]func(){
		"archive":                func() { b.archive() },
		"archive while stopped":  func() { b.stop(); b.archive() },
		"restore":                func() { b.restore(snapshot.ID) },
		"restore while stopped":  func() { b.stop(); b.restore(snapshot.ID) },
		"restore while archived": func() { b.archive(); b.restore(snapshot.ID) },
		"restore of a backup":    func() { b.restoreBackup(backup.ID) },
	} {
		act()
		if out := b.exec("cat /srv/f /data/f && echo " + "'" + what + "' >/data/written && cat /data/written"); out != "disk\nbucket\n"+what || b.mounted() != 1 {
			t.Errorf("after %s: %q, %d mounts", what, out, b.mounted())
		}
		if content, err := os.ReadFile(filepath.Join(n.s3.Folder, n.s3.Bucket, "data/written")); err != nil || string(content) != what+"\n" {
			t.Errorf("after %s the object store has %q, %v", what, content, err)
		}
	}
	mounts, err := n.API.Mounts(testkit.Context(t), b.id)
	b.must(err)
	testkit.Diff(t, "mounts", mounts, []types.Mount{mounted})
	b.must(n.API.Unmount(testkit.Context(t), b.id, "/data"))
	for _, kind := range []types.EventType{types.EventTypeMounted, types.EventTypeUnmounted} {
		if events := b.awaitEvents(kind, 1); len(events) != 1 || events[0].DurationMS == 0 {
			t.Errorf("events %+v", events)
		}
	}
}

func TestKilledProgramDoesNotWaitForTheObjectStore(t *testing.T) {
	n := newBucketNode(t)
	b := n.newBox(t)
	b.mount(types.MountRequest{Bucket: "data", Path: "/data"})
	arrived, resume := make(chan struct{}, 100), make(chan struct{})
	n.s3.Fail(func(req *http.Request) s3test.Fault {
		if req.Method == http.MethodPut {
			arrived <- struct{}{}
			<-resume
		}
		return s3test.Fault{}
	})
	defer close(resume)
	ended := make(chan types.ExecResult, 1)
	go func() {
		result, _ := n.API.Exec(testkit.Context(t), string(b.id), client.ExecRequest{Command: types.Command{Command: "dd if=/etc/hostname of=/data/f"}})
		ended <- result
	}()
	testkit.Receive(t, "an upload", arrived)
	b.exec("kill -9 $(pidof dd)")
	testkit.Receive(t, "the end of the program", ended)
}

func TestFailedMountsAreExplained(t *testing.T) {
	n := newBucketNode(t)
	b := n.newBox(t)
	b.exec("ln -s /srv /link")
	for _, c := range []struct {
		req  types.MountRequest
		code problem.Code
		want string
	}{
		{types.MountRequest{Bucket: "none", Path: "/data"}, problem.RequestInvalid, "data, frozen"},
		{types.MountRequest{Bucket: "data", Path: "/link/data"}, problem.MountPointInvalid, "symbolic link"},
		{types.MountRequest{Bucket: "data", Path: "/etc/passwd"}, problem.MountPointInvalid, "/etc/passwd"},
		{types.MountRequest{Bucket: "data", Path: "/proc/1"}, problem.RequestInvalid, "mount point"},
	} {
		_, err := n.API.Mount(testkit.Context(t), b.id, c.req)
		wantProblem(t, err, c.code, c.want)
	}
	n.s3.Stop()
	_, err := n.API.Mount(testkit.Context(t), b.id, types.MountRequest{Bucket: "data", Path: "/data"})
	wantProblem(t, err, problem.ObjectStoreFailed, "unreachable")
	if b.mounted() != 0 || b.exec("ls -d /data 2>&1; true") == "/data" {
		t.Error("a failed mount changed the sandbox")
	}
	n.s3.Restart()
	b.mount(types.MountRequest{Bucket: "data", Path: "/data"})
	// A write that does not reach the bucket fails when the file is closed.
	n.s3.Stop()
	if out := b.exec("echo lost >/data/f; echo status $?"); !strings.Contains(out, "status 1") && !strings.Contains(out, "status 2") {
		t.Errorf("a write without the object store: %q", out)
	}
	n.s3.Restart()
	b.exec("echo kept >/data/f && test \"$(cat /data/f)\" = kept")
}

// wantProblem fails unless err is a problem with this code and text.
func wantProblem(t *testing.T, err error, code problem.Code, text string) {
	t.Helper()
	if p, ok := errors.AsType[*problem.Problem](err); !ok || p.Code != code || !strings.Contains(p.Detail, text) {
		t.Errorf("got %v, want %s with %q", err, code, text)
	}
}
