//go:build mounts

package tree_test

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/disk/tree"
	"github.com/doze-run/doze/testkit"
)

// overlaid calls use with a mounted overlay of layers, highest first, and if upper is not empty with upper
// on top of them.
func overlaid(t *testing.T, options, upper string, layers []string, use func(folder string)) {
	t.Helper()
	folder := t.TempDir()
	options += ",lowerdir=" + strings.Join(layers, ":")
	if upper != "" {
		options += ",upperdir=" + upper + ",workdir=" + t.TempDir()
	}
	testkit.NoError(t, "mount an overlay", unix.Mount("overlay", folder, "overlay", 0, options))
	defer func() { testkit.NoError(t, "unmount the overlay", unix.Unmount(folder, 0)) }()
	use(folder)
}

// changeAtRandom makes random changes to the files in a folder. Changes that are not possible are left out.
func changeAtRandom(r *rand.Rand, root string, count int) {
	anyPath := func() string {
		at := root
		for range 1 + r.IntN(3) {
			at = filepath.Join(at, string("abcd"[r.IntN(4)]))
		}
		return at
	}
	for range count {
		at, other := anyPath(), anyPath()
		switch r.IntN(14) {
		case 0, 1, 2:
			_ = os.MkdirAll(at, 0o755)
		case 3, 4:
			_ = os.WriteFile(at, fmt.Append(nil, r.Uint64()), 0o644)
		case 5, 6:
			if at != root {
				_ = os.RemoveAll(at)
			}
		case 7:
			_ = os.Rename(at, other)
		case 8:
			_ = os.Link(at, other)
		case 9:
			_ = os.Symlink(fmt.Sprint(r.Uint64()), at)
		case 10:
			_ = unix.Lsetxattr(at, "user.note", fmt.Append(nil, r.Uint64()), 0)
		case 11:
			_ = os.Chmod(at, fs.FileMode(0o700+r.IntN(0o100)))
			_ = os.Lchown(at, r.IntN(100), r.IntN(100))
		case 12:
			_ = unix.Mknod(at, unix.S_IFSOCK|0o600, 0) // an open of a pipe would block
		case 13: // a folder instead of the earlier content
			_ = os.RemoveAll(at)
			_ = os.Mkdir(at, 0o755)
		}
	}
}

// writeMerged writes the merged layer to a folder, as a restore of a backup does.
func writeMerged(t *testing.T, disk *tree.Folder, root, opaque string) {
	t.Helper()
	type attributed struct {
		path       string
		stat       unix.Stat_t
		attributes map[string][]byte
	}
	var all []attributed
	firsts := map[[2]uint64]string{}
	walkMerged(t, disk, "", func(f *tree.Folder, e *tree.Entry, name string) {
		at := filepath.Join(root, name)
		if e.Whiteout() {
			must(t, unix.Mknod(at, unix.S_IFCHR, 0))
			return
		}
		file := [2]uint64{uint64(e.Layer), e.Stat.Ino}
		if first, ok := firsts[file]; ok && e.Kind() != unix.S_IFDIR {
			must(t, os.Link(first, at))
			return
		}
		firsts[file] = at
		switch e.Kind() {
		case unix.S_IFDIR:
			must(t, os.Mkdir(at, 0o700))
			if e.Opaque() {
				must(t, unix.Lsetxattr(at, opaque, []byte("y"), 0))
			}
		case unix.S_IFREG:
			must(t, os.WriteFile(at, []byte(contentOf(t, f, e)), 0o600))
		case unix.S_IFLNK:
			target, err := f.Readlink(e)
			must(t, errors.Join(err, os.Symlink(target, at)))
		default:
			must(t, unix.Mknod(at, e.Stat.Mode, int(e.Stat.Rdev)))
		}
		values, err := f.Attributes(e)
		must(t, err)
		all = append(all, attributed{at, e.Stat, values})
	})
	st, err := disk.Stat()
	must(t, err)
	values, err := disk.RootAttributes()
	must(t, err)
	all = slices.Insert(all, 0, attributed{root, st, values})
	for _, a := range slices.Backward(all) { // folders after their entries, which change their times
		must(t, os.Lchown(a.path, int(a.stat.Uid), int(a.stat.Gid)))
		if a.stat.Mode&unix.S_IFMT != unix.S_IFLNK {
			must(t, unix.Chmod(a.path, a.stat.Mode&0o7777))
		}
		for name, value := range a.attributes {
			must(t, unix.Lsetxattr(a.path, name, value, 0))
		}
		must(t, unix.UtimesNanoAt(unix.AT_FDCWD, a.path, []unix.Timespec{{Nsec: unix.UTIME_OMIT}, a.stat.Mtim}, unix.AT_SYMLINK_NOFOLLOW))
	}
}

// visible is contents without the number of links: a layer has links that a higher one hides.
func visible(t *testing.T, root string) map[string]entry {
	t.Helper()
	all := contents(t, root)
	for name, e := range all {
		e.Links = 0
		all[name] = e
	}
	return all
}

// The kernel makes the layers, and shows both them and the merged layer.
func TestMergedLayersShowTheSameDiskInAnOverlayFileSystem(t *testing.T) {
	for name, c := range map[string]struct{ options, opaque string }{
		"userxattr": {"userxattr", "user.overlay.opaque"},
		"trusted":   {"redirect_dir=off,metacopy=off,index=off", "trusted.overlay.opaque"},
	} {
		t.Run(name, func(t *testing.T) {
			started := time.Now()
			for seed := range uint64(60) {
				r := rand.New(rand.NewPCG(seed, 1))
				image := []string{t.TempDir()}
				changeAtRandom(r, image[0], 40)
				layers := slices.Clone(image) // highest first
				images := 1 + r.IntN(2)
				for number := range images + r.IntN(4) {
					upper := t.TempDir()
					overlaid(t, c.options, upper, layers, func(folder string) { changeAtRandom(r, folder, 5+r.IntN(40)) })
					layers = slices.Insert(layers, 0, upper)
					if number+1 < images {
						image = slices.Clone(layers)
					}
				}
				whole := t.TempDir()
				writeMerged(t, openLayers(t, layers[:len(layers)-len(image)], image), whole, c.opaque)
				var want, got map[string]entry
				empty := t.TempDir() // an overlay without a higher layer needs two
				overlaid(t, c.options, "", append(slices.Clone(layers), empty), func(folder string) { want = visible(t, folder) })
				overlaid(t, c.options, "", slices.Concat([]string{whole}, image, []string{empty}), func(folder string) { got = visible(t, folder) })
				testkit.Diff(t, fmt.Sprintf("the disk with the merged layer, seed %d", seed), got, want)
				if c.opaque == "user.overlay.opaque" {
					flat := flattened(t, layers[:len(layers)-len(image)], image)
					overlaid(t, c.options, "", slices.Concat([]string{flat}, image, []string{empty}), func(folder string) { got = visible(t, folder) })
					testkit.Diff(t, fmt.Sprintf("the disk with the flat layer, seed %d", seed), got, want)
				}
				if t.Failed() {
					return
				}
			}
			t.Logf("took %s", time.Since(started))
		})
	}
}

// The layer with paths shows these above the image, with the rest of the image, and above the disk itself, with the rest of
// that disk.
func TestFlattenedPathsShowTheDiskInAnOverlayFileSystem(t *testing.T) {
	const options = "userxattr"
	compared, replaced := 0, 0
	for seed := range uint64(150) {
		r := rand.New(rand.NewPCG(seed, 3))
		image := []string{t.TempDir()}
		changeAtRandom(r, image[0], 40)
		layers := slices.Clone(image) // highest first
		for range 1 + r.IntN(3) {
			upper := t.TempDir()
			overlaid(t, options, upper, layers, func(folder string) { changeAtRandom(r, folder, 5+r.IntN(40)) })
			layers = slices.Insert(layers, 0, upper)
		}
		above := layers[:len(layers)-1]
		mounted := func(layers ...string) (all map[string]entry) {
			overlaid(t, options, "", append(layers, t.TempDir()), func(folder string) { all = withoutLinks(contents(t, folder)) })
			return all
		}
		disk, below := mounted(layers...), mounted(image...)
		if len(disk) == 1 {
			continue
		}
		paths := somePaths(r, disk)
		flat, err := flattenedPaths(t, above, image, paths)
		must(t, err)
		want := maps.Clone(below)
		maps.DeleteFunc(want, func(name string, _ entry) bool {
			in, _ := atPaths(name, paths)
			return in
		})
		for name, e := range disk {
			in, folder := atPaths(name, paths)
			if folder && !in && below[name].Mode != 0 && below[name].Mode&unix.S_IFMT != unix.S_IFDIR {
				replaced++
			}
			if in || folder {
				want[name] = e
			}
		}
		testkit.Diff(t, fmt.Sprintf("the image with the paths %q, seed %d", paths, seed), mounted(slices.Insert(slices.Clone(image), 0, flat)...), want)

		merged, err := tree.OpenMerged(above, image, 0)
		must(t, err)
		must(t, tree.Overlay(flat, merged, tree.NewPaths(paths)))
		merged.Close()
		testkit.Diff(t, fmt.Sprintf("the disk with its own paths %q, seed %d", paths, seed), mounted(slices.Insert(slices.Clone(layers), 0, flat)...), disk)
		if t.Failed() {
			return
		}
		compared++
	}
	if compared < 50 || replaced == 0 {
		t.Errorf("compared %d disks; %d folders replaced another kind of entry of the image", compared, replaced)
	}
}

// somePaths returns one or two paths of entries, without one inside another.
func somePaths(r *rand.Rand, all map[string]entry) []string {
	names := slices.Sorted(maps.Keys(all))[1:] // without the root
	first, second := "/"+names[r.IntN(len(names))], "/"+names[r.IntN(len(names))]
	if strings.HasPrefix(first+"/", second+"/") || strings.HasPrefix(second+"/", first+"/") {
		return []string{first}
	}
	return []string{first, second}
}
