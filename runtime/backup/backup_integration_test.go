//go:build integration

package backup_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/backup"
	"github.com/doze-run/doze/runtime/backup/s3test"
	"github.com/doze-run/doze/runtime/disk/disktest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/backupstest"
	"github.com/doze-run/doze/testkit"
)

const password = "correct horse battery staple"

// configOf returns the configuration of a client of the server.
func configOf(t testing.TB, n *disktest.Node, s *s3test.Server) backup.Config {
	return backup.Config{
		ObjectStore: backup.ObjectStore{Endpoint: s.URL, Bucket: s.Bucket, Prefix: "doze/", Region: "us-east-1", AccessKey: s.AccessKey, SecretKey: s.SecretKey},
		Password:    password, Helper: disktest.Program("doze-backup"), NetnsHelper: disktest.Program("doze-netns"),
		Disks: n.Disks, Folder: t.TempDir(), Node: n.ID, Log: slog.New(slog.DiscardHandler),
	}
}

func clientOf(t testing.TB, cfg backup.Config) *backup.Client {
	t.Helper()
	c := backup.New(cfg)
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// rig is a node with an object store and the containers of a test.
type rig struct {
	testing.TB
	ctx  context.Context
	node *disktest.Node
	s3   *s3test.Server
	cfg  backup.Config
	*backup.Client
}

func newRig(t testing.TB) *rig {
	t.Helper()
	r := &rig{TB: t, ctx: testkit.Context(t), node: disktest.Open(t), s3: s3test.Start(t)}
	r.cfg = configOf(t, r.node, r.s3)
	r.Client = clientOf(t, r.cfg)
	return r
}

// snapshot returns a snapshot of a container, which is deleted with the test.
func (r *rig) snapshot(id sandbox.ID) sandbox.SnapshotID {
	r.Helper()
	s := r.snapshotID()
	testkit.NoError(r, "move", r.node.Disks.Move(r.ctx, id, s))
	return s
}

func (r *rig) snapshotID() sandbox.SnapshotID {
	s := sandbox.SnapshotID(sandbox.NewID())
	r.Cleanup(func() { testkit.NoError(r, "delete", r.node.Disks.Delete(testkit.Context(r), s)) })
	return s
}

func record(id sandbox.ID) sandbox.Backup {
	return sandbox.Backup{
		ID: sandbox.BackupID(sandbox.NewID()), Owner: "owner", Sandbox: id, CreatedAt: time.Now().UTC(), Origin: sandbox.Sandbox{Image: "base", ImageRef: disktest.BaseImage},
	}
}

func ignore(sandbox.BackupProgress) {}

// backUp moves the disk of a container to a snapshot, and backs up the snapshot.
func (r *rig) backUp(id sandbox.ID) (sandbox.Backup, sandbox.SnapshotID) {
	r.Helper()
	s := r.snapshot(id)
	b, err := r.Create(r.ctx, record(id), s, ignore)
	testkit.NoError(r, "back up", err)
	return b, s
}

// restore returns a new container with the disk of a backup.
func (r *rig) restore(b sandbox.Backup) sandbox.ID {
	r.Helper()
	s := r.snapshotID()
	_, err := r.Restore(r.ctx, b, s, false, ignore)
	testkit.NoError(r, "restore", err)
	return r.node.Create(r, sandbox.SnapshotRef(s))
}

func TestBackupsConform(t *testing.T) {
	backupstest.Run(t, func(t *testing.T) backupstest.System {
		r := newRig(t)
		image := "localhost/doze/test-backup:" + string(sandbox.NewID())
		version := 0
		build := func(t testing.TB) {
			t.Helper()
			version++
			script := fmt.Sprintf(`cd %s; mkdir -p etc tmp proc sys dev run srv; echo %d >etc/version; echo root:x:0:0::/: >etc/passwd; tar -c . | podman import --quiet - %s; podman image prune --force`, t.TempDir(), version, image)
			if out, err := exec.Command("sh", "-ec", script).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
		}
		build(t)
		t.Cleanup(func() {
			if out, err := exec.Command("sh", "-ec", "podman image prune --force; podman rmi "+image).CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		})
		system := backupstest.System{System: r.node.System(), Backups: r.Client, RebuildImage: build}
		system.Spec = func(t testing.TB, id sandbox.ID) sandbox.ContainerSpec {
			spec := r.node.Spec(t, id)
			spec.ImageRef = image
			return spec
		}
		system.MoreBackups = func(t testing.TB) sandbox.Backups {
			cfg := configOf(t, r.node, r.s3)
			cfg.Node = string(sandbox.NewID())
			return clientOf(t, cfg)
		}
		return system
	})
}

// furnish writes entries of all kinds, above the image and above the snapshot of an earlier call.
const furnish = `cd "$root"
case $1 in
1)
	mkdir -p srv/a/deep/er srv/empty srv/replaced srv/gone srv/opaque
	echo one >srv/a/file; head -c 300000 /dev/urandom >srv/a/random; : >srv/a/nothing
	chmod 4755 srv/a/file; chown 1000:2000 srv/a/random; chmod 1777 srv/empty; chmod 0 srv/a/nothing
	ln srv/a/file srv/link; ln srv/a/file srv/a/deep/link; ln -s ../nowhere srv/symlink; chown -h 5:6 srv/symlink; ln srv/symlink srv/symlink-2
	touch -d 2001-02-03T04:05:06.789123456Z srv/a/file; touch -h -d 1999-01-01 srv/symlink
	touch -d 1600-01-01 srv/a/early; touch -d 2300-01-01 srv/a/late
	mkfifo -m 620 srv/pipe; mknod srv/whiteout-like c 0 0 || true
	truncate -s 1T srv/sparse; printf x | dd of=srv/sparse bs=1 seek=$((3 << 30)) conv=notrunc 2>/dev/null
	truncate -s 5M srv/holes; truncate -s 100 srv/small-hole
	cp /bin/true srv/capable
	python3 -c '
import os, struct
none = 0xffffffff
def acl(*entries): return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *e) for e in entries)
os.setxattr("srv/a/file", "user.note", b"some value"); os.setxattr("srv/a", "user.binary", bytes(range(256)))
os.setxattr("srv/a/random", "system.posix_acl_access", acl((1, 6, none), (2, 7, 7), (4, 4, none), (16, 7, none), (32, 4, none)))
os.setxattr("srv/empty", "system.posix_acl_default", acl((1, 7, none), (4, 5, none), (8, 5, 9), (16, 5, none), (32, 5, none)))
os.setxattr("srv/capable", "security.capability", struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0))'
	printf x >"srv/$(printf 'not\377utf8')"; printf x >srv/doze-encoded-41; printf x >"srv/with
newline"; printf x >"srv/$(printf %0255d 0)"
	echo 1 >srv/replaced/1; echo 1 >srv/gone/1; echo 1 >srv/opaque/1; echo 1 >srv/file-then-folder; mkdir srv/folder-then-file
	rm -r usr/share/doc; mkdir usr/share/doc; echo new >usr/share/doc/new; rm etc/issue; echo changed >etc/motd
	touch -d 2010-01-01T00:00:00.5Z srv/a/deep srv/a srv ;;
2)
	rm -r srv/gone srv/replaced; mkdir srv/replaced; echo 2 >srv/replaced/2; rm -r srv/opaque; mkdir srv/opaque; rm srv/a/nothing
	rm srv/file-then-folder; mkdir srv/file-then-folder; echo 2 >srv/file-then-folder/2; rmdir srv/folder-then-file; echo 2 >srv/folder-then-file
	echo two >>srv/a/deep/link; chmod 700 srv/a/deep; python3 -c 'import os; os.removexattr("srv/a", "user.binary")'; rm -r usr/share/doc
	touch -d 2011-01-01 srv/a ;;
esac`

// description prints a line for each entry of a disk, with all properties that a backup preserves. It omits the
// root, which Podman creates for each container.
const description = `
import hashlib, os, stat, sys
first = {}
def extents(fd, size):
    at = 0
    while at < size:
        try: start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError: return
        at = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, at
def describe(path):
    st = os.lstat(path)
    xattrs = sorted((n, os.getxattr(path, n, follow_symlinks=False)) for n in os.listxattr(path, follow_symlinks=False))
    line = [path, oct(st.st_mode), st.st_uid, st.st_gid, st.st_mtime_ns, st.st_rdev, xattrs]
    if not stat.S_ISDIR(st.st_mode):
        line += [st.st_size, first.setdefault(st.st_ino, path)]
    if stat.S_ISLNK(st.st_mode): line.append(os.readlink(path))
    if stat.S_ISREG(st.st_mode):
        fd = os.open(path, os.O_RDONLY)
        for start, end in extents(fd, st.st_size):
            line += [start, end, hashlib.sha256(os.pread(fd, end - start, start)).hexdigest()]
        os.close(fd)
    print(line)
os.chdir(os.fsencode(sys.argv[1]))
for folder, folders, files in os.walk(b"."):
    folders.sort()
    for name in sorted(folders + files): describe(os.path.join(folder, name))`

func describe(t testing.TB, id sandbox.ID) []string {
	t.Helper()
	return strings.Split(disktest.Unshare(t, id, `python3 -c "$1" "$root"`, description), "\n")
}

func TestRestoreIsByteForByte(t *testing.T) {
	r := newRig(t)
	first := r.node.Create(t, disktest.BaseImage)
	disktest.Unshare(t, first, furnish, "1")
	want1 := describe(t, first)
	one, s := r.backUp(first)
	second := r.node.Create(t, sandbox.SnapshotRef(s))
	disktest.Unshare(t, second, furnish, "2")
	want2 := describe(t, second)
	two, _ := r.backUp(second)

	for _, c := range []struct {
		backup sandbox.Backup
		want   []string
	}{{one, want1}, {two, want2}} {
		id := r.restore(c.backup)
		testkit.Diff(t, "entries", describe(t, id), c.want)
		again, _ := r.backUp(id)
		if again.Stored > 100<<10 {
			t.Errorf("a backup of the restored disk stored %d bytes", again.Stored)
		}
	}
}

// random writes count files of so many KiB into folder of a container.
func random(t testing.TB, id sandbox.ID, folder string, count, kib int) {
	t.Helper()
	disktest.Unshare(t, id, `mkdir -p "$root/srv/$1"; for i in $(seq "$2"); do head -c "$3"k /dev/urandom >"$root/srv/$1/$i"; done`, folder, fmt.Sprint(count), fmt.Sprint(kib))
}

// TestSecondBackupSendsWhatHasChanged: 1 % of the files changed.
func TestSecondBackupSendsWhatHasChanged(t *testing.T) {
	r := newRig(t)
	id := r.node.Create(t, disktest.BaseImage)
	random(t, id, "data", 1000, 12)
	first, s := r.backUp(id)
	if first.Usage.Bytes != 1000*12<<10 || first.Stored < first.Usage.Bytes {
		t.Errorf("the first backup has %d bytes and stored %d", first.Usage.Bytes, first.Stored)
	}
	changed := r.node.Create(t, sandbox.SnapshotRef(s))
	random(t, changed, "data", 10, 12)
	r.s3.ResetCounts()
	second, _ := r.backUp(changed)
	if second.Usage != first.Usage {
		t.Errorf("the second backup has %+v, the first %+v", second.Usage, first.Usage)
	}
	if sent := r.s3.Uploaded(); sent > first.Stored/10 || second.Stored > sent || second.Stored < 10*12<<10 {
		t.Errorf("the second backup sent %d bytes and reports %d; the first stored %d", sent, second.Stored, first.Stored)
	}
}

func wantFailure(t testing.TB, what string, err error, want sandbox.ObjectStoreFailure) {
	t.Helper()
	failed, ok := errors.AsType[*sandbox.ObjectStoreError](err)
	if !ok || failed.Failure != want {
		t.Errorf("%s: %v, want the failure %q", what, err, want)
	}
}

func TestFailuresOfTheObjectStoreAreNamed(t *testing.T) {
	r := newRig(t)
	id := r.node.Create(t, disktest.BaseImage)
	random(t, id, "data", 10, 100)
	good, s := r.backUp(id)
	with := func(change func(*backup.Config)) *backup.Client {
		cfg := r.cfg
		cfg.Folder = t.TempDir() // the cache must not conceal the failure
		change(&cfg)
		return clientOf(t, cfg)
	}
	for name, c := range map[string]struct {
		change func(*backup.Config)
		want   sandbox.ObjectStoreFailure
	}{
		"wrong secret": {func(c *backup.Config) { c.SecretKey = "wrong" }, sandbox.ObjectStoreDenied},
		"wrong key":    {func(c *backup.Config) { c.AccessKey = "wrong" }, sandbox.ObjectStoreDenied},
		"no bucket":    {func(c *backup.Config) { c.Bucket = "missing" }, sandbox.ObjectStoreNoBucket},
		"no server":    {func(c *backup.Config) { c.Endpoint = "http://127.0.0.1:1" }, sandbox.ObjectStoreUnreachable},
		"password":     {func(c *backup.Config) { c.Password = "another password" }, sandbox.ObjectStorePassword},
	} {
		client := with(c.change)
		_, err := client.List(r.ctx, "owner")
		wantFailure(t, "list, "+name, err, c.want)
		_, err = client.Create(r.ctx, record(id), s, ignore)
		wantFailure(t, "create, "+name, err, c.want)
		_, err = client.Restore(r.ctx, good, r.snapshotID(), false, ignore)
		wantFailure(t, "restore, "+name, err, c.want)
		wantFailure(t, "delete, "+name, client.Delete(r.ctx, []sandbox.BackupID{good.ID}), c.want)
	}
	list, err := r.List(r.ctx, "owner")
	if err != nil || len(list) != 1 || list[0].ID != good.ID {
		t.Errorf("after the failures: %v, %v", list, err)
	}
}

// TestInterruptedBackupIsResumed: the S3 server fails during a backup. The next backup is complete, and does not upload
// again what the server has.
func TestInterruptedBackupIsResumed(t *testing.T) {
	const (
		files    = 60 << 20
		attempts = 10 // at one pack, after which the backup fails
		overhead = 1 << 20
	)
	r := newRig(t)
	id := r.node.Create(t, disktest.BaseImage)
	random(t, id, "data", files>>20, 1024)
	s := r.snapshot(id)
	var failures, stored atomic.Int64
	var complete, failing atomic.Pointer[string] // keys of packs
	r.s3.Fail(func(q *http.Request) s3test.Fault {
		if q.Method != http.MethodPut || q.ContentLength < 1<<20 {
			return s3test.Fault{}
		}
		if key := q.URL.Path; !complete.CompareAndSwap(nil, &key) && *complete.Load() != key {
			failing.CompareAndSwap(nil, &key)
			if *failing.Load() == key && failures.Add(1) <= attempts {
				return s3test.Fault{Cut: true}
			}
		}
		stored.Add(q.ContentLength)
		return s3test.Fault{}
	})
	_, err := r.Create(r.ctx, record(id), s, ignore)
	wantFailure(t, "a server that fails", err, sandbox.ObjectStoreUnreachable)
	if list, err := r.List(r.ctx, "owner"); err != nil || len(list) != 0 {
		t.Errorf("after the failure: %v, %v", list, err)
	}
	if failures.Load() < attempts || stored.Load() < 20<<20 {
		t.Fatalf("%d uploads failed, and the server stored %d bytes", failures.Load(), stored.Load())
	}
	r.s3.Fail(nil)
	r.s3.ResetCounts()
	b, err := r.Create(r.ctx, record(id), s, ignore)
	testkit.NoError(t, "back up again", err)
	if sent, missing := r.s3.Uploaded(), files-stored.Load(); sent > missing+overhead {
		t.Errorf("the second backup sent %d bytes; the server lacked %d", sent, missing)
	}
	want := disktest.Unshare(t, r.node.Create(t, sandbox.SnapshotRef(s)), `cd "$root/srv/data" && sha256sum *`)
	if got := disktest.Unshare(t, r.restore(b), `cd "$root/srv/data" && sha256sum *`); got != want {
		t.Errorf("restored %s, want %s", got, want)
	}
}

// TestBriefFailuresAreRetried: a server that responds 500 and 503 now and then, slowly.
func TestBriefFailuresAreRetried(t *testing.T) {
	r := newRig(t)
	id := r.node.Create(t, disktest.BaseImage)
	random(t, id, "data", 30, 1024)
	var requests atomic.Int64
	r.s3.Fail(func(*http.Request) s3test.Fault {
		switch requests.Add(1) % 4 {
		case 0:
			return s3test.Fault{Status: http.StatusInternalServerError}
		case 1:
			return s3test.Fault{Status: http.StatusServiceUnavailable, Delay: 20 * time.Millisecond}
		case 2:
			return s3test.Fault{CutResponse: 1 << 20}
		}
		return s3test.Fault{}
	})
	b, _ := r.backUp(id)
	r.restore(b)
}

// TestDamageIsFound: a bad disk of the object store changes, and loses, objects.
func TestDamageIsFound(t *testing.T) {
	for _, kind := range []string{"p", "q"} { // packs of content, and of folders
		for name, damage := range map[string]func(*rig, string){
			"changed": func(r *rig, key string) {
				path := filepath.Join(r.s3.Folder, r.s3.Bucket, key)
				content, err := os.ReadFile(path)
				testkit.NoError(r, "read", err)
				for i := range content {
					content[i] ^= 0x55
				}
				testkit.NoError(r, "damage", os.WriteFile(path, content, 0o600))
			},
			"missing": func(r *rig, key string) {
				testkit.NoError(r, "remove", os.Remove(filepath.Join(r.s3.Folder, r.s3.Bucket, key)))
			},
		} {
			t.Run(kind+" "+name, func(t *testing.T) {
				r := newRig(t)
				id := r.node.Create(t, disktest.BaseImage)
				random(t, id, "data", 20, 100)
				b, _ := r.backUp(id)
				damaged := 0
				for _, key := range r.s3.Objects(t) {
					if strings.HasPrefix(key, "doze/"+kind) {
						damage(r, key)
						damaged++
					}
				}
				if damaged == 0 {
					t.Fatalf("no object to damage in %q", r.s3.Objects(t))
				}
				cfg := r.cfg
				cfg.Folder = t.TempDir()
				_, err := clientOf(t, cfg).Restore(r.ctx, b, r.snapshotID(), false, ignore)
				wantFailure(t, "restore", err, sandbox.ObjectStoreDamaged)
			})
		}
	}
}

// TestChecksumsOfPacks: packs are sent with a CRC-32C, and with an MD5 to an object store that demands it.
func TestChecksumsOfPacks(t *testing.T) {
	for name, demanded := range map[string]bool{"CRC-32C": false, "MD5": true} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			id := r.node.Create(t, disktest.BaseImage)
			random(t, id, "data", 4, 1024)
			var crc, md5 atomic.Int64
			r.s3.Fail(func(q *http.Request) s3test.Fault {
				if q.Method != http.MethodPut || !strings.HasPrefix(q.URL.Path, "/"+r.s3.Bucket+"/doze/p") {
					return s3test.Fault{}
				}
				if q.Header.Get("Content-Md5") != "" {
					md5.Add(1)
				} else if q.Header.Get("X-Amz-Checksum-Crc32c") != "" {
					crc.Add(1)
					if demanded {
						return s3test.Fault{Status: http.StatusBadRequest}
					}
				}
				return s3test.Fault{}
			})
			before := describe(t, id)
			b, _ := r.backUp(id)
			if crc.Load() == 0 || md5.Load() > 0 != demanded {
				t.Errorf("%d packs came with a CRC-32C, %d with an MD5", crc.Load(), md5.Load())
			}
			testkit.Diff(t, "the restored disk", describe(t, r.restore(b)), before)
		})
	}
}

// helpers returns the ids of the processes of the helper program.
func helpers(t testing.TB, program string) (pids []string) {
	t.Helper()
	out, _ := exec.Command("pgrep", "-f", "^"+program+" run").Output()
	return strings.Fields(string(out))
}

// TestKilledHelperLeavesNothing: a killed helper leaves no backup, and the next backup is complete.
func TestKilledHelperLeavesNothing(t *testing.T) {
	r := newRig(t)
	id := r.node.Create(t, disktest.BaseImage)
	random(t, id, "data", 40, 1024)
	s := r.snapshot(id)
	blocked, release := make(chan struct{}), make(chan struct{})
	var once atomic.Bool
	r.s3.Fail(func(q *http.Request) s3test.Fault {
		if q.Method == http.MethodPut && q.ContentLength > 1<<20 && once.CompareAndSwap(false, true) {
			close(blocked)
			<-release
		}
		return s3test.Fault{}
	})
	failed := make(chan error, 1)
	go func() {
		_, err := r.Create(r.ctx, record(id), s, ignore)
		failed <- err
	}()
	testkit.Closed(t, "an upload", blocked)
	pids := helpers(t, r.cfg.Helper)
	if len(pids) == 0 {
		t.Fatal("no helper runs")
	}
	testkit.NoError(t, "kill", exec.Command("kill", append([]string{"-KILL"}, pids...)...).Run())
	if err := <-failed; err == nil {
		t.Error("the backup succeeded")
	}
	close(release)
	r.s3.Fail(nil)
	if list, err := r.List(r.ctx, "owner"); err != nil || len(list) != 0 {
		t.Errorf("after the kill: %v, %v", list, err)
	}
	b, err := r.Create(r.ctx, record(id), s, ignore)
	testkit.NoError(t, "back up again", err)
	r.restore(b)
}

// TestSecretsAreNotOnTheDisk: neither the credentials nor the password are in the cache, and the content of
// the sandbox is not readable in the object store.
func TestSecretsAreNotOnTheDisk(t *testing.T) {
	r := newRig(t)
	id := r.node.Create(t, disktest.BaseImage)
	disktest.Unshare(t, id, `echo "the secret content" >"$root/srv/secret-name"`)
	b, _ := r.backUp(id)
	r.restore(b)
	for folder, secrets := range map[string][]string{
		r.cfg.Folder: {r.cfg.SecretKey, password, "secret content", "secret-name"}, r.s3.Folder: {"secret content", "secret-name", password},
	} {
		err := filepath.WalkDir(folder, func(path string, e os.DirEntry, err error) error {
			if err != nil || !e.Type().IsRegular() {
				return err
			}
			content, err := os.ReadFile(path)
			for _, secret := range secrets {
				if bytes.Contains(content, []byte(secret)) {
					t.Errorf("%s contains %q", path, secret)
				}
			}
			return err
		})
		testkit.NoError(t, "read "+folder, err)
	}
}

// TestMaintenanceKeepsBackups also runs maintenance from another node.
func TestMaintenanceKeepsBackups(t *testing.T) {
	r := newRig(t)
	testkit.NoError(t, "maintain an empty bucket", r.Maintain(r.ctx))
	id := r.node.Create(t, disktest.BaseImage)
	random(t, id, "data", 10, 100)
	b, _ := r.backUp(id)
	testkit.NoError(t, "maintain", r.Maintain(r.ctx))
	testkit.NoError(t, "maintain from another node", clientOf(t, configOf(t, disktest.Open(t), r.s3)).Maintain(r.ctx))
	r.restore(b)
}
