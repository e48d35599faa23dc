package helper

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/backup/wire"
	"github.com/doze-run/doze/runtime/disk/tree"
	"github.com/doze-run/doze/testkit"
)

// write creates files with their folders below root. Names that end with a slash are folders.
func write(t *testing.T, root string, files map[string]string) {
	t.Helper()
	for name, content := range files {
		at := filepath.Join(root, name)
		testkit.NoError(t, "make a folder", os.MkdirAll(filepath.Dir(at), 0o755))
		if strings.HasSuffix(name, "/") {
			testkit.NoError(t, "make a folder", os.MkdirAll(at, 0o755))
			continue
		}
		testkit.NoError(t, "write a file", os.WriteFile(at, []byte(content), 0o644))
	}
}

func remove(t *testing.T, root, name string) {
	t.Helper()
	testkit.NoError(t, "make a folder", os.MkdirAll(filepath.Dir(filepath.Join(root, name)), 0o755))
	testkit.NoError(t, "make a whiteout", unix.Mknod(filepath.Join(root, name), unix.S_IFCHR, 0))
}

// wantPaths fails unless these are the paths of a disk, without the root.
func wantPaths(t *testing.T, disk map[string]entryLine, want ...string) {
	t.Helper()
	got := slices.DeleteFunc(slices.Sorted(maps.Keys(disk)), func(name string) bool { return name == "" })
	slices.Sort(want)
	testkit.Diff(t, "paths", got, want)
}

// overlaid returns the disk on which a partial backup was restored.
func (r *rig) overlaid(id string, paths, layers, below []string) map[string]entryLine {
	r.Helper()
	target, _, err := r.restore(id)
	testkit.NoError(r, "restore", err)
	disk, err := tree.OpenMerged(layers, below, 0)
	testkit.NoError(r, "open", err)
	defer disk.Close()
	testkit.NoError(r, "overlay", tree.Overlay(target, disk, tree.NewPaths(paths)))
	return diskOf(r.T, slices.Concat([]string{target}, layers, below), nil)
}

// The paths of a backup are complete: they have what the image has there, and none of what was deleted there.
func TestPartialBackupIncludesTheImage(t *testing.T) {
	r := newRig(t)
	layers, below := makeDisk(t)
	want := diskOf(t, slices.Concat(layers, below), nil)
	paths := []string{"/both", "/opaque", "/program", "/symlink", "/sparse", "/sticky", "/\xff name", "/fifo", "/socket"}
	created, err := r.backUpPart("part", wire.Request{Layers: layers, Below: below, Paths: paths})
	testkit.NoError(t, "back up", err)

	lower := t.TempDir()
	write(t, lower, map[string]string{"both/other": "x", "both/file": "x", "sticky": "a file", "program/file": "x", "rest/file": "x"})
	got := r.overlaid("part", paths, []string{lower}, nil)
	rest := diskOf(t, []string{lower}, nil)
	for _, m := range []map[string]entryLine{got, want, rest} {
		for name, line := range m {
			line.Opaque = false
			if strings.HasPrefix(line.Content, "link to ") { // the first link may not be in the backup
				line.Content = "link"
			}
			m[name] = line
		}
	}
	entries := int64(1)
	for name := range got {
		if name == "" || strings.HasPrefix(name, "rest") {
			testkit.Diff(t, "the rest "+name, got[name], rest[name])
			continue
		}
		entries++
		if strings.HasPrefix(want[name].Content, "link") || strings.HasPrefix(got[name].Content, "link") {
			continue
		}
		testkit.Diff(t, name, got[name], want[name])
	}
	for name := range want {
		top, _, _ := strings.Cut(name, "/")
		if _, ok := got[name]; ok != slices.Contains(paths, "/"+top) && name != "" {
			t.Errorf("%q: restored %v", name, ok)
		}
	}
	if created.Usage.Entries != entries {
		t.Errorf("the backup has %d entries, want %d", created.Usage.Entries, entries)
	}
}

// The folders that contain a path keep their files and attributes, and missing ones are added.
func TestPartialBackupOfInnerPaths(t *testing.T) {
	r := newRig(t)
	layer, image, lower := t.TempDir(), t.TempDir(), t.TempDir()
	write(t, image, map[string]string{"srv/app/image": "1", "srv/app/deleted": "1", "srv/other": "1"})
	write(t, layer, map[string]string{"srv/app/new": "2", "new/folder/file": "2", "new/folder/not": "2"})
	remove(t, layer, "srv/app/deleted")
	testkit.NoError(t, "set the mode", os.Chmod(filepath.Join(layer, "new"), 0o710))
	paths := []string{"/srv/app", "/new/folder/file"}
	_, err := r.backUpPart("part", wire.Request{Layers: []string{layer}, Below: []string{image}, Paths: paths})
	testkit.NoError(t, "back up", err)

	write(t, lower, map[string]string{"srv/app/old": "3", "srv/rest": "3"})
	testkit.NoError(t, "set the mode", os.Chmod(filepath.Join(lower, "srv"), 0o731))
	testkit.NoError(t, "set an attribute", unix.Lsetxattr(filepath.Join(lower, "srv"), "user.note", []byte("lower"), 0))
	setTime(t, filepath.Join(lower, "srv"), time.Unix(1234567890, 1))
	got := r.overlaid("part", paths, []string{lower}, nil)
	wantPaths(t, got, "srv", "srv/app", "srv/app/image", "srv/app/new", "srv/rest", "new", "new/folder", "new/folder/file")
	testkit.Diff(t, "the folder that contains the path", got["srv"], diskOf(t, []string{lower}, nil)["srv"])
	if got["new"].Mode&0o777 != 0o710 {
		t.Errorf("the added folder has the mode %o", got["new"].Mode)
	}
}

func TestOwnersInTheImageAreShifted(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	r := newRig(t)
	layer, image := t.TempDir(), t.TempDir()
	write(t, image, map[string]string{"etc/image": "1", "etc/both": "1"})
	write(t, layer, map[string]string{"etc/both": "2"})
	testkit.NoError(t, "set the owner", errors.Join(os.Chown(filepath.Join(image, "etc/image"), 5, 6), os.Chown(filepath.Join(layer, "etc/both"), 7, 8)))
	_, err := r.backUpPart("part", wire.Request{Layers: []string{layer}, Below: []string{image}, Paths: []string{"/etc"}, Shift: 100})
	testkit.NoError(t, "back up", err)
	target, _, err := r.restore("part")
	testkit.NoError(t, "restore", err)
	got := diskOf(t, []string{target}, nil)
	for name, want := range map[string][2]uint32{"etc/image": {105, 106}, "etc/both": {7, 8}} {
		if line := got[name]; line.UID != want[0] || line.GID != want[1] {
			t.Errorf("%s has the owner %d:%d, want %v", name, line.UID, line.GID, want)
		}
	}
}

func TestMissingPathsAreNamed(t *testing.T) {
	r := newRig(t)
	layer := t.TempDir()
	write(t, layer, map[string]string{"srv/file": "1", "there": "1"})
	remove(t, layer, "deleted")
	testkit.NoError(t, "make a link", os.Symlink("srv", filepath.Join(layer, "link")))
	for path, want := range map[string]string{
		"/none": `"/none" does not exist`, "/srv/none": `"/srv/none" does not exist`, "/none/file": `"/none" does not exist`, "/deleted": `"/deleted" does not exist`,
		"/there/file": `"/there" is not a folder`, "/link/file": `"/link" is a symbolic link, and not the folder of a path`, "/" + strings.Repeat("a", 256): `"/` + strings.Repeat("a", 256) + `" does not exist`,
	} {
		_, err := r.backUpPart("part", wire.Request{Layers: []string{layer}, Paths: []string{"/srv/file", path}})
		if failed, ok := errors.AsType[*wire.Error](err); !ok || failed.Code != wire.NoPath || failed.Message != want {
			t.Errorf("%s: %v, want %s", path, err, want)
		}
	}
	if _, _, err := r.restore("part"); describe(err).Code != wire.NotFound {
		t.Errorf("a failed backup is stored: %v", err)
	}
}

func TestOverlayRefusesToReplaceOtherEntries(t *testing.T) {
	r := newRig(t)
	layer := t.TempDir()
	write(t, layer, map[string]string{"srv/app/file": "1"})
	_, err := r.backUpPart("part", wire.Request{Layers: []string{layer}, Paths: []string{"/srv/app/file"}})
	testkit.NoError(t, "back up", err)
	for kind, make := range map[string]func(name string) error{
		"file": func(name string) error { return os.WriteFile(name, nil, 0o644) }, "link": func(name string) error { return os.Symlink("/etc", name) },
	} {
		lower := t.TempDir()
		write(t, lower, map[string]string{"srv/": ""})
		testkit.NoError(t, "make an entry", make(filepath.Join(lower, "srv/app")))
		target, _, err := r.restore("part")
		testkit.NoError(t, "restore", err)
		disk, err := tree.OpenMerged([]string{lower}, nil, 0)
		testkit.NoError(t, "open", err)
		defer disk.Close()
		if err := tree.Overlay(target, disk, tree.NewPaths([]string{"/srv/app/file"})); !errors.Is(err, tree.ErrNotFolder) || !strings.Contains(err.Error(), `"/srv/app"`) {
			t.Errorf("%s: %v", kind, err)
		}
	}
}

// Excludes hide changes: the image's entries are visible again, and so are those that were deleted.
func TestExcludesHideChanges(t *testing.T) {
	r := newRig(t)
	layer, image := t.TempDir(), t.TempDir()
	write(t, image, map[string]string{"cache/image": "1", "cache/deleted": "1", "etc/changed.conf": "1", "etc/gone.log": "1"})
	write(t, layer, map[string]string{"cache/new": "2", "etc/changed.conf": "2", "etc/a.log": "2", "etc/keep.log": "2", "srv/cache/file": "2"})
	remove(t, layer, "cache/deleted")
	remove(t, layer, "etc/gone.log")
	_, err := r.backUpPart("part", wire.Request{Layers: []string{layer}, Below: []string{image}, Excludes: []string{"/cache", "*.log", "!keep.log", "/etc/*.conf"}})
	testkit.NoError(t, "back up", err)
	target, _, err := r.restore("part")
	testkit.NoError(t, "restore", err)
	wantPaths(t, diskOf(t, []string{target}, []string{image}), "etc", "etc/keep.log", "srv", "srv/cache", "srv/cache/file")
	wantPaths(t, diskOf(t, []string{target, image}, nil), "cache", "cache/image", "cache/deleted", "etc", "etc/changed.conf", "etc/gone.log", "etc/keep.log", "srv", "srv/cache", "srv/cache/file")
}

func TestGitignoreAppliesInWorkTrees(t *testing.T) {
	r := newRig(t)
	layer, image := t.TempDir(), t.TempDir()
	write(t, image, map[string]string{"image/.git/HEAD": "x", "image/.gitignore": "*.log\n"})
	write(t, layer, map[string]string{
		".gitignore": "*", "outside/.gitignore": "*", "outside/a.log": "x",
		"app/.git/a.log": "x", "app/.git/.gitignore": "*", "app/.gitignore": "*.log\n/build/\n.git\nnested\n!important.log\n", "app/a.log": "x", "app/important.log": "x", "app/build/out": "x", "app/src/build/out": "x",
		"app/src/.gitignore": "!a.log\n*.tmp\n", "app/src/a.log": "x", "app/src/b.log": "x", "app/src/a.tmp": "x", "app/a.tmp": "x", "app/nested/file": "x",
		"app/module/.git": "gitdir: ../.git/modules/module", "app/module/a.log": "x", "app/linked/file": "x",
		"image/a.log": "x", "image/a": "x",
	})
	testkit.NoError(t, "make a link", os.Symlink("../src/.gitignore", filepath.Join(layer, "app/linked/.gitignore")))
	write(t, layer, map[string]string{"app/large/.gitignore": strings.Repeat("*\n", 40_000), "app/large/file": "x"})
	request := wire.Request{Layers: []string{layer}, Below: []string{image}, Gitignore: true}
	_, err := r.backUpPart("whole", request)
	testkit.NoError(t, "back up", err)
	target, _, err := r.restore("whole")
	testkit.NoError(t, "restore", err)
	app := []string{"app", "app/.git", "app/.git/a.log", "app/.git/.gitignore", "app/.gitignore", "app/important.log", "app/src", "app/src/build", "app/src/build/out", "app/src/.gitignore", "app/src/a.log",
		"app/a.tmp", "app/module", "app/module/.git", "app/module/a.log", "app/linked", "app/linked/.gitignore", "app/linked/file", "app/large", "app/large/.gitignore", "app/large/file"}
	wantPaths(t, diskOf(t, []string{target}, []string{image}), append(app, ".gitignore", "outside", "outside/.gitignore", "outside/a.log", "image", "image/a")...)

	// A path is in the backup even if it is ignored, and the files above it apply to what it contains.
	request.Paths = []string{"/app/src", "/app/nested", "/app/a.log"}
	_, err = r.backUpPart("part", request)
	testkit.NoError(t, "back up", err)
	target, _, err = r.restore("part")
	testkit.NoError(t, "restore", err)
	wantPaths(t, diskOf(t, []string{target}, nil), "app", "app/a.log", "app/nested", "app/nested/file", "app/src", "app/src/.gitignore", "app/src/a.log", "app/src/build", "app/src/build/out")
}

func TestPatternsOfGitignoreFilesAreLimited(t *testing.T) {
	r := newRig(t)
	layer := t.TempDir()
	write(t, layer, map[string]string{".git/": "", ".gitignore": strings.Repeat("a\n", 900), "b/.gitignore": strings.Repeat("a\n", 900), "b/c/.gitignore": strings.Repeat("a\n", 201)})
	_, err := r.backUpPart("whole", wire.Request{Layers: []string{layer}, Gitignore: true})
	if failed, ok := errors.AsType[*wire.Error](err); !ok || failed.Code != wire.Unsupported || !strings.Contains(failed.Message, "/b/c") {
		t.Errorf("it is stored: %v", err)
	}
	_, err = r.backUpPart("whole", wire.Request{Layers: []string{layer}})
	testkit.NoError(t, "back up without gitignore", err)
}
