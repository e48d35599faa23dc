//go:build mounts

package tree_test

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/disk/tree"
	"github.com/doze-run/doze/testkit"
)

// It needs root, to set owners.
func TestFlattenedPathsKeepLinksAndShiftOwners(t *testing.T) {
	image := build(t, "d usr", "d usr/bin", "f usr/bin/a image", "h usr/bin/b usr/bin/a", "l usr/bin/c a", "f usr/other x")
	layer := build(t, "d usr", "d usr/bin", "f usr/bin/d own", "h usr/bin/e usr/bin/d")
	must(t, os.Lchown(filepath.Join(image, "usr/bin/a"), 5, 6))
	must(t, os.Lchown(filepath.Join(image, "usr/bin/c"), 7, 8))
	must(t, os.Chmod(filepath.Join(image, "usr/bin/a"), 0o755|os.ModeSetuid))
	must(t, os.Lchown(filepath.Join(layer, "usr/bin/d"), 9, 10))
	must(t, os.Lchown(filepath.Join(layer, "usr"), 11, 12))
	must(t, unix.Lsetxattr(filepath.Join(layer, "usr"), "user.note", []byte("x"), 0))
	must(t, unix.Lsetxattr(filepath.Join(layer, "usr"), "user.overlay.opaque", []byte("y"), 0)) // hides the image's usr
	disk, err := tree.OpenMerged([]string{layer}, nil, 0)
	must(t, err)
	if err := tree.NewPaths([]string{"/usr/bin/a"}).Check(disk); err == nil {
		t.Error("the disk has a hidden file of the image")
	}
	disk.Close()
	must(t, unix.Lremovexattr(filepath.Join(layer, "usr"), "user.overlay.opaque"))

	disk, err = tree.OpenMerged([]string{layer}, []string{image}, 100)
	must(t, err)
	defer disk.Close()
	flat := filepath.Join(t.TempDir(), "flat")
	must(t, tree.FlattenPaths(t.Context(), disk, flat, tree.NewPaths([]string{"/usr/bin"})))
	got := map[string]string{}
	for name, e := range contents(t, flat) {
		got[name] = fmt.Sprintf("%o %d:%d %q", e.Mode&0o7777, e.UID, e.GID, slices.Sorted(maps.Keys(e.Attributes)))
	}
	delete(got, ".")
	testkit.Diff(t, "the layer", got, map[string]string{
		"usr": `755 11:12 ["user.note"]`, "usr/bin": `755 0:0 ["user.overlay.opaque"]`, "usr/bin/a": "4755 105:106 []", "usr/bin/b": "4755 105:106 []", "usr/bin/c": "777 107:108 []",
		"usr/bin/d": "644 9:10 []", "usr/bin/e": "644 9:10 []",
	})
	sameFile(t, filepath.Join(flat, "usr/bin/a"), filepath.Join(flat, "usr/bin/b"))
	sameFile(t, filepath.Join(flat, "usr/bin/d"), filepath.Join(flat, "usr/bin/e"))
}
