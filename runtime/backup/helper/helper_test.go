package helper

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/repo/blob"
	"github.com/kopia/kopia/repo/blob/filesystem"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/backup/wire"
	"github.com/doze-run/doze/runtime/disk/tree"
	"github.com/doze-run/doze/testkit"
)

// rig is a repository in a folder.
type rig struct {
	*testing.T
	blobs, cache string
	password     string
	fail         func(blob.ID) error // of uploads; may be nil
}

// faulty is a storage with the faults of a rig.
type faulty struct {
	blob.Storage
	*rig
}

func (f faulty) PutBlob(ctx context.Context, id blob.ID, data blob.Bytes, opts blob.PutOptions) error {
	if f.fail != nil {
		if err := f.fail(id); err != nil {
			return err
		}
	}
	return f.Storage.PutBlob(ctx, id, data, opts)
}

func newRig(t *testing.T) *rig {
	return &rig{T: t, blobs: t.TempDir(), cache: t.TempDir(), password: "correct horse battery staple"}
}

// open opens the repository for a request, until the test has ended.
func (r *rig) open(request wire.Request) (*repository, error) {
	r.Helper()
	ctx := testkit.Context(r)
	storage, err := filesystem.New(ctx, &filesystem.Options{Path: r.blobs}, false)
	testkit.NoError(r, "open the storage", err)
	request.Password, request.Cache, request.Node = r.password, r.cache, "test"
	opened, err := openIn(ctx, &store{Storage: faulty{storage, r}}, request)
	if err == nil {
		r.Cleanup(opened.close)
	}
	return opened, err
}

// backUp backs up a disk.
func (r *rig) backUp(id string, layers, below []string) wire.Result {
	r.Helper()
	result, err := r.backUpPart(id, wire.Request{Layers: layers, Below: below})
	testkit.NoError(r, "back up", err)
	return result
}

// backUpPart backs up the part of a disk that the request names.
func (r *rig) backUpPart(id string, request wire.Request) (wire.Result, error) {
	r.Helper()
	request.Operation, request.Owner, request.Limit, request.IDs, request.Sandbox = wire.Create, "owner", cmp.Or(request.Limit, 10), []string{id}, "sandbox"
	request.Time, request.Record = time.Now(), json.RawMessage(fmt.Sprintf(`{"id":%q}`, id))
	opened, err := r.open(request)
	testkit.NoError(r, "open", err)
	result, err := opened.backUp(testkit.Context(r), request, discarded())
	return result, opened.explain(err)
}

// restore restores a backup, and returns the folder.
func (r *rig) restore(id string) (string, wire.Result, error) {
	r.Helper()
	request := wire.Request{Operation: wire.Restore, IDs: []string{id}, Target: filepath.Join(r.TempDir(), "target")}
	opened, err := r.open(request)
	testkit.NoError(r, "open", err)
	result, err := opened.restore(testkit.Context(r), request, discarded())
	return request.Target, result, opened.explain(err)
}

func discarded() *peer { return newPeer(io.Discard) }

// entryLine has the properties of an entry that a backup preserves.
type entryLine struct {
	Mode, UID, GID   uint32
	Device           uint64
	Modified         time.Time
	Attributes       map[string]string
	Opaque, Whiteout bool
	Content          string // hash of a file, target of a symbolic link, or first path of a hard link
	Size             int64
	Extents          []tree.Extent
}

// diskOf describes the entries of a disk by their paths.
func diskOf(t *testing.T, layers, below []string) map[string]entryLine {
	t.Helper()
	disk, err := tree.OpenLayers(layers, below)
	testkit.NoError(t, "open", err)
	defer disk.Close()
	st, err := disk.Stat()
	testkit.NoError(t, "stat", err)
	attributes, err := disk.RootAttributes()
	testkit.NoError(t, "attributes", err)
	all := map[string]entryLine{"": lineOf(&st, attributes)}
	firsts := map[inode]string{}
	var walk func(f *tree.Folder, at string)
	walk = func(f *tree.Folder, at string) {
		entries, err := f.Entries()
		testkit.NoError(t, "entries", err)
		for _, e := range entries {
			name := path.Join(at, e.Name)
			attributes, err := f.Attributes(e)
			testkit.NoError(t, "attributes", err)
			line := lineOf(&e.Stat, attributes)
			line.Opaque, line.Whiteout = e.Opaque(), e.Whiteout()
			first, linked := firsts[inodeOf(e)]
			switch {
			case e.Kind() == unix.S_IFDIR:
				inner, err := f.Folder(e)
				testkit.NoError(t, "folder", err)
				walk(inner, name)
				inner.Close()
			case linked:
				line.Content = "link to " + first
			case e.Kind() == unix.S_IFLNK:
				line.Content, err = f.Readlink(e)
				testkit.NoError(t, "readlink", err)
			case e.Kind() == unix.S_IFREG:
				file, err := f.Open(e)
				testkit.NoError(t, "open", err)
				content := sha256.New()
				line.Size, err = io.Copy(content, file)
				testkit.NoError(t, "read", err)
				line.Extents, _, err = tree.Extents(file, e.Stat.Size)
				testkit.NoError(t, "extents", err)
				line.Content = fmt.Sprintf("%x", content.Sum(nil))
				file.Close()
			}
			firsts[inodeOf(e)] = name
			all[name] = line
		}
	}
	walk(disk, "")
	return all
}

func lineOf(st *unix.Stat_t, attributes map[string][]byte) entryLine {
	line := entryLine{Mode: st.Mode, UID: st.Uid, GID: st.Gid, Device: st.Rdev, Modified: time.Unix(st.Mtim.Unix()).UTC()}
	for name, value := range attributes {
		if line.Attributes == nil {
			line.Attributes = map[string]string{}
		}
		line.Attributes[name] = string(value)
	}
	return line
}

// setTime sets the time of the last modification of an entry, which may be a link.
func setTime(t *testing.T, file string, at time.Time) {
	t.Helper()
	times := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Sec: at.Unix(), Nsec: int64(at.Nanosecond())}}
	testkit.NoError(t, "set the time", unix.UtimesNanoAt(unix.AT_FDCWD, file, times, unix.AT_SYMLINK_NOFOLLOW))
}

// makeDisk returns the layers of a disk with all kinds of entries that a backup preserves, highest first, and the
// layers of its image.
func makeDisk(t *testing.T) (layers, below []string) {
	t.Helper()
	high, low, image := t.TempDir(), t.TempDir(), t.TempDir()
	run := func(errs ...error) {
		t.Helper()
		testkit.NoError(t, "make the disk", errors.Join(errs...))
	}
	set := func(file, name, value string) { run(unix.Lsetxattr(file, name, []byte(value), 0)) }
	in := func(name string) string { return filepath.Join(high, name) }
	for _, root := range []string{high, low, image} {
		run(os.Chmod(root, 0o755), os.Mkdir(filepath.Join(root, "both"), 0o755), os.WriteFile(filepath.Join(root, "both", "file"), []byte(root), 0o600))
	}
	run(os.Mkdir(filepath.Join(image, "gone"), 0o755), os.Mkdir(filepath.Join(image, "opaque"), 0o755), os.WriteFile(filepath.Join(image, "opaque/old"), nil, 0o600))
	run(os.WriteFile(filepath.Join(low, "both/low"), []byte("low"), 0o644), os.Link(filepath.Join(low, "both/low"), filepath.Join(low, "low-link")))
	run(os.WriteFile(filepath.Join(low, "both/removed"), nil, 0o644), unix.Mknod(in("both/removed"), unix.S_IFCHR, 0))

	run(unix.Mknod(in("gone"), unix.S_IFCHR, 0), os.Mkdir(in("opaque"), 0o750), os.WriteFile(in("opaque/new"), []byte("new"), 0o600))
	set(in("opaque"), "user.overlay.opaque", "y")
	set(in("opaque"), "user.note", "\x00\xff")
	set(high, "user.note", "root")
	run(os.WriteFile(in("program"), []byte("run"), 0o600), os.Chmod(in("program"), 0o755|os.ModeSetuid))
	set(in("program"), "user.note", "kept")
	run(os.Link(in("program"), in("z-link")), os.Link(in("program"), in("opaque/z-link")))
	run(os.Symlink("/no/where", in("symlink")), os.Link(in("symlink"), in("symlink-link")), os.Symlink(strings.Repeat("x", 4000), in("long")))
	run(unix.Mkfifo(in("fifo"), 0o600), os.Chmod(in("fifo"), 0o620), os.Link(in("fifo"), in("fifo-link")), unix.Mknod(in("socket"), unix.S_IFSOCK|0o600, 0))
	run(os.Mkdir(in("sticky"), 0o700), os.Chmod(in("sticky"), 0o777|os.ModeSticky), os.Mkdir(in("sticky/empty"), 0o700))
	run(os.WriteFile(in("\xff name"), []byte("not UTF-8"), 0o600), os.Mkdir(in("doze-encoded-61"), 0o700), os.WriteFile(in("doze-encoded-61/\xfe"), []byte("x"), 0o600))
	run(os.WriteFile(in("unreadable"), []byte("x"), 0o400), os.WriteFile(in("nothing"), nil, 0o600))
	run(os.WriteFile(in("large"), []byte(strings.Repeat("a line of a large file\n", 1<<18)), 0o600))
	const block = 1 << 20
	sparse, err := os.Create(in("sparse"))
	run(err)
	for _, at := range []int64{block, 3 * block} {
		_, err := sparse.WriteAt([]byte(strings.Repeat("s", block)), at)
		run(err)
	}
	run(sparse.Truncate(5*block+1), sparse.Close(), os.WriteFile(in("hole"), nil, 0o600), os.Truncate(in("hole"), 3*block))
	for i, name := range []string{"program", "symlink", "fifo", "gone", "sticky", "opaque", "both"} {
		setTime(t, in(name), time.Unix(981173106+int64(i), 789))
	}
	setTime(t, in("nothing"), time.Date(2300, 1, 2, 3, 4, 5, 6, time.UTC)) // Kopia cannot store it
	setTime(t, in("sticky/empty"), time.Date(2301, 1, 2, 3, 4, 5, 6, time.UTC))
	return []string{high, low}, []string{image}
}

func TestRestoredDiskIsTheSame(t *testing.T) {
	r := newRig(t)
	layers, below := makeDisk(t)
	want := diskOf(t, layers, below)
	for _, name := range []string{"gone", "both/low", "low-link", "opaque/new", "doze-encoded-61/\xfe", "socket"} {
		if _, ok := want[name]; !ok {
			t.Fatalf("the disk has no %q", name)
		}
	}
	created := r.backUp("first", layers, below)
	if created.Usage.Entries != int64(len(want)) {
		t.Errorf("the backup has %d entries, want %d", created.Usage.Entries, len(want))
	}
	target, restored, err := r.restore("first")
	testkit.NoError(t, "restore", err)
	testkit.Diff(t, "the restored disk", diskOf(t, []string{target}, below), want)
	if restored.Usage.Entries != created.Usage.Entries {
		t.Errorf("%d entries were restored, want %d", restored.Usage.Entries, created.Usage.Entries)
	}
}

func TestRestoreLeavesNoContentInTheCache(t *testing.T) {
	r := newRig(t)
	layers, below := makeDisk(t)
	r.backUp("first", layers, below)
	opened, err := r.open(wire.Request{Operation: wire.List})
	testkit.NoError(t, "open", err)
	manifests, err := opened.find(testkit.Context(t), map[string]string{backupTag: "first"})
	testkit.NoError(t, "find the backup", err)
	w := writer{ctx: testkit.Context(t), source: opened, details: map[string]*detail{}}
	entries, err := w.entries(manifests[0].RootEntry)
	testkit.NoError(t, "read the root", err)
	for _, e := range entries {
		if e.Name == detailsName {
			testkit.NoError(t, "read a file", w.readDetails(e))
		}
	}
	if len(r.contents()) == 0 {
		t.Fatal("Kopia caches the content of files in another folder")
	}
	_, _, err = r.restore("first")
	testkit.NoError(t, "restore", err)
	if left := r.contents(); len(left) > 0 {
		t.Errorf("the cache has %q", left)
	}
}

// contents returns the content of files that the cache has.
func (r *rig) contents() []string {
	files, err := filepath.Glob(filepath.Join(cacheFolder(wire.Request{Cache: r.cache}), "contents", "*"))
	testkit.NoError(r, "read the cache", err)
	return files
}

func TestSecondBackupStoresOnlyChanges(t *testing.T) {
	r := newRig(t)
	layers, below := makeDisk(t)
	content := make([]byte, 4<<20)
	for i := range content {
		content[i] = byte(i * i >> 8)
	}
	testkit.NoError(t, "write", os.WriteFile(filepath.Join(layers[1], "more"), content, 0o600))
	first := r.backUp("first", layers, below)
	testkit.NoError(t, "write", os.WriteFile(filepath.Join(layers[0], "added"), []byte("added"), 0o600))
	testkit.NoError(t, "remove", os.Remove(filepath.Join(layers[0], "large")))
	second := r.backUp("second", layers, below)
	if first.Stored == 0 || second.Stored > first.Stored/2 {
		t.Errorf("the first backup stored %d bytes, the second one %d", first.Stored, second.Stored)
	}
	for id, large := range map[string]bool{"first": true, "second": false} {
		target, _, err := r.restore(id)
		testkit.NoError(t, "restore", err)
		_, missing := os.Lstat(filepath.Join(target, "large"))
		if large != (missing == nil) {
			t.Errorf("the backup %s has the removed file: %v", id, missing)
		}
	}
}

// TestFailedBackupIsResumed: one upload fails.
func TestFailedBackupIsResumed(t *testing.T) {
	r := newRig(t)
	layer, content := t.TempDir(), make([]byte, 4<<20)
	rand.Read(content)
	testkit.NoError(t, "write", os.WriteFile(filepath.Join(layer, "file"), content, 0o600))
	var once sync.Once
	r.fail = func(id blob.ID) (err error) {
		if strings.HasPrefix(string(id), "p") {
			once.Do(func() { err = errors.New("the object store fails") })
		}
		return err
	}
	if _, err := r.backUpPart("first", wire.Request{Layers: []string{layer}}); describe(err).Code != wire.Unreachable {
		t.Fatalf("a failed upload: %v", err)
	}
	if second := r.backUp("second", []string{layer}, nil); second.Stored > int64(len(content))/10 {
		t.Errorf("the second backup stored %d bytes of %d again", second.Stored, len(content))
	}
}

func TestBackupsOfAnOwnerAreListedAndDeleted(t *testing.T) {
	r := newRig(t)
	if opened, err := r.open(wire.Request{Operation: wire.List}); err != nil || opened.DirectRepository != nil {
		t.Fatalf("opened a missing repository: %v", err)
	}
	layer := t.TempDir()
	for _, id := range []string{"first", "second"} {
		r.backUp(id, []string{layer}, nil)
	}
	opened, err := r.open(wire.Request{Operation: wire.Delete})
	testkit.NoError(t, "open", err)
	ctx := testkit.Context(t)
	ids := func(owner string) []string {
		t.Helper()
		backups, err := opened.list(ctx, owner)
		testkit.NoError(t, "list", err)
		var all []string
		for _, b := range backups {
			var record struct{ ID string }
			testkit.NoError(t, "decode the record", json.Unmarshal(b.Record, &record))
			all = append(all, record.ID)
		}
		return all
	}
	testkit.Diff(t, "the backups of another owner", ids("other"), []string(nil))
	if got := ids("owner"); len(got) != 2 {
		t.Errorf("the backups are %v", got)
	}
	testkit.NoError(t, "delete", opened.delete(ctx, []string{"first", "missing"}))
	testkit.Diff(t, "the backups", ids("owner"), []string{"second"})
	if _, _, err := r.restore("first"); describe(err).Code != wire.NotFound {
		t.Errorf("restored a deleted backup: %v", err)
	}
	testkit.NoError(t, "maintain", opened.maintain(ctx))
}

func TestBackupsOfAnOwnerAreLimited(t *testing.T) {
	r := newRig(t)
	r.backUp("first", []string{t.TempDir()}, nil)
	r.backUp("second", []string{t.TempDir()}, nil)
	_, err := r.backUpPart("third", wire.Request{Layers: []string{t.TempDir()}, Limit: 2})
	if describe(err).Code != wire.Limit {
		t.Errorf("an owner with as many backups as allowed: %v", err)
	}
}

func TestWrongPasswordIsReported(t *testing.T) {
	r := newRig(t)
	r.backUp("first", []string{t.TempDir()}, nil)
	r.password, r.cache = "another password", t.TempDir()
	if _, err := r.open(wire.Request{Operation: wire.List}); err == nil || describe(err).Code != wire.Password {
		t.Errorf("opened it: %v", err)
	}
}

func TestCanceledBackupStoresNoBackup(t *testing.T) {
	r := newRig(t)
	layers, below := makeDisk(t)
	request := wire.Request{
		Operation: wire.Create, Owner: "owner", Limit: 1, IDs: []string{"first"}, Time: time.Now(), Record: json.RawMessage(`{}`), Layers: layers, Below: below,
	}
	opened, err := r.open(request)
	testkit.NoError(t, "open", err)
	ctx, cancel := context.WithCancel(testkit.Context(t))
	cancel()
	if _, err := opened.backUp(ctx, request, discarded()); !errors.Is(err, context.Canceled) {
		t.Errorf("created it: %v", err)
	}
	if _, _, err := r.restore("first"); describe(err).Code != wire.NotFound {
		t.Errorf("restored it: %v", err)
	}
}

// TestFullDiskIsReported, also if the object store failed before.
func TestFullDiskIsReported(t *testing.T) {
	r := &repository{store: &store{failed: &wire.Error{Code: wire.Unreachable}}}
	for _, cause := range []error{syscall.ENOSPC, syscall.EDQUOT} {
		failed := fmt.Errorf("restore: %w", os.NewSyscallError("write", cause))
		for name, err := range map[string]error{"open": failed, "serve": r.explain(failed)} {
			if got := describe(err); got.Code != wire.Full || got.Message != failed.Error() {
				t.Errorf("%s: %v is %+v", name, cause, got)
			}
		}
	}
}

// flushes records when a writer is flushed.
type flushes struct {
	repo.RepositoryWriter
	start time.Time
	at    []time.Duration
}

func (f *flushes) Flush(context.Context) error {
	f.at = append(f.at, time.Since(f.start))
	return nil
}

// TestCheckpoints of a backup that sends nothing in the first 7 seconds.
func TestCheckpoints(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &flushes{start: time.Now()}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		sent := func() int64 { return max(int64(time.Since(w.start)), int64(7*time.Second)) }
		testkit.NoError(t, "flush", flushRegularly(ctx, w, sent, cancel))
		testkit.Diff(t, "the first checkpoints", w.at[:2], []time.Duration{10 * time.Second, 15 * time.Second})
		if last := w.at[len(w.at)-2:]; last[1]-last[0] != maxCheckpoint || len(w.at) > 120 {
			t.Errorf("%d checkpoints, the last at %v", len(w.at), last)
		}
	})
}
