package tree_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/disk/tree"
	"github.com/doze-run/doze/runtime/disk/tree/treetest"
	"github.com/doze-run/doze/testkit"
)

// entry is what a copy must preserve of an entry, but for hard links.
type entry struct {
	Mode       uint32
	UID, GID   uint32
	Links      uint64
	Device     uint64
	Size       int64
	Modified   time.Time
	Content    string
	Attributes map[string]string
	Extents    []tree.Extent
}

// contents describes each entry below root by its path.
func contents(t *testing.T, root string) map[string]entry {
	t.Helper()
	all := map[string]entry{}
	firsts := map[uint64]string{}
	err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		name, _ := filepath.Rel(root, path)
		e := entry{
			Mode: st.Mode, UID: st.Uid, GID: st.Gid, Device: st.Rdev, Modified: time.Unix(st.Mtim.Unix()),
			Attributes: attributes(t, path), Links: uint64(st.Nlink),
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			e.Size, e.Extents = st.Size, extents(t, path, st.Size)
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			e.Content = fmt.Sprintf("%x", sha256.Sum256(content))
			if st.Nlink > 1 {
				if first, ok := firsts[st.Ino]; ok {
					e.Content = "link to " + first
				} else {
					firsts[st.Ino] = name
				}
			}
		case unix.S_IFLNK:
			e.Content, _ = os.Readlink(path)
		case unix.S_IFDIR:
			e.Links = 0 // Btrfs does not count them
		}
		all[name] = e
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// extents returns the parts of a file that are not holes, in units larger than the blocks of
// file systems.
func extents(t *testing.T, path string, size int64) (rounded []tree.Extent) {
	t.Helper()
	const unit = 64 << 10
	file, err := os.Open(path)
	must(t, err)
	defer file.Close()
	exact, _, err := tree.Extents(file, size)
	must(t, err)
	end := int64(-1)
	for _, e := range exact {
		begin, next := e.Offset/unit, (e.Offset+e.Length+unit-1)/unit
		if begin > end {
			rounded = append(rounded, tree.Extent{Offset: begin})
		}
		last := &rounded[len(rounded)-1]
		last.Length, end = next-last.Offset, next
	}
	return rounded
}

func attributes(t *testing.T, path string) map[string]string {
	t.Helper()
	buffer := make([]byte, 64<<10)
	n, err := unix.Llistxattr(path, buffer)
	if errors.Is(err, unix.ENOTSUP) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for name := range strings.SplitSeq(strings.TrimRight(string(buffer[:n]), "\x00"), "\x00") {
		if name == "" || name == "security.selinux" {
			continue
		}
		value := make([]byte, 64<<10)
		n, err := unix.Lgetxattr(path, name, value)
		if err != nil {
			t.Fatal(err)
		}
		all[name] = string(value[:n])
	}
	return all
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// manyKinds fills a folder with an entry of each kind.
func manyKinds(t *testing.T, root string) {
	t.Helper()
	old := time.Date(2001, 2, 3, 4, 5, 6, 789, time.UTC)
	file := func(name, content string, mode os.FileMode) string {
		path := filepath.Join(root, name)
		must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must(t, os.WriteFile(path, []byte(content), 0o600))
		must(t, os.Chmod(path, mode))
		must(t, os.Chtimes(path, old, old))
		return path
	}
	first := file("a/first", "one file, three names", 0o640)
	must(t, os.Link(first, filepath.Join(root, "second")))
	must(t, os.MkdirAll(filepath.Join(root, "z/deep/er"), 0o755))
	must(t, os.Link(first, filepath.Join(root, "z/deep/er/third")))
	file("bin/program", "#!/bin/sh\n", 0o755|os.ModeSetuid)
	file("empty", "", 0o444)
	file("large", strings.Repeat("0123456789abcdef", 20_000), 0o644)
	file("name with \n and \xff", "x", 0o644)
	must(t, os.MkdirAll(filepath.Join(root, "empty folder"), 0o700))
	must(t, os.MkdirAll(filepath.Join(root, "tmp"), 0o777))
	must(t, os.Chmod(filepath.Join(root, "tmp"), 0o777|os.ModeSticky))
	for i := range 300 {
		file(fmt.Sprintf("many/%03d", i), fmt.Sprint(i), 0o644)
	}

	sparse, err := os.Create(filepath.Join(root, "sparse"))
	must(t, err)
	_, err = sparse.WriteAt([]byte("begin"), 1<<20)
	must(t, err)
	_, err = sparse.WriteAt([]byte("end"), 5<<20)
	must(t, err)
	must(t, sparse.Truncate(9<<20))
	must(t, sparse.Close())

	must(t, os.Symlink("/nowhere/at all", filepath.Join(root, "dangling")))
	must(t, os.Symlink("a", filepath.Join(root, "to a folder")))
	must(t, unix.Mkfifo(filepath.Join(root, "fifo"), 0o620))
	must(t, unix.Mknod(filepath.Join(root, "socket"), unix.S_IFSOCK|0o600, 0))
	must(t, unix.Mknod(filepath.Join(root, "whiteout"), unix.S_IFCHR, 0))
	must(t, unix.Setxattr(filepath.Join(root, "a"), "user.overlay.opaque", []byte("y"), 0))
	must(t, unix.Setxattr(first, "user.note", []byte(strings.Repeat("n", 2000)), 0))
	if os.Getuid() == 0 {
		must(t, os.Lchown(filepath.Join(root, "dangling"), 3, 4))
		must(t, os.Lchown(filepath.Join(root, "bin/program"), 1, 2))
		must(t, os.Chmod(filepath.Join(root, "bin/program"), 0o755|os.ModeSetuid))
		must(t, os.Lchown(filepath.Join(root, "empty folder"), 5, 6))
		must(t, os.Lchown(filepath.Join(root, "fifo"), 7, 8))
	}
	must(t, os.Chtimes(filepath.Join(root, "a"), old, old))
}

func TestCopyIsExact(t *testing.T) { copyIsExact(t, t.TempDir()) }

// copyIsExact checks copies within a folder.
func copyIsExact(t *testing.T, folder string) {
	for _, passes := range []string{"one pass", "two passes"} {
		t.Run(passes, func(t *testing.T) {
			source, target := filepath.Join(folder, passes), filepath.Join(folder, passes+", copied")
			must(t, os.Mkdir(source, 0o755))
			manyKinds(t, source)
			c := tree.New(source, target)
			if passes == "two passes" {
				must(t, c.Prefetch(t.Context()))
			}
			usage, err := c.Complete(t.Context())
			must(t, err)
			testkit.Diff(t, "copy", contents(t, target), contents(t, source))
			if usage.Entries != int64(len(contents(t, source))) {
				t.Errorf("usage has %d entries, want %d", usage.Entries, len(contents(t, source)))
			}
			measured, err := tree.Measure(t.Context(), source, tree.Usage{})
			must(t, err)
			if measured != usage {
				t.Errorf("measured %+v, copied %+v", measured, usage)
			}
		})
	}
}

func TestMeasureCountsEachFileOnce(t *testing.T) {
	root := t.TempDir()
	must(t, os.WriteFile(filepath.Join(root, "a"), make([]byte, 1<<20), 0o600))
	before, err := tree.Measure(t.Context(), root, tree.Usage{})
	must(t, err)
	for i := range 6 {
		must(t, os.Link(filepath.Join(root, "a"), filepath.Join(root, fmt.Sprint(i))))
	}
	after, err := tree.Measure(t.Context(), root, tree.Usage{})
	must(t, err)
	if after.Entries != before.Entries+6 || after.Bytes > before.Bytes || after.Bytes < before.Bytes-7*512 {
		t.Errorf("%+v with one name, %+v with seven", before, after)
	}
}

func TestMeasureStopsBeyondItsLimit(t *testing.T) {
	root := t.TempDir()
	for i := range 3000 { // more than a folder's first names
		must(t, os.WriteFile(filepath.Join(root, fmt.Sprint(i)), make([]byte, 4096), 0o600))
	}
	all, err := tree.Measure(t.Context(), root, tree.Usage{})
	must(t, err)
	if all.Entries != 3001 || all.Bytes < 3000*4096 {
		t.Errorf("all: %+v", all)
	}
	for _, limit := range []tree.Usage{{Entries: 10}, {Bytes: 40960}, {Entries: 2000, Bytes: 40960}} {
		usage, err := tree.Measure(t.Context(), root, limit)
		must(t, err)
		exceeds := limit.Entries > 0 && usage.Entries > limit.Entries || limit.Bytes > 0 && usage.Bytes > limit.Bytes
		if !exceeds || usage.Entries > 100 && limit.Bytes > 0 || usage.Bytes > 100*4096 {
			t.Errorf("limit %+v: stopped at %+v", limit, usage)
		}
	}
	if usage, err := tree.Measure(t.Context(), root, all); err != nil || usage != all {
		t.Errorf("exactly the limit: %+v, %v", usage, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := tree.Measure(ctx, root, tree.Usage{}); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
}

// TestPassesCopyEachChange changes a tree at random between the passes.
func TestPassesCopyEachChange(t *testing.T) {
	for seed := range uint64(16) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			random := rand.New(rand.NewPCG(seed, 0))
			source, target := t.TempDir(), filepath.Join(t.TempDir(), "copy")
			manyKinds(t, source)
			if seed%2 == 1 {
				treetest.AwaitSettled(t) // so that the second pass copies only what changes
			}
			c := tree.New(source, target)
			must(t, c.Prefetch(t.Context()))
			changeSome := func() {
				for range 1 + random.IntN(30) {
					change(t, random, source)
				}
			}
			changeSome()
			if seed >= 8 {
				if seed%4 >= 2 {
					treetest.AwaitSettled(t) // so that the repeated pass copies what has changed
				}
				must(t, tree.Repeat(t.Context(), c, nil))
				changeSome()
			}
			_, err := c.Complete(t.Context())
			must(t, err)
			testkit.Diff(t, "copy", contents(t, target), contents(t, source))
		})
	}
}

// change makes one random change below root.
func change(t *testing.T, random *rand.Rand, root string) {
	t.Helper()
	var all []string
	must(t, filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if path != root {
			all = append(all, path)
		}
		return err
	}))
	path := all[random.IntN(len(all))]
	info, err := os.Lstat(path)
	must(t, err)
	fresh := filepath.Join(filepath.Dir(path), fmt.Sprintf("new%d", random.IntN(1000)))
	switch random.IntN(11) {
	case 0:
		must(t, os.RemoveAll(path))
	case 1:
		_ = os.Rename(path, fresh)
	case 2:
		_ = os.WriteFile(fresh, fmt.Append(nil, random.IntN(1e9)), 0o644)
	case 3:
		_ = os.MkdirAll(filepath.Join(fresh, "inner"), 0o750)
	case 4: // a file in place of a folder, and the reverse
		must(t, os.RemoveAll(path))
		if info.IsDir() {
			must(t, os.WriteFile(path, []byte("was a folder"), 0o600))
		} else {
			must(t, os.MkdirAll(filepath.Join(path, "inner"), 0o700))
		}
	case 5:
		_ = os.Link(path, fresh)
	case 6:
		if info.Mode()&fs.ModeSymlink == 0 {
			must(t, os.Chmod(path, os.FileMode(random.IntN(0o1000))|0o700&info.Mode()))
		}
	case 7:
		if info.Mode().IsRegular() { // in place, with the size and time that it had
			file, err := os.OpenFile(path, os.O_RDWR, 0)
			must(t, err)
			_, err = file.WriteAt([]byte{byte(random.IntN(256))}, 0)
			must(t, err)
			must(t, file.Close())
			must(t, os.Chtimes(path, info.ModTime(), info.ModTime()))
		}
	case 8:
		if info.Mode().IsRegular() || info.IsDir() {
			must(t, unix.Setxattr(path, "user.changed", fmt.Append(nil, random.IntN(1000)), 0))
		}
	case 9:
		if os.Getuid() == 0 {
			must(t, os.Lchown(path, 3*random.IntN(2), 0))
		}
	case 10:
		for name := range attributes(t, path) {
			must(t, unix.Lremovexattr(path, name))
		}
	}
}

// TestSecondPassRestoresAFolder: a folder from the first pass has an owner and attributes already.
func TestSecondPassRestoresAFolder(t *testing.T) {
	chown := func(path string, uid, gid int) {
		if os.Getuid() == 0 { // only root may
			must(t, os.Chown(path, uid, gid))
		}
	}
	source, target := t.TempDir(), filepath.Join(t.TempDir(), "copy")
	folder := filepath.Join(source, "folder")
	must(t, os.Mkdir(folder, 0o750))
	chown(folder, 5, 6)
	must(t, unix.Setxattr(folder, "user.note", []byte("x"), 0))
	c := tree.New(source, target)
	must(t, c.Prefetch(t.Context()))
	chown(folder, 0, 0)
	must(t, unix.Removexattr(folder, "user.note"))
	_, err := c.Complete(t.Context())
	must(t, err)
	testkit.Diff(t, "copy", contents(t, target), contents(t, source))
}

// TestSecondPassAddsNoAccessControlList: a new file inherits one from a folder of the first pass.
func TestSecondPassAddsNoAccessControlList(t *testing.T) {
	source, target := t.TempDir(), filepath.Join(t.TempDir(), "copy")
	folder, file := filepath.Join(source, "folder"), filepath.Join(source, "folder/file")
	must(t, os.Mkdir(folder, 0o755))
	must(t, os.WriteFile(file, []byte("1"), 0o644))
	list := []byte{2, 0, 0, 0} // version; entries with a tag, permissions and an id
	for _, entry := range [][8]byte{{0x01, 0, 7}, {0x02, 0, 5, 0, 1}, {0x04, 0, 5}, {0x10, 0, 5}, {0x20, 0, 5}} {
		list = append(list, entry[:]...)
	}
	must(t, unix.Setxattr(folder, "system.posix_acl_default", list, 0)) // ext4, XFS, Btrfs and tmpfs have them
	c := tree.New(source, target)
	must(t, c.Prefetch(t.Context()))
	must(t, os.WriteFile(file, []byte("22"), 0o644))
	_, err := c.Complete(t.Context())
	must(t, err)
	testkit.Diff(t, "copy", contents(t, target), contents(t, source))
}

// mapped creates a file of two pages and maps it.
func mapped(t *testing.T, path string) (pages []byte) {
	t.Helper()
	must(t, os.WriteFile(path, make([]byte, 8192), 0o600))
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	must(t, err)
	defer file.Close()
	pages, err = unix.Mmap(int(file.Fd()), 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	must(t, err)
	t.Cleanup(func() { must(t, unix.Munmap(pages)) })
	return pages
}

// TestMappedPageThatStaysDirtyIsCopied changes a page that was dirty before the first pass, which
// changes no time of the file.
func TestMappedPageThatStaysDirtyIsCopied(t *testing.T) {
	source, target := t.TempDir(), filepath.Join(t.TempDir(), "copy")
	pages := mapped(t, filepath.Join(source, "database"))
	pages[0] = 1
	treetest.AwaitSettled(t) // an old change, which alone would not make the file be copied again
	c := tree.New(source, target)
	must(t, c.Prefetch(t.Context()))
	pages[0] = 2
	_, err := c.Complete(t.Context())
	must(t, err)
	if content, err := os.ReadFile(filepath.Join(target, "database")); err != nil || content[0] != 2 {
		t.Errorf("the copy has %d, %v; want 2", content[0], err)
	}
}

// TestMappedPageIsWrittenBackByTheRepeatedPass changes a page after each pass. The first change changes the time of the file, and
// the second one only if the page has been written back.
func TestMappedPageIsWrittenBackByTheRepeatedPass(t *testing.T) {
	source, target := t.TempDir(), filepath.Join(t.TempDir(), "copy")
	pages := mapped(t, filepath.Join(source, "database"))
	c := tree.New(source, target)
	must(t, c.Prefetch(t.Context()))
	want := func(when string, value byte) {
		t.Helper()
		if content, err := os.ReadFile(filepath.Join(target, "database")); err != nil || content[0] != value {
			t.Errorf("%s the copy has %d, %v; want %d", when, content[0], err, value)
		}
	}
	pages[0] = 1
	treetest.AwaitSettled(t)
	must(t, tree.Repeat(t.Context(), c, nil))
	want("after the repeated pass", 1)
	pages[0] = 2
	_, err := c.Complete(t.Context())
	must(t, err)
	want("at the end", 2)
}

// TestRepeatedPassLeavesWhatMayChangeAgain: files that have just changed, and large ones.
func TestRepeatedPassLeavesWhatMayChangeAgain(t *testing.T) {
	source, target := t.TempDir(), filepath.Join(t.TempDir(), "copy")
	names := []string{"settled", "recent", "large", "removed"}
	write := func(name, content string) { must(t, os.WriteFile(filepath.Join(source, name), []byte(content), 0o600)) }
	for _, name := range names {
		write(name, "1")
	}
	c := tree.New(source, target)
	must(t, c.Prefetch(t.Context()))
	write("settled", "2")
	must(t, os.Remove(filepath.Join(source, "removed")))
	write("large", "2")
	must(t, os.Truncate(filepath.Join(source, "large"), 16<<20+1))
	treetest.AwaitSettled(t)
	for _, name := range []string{"recent", "new"} {
		write(name, "2")
	}
	must(t, tree.Repeat(t.Context(), c, nil))
	got := map[string]string{}
	for _, name := range append(names, "new") {
		content, err := os.ReadFile(filepath.Join(target, name))
		if err == nil {
			got[name] = string(content[:1])
		}
	}
	testkit.Diff(t, "copy after the repeated pass", got, map[string]string{"settled": "2", "recent": "1", "large": "1"})
	_, err := c.Complete(t.Context())
	must(t, err)
	testkit.Diff(t, "copy", contents(t, target), contents(t, source))
}

// TestFolderThatVanishesDuringTheRepeatedPass: the copy has its files from the first pass.
func TestFolderThatVanishesDuringTheRepeatedPass(t *testing.T) {
	source, target := t.TempDir(), filepath.Join(t.TempDir(), "copy")
	folder, file := filepath.Join(source, "folder"), filepath.Join(source, "folder", "file")
	must(t, os.Mkdir(folder, 0o755))
	must(t, os.WriteFile(file, []byte("1"), 0o600))
	c := tree.New(source, target)
	must(t, c.Prefetch(t.Context()))
	must(t, tree.Repeat(t.Context(), c, func() { must(t, os.Rename(folder, folder+"-2")) }))
	must(t, os.Rename(folder+"-2", folder))
	must(t, os.WriteFile(file, []byte("2"), 0o600))
	_, err := c.Complete(t.Context())
	must(t, err)
	testkit.Diff(t, "copy", contents(t, target), contents(t, source))
}

// TestHardLinkInARenamedFolderStaysOne: the rename of a folder changes nothing of the files in it.
func TestHardLinkInARenamedFolderStaysOne(t *testing.T) {
	source, target := t.TempDir(), filepath.Join(t.TempDir(), "copy")
	must(t, os.Mkdir(filepath.Join(source, "before"), 0o755))
	must(t, os.WriteFile(filepath.Join(source, "before/first"), []byte("one file, two names"), 0o600))
	must(t, os.Link(filepath.Join(source, "before/first"), filepath.Join(source, "second")))
	treetest.AwaitSettled(t) // an old change, which alone would not make the file be copied again
	c := tree.New(source, target)
	must(t, c.Prefetch(t.Context()))
	must(t, os.Rename(filepath.Join(source, "before"), filepath.Join(source, "after")))
	_, err := c.Complete(t.Context())
	must(t, err)
	testkit.Diff(t, "copy", contents(t, target), contents(t, source))
}

// TestTreeThatChangesDuringPasses removes and creates entries while they are copied.
func TestTreeThatChangesDuringPasses(t *testing.T) {
	source, target := t.TempDir(), filepath.Join(t.TempDir(), "copy")
	manyKinds(t, source)
	ctx, stop := context.WithCancel(t.Context())
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		random := rand.New(rand.NewPCG(1, 2))
		for ctx.Err() == nil {
			path := filepath.Join(source, "many", fmt.Sprintf("%03d", random.IntN(300)))
			switch random.IntN(4) {
			case 0:
				_ = os.RemoveAll(path)
			case 1:
				_ = os.MkdirAll(filepath.Join(path, "folder", fmt.Sprint(random.IntN(3))), 0o755)
			case 2:
				_ = os.WriteFile(path, fmt.Append(nil, random.IntN(1e9)), 0o644)
			case 3:
				_ = os.Symlink(filepath.Join(source, "nowhere"), path)
			}
		}
	}()
	var c *tree.Copy
	for i := range 5 {
		target = filepath.Join(t.TempDir(), fmt.Sprint(i))
		c = tree.New(source, target)
		must(t, c.Prefetch(t.Context()))
		for range i {
			must(t, tree.Repeat(t.Context(), c, nil))
		}
	}
	stop()
	<-stopped
	_, err := c.Complete(t.Context())
	must(t, err)
	testkit.Diff(t, "copy", contents(t, target), contents(t, source))
}

// nested makes folders in each other.
func nested(t *testing.T, root string, levels int) {
	t.Helper()
	fd, err := unix.Open(root, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	must(t, err)
	for range levels {
		must(t, unix.Mkdirat(fd, "d", 0o700))
		inner, err := unix.Openat(fd, "d", unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		must(t, err)
		must(t, unix.Close(fd))
		fd = inner
	}
	must(t, unix.Close(fd))
}

// TestRemoveOfMoreLevelsThanOpenFiles: a sandbox may nest any number of folders.
func TestRemoveOfMoreLevelsThanOpenFiles(t *testing.T) {
	parent := t.TempDir()
	must(t, os.Mkdir(filepath.Join(parent, "deep"), 0o700))
	must(t, os.Mkdir(filepath.Join(parent, "other"), 0o700))
	nested(t, filepath.Join(parent, "deep"), 2000)
	var limit unix.Rlimit
	must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	defer func() { must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)) }()
	must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 300, Max: limit.Max}))
	must(t, tree.Remove(parent, "deep"))
	if left, err := os.ReadDir(parent); err != nil || len(left) != 1 || left[0].Name() != "other" {
		t.Errorf("left: %v, %v", left, err)
	}
}

// TestRemoveOfALargeFolder: its names are not read together.
func TestRemoveOfALargeFolder(t *testing.T) {
	parent := t.TempDir()
	must(t, os.Mkdir(filepath.Join(parent, "large"), 0o700))
	for i := range 25_000 {
		must(t, os.Symlink("x", filepath.Join(parent, "large", fmt.Sprint(i))))
	}
	must(t, tree.Remove(parent, "large"))
	if left, err := os.ReadDir(parent); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// TestDepthIsBounded: each level needs a descriptor.
func TestDepthIsBounded(t *testing.T) {
	source := t.TempDir()
	nested(t, source, 1100)
	_, err := tree.New(source, filepath.Join(t.TempDir(), "copy")).Complete(t.Context())
	if err == nil || !strings.Contains(err.Error(), "more than 1000 levels") {
		t.Errorf("got %v", err)
	}
}

func TestNumberOfEntriesIsBounded(t *testing.T) {
	source := t.TempDir()
	manyKinds(t, source)
	c := tree.New(source, filepath.Join(t.TempDir(), "copy"))
	tree.Limit(c, 100)
	must(t, c.Prefetch(t.Context()))
	if _, err := c.Complete(t.Context()); err == nil || !strings.Contains(err.Error(), "more than 100 files") {
		t.Errorf("got %v", err)
	}
}

func TestCopyEndsWithItsContext(t *testing.T) {
	source := t.TempDir()
	manyKinds(t, source)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	c := tree.New(source, filepath.Join(t.TempDir(), "copy"))
	if err := c.Prefetch(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("prefetch: %v", err)
	}
	if _, err := c.Complete(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("complete: %v", err)
	}
}
