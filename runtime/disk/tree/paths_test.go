package tree_test

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/disk/tree"
	"github.com/doze-run/doze/testkit"
)

// atPaths reports whether a name is at one of the absolute paths or in such a folder, and whether it contains a path.
func atPaths(name string, paths []string) (in, above bool) {
	name = "/" + strings.TrimPrefix(name, ".")
	for _, p := range paths {
		in = in || name == p || strings.HasPrefix(name, p+"/")
		above = above || name == "/" || strings.HasPrefix(p, name+"/")
	}
	return in, above
}

func TestPartialCopyHasThePathsOnly(t *testing.T) {
	for _, passes := range []string{"one pass", "two passes"} {
		t.Run(passes, func(t *testing.T) {
			source, target := t.TempDir(), filepath.Join(t.TempDir(), "copy")
			manyKinds(t, source)
			paths := []string{"/a", "/z/deep/er/third", "/many/007", "/sparse", "/dangling", "/whiteout", "/bin/none", "/none/a", "/fifo", "/empty/file", "/to a folder/first", "/" + strings.Repeat("n", 300), "/empty folder"}
			c := tree.NewPartial(source, target, tree.NewPaths(paths))
			if passes == "two passes" {
				must(t, c.Prefetch(t.Context()))
				must(t, os.Rename(filepath.Join(source, "many/008"), filepath.Join(source, "many/007")))
				must(t, os.Remove(filepath.Join(source, "dangling")))
				must(t, os.WriteFile(filepath.Join(source, "bin/none"), nil, 0o600))
				must(t, os.WriteFile(filepath.Join(source, "many/not"), nil, 0o600))
				must(t, os.Link(filepath.Join(source, "a/first"), filepath.Join(source, "a/fourth")))
				must(t, os.RemoveAll(filepath.Join(source, "empty folder")))
			}
			usage, err := c.Complete(t.Context())
			must(t, err)
			want := contents(t, source)
			maps.DeleteFunc(want, func(name string, _ entry) bool {
				in, above := atPaths(name, paths)
				return !in && !above
			})
			testkit.Diff(t, "copy", withoutLinks(contents(t, target)), withoutLinks(want))
			if usage.Entries != int64(len(want)) {
				t.Errorf("usage has %d entries, want %d", usage.Entries, len(want))
			}
			sameFile(t, filepath.Join(target, "a/first"), filepath.Join(target, "z/deep/er/third"))
		})
	}
}

// withoutLinks replaces links by the content of their file, and omits the number of links.
func withoutLinks(all map[string]entry) map[string]entry {
	for name, e := range all {
		if first, ok := strings.CutPrefix(e.Content, "link to "); ok && e.Mode&unix.S_IFMT == unix.S_IFREG {
			e.Content = all[first].Content
		}
		e.Links = 0
		all[name] = e
	}
	return all
}

func sameFile(t *testing.T, a, b string) {
	t.Helper()
	first, err := os.Lstat(a)
	must(t, err)
	second, err := os.Lstat(b)
	must(t, err)
	if !os.SameFile(first, second) {
		t.Errorf("%s and %s are not links to one file", a, b)
	}
}

// flattenedPaths returns the folder of the layer with the paths of a disk.
func flattenedPaths(t *testing.T, layers, below, paths []string) (string, error) {
	t.Helper()
	disk, err := tree.OpenMerged(layers, below, 0)
	must(t, err)
	defer disk.Close()
	target := filepath.Join(t.TempDir(), "flat")
	return target, tree.FlattenPaths(t.Context(), disk, target, tree.NewPaths(paths))
}

// The layer with paths of a disk shows these above the image, and above any other disk.
func TestFlattenedPathsShowTheMergedDisk(t *testing.T) {
	missing, replaced := 0, 0
	for seed := range uint64(400) {
		r := rand.New(rand.NewPCG(seed, 2))
		d := newRandomDisk(t, r)
		image, disk, layers, below := d.image, d.all, d.layers, d.below
		paths := randomPaths(r)
		flat, err := flattenedPaths(t, layers, below, paths)
		if want := missingEntry(disk, paths); want != "" {
			if err, ok := errors.AsType[*tree.PathError](err); !ok || !slices.ContainsFunc(paths, func(p string) bool { return strings.HasPrefix(p+"/", err.Path+"/") }) {
				t.Fatalf("seed %d: %q: %v, want an error for %s", seed, paths, err, want)
			}
			missing++
			continue
		}
		must(t, err)
		want := maps.Clone(image)
		for name := range want {
			if in, _ := atPaths(name, paths); in {
				delete(want, name)
			}
		}
		for _, name := range slices.Sorted(maps.Keys(disk)) {
			in, above := atPaths(name, paths)
			if above && !strings.HasPrefix(want[name], "d ") {
				if want[name] != "" {
					replaced++
				}
				want[name] = disk[name]
			}
			if in {
				want[name] = disk[name]
			}
		}
		show(image, merged(t, []string{flat}, below))
		testkit.Diff(t, fmt.Sprintf("the image with the paths %q, seed %d", paths, seed), image, want)
		if t.Failed() {
			return
		}
	}
	if missing < 50 || missing > 350 || replaced == 0 {
		t.Errorf("%d disks lacked a path, %d folders replaced another kind of entry", missing, replaced)
	}
}

// randomPaths returns one or two paths of the entries of randomLayer, without one inside another.
func randomPaths(r *rand.Rand) []string {
	at := func() (p string) {
		for range 1 + r.IntN(3) {
			p += "/" + string("abc"[r.IntN(3)])
		}
		return p
	}
	paths := []string{at(), at()}
	if strings.HasPrefix(paths[0]+"/", paths[1]+"/") || strings.HasPrefix(paths[1]+"/", paths[0]+"/") {
		return paths[:1]
	}
	return paths
}

// missingEntry returns the first of the paths that a disk does not have.
func missingEntry(disk map[string]string, paths []string) string {
	for _, p := range paths {
		if disk[p[1:]] == "" {
			return p
		}
	}
	return ""
}

func TestFlattenedPathsNameTheMissingEntry(t *testing.T) {
	layers := []string{build(t, "d srv", "w srv/deleted", "l srv/link /etc", "f srv/file x", "d new")}
	below := []string{build(t, "d srv", "f srv/deleted x", "d etc", "f etc/passwd x")}
	for path, want := range map[string]string{
		"/none":                            `"/none" does not exist`,
		"/none/a/b":                        `"/none" does not exist`,
		"/srv/deleted":                     `"/srv/deleted" does not exist`,
		"/srv/link/passwd":                 `"/srv/link" is a symbolic link, and not the folder of a path`,
		"/srv/file/a":                      `"/srv/file" is not a folder`,
		"/new/" + strings.Repeat("n", 300): `"/new/` + strings.Repeat("n", 300) + `" does not exist`,
	} {
		if _, err := flattenedPaths(t, layers, below, []string{"/etc/passwd", path}); err == nil || err.Error() != want {
			t.Errorf("%s: %v", path, err)
		}
		disk, err := tree.OpenMerged(layers, below, 0)
		must(t, err)
		if err := tree.NewPaths([]string{"/etc/passwd", path}).Check(disk); err == nil || err.Error() != want {
			t.Errorf("check of %s: %v", path, err)
		}
		if err := tree.NewPaths([]string{"/etc/passwd", "/srv/link"}).Check(disk); err != nil {
			t.Errorf("check of paths that exist: %v", err)
		}
		disk.Close()
	}
}
