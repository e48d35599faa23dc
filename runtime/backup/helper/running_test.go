package helper

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/backup/wire"
	"github.com/doze-run/doze/runtime/disk/tree/treetest"
	"github.com/doze-run/doze/testkit"
)

// programs are what the node does during the backup of a running sandbox.
type programs struct {
	stopped  func() // is called when programs must stop
	captured func() // is called when they may continue
}

// backUpRunning backs up the disk of running programs.
func (r *rig) backUpRunning(id string, request wire.Request, n programs) (wire.Result, error) {
	r.Helper()
	request.Operation, request.Owner, request.Limit, request.IDs, request.Sandbox = wire.Create, "owner", cmp.Or(request.Limit, 10), []string{id}, "sandbox"
	request.Time, request.Running = time.Now(), true
	opened, err := r.open(request)
	testkit.NoError(r, "open", err)
	in, out := io.Pipe()
	defer out.Close()
	p := newPeer(out)
	ctx := testkit.Context(r)
	go func() {
		for messages := json.NewDecoder(in); ; {
			var m wire.Message
			if messages.Decode(&m) != nil {
				return
			}
			var o wire.Order
			switch {
			case m.Ready:
				n.stopped()
			case m.Captured:
				n.captured()
				o.Record = json.RawMessage(fmt.Sprintf(`{"id":%q}`, id))
			default:
				continue
			}
			select {
			case p.orders <- o:
			case <-ctx.Done():
				return
			}
		}
	}()
	result, err := opened.backUp(ctx, request, p)
	return result, opened.explain(err)
}

func ignore() {}

func TestRestoredDiskOfARunningSandboxIsTheSame(t *testing.T) {
	for name, settled := range map[string]bool{"uploaded while programs run": true, "captured": false} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			layers, below := makeDisk(t)
			if settled {
				treetest.AwaitSettled(t)
			}
			want := diskOf(t, layers, below)
			created, err := r.backUpRunning("first", wire.Request{Layers: layers, Below: below}, programs{ignore, func() { testkit.NoError(t, "remove", os.RemoveAll(layers[0])) }})
			testkit.NoError(t, "back up", err)
			target, restored, err := r.restore("first")
			testkit.NoError(t, "restore", err)
			testkit.Diff(t, "the restored disk", diskOf(t, []string{target}, below), want)
			if created.Usage.Entries != int64(len(want)) || restored.Usage.Entries != created.Usage.Entries {
				t.Errorf("%d entries were stored, %d restored, want %d", created.Usage.Entries, restored.Usage.Entries, len(want))
			}
		})
	}
}

func TestOnlyChangedFilesAreReadWhileProgramsAreStopped(t *testing.T) {
	r := newRig(t)
	top := t.TempDir()
	for i := range 100 {
		testkit.NoError(t, "write", os.WriteFile(filepath.Join(top, fmt.Sprint(i)), []byte("before"), 0o600))
	}
	treetest.AwaitSettled(t)
	opens, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	testkit.NoError(t, "watch", err)
	defer unix.Close(opens)
	events := make([]byte, 64<<10)
	n := 0
	_, err = r.backUpRunning("first", wire.Request{Layers: []string{top}}, programs{
		func() {
			testkit.NoError(t, "write", os.WriteFile(filepath.Join(top, "50"), []byte("after"), 0o600))
			testkit.NoError(t, "rename", os.Rename(filepath.Join(top, "60"), filepath.Join(top, "renamed")))
			_, err := unix.InotifyAddWatch(opens, top, unix.IN_OPEN)
			testkit.NoError(t, "watch", err)
		},
		func() {
			n, err = unix.Read(opens, events)
			testkit.NoError(t, "read the opens", err)
		},
	})
	testkit.NoError(t, "back up", err)
	opened := map[string]bool{}
	for at := 0; at < n; {
		length := int(binary.NativeEndian.Uint32(events[at+12:])) // struct inotify_event
		if name := strings.TrimRight(string(events[at+16:at+16+length]), "\x00"); name != "" {
			opened[name] = true
		}
		at += 16 + length
	}
	testkit.Diff(t, "opened files", opened, map[string]bool{"50": true, "renamed": true}) // a rename changes the time of a file
	target, _, err := r.restore("first")
	testkit.NoError(t, "restore", err)
	testkit.Diff(t, "the restored disk", diskOf(t, []string{target}, nil), diskOf(t, []string{top}, nil))
}

// TestDiskThatChangesDuringPasses changes all kinds of entries all the time, except while the programs are stopped.
func TestDiskThatChangesDuringPasses(t *testing.T) {
	r := newRig(t)
	top, below := t.TempDir(), t.TempDir()
	for i := range 40 {
		testkit.NoError(t, "write", os.WriteFile(filepath.Join(below, fmt.Sprintf("f%d", i)), []byte("below"), 0o600))
	}
	// More than enoughCaptured, so that there are several passes.
	large := make([]byte, enoughCaptured+1)
	for i := range large {
		large[i] = byte(i * i >> 10)
	}
	testkit.NoError(t, "write", os.WriteFile(filepath.Join(top, "large"), large, 0o600))
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	for range 500 {
		change(top, random)
	}
	treetest.AwaitSettled(t)
	for round := range 4 {
		stop, running := make(chan chan struct{}), make(chan struct{})
		end, cancel := context.WithCancel(t.Context())
		go func() {
			defer close(running)
			for end.Err() == nil {
				select {
				case stopped := <-stop:
					stopped <- struct{}{}
					select {
					case <-stopped:
					case <-end.Done():
					}
				default:
					change(top, random)
				}
			}
		}()
		var want map[string]entryLine
		stopped := make(chan struct{})
		id := fmt.Sprint(round)
		_, err := r.backUpRunning(id, wire.Request{Layers: []string{top, below}}, programs{
			func() {
				stop <- stopped
				<-stopped
				want = diskOf(t, []string{top, below}, nil)
			},
			func() { stopped <- struct{}{} },
		})
		cancel()
		<-running
		testkit.NoError(t, "back up", err)
		target, _, err := r.restore(id)
		testkit.NoError(t, "restore", err)
		testkit.Diff(t, "the restored disk", diskOf(t, []string{target}, nil), want)
	}
}

// change makes a random change in a folder. Errors do not matter, because entries have all kinds.
func change(top string, random *rand.Rand) {
	names := []string{}
	for range 2 {
		name := fmt.Sprintf("f%d", random.IntN(40))
		if random.IntN(3) == 0 {
			name = filepath.Join("d"+fmt.Sprint(random.IntN(5)), name)
		}
		names = append(names, filepath.Join(top, name))
	}
	a, b := names[0], names[1]
	switch random.IntN(12) {
	case 0:
		os.Mkdir(filepath.Join(top, fmt.Sprintf("d%d", random.IntN(5))), 0o755)
	case 1:
		os.Mkdir(a, 0o700)
	case 2:
		os.RemoveAll(a)
	case 3:
		os.Rename(a, b)
	case 4:
		os.Link(a, b)
	case 5:
		os.Symlink("f1", a)
	case 6:
		os.Chmod(a, os.FileMode(random.IntN(0o777))|0o600)
	case 7:
		unix.Lsetxattr(a, "user.doze", []byte(fmt.Sprint(random.IntN(100))), 0)
	case 8:
		os.Truncate(a, int64(random.IntN(200_000)))
	case 9:
		if file, err := os.OpenFile(a, os.O_WRONLY, 0); err == nil {
			file.WriteAt([]byte(fmt.Sprint(random.Uint64())), int64(random.IntN(150_000)))
			file.Close()
		}
	case 10:
		os.Rename(filepath.Join(top, fmt.Sprintf("d%d", random.IntN(5))), filepath.Join(top, fmt.Sprintf("d%d", random.IntN(5))))
	default:
		os.WriteFile(a, bytes.Repeat([]byte(fmt.Sprint(random.Uint64())), random.IntN(3000)), 0o600)
	}
}

// A file that was written just before the backup is uploaded by a later pass, and not while programs are stopped.
func TestLargeNewFileIsUploadedWhileProgramsRun(t *testing.T) {
	r := newRig(t)
	top := t.TempDir()
	content := make([]byte, enoughCaptured+1)
	for i := range content {
		content[i] = byte(i * i >> 9)
	}
	name := filepath.Join(top, "new")
	testkit.NoError(t, "write", os.WriteFile(name, content, 0o600))
	opens, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	testkit.NoError(t, "watch", err)
	defer unix.Close(opens)
	_, err = r.backUpRunning("first", wire.Request{Layers: []string{top}}, programs{
		func() {
			_, err := unix.InotifyAddWatch(opens, name, unix.IN_OPEN)
			testkit.NoError(t, "watch", err)
		},
		func() {
			if n, _ := unix.Read(opens, make([]byte, 4096)); n > 0 {
				t.Error("the file was read while programs were stopped")
			}
		},
	})
	testkit.NoError(t, "back up", err)
	target, _, err := r.restore("first")
	testkit.NoError(t, "restore", err)
	testkit.Diff(t, "the restored disk", diskOf(t, []string{target}, nil), diskOf(t, []string{top}, nil))
}

func TestDiskThatIsGoneNeedsASnapshot(t *testing.T) {
	r := newRig(t)
	top := t.TempDir()
	for name, request := range map[string]struct {
		layers []string
		remove bool
	}{
		"before the passes":  {[]string{filepath.Join(top, "none")}, false},
		"before the capture": {[]string{top}, true},
	} {
		_, err := r.backUpRunning("first", wire.Request{Layers: request.layers}, programs{func() {
			if request.remove {
				testkit.NoError(t, "remove", os.RemoveAll(top))
			}
		}, ignore})
		if describe(err).Code != wire.NeedsSnapshot {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestDetailsOfARunningSandboxAreLimited(t *testing.T) {
	c := capturer{}
	c.details.Store(maxDetails - 10)
	testkit.NoError(t, "hold", c.hold("/a", 10))
	if err := c.hold("/b", 1); describe(err).Code != wire.Unsupported {
		t.Errorf("more than the limit: %v", err)
	}
}

// linkedFile creates a file with a size and a second link in a folder.
func linkedFile(t *testing.T, folder string, size int64) {
	t.Helper()
	file := filepath.Join(folder, "file")
	testkit.NoError(t, "write", os.WriteFile(file, bytes.Repeat([]byte("x"), int(size)), 0o600))
	testkit.NoError(t, "link", os.Link(file, filepath.Join(folder, "link")))
}

// capture captures a folder of stopped programs before any upload.
func capture(t *testing.T, folder string, limit int64) (*pack, error) {
	t.Helper()
	disk, err := openSelected(wire.Request{Layers: []string{folder}})
	testkit.NoError(t, "open", err)
	t.Cleanup(disk.Close)
	p, err := newPack(t.TempDir(), limit)
	testkit.NoError(t, "open", err)
	t.Cleanup(func() { p.file.Close() })
	u := &uploader{ctx: testkit.Context(t), slots: make(chan struct{}, readers-1)}
	c := capturer{uploader: u, done: &uploads{}, pack: p, linked: map[inode]func() (stored, error){}}
	_, err = c.folder(disk, 0)
	return p, err
}

func TestLinksAreCapturedOnce(t *testing.T) {
	const size = 1 << 20
	top := t.TempDir()
	linkedFile(t, top, size)
	p, err := capture(t, top, 2*size)
	testkit.NoError(t, "capture", err)
	if got := p.end.Load(); got != size {
		t.Errorf("%d bytes were captured of a file with %d", got, size)
	}
}

func TestCapturedBytesAreLimited(t *testing.T) {
	const size = 1 << 20
	top := t.TempDir()
	linkedFile(t, top, size)
	p, err := capture(t, top, size-1)
	if describe(err).Code != wire.NeedsSnapshot {
		t.Errorf("more than the limit: %v", err)
	}
	if st, err := p.file.Stat(); err != nil || st.Size() > 0 {
		t.Errorf("%d bytes were written, %v", st.Size(), err)
	}
}

// TestFileWithTooManyHolesIsRefused: its zeros would be read, because there are more extents than are recorded.
func TestFileWithTooManyHolesIsRefused(t *testing.T) {
	r := newRig(t)
	top := t.TempDir()
	file, err := os.Create(filepath.Join(top, "sparse"))
	testkit.NoError(t, "create", err)
	defer file.Close()
	const extents = 1<<16 + 1 // one more than tree.Extents returns
	for i := range int64(extents) {
		if _, err := file.WriteAt([]byte{1}, i*3*4096); err != nil {
			t.Fatal(err)
		}
	}
	testkit.NoError(t, "grow", file.Truncate(10<<40))
	testkit.NoError(t, "sync", file.Sync()) // extents of pages that are not written may be merged
	request := wire.Request{Layers: []string{top}}
	if _, err := r.backUpPart("first", request); describe(err).Code != wire.Unsupported {
		t.Errorf("of stopped programs: %v", err)
	}
	if _, err := r.backUpRunning("second", request, programs{ignore, ignore}); describe(err).Code != wire.Unsupported {
		t.Errorf("of running programs, while they run: %v", err)
	}
	if _, err := capture(t, top, maxCapturedBytes); describe(err).Code != wire.Unsupported {
		t.Errorf("of running programs, while they are stopped: %v", err)
	}
}

// TestMappedPageOfARunningSandboxIsStored changes a page that was changed before the backup began, which leaves the
// file's times as they were if the page has not been written back.
func TestMappedPageOfARunningSandboxIsStored(t *testing.T) {
	r := newRig(t)
	top := t.TempDir()
	file, err := os.Create(filepath.Join(top, "database"))
	testkit.NoError(t, "create", err)
	defer file.Close()
	testkit.NoError(t, "truncate", file.Truncate(8192))
	pages, err := unix.Mmap(int(file.Fd()), 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	testkit.NoError(t, "map", err)
	defer unix.Munmap(pages)
	pages[0] = 1
	treetest.AwaitSettled(t)
	_, err = r.backUpRunning("first", wire.Request{Layers: []string{top}}, programs{func() { pages[0] = 2 }, ignore})
	testkit.NoError(t, "back up", err)
	target, _, err := r.restore("first")
	testkit.NoError(t, "restore", err)
	if content, err := os.ReadFile(filepath.Join(target, "database")); err != nil || content[0] != 2 {
		t.Errorf("the backup has %d, %v; want 2", content[0], err)
	}
}

func TestSelectionOfARunningSandbox(t *testing.T) {
	r := newRig(t)
	top := t.TempDir()
	write := func(name, content string) {
		testkit.NoError(t, "make the folder", os.MkdirAll(filepath.Dir(filepath.Join(top, name)), 0o755))
		testkit.NoError(t, "write", os.WriteFile(filepath.Join(top, name), []byte(content), 0o600))
	}
	for _, name := range []string{"srv/a", "srv/a.log", "srv/cache/b", "other/c", "repo/.git/HEAD", "repo/x.o", "repo/x.c"} {
		write(name, name)
	}
	write("repo/.gitignore", "*.o\n")
	_, err := r.backUpRunning("first", wire.Request{
		Layers: []string{top}, Paths: []string{"/srv", "/repo"}, Excludes: []string{"*.log", "/srv/cache"}, Gitignore: true,
	}, programs{func() {
		write("repo/.gitignore", "*.c\n")
		write("srv/later.log", "")
		write("srv/later", "")
	}, ignore})
	testkit.NoError(t, "back up", err)
	target, _, err := r.restore("first")
	testkit.NoError(t, "restore", err)
	var got []string
	for name, line := range diskOf(t, []string{target}, nil) {
		if line.Mode&unix.S_IFMT == unix.S_IFREG {
			got = append(got, name)
		}
	}
	testkit.Diff(t, "files", slices.Sorted(slices.Values(got)), []string{"repo/.git/HEAD", "repo/.gitignore", "repo/x.o", "srv/a", "srv/later"})
}

func TestCanceledCaptureStoresNoBackup(t *testing.T) {
	r := newRig(t)
	top := t.TempDir()
	testkit.NoError(t, "write", os.WriteFile(filepath.Join(top, "a"), []byte("a"), 0o600))
	request := wire.Request{Operation: wire.Create, Owner: "owner", Limit: 1, IDs: []string{"first"}, Time: time.Now(), Layers: []string{top}, Running: true}
	opened, err := r.open(request)
	testkit.NoError(t, "open", err)
	ctx, cancel := context.WithCancel(testkit.Context(t))
	in, out := io.Pipe()
	defer out.Close()
	go func() {
		for messages := json.NewDecoder(in); ; {
			var m wire.Message
			if messages.Decode(&m) != nil {
				return
			}
			if m.Ready {
				cancel()
			}
		}
	}()
	if _, err := opened.backUp(ctx, request, newPeer(out)); !errors.Is(err, context.Canceled) {
		t.Errorf("created it: %v", err)
	}
	if _, _, err := r.restore("first"); describe(err).Code != wire.NotFound {
		t.Errorf("restored it: %v", err)
	}
	if left, err := os.ReadDir(r.cache); err != nil || strings.Contains(fmt.Sprint(left), "capture-") {
		t.Errorf("left in the cache: %v, %v", left, err)
	}
}

// The record of a backup arrives long before it is taken.
func TestEndOfTheNodeIsNoticedWhileOrdersWait(t *testing.T) {
	in, out := io.Pipe()
	var closed atomic.Bool
	ended := make(chan bool, 1)
	n := newPeer(io.Discard)
	go n.receive(json.NewDecoder(in), func() { ended <- closed.Load() })
	orders := json.NewEncoder(out)
	for range maxOrders {
		testkit.NoError(t, "send", orders.Encode(wire.Order{Record: json.RawMessage(`{}`)}))
	}
	closed.Store(true)
	testkit.NoError(t, "close", out.Close())
	if !testkit.Receive(t, "the end of the request", ended) {
		t.Error("an order canceled the request")
	}
}
