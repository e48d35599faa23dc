package helper

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/repo/content"
	"github.com/kopia/kopia/repo/object"
	"github.com/kopia/kopia/snapshot"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/backup/wire"
	"github.com/doze-run/doze/testkit"
)

// objects is a repository with the content of objects alone.
type objects struct {
	repo.Repository
	content map[object.ID]string
	endless object.ID // consists of spaces
	last    int
}

func newObjects() *objects { return &objects{content: map[object.ID]string{}} }

func (o *objects) OpenObject(_ context.Context, id object.ID) (object.Reader, error) {
	text, ok := o.content[id]
	if id == o.endless {
		return &openObject{spaces{}}, nil
	}
	if !ok {
		return nil, object.ErrObjectNotFound
	}
	return &openObject{strings.NewReader(text)}, nil
}

func (o *objects) PrefetchObjects(context.Context, []object.ID, string) ([]content.ID, error) {
	return nil, nil
}

type openObject struct {
	io.ReadSeeker
}

func (o *openObject) Close() error  { return nil }
func (o *openObject) Length() int64 { return 0 }

// spaces is an endless text.
type spaces struct{ io.Seeker }

func (spaces) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = ' '
	}
	return len(p), nil
}

// add adds an object.
func (o *objects) add(content string) object.ID {
	o.last++
	id, err := object.ParseID(fmt.Sprintf("k%032x", o.last))
	if err != nil {
		panic(err)
	}
	o.content[id] = content
	return id
}

// folder adds a folder with entries.
func (o *objects) folder(name string, entries ...*snapshot.DirEntry) *snapshot.DirEntry {
	text, err := json.Marshal(snapshot.DirManifest{StreamType: "kopia:directory", Entries: entries})
	if err != nil {
		panic(err)
	}
	return entryIn(name, snapshot.EntryTypeDirectory, o.add(string(text)), 0)
}

func (o *objects) file(name, content string) *snapshot.DirEntry {
	return entryIn(name, snapshot.EntryTypeFile, o.add(content), int64(len(content)))
}

func (o *objects) link(name, target string) *snapshot.DirEntry {
	return entryIn(name, snapshot.EntryTypeSymlink, o.add(target), int64(len(target)))
}

func entryIn(name string, kind snapshot.EntryType, id object.ID, size int64) *snapshot.DirEntry {
	return &snapshot.DirEntry{
		Name: name, Type: kind, Permissions: 0o755, FileSize: size, ObjectID: id, UserID: uint32(os.Getuid()), GroupID: uint32(os.Getgid()),
	}
}

// root adds the root of a backup.
func (o *objects) root(disk []*snapshot.DirEntry, details string) *snapshot.DirEntry {
	return o.folder("/", o.folder(diskName, disk...), o.file(detailsName, details))
}

// guarded is a folder with a target for a restore. Nothing outside of the target may change.
type guarded struct {
	testing.TB
	folder, target string
	before         map[string]entryLine
}

func newGuarded(t testing.TB) *guarded {
	g := &guarded{TB: t, folder: t.TempDir()}
	outside := filepath.Join(g.folder, "outside")
	testkit.NoError(t, "make a folder outside", os.Mkdir(outside, 0o755))
	testkit.NoError(t, "make a file outside", os.WriteFile(filepath.Join(outside, "file"), []byte("secret"), 0o644))
	g.before = g.describe()
	g.target = filepath.Join(g.folder, "target")
	return g
}

// describe describes the entries outside of the target.
func (g *guarded) describe() map[string]entryLine {
	g.Helper()
	all := map[string]entryLine{}
	testkit.NoError(g, "walk", filepath.WalkDir(g.folder, func(at string, _ os.DirEntry, err error) error {
		if err != nil || at == g.folder {
			return err
		}
		if at == g.target {
			return filepath.SkipDir
		}
		var st unix.Stat_t
		if err := unix.Lstat(at, &st); err != nil {
			return err
		}
		line := lineOf(&st, nil)
		line.Size = int64(st.Nlink)
		if st.Mode&unix.S_IFMT == unix.S_IFREG {
			text, err := os.ReadFile(at)
			if err != nil {
				return err
			}
			line.Content = string(text)
		}
		all[at] = line
		return nil
	}))
	return all
}

// restore restores a backup with this root into the target.
func (g *guarded) restore(o *objects, root *snapshot.DirEntry) error {
	g.Helper()
	w := writer{ctx: context.Background(), source: o, progress: &progress{}, details: map[string]*detail{}}
	err := (&repository{store: &store{}}).explain(w.run(root, g.target))
	if after := g.describe(); !equalLines(after, g.before) {
		g.Errorf("the restore has changed entries outside of its target:\n%v\n%v", g.before, after)
	}
	return err
}

func equalLines(a, b map[string]entryLine) bool { return fmt.Sprint(a) == fmt.Sprint(b) }

// aNode is the detail of a pipe.
func aNode(at string) string {
	text, err := json.Marshal(detail{Path: at, Node: &node{Mode: unix.S_IFIFO | 0o600, UID: uint32(os.Getuid()), GID: uint32(os.Getgid())}})
	if err != nil {
		panic(err)
	}
	return string(text) + "\n"
}

func aLink(at, other string) string {
	text, err := json.Marshal(detail{Path: at, Link: other})
	if err != nil {
		panic(err)
	}
	return string(text) + "\n"
}

// The content of an object store may be hostile: another client may know the password.
func TestHostileBackupsAreRefused(t *testing.T) {
	type entries = []*snapshot.DirEntry
	cases := map[string]func(o *objects) *snapshot.DirEntry{
		"a file and a folder with one name": func(o *objects) *snapshot.DirEntry {
			return o.root(entries{o.file("a", "x"), o.folder("a", o.file("in", "x"))}, "")
		},
		"a link and a folder with one name": func(o *objects) *snapshot.DirEntry {
			return o.root(entries{o.link("a", "../outside"), o.folder("a", o.file("in", "x"))}, "")
		},
		"a folder and a link with one name": func(o *objects) *snapshot.DirEntry {
			return o.root(entries{o.folder("a", o.file("in", "x")), o.link("a", "../outside")}, "")
		},
		"a link and a file with one name": func(o *objects) *snapshot.DirEntry {
			return o.root(entries{o.link("a", "../outside/file"), o.file("a", "x")}, "")
		},
		"two files with one name": func(o *objects) *snapshot.DirEntry { return o.root(entries{o.file("a", "x"), o.file("a", "y")}, "") },
		"two folders with one name": func(o *objects) *snapshot.DirEntry {
			return o.root(entries{o.folder("a"), o.folder("a")}, "")
		},
		"two names that are one after decoding": func(o *objects) *snapshot.DirEntry {
			return o.root(entries{o.file("a", "x"), o.file("doze-encoded-61", "y")}, "")
		},
		"an unknown type": func(o *objects) *snapshot.DirEntry {
			return o.root(entries{entryIn("a", "x", o.add(""), 0)}, "")
		},
		"a content that is missing": func(o *objects) *snapshot.DirEntry {
			e := o.file("a", "x")
			delete(o.content, e.ObjectID)
			return o.root(entries{e}, "")
		},
		"a file that is too short": func(o *objects) *snapshot.DirEntry {
			return o.root(entries{entryIn("a", snapshot.EntryTypeFile, o.add("x"), 2)}, "")
		},
		"a file that is shorter than its extents": func(o *objects) *snapshot.DirEntry {
			return o.root(entries{o.file("a", "x")}, `{"path":"a","size":100,"extents":[{"offset":10,"length":2}]}`)
		},
		"no disk":    func(o *objects) *snapshot.DirEntry { return o.folder("/", o.file(detailsName, "")) },
		"no folders": func(o *objects) *snapshot.DirEntry { return o.file("/", "no JSON") },
		"a folder without JSON": func(o *objects) *snapshot.DirEntry {
			return o.root(entries{entryIn("a", snapshot.EntryTypeDirectory, o.add("no JSON"), 0)}, "")
		},
		"details without JSON": func(o *objects) *snapshot.DirEntry { return o.root(nil, "no JSON") },
		"details that are cut off": func(o *objects) *snapshot.DirEntry {
			return o.root(nil, strings.TrimRight(aNode("a"), "}\n"))
		},
		"details that are too large": func(o *objects) *snapshot.DirEntry {
			e := o.file(detailsName, "")
			o.endless = e.ObjectID
			return o.folder("/", o.folder(diskName), e)
		},
		"no root": func(*objects) *snapshot.DirEntry { return nil },
		"an entry that is null": func(o *objects) *snapshot.DirEntry {
			return o.root(entries{o.folder("a", o.file("b", ""), nil)}, "")
		},
		"a null for the disk":                func(o *objects) *snapshot.DirEntry { return o.folder("/", nil) },
		"a special file in place of another": func(o *objects) *snapshot.DirEntry { return o.root(entries{o.file("a", "x")}, aNode("a")) },
		"a special file in a missing folder": func(o *objects) *snapshot.DirEntry { return o.root(nil, aNode("missing/a")) },
		"a special file through a link": func(o *objects) *snapshot.DirEntry {
			return o.root(entries{o.link("a", "../outside")}, aNode("a/b"))
		},
		"a special file through a file": func(o *objects) *snapshot.DirEntry { return o.root(entries{o.file("a", "x")}, aNode("a/b")) },
		"a link through a link": func(o *objects) *snapshot.DirEntry {
			return o.root(entries{o.link("a", "../outside"), o.file("b", "x")}, aLink("a/b", "b"))
		},
		"a link to a file through a link": func(o *objects) *snapshot.DirEntry {
			return o.root(entries{o.link("a", "../outside")}, aLink("b", "a/file"))
		},
		"a link to a missing file": func(o *objects) *snapshot.DirEntry { return o.root(nil, aLink("b", "a")) },
		"a link in place of a file": func(o *objects) *snapshot.DirEntry {
			return o.root(entries{o.file("a", "x"), o.file("b", "y")}, aLink("b", "a"))
		},
		"folders that are nested too deep": func(o *objects) *snapshot.DirEntry {
			e := o.folder("a")
			for range maxDepth + 1 {
				e = o.folder("a", e)
			}
			return o.root(entries{e}, "")
		},
	}
	for _, name := range hostileNames {
		cases[fmt.Sprintf("a file %q", name)] = func(o *objects) *snapshot.DirEntry { return o.root(entries{o.file(name, "x")}, "") }
		cases[fmt.Sprintf("a link %q", name)] = func(o *objects) *snapshot.DirEntry {
			return o.root(entries{o.link(name, "../outside")}, "")
		}
		cases[fmt.Sprintf("a folder %q", name)] = func(o *objects) *snapshot.DirEntry {
			return o.root(entries{o.folder(name, o.file("in", "x"))}, "")
		}
	}
	for _, at := range []string{"", "..", "../outside/a", "a/../../outside/b", "a/..", "./a", "a/doze-encoded-2e2e/b", "a/doze-encoded-2e2e2f6f757473696465/b"} {
		cases[fmt.Sprintf("a special file at %q", at)] = func(o *objects) *snapshot.DirEntry { return o.root(entries{o.folder("a")}, aNode(at)) }
		cases[fmt.Sprintf("a link at %q", at)] = func(o *objects) *snapshot.DirEntry {
			return o.root(entries{o.folder("a"), o.file("b", "x")}, aLink(at, "b"))
		}
	}
	for _, other := range []string{"..", "../outside/file", "a/../../outside/file", "a/doze-encoded-2e2e/b"} {
		cases[fmt.Sprintf("a link to %q", other)] = func(o *objects) *snapshot.DirEntry { return o.root(entries{o.folder("a")}, aLink("b", other)) }
	}
	for name, make := range cases {
		t.Run(name, func(t *testing.T) {
			o := newObjects()
			g := newGuarded(t)
			err := g.restore(o, make(o))
			switch {
			case err == nil:
				t.Error("it was restored")
			case !isDamage(err):
				t.Errorf("it is not reported as damage: %v", err)
			}
		})
	}
}

// Unusual details that do no harm may be restored. Nothing outside of the target may change.
func TestUnusualDetailsChangeOnlyTheTarget(t *testing.T) {
	uid := os.Getuid()
	for name, details := range map[string]string{
		"a path twice":                  aNode("b") + aNode("b"),
		"a link to a folder":            aLink("b", "a"),
		"a path from the root":          aNode("/b"),
		"a path with empty names":       aNode("a//b"),
		"attributes of a missing entry": `{"path":"missing","attributes":{"user.a":"eA=="}}`,
		"an unknown attribute":          `{"path":"a","attributes":{"unknown":"eA=="}}`,
		"an attribute without a name":   `{"path":"a","attributes":{"":"eA=="}}`,
		"overlapping extents":           `{"path":"f","size":10,"extents":[{"offset":0,"length":2},{"offset":1,"length":1}]}`,
		"a negative extent":             `{"path":"f","size":10,"extents":[{"offset":-5,"length":3}]}`,
		"a negative length":             `{"path":"f","size":10,"extents":[{"offset":0,"length":-3},{"offset":0,"length":3}]}`,
		"an extent after the end":       `{"path":"f","size":10,"extents":[{"offset":100,"length":3}]}`,
		"a huge size":                   `{"path":"f","size":9223372036854775807,"extents":[{"offset":0,"length":3}]}`,
		"a time that does not exist":    `{"path":"f","modified":{"Sec":0,"Nsec":2000000000}}`,
		"a file as a special file":      fmt.Sprintf(`{"path":"n","node":{"mode":%d,"uid":%d}}`, unix.S_IFREG|0o644, uid),
		"a folder as a special file":    fmt.Sprintf(`{"path":"n","node":{"mode":%d,"uid":%d}}`, unix.S_IFDIR|0o755, uid),
		"no JSON after it":              `{"path":""}` + "null\n1\n",
		"an owner beyond the namespace": `{"path":"n","node":{"mode":4480,"uid":4294967295,"gid":4294967295}}`,
	} {
		t.Run(name, func(t *testing.T) {
			o := newObjects()
			err := newGuarded(t).restore(o, o.root([]*snapshot.DirEntry{o.folder("a"), o.file("f", "xyz")}, details))
			t.Logf("restored: %v", err)
		})
	}
}

func TestHostileBackupInARepositoryIsRefused(t *testing.T) {
	r := newRig(t)
	r.backUp("good", []string{t.TempDir()}, nil)
	opened, err := r.open(wire.Request{Operation: wire.Delete})
	testkit.NoError(t, "open", err)
	testkit.NoError(t, "write", opened.write(testkit.Context(t), func(ctx context.Context, w repo.DirectRepositoryWriter) error {
		add := func(name string, kind snapshot.EntryType, prefix content.IDPrefix, text []byte) *snapshot.DirEntry {
			out := w.NewObjectWriter(ctx, object.WriterOptions{Prefix: prefix})
			defer out.Close()
			_, err := out.Write(text)
			testkit.NoError(t, "write an object", err)
			id, err := out.Result()
			testkit.NoError(t, "write an object", err)
			return entryIn(name, kind, id, int64(len(text)))
		}
		folder := func(name string, entries ...*snapshot.DirEntry) *snapshot.DirEntry {
			text, err := json.Marshal(snapshot.DirManifest{StreamType: "kopia:directory", Entries: entries})
			testkit.NoError(t, "encode", err)
			return add(name, snapshot.EntryTypeDirectory, "k", text)
		}
		escape := folder("..", add("outside", snapshot.EntryTypeFile, "", []byte("x")))
		_, err := snapshot.SaveSnapshot(ctx, w, &snapshot.Manifest{
			Source: snapshot.SourceInfo{Host: "doze", UserName: "owner", Path: "/sandbox"}, Description: "{}",
			RootEntry: folder("/", folder(diskName, escape), add(detailsName, snapshot.EntryTypeFile, "", nil)),
			Tags:      map[string]string{ownerTag: "owner", backupTag: "hostile"},
		})
		return err
	}))
	target, _, err := r.restore("hostile")
	if !isDamage(err) {
		t.Errorf("restored it: %v", err)
	}
	if _, err := os.Lstat(filepath.Join(filepath.Dir(target), "outside")); err == nil {
		t.Error("the restore has written outside of its target")
	}
	_, _, err = r.restore("good")
	testkit.NoError(t, "restore the other one", err)
}

// The details of any backup change the target alone.
func FuzzDetails(f *testing.F) {
	for _, at := range []string{"a", "a/b", "../outside/a", "a/../../outside/b", "link/b", "doze-encoded-2e2e/a"} {
		f.Add([]byte(aNode(at)))
		f.Add([]byte(aLink(at, "f") + aLink("b", at)))
	}
	f.Add([]byte(`{"path":"f","size":10,"extents":[{"offset":5,"length":3}],"attributes":{"user.a":"eA=="},"opaque":true,"modified":{"Sec":1,"Nsec":2}}`))
	f.Fuzz(func(t *testing.T, details []byte) {
		// Large numbers make sparse files, which a file system may refuse.
		if bytes.Contains(details, []byte(`"size"`)) && len(details) > 1<<16 {
			return
		}
		o := newObjects()
		disk := []*snapshot.DirEntry{o.folder("a", o.link("out", "../../outside")), o.file("f", "xyz"), o.link("link", "../outside")}
		_ = newGuarded(t).restore(o, o.root(disk, string(details)))
	})
}

// Several windows, each with files of several folders.
func TestManyFoldersAreRestored(t *testing.T) {
	o := newObjects()
	var folders []*snapshot.DirEntry
	for n := range 3*windowFolders + 1 {
		var files []*snapshot.DirEntry
		for i := range n % 20 {
			files = append(files, o.file(fmt.Sprint(i), fmt.Sprint(n, i)))
		}
		folders = append(folders, o.folder(fmt.Sprintf("folder-%04d", n), files...))
	}
	g := newGuarded(t)
	testkit.NoError(t, "restore", g.restore(o, o.root(folders, "")))
	entries, err := os.ReadDir(g.target)
	testkit.NoError(t, "read", err)
	if len(entries) != len(folders) {
		t.Fatalf("there are %d folders", len(entries))
	}
	for n, folder := range entries {
		files, err := os.ReadDir(filepath.Join(g.target, folder.Name()))
		testkit.NoError(t, "read", err)
		if len(files) != n%20 {
			t.Errorf("%s has %d files", folder.Name(), len(files))
		}
		for _, file := range files {
			text, err := os.ReadFile(filepath.Join(g.target, folder.Name(), file.Name()))
			testkit.NoError(t, "read", err)
			if want := strings.Fields(string(text)); !slices.Equal(want, []string{fmt.Sprint(n), file.Name()}) {
				t.Errorf("%s of %s has %q", file.Name(), folder.Name(), text)
			}
		}
	}
}

func TestCanceledRestoreEnds(t *testing.T) {
	r := newRig(t)
	layers, below := makeDisk(t)
	r.backUp("first", layers, below)
	request := wire.Request{Operation: wire.Restore, IDs: []string{"first"}, Target: filepath.Join(t.TempDir(), "target"), Time: time.Now()}
	opened, err := r.open(request)
	testkit.NoError(t, "open", err)
	ctx, cancel := context.WithCancel(testkit.Context(t))
	cancel()
	if _, err := opened.restore(ctx, request, discarded()); err == nil || isDamage(err) {
		t.Errorf("restored it: %v", err)
	}
}
