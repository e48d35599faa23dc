//go:build mounts

package tree_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/disk/tree"
)

// fileSystems are what the storage of a node may be on.
var fileSystems = []struct {
	name   string
	mkfs   []string
	size   int64 // in bytes; XFS needs 300 MiB
	shares bool  // the blocks of copies
}{
	{"ext4", []string{"mkfs.ext4", "-q", "-b", "4096"}, 64 << 20, false},
	{"xfs", []string{"mkfs.xfs", "-q"}, 320 << 20, true},
	{"btrfs", []string{"mkfs.btrfs", "-q"}, 128 << 20, true},
}

// mounted returns a folder on a new file system, on a loop device.
func mounted(t *testing.T, name string, mkfs []string, size int64) string {
	t.Helper()
	dir := t.TempDir()
	image, folder := filepath.Join(dir, "image"), filepath.Join(dir, "mounted")
	must(t, os.WriteFile(image, nil, 0o600))
	must(t, os.Truncate(image, size))
	must(t, os.Mkdir(folder, 0o755))
	for _, command := range [][]string{append(mkfs, image), {"mount", "-t", name, "-o", "loop", image, folder}} {
		if out, err := exec.CommandContext(t.Context(), command[0], command[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s (packaging/host/setup --with-tests installs the programs)", command, err, out)
		}
	}
	t.Cleanup(func() {
		if err := unix.Unmount(folder, 0); err != nil {
			t.Errorf("unmount %s: %v", name, err)
		}
	})
	return folder
}

// used returns how many bytes of a file system are in use.
func used(t *testing.T, folder string) int64 {
	t.Helper()
	unix.Sync()
	var st unix.Statfs_t
	must(t, unix.Statfs(folder, &st))
	return int64(st.Blocks-st.Bfree) * st.Bsize
}

func TestCopiesOnFileSystems(t *testing.T) {
	for _, f := range fileSystems {
		t.Run(f.name, func(t *testing.T) {
			folder := mounted(t, f.name, f.mkfs, f.size)
			copyIsExact(t, folder)
			const size = 8 << 20
			source := filepath.Join(folder, "source")
			must(t, os.Mkdir(source, 0o755))
			content := make([]byte, size)
			for i := range content {
				content[i] = byte(i>>12 + i)
			}
			must(t, os.WriteFile(filepath.Join(source, "file"), content, 0o600))
			before := used(t, folder)
			if _, err := tree.New(source, filepath.Join(folder, "copy")).Complete(t.Context()); err != nil {
				t.Fatal(err)
			}
			if added := used(t, folder) - before; f.shares != (added < size/2) {
				t.Errorf("a copy of %d bytes takes %d more; shared blocks: %t", size, added, f.shares)
			}
		})
	}
}

// A copy for which the disk has no space fails, and can be removed.
func TestCopyToAFullFileSystemFails(t *testing.T) {
	folder := mounted(t, fileSystems[0].name, fileSystems[0].mkfs, fileSystems[0].size)
	source := filepath.Join(folder, "source")
	must(t, os.Mkdir(source, 0o755))
	must(t, os.WriteFile(filepath.Join(source, "file"), make([]byte, 40<<20), 0o600))
	before := used(t, folder)
	c := tree.New(source, filepath.Join(folder, "copy"))
	if err := c.Prefetch(t.Context()); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("the first pass: %v", err)
	}
	must(t, tree.Remove(folder, "copy"))
	if left := used(t, folder) - before; left > 1<<20 {
		t.Errorf("%d bytes are left", left)
	}
}
