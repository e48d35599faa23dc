package tree_test

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/disk/tree"
	"github.com/doze-run/doze/testkit"
)

// build returns a layer. Each line is an entry: a letter, a path and an argument.
//
//	d PATH          a folder
//	o PATH          an opaque folder
//	f PATH CONTENT  a file
//	l PATH TARGET   a symbolic link
//	w PATH          a whiteout
//	h PATH OTHER    another name of the file OTHER
//
// A folder without a line of its own above its entries is not created.
func build(t *testing.T, lines ...string) string {
	t.Helper()
	root := t.TempDir()
	for _, line := range lines {
		kind, rest, _ := strings.Cut(line, " ")
		name, argument, _ := strings.Cut(rest, " ")
		at := filepath.Join(root, name)
		switch kind {
		case "d":
			must(t, os.Mkdir(at, 0o755))
		case "o":
			must(t, errors.Join(os.Mkdir(at, 0o755), unix.Lsetxattr(at, "user.overlay.opaque", []byte("y"), 0)))
		case "f":
			must(t, os.WriteFile(at, []byte(argument), 0o644))
		case "l":
			must(t, os.Symlink(argument, at))
		case "w":
			must(t, unix.Mknod(at, unix.S_IFCHR, 0))
		case "h":
			must(t, os.Link(filepath.Join(root, argument), at))
		default:
			t.Fatalf("unknown line %q", line)
		}
	}
	return root
}

// openLayers is tree.OpenLayers for the time of the test.
func openLayers(t *testing.T, layers, below []string) *tree.Folder {
	t.Helper()
	f, err := tree.OpenLayers(layers, below)
	testkit.NoError(t, "open the layers", err)
	t.Cleanup(f.Close)
	return f
}

// merged returns the lines of the merged layer.
func merged(t *testing.T, layers, below []string) []string {
	t.Helper()
	lines := []string{}
	firsts := map[[2]uint64]string{}
	walkMerged(t, openLayers(t, layers, below), "", func(f *tree.Folder, e *tree.Entry, at string) {
		file := [2]uint64{uint64(e.Layer), e.Stat.Ino}
		first, linked := firsts[file]
		switch {
		case e.Whiteout():
			lines = append(lines, "w "+at)
		case e.Opaque():
			lines = append(lines, "o "+at)
		case e.Kind() == unix.S_IFDIR:
			lines = append(lines, "d "+at)
		case e.Kind() == unix.S_IFLNK:
			target, err := f.Readlink(e)
			testkit.NoError(t, "read a link", err)
			lines = append(lines, "l "+at+" "+target)
		case linked:
			lines = append(lines, "h "+at+" "+first)
		default:
			firsts[file] = at
			lines = append(lines, "f "+at+" "+contentOf(t, f, e))
		}
	})
	return lines
}

// flattened returns the folder of the flat layer.
func flattened(t *testing.T, layers, below []string) string {
	t.Helper()
	target := filepath.Join(t.TempDir(), "flat")
	must(t, tree.Flatten(t.Context(), openLayers(t, layers, below), target))
	return target
}

// walkMerged calls visit with each entry below a folder, parents first.
func walkMerged(t *testing.T, f *tree.Folder, at string, visit func(f *tree.Folder, e *tree.Entry, at string)) {
	t.Helper()
	entries, err := f.Entries()
	testkit.NoError(t, "read a folder", err)
	for _, e := range entries {
		inPath := path.Join(at, e.Name)
		visit(f, e, inPath)
		if e.Kind() != unix.S_IFDIR {
			continue
		}
		inner, err := f.Folder(e)
		testkit.NoError(t, "open a folder", err)
		if inner.Opaque() != e.Opaque() {
			t.Errorf("%s: the folder is opaque: %t; its entry: %t", inPath, inner.Opaque(), e.Opaque())
		}
		walkMerged(t, inner, inPath, visit)
		inner.Close()
	}
}

func contentOf(t *testing.T, f *tree.Folder, e *tree.Entry) string {
	t.Helper()
	file, err := f.Open(e)
	testkit.NoError(t, "open", err)
	defer file.Close()
	content, err := io.ReadAll(file)
	testkit.NoError(t, "read", err)
	return string(content)
}

func TestMergedLayersShowTheSameDisk(t *testing.T) {
	type layers = [][]string // highest first
	for name, c := range map[string]struct {
		layers, image layers
		want          []string
	}{
		"entries of all layers": {
			layers: layers{{"d a", "f a/1 one", "f top t"}, {"d a", "f a/2 two", "d a/in", "f a/in/3 three"}},
			image:  layers{{"d a", "f a/4 four"}},
			want:   []string{"d a", "f a/1 one", "f a/2 two", "d a/in", "f a/in/3 three", "f top t"},
		},
		"the file of the highest layer": {
			layers: layers{{"f a high"}, {"f a low"}, {"l a lowest"}},
			want:   []string{"f a high"},
		},
		"a symbolic link": {
			layers: layers{{"l a /no/where"}, {"d a", "f a/hidden x"}},
			want:   []string{"l a /no/where"},
		},
		"a file over a folder": {
			layers: layers{{"f a new"}, {"d a", "f a/old x"}},
			image:  layers{{"d a", "f a/older x"}},
			want:   []string{"f a new"},
		},
		"a folder over a file": {
			layers: layers{{"d a", "f a/new x"}, {"f a old"}, {"d a", "f a/hidden x"}},
			image:  layers{{"d a", "f a/older x"}},
			want:   []string{"o a", "f a/new x"},
		},
		"a folder over a whiteout": {
			layers: layers{{"d a", "f a/new x"}, {"w a"}, {"d a", "f a/hidden x"}},
			image:  layers{{"d a", "f a/older x"}},
			want:   []string{"o a", "f a/new x"},
		},
		"two folders over a file": {
			layers: layers{{"d a", "f a/1 x"}, {"d a", "f a/2 x"}, {"f a old"}},
			image:  layers{{"d a", "f a/older x"}},
			want:   []string{"o a", "f a/1 x", "f a/2 x"},
		},
		"an opaque folder": {
			layers: layers{{"o a", "f a/new x"}, {"d a", "f a/hidden x"}},
			image:  layers{{"d a", "f a/older x"}},
			want:   []string{"o a", "f a/new x"},
		},
		"an opaque folder in a lower layer": {
			layers: layers{{"d a", "f a/new x"}, {"o a", "f a/low x"}, {"d a", "f a/hidden x"}},
			image:  layers{{"d a", "f a/older x"}},
			want:   []string{"o a", "f a/low x", "f a/new x"},
		},
		"an opaque folder in an opaque folder": {
			layers: layers{{"d a", "d a/in", "f a/in/1 x"}, {"o a", "o a/in"}, {"d a", "d a/in", "f a/in/hidden x"}},
			image:  layers{{"d a", "d a/in", "f a/in/older x"}},
			want:   []string{"o a", "o a/in", "f a/in/1 x"},
		},
		"a whiteout of an entry of the image": {
			layers: layers{{"w file", "w folder", "d a", "w a/in"}},
			image:  layers{{"f file x", "d folder"}, {"d a", "f a/in x"}},
			want:   []string{"d a", "w a/in", "w file", "w folder"},
		},
		"a whiteout of an entry of another layer": {
			layers: layers{{"w file", "w folder", "d a", "w a/in"}, {"f file x", "d folder", "f folder/in x", "d a", "f a/in x"}},
			image:  layers{{"d a"}},
			want:   []string{"d a"},
		},
		"a whiteout of an entry of both": {
			layers: layers{{"w file"}, {"f file x"}},
			image:  layers{{"f file y"}},
			want:   []string{"w file"},
		},
		"a whiteout under an entry": {
			layers: layers{{"f file x"}, {"w file"}},
			image:  layers{{"f file y"}},
			want:   []string{"f file x"},
		},
		"a whiteout in an opaque folder": {
			layers: layers{{"o a", "w a/in"}},
			image:  layers{{"d a", "f a/in x"}},
			want:   []string{"o a"},
		},
		"a whiteout in a folder over a file of the image": {
			layers: layers{{"d a", "w a/in", "f a/new x"}},
			image:  layers{{"f a x"}, {"d a", "f a/in x"}},
			want:   []string{"o a", "f a/new x"},
		},
		"a whiteout in a folder that the image does not have": {
			layers: layers{{"d a", "w a/in", "d a/b", "w a/b/in"}},
			image:  layers{{"f in x"}},
			want:   []string{"d a", "d a/b"},
		},
		"a folder over a link of the image": {
			layers: layers{{"d a", "f a/new x"}},
			image:  layers{{"l a b", "d b", "f b/in x"}},
			want:   []string{"o a", "f a/new x"},
		},
		"a folder over a whiteout of the image": {
			layers: layers{{"d a", "w a/in"}},
			image:  layers{{"w a"}, {"d a", "f a/in x"}},
			want:   []string{"o a"},
		},
		"an opaque folder of the image": {
			layers: layers{{"d a", "w a/in", "w a/hidden"}},
			image:  layers{{"o a", "f a/in x"}, {"d a", "f a/hidden x"}},
			want:   []string{"d a", "w a/in"},
		},
		"a folder of the image over one of its files": {
			layers: layers{{"d a", "w a/in", "f a/new x"}},
			image:  layers{{"d a", "f a/in x", "f a/other x"}, {"f a x"}, {"d a", "f a/hidden x"}},
			want:   []string{"d a", "w a/in", "f a/new x"},
		},
		"hard links": {
			layers: layers{{"d a", "f a/1 one", "h a/2 a/1", "h b a/1"}, {"f low x", "h low-link low"}},
			want:   []string{"d a", "f a/1 one", "h a/2 a/1", "h b a/1", "f low x", "h low-link low"},
		},
		"hard links, one of them hidden": {
			layers: layers{{"f 1 new"}, {"f 1 old", "h 2 1", "h 3 1"}},
			want:   []string{"f 1 new", "f 2 old", "h 3 2"},
		},
		"nothing": {layers: layers{{}, {}}, image: layers{{"f a x"}}, want: []string{}},
	} {
		t.Run(name, func(t *testing.T) {
			var above, below []string
			for _, lines := range c.layers {
				above = append(above, build(t, lines...))
			}
			for _, lines := range c.image {
				below = append(below, build(t, lines...))
			}
			testkit.Diff(t, "the merged layer", merged(t, above, below), c.want)
			testkit.Diff(t, "the flat layer", merged(t, []string{flattened(t, above, below)}, below), c.want)
		})
	}
}

// show adds a layer to what an overlay shows: lines of build by path, without whiteouts.
func show(view map[string]string, layer []string) {
	for _, line := range layer {
		kind, rest, _ := strings.Cut(line, " ")
		name, _, _ := strings.Cut(rest, " ")
		if !(kind == "d" && strings.HasPrefix(view[name], "d ")) {
			maps.DeleteFunc(view, func(other, _ string) bool { return strings.HasPrefix(other, name+"/") })
		}
		switch kind {
		case "w":
			delete(view, name)
		case "o":
			view[name] = "d " + name
		default:
			view[name] = line
		}
	}
}

// randomLayer returns lines of build for a layer, in the order of paths. number distinguishes its files.
func randomLayer(r *rand.Rand, number int) []string {
	var lines []string
	var fill func(at string, depth int)
	fill = func(at string, depth int) {
		for _, name := range []string{"a", "b", "c"} {
			name = path.Join(at, name)
			kind := "ddddofww---"[r.IntN(11)]
			switch {
			case kind == '-', depth == 3 && (kind == 'd' || kind == 'o'):
			case kind == 'f':
				lines = append(lines, fmt.Sprintf("f %s %d", name, number))
			default:
				lines = append(lines, fmt.Sprintf("%c %s", kind, name))
				if kind != 'w' {
					fill(name, depth+1)
				}
			}
		}
	}
	fill("", 0)
	return lines
}

// randomDisk is a disk of random layers.
type randomDisk struct {
	layers, below []string          // folders of the layers above the image and of the image, highest first
	image, all    map[string]string // entries of the image and of the disk
}

func newRandomDisk(t *testing.T, r *rand.Rand) randomDisk {
	t.Helper()
	d := randomDisk{image: map[string]string{}, all: map[string]string{}}
	images := 1 + r.IntN(2)
	for number := range images + 1 + r.IntN(3) {
		lines := randomLayer(r, number)
		show(d.all, lines)
		if number < images {
			show(d.image, lines)
			d.below = slices.Insert(d.below, 0, build(t, lines...))
		} else {
			d.layers = slices.Insert(d.layers, 0, build(t, lines...))
		}
	}
	return d
}

// The merged layer on top of the image shows what all layers on top of it show.
func TestMergedLayersShowTheSameDiskAsAnyLayers(t *testing.T) {
	whiteouts, opaque := 0, 0
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 0))
		d := newRandomDisk(t, r)
		image, want, layers, below := d.image, d.all, d.layers, d.below
		lines := merged(t, layers, below)
		testkit.Diff(t, fmt.Sprintf("the flat layer, seed %d", seed), merged(t, []string{flattened(t, layers, below)}, below), lines)
		show(image, lines)
		testkit.Diff(t, fmt.Sprintf("the disk with the merged layer, seed %d", seed), image, want)
		if t.Failed() {
			return
		}
		for _, line := range lines {
			switch line[0] {
			case 'w':
				whiteouts++
			case 'o':
				opaque++
			}
		}
	}
	if whiteouts < 100 || opaque < 100 {
		t.Errorf("the merged layers have %d whiteouts and %d opaque folders", whiteouts, opaque)
	}
}

func TestAttributesOfTheHighestLayerWin(t *testing.T) {
	layers := []string{build(t, "d a", "f a/1 high"), build(t, "d a", "f a/1 low", "f a/2 low")}
	at := time.Unix(981173106, 789)
	for i, value := range []string{"high", "low"} {
		for _, name := range []string{"", "a", "a/1", "a/2"} {
			file := filepath.Join(layers[i], name)
			if _, err := os.Stat(file); err != nil {
				continue
			}
			must(t, unix.Lsetxattr(file, "user.note", []byte(value), 0))
			must(t, unix.Lsetxattr(file, "user."+value, nil, 0))
			must(t, unix.Lsetxattr(file, "user.overlay.origin", []byte("x"), 0))
			must(t, os.Chmod(file, 0o700+os.FileMode(i)))
			must(t, os.Chtimes(file, at, at.Add(time.Duration(i)*time.Hour)))
		}
	}
	high := map[string][]byte{"user.note": []byte("high"), "user.high": nil}
	low := map[string][]byte{"user.note": []byte("low"), "user.low": nil}
	disk := openLayers(t, layers, nil)
	got, err := disk.RootAttributes()
	testkit.NoError(t, "attributes of the root", err)
	testkit.Diff(t, "attributes of the root", got, high)
	st, err := disk.Stat()
	testkit.NoError(t, "stat the root", err)
	if st.Mode&0o777 != 0o700 || st.Mtim.Sec != at.Unix() {
		t.Errorf("the root has mode %o, modified at %d", st.Mode&0o777, st.Mtim.Sec)
	}
	walkMerged(t, disk, "", func(f *tree.Folder, e *tree.Entry, name string) {
		want, layer := high, 0
		if name == "a/2" {
			want, layer = low, 1
		}
		got, err := f.Attributes(e)
		testkit.NoError(t, "attributes of "+name, err)
		testkit.Diff(t, "attributes of "+name, got, want)
		modified := at.Add(time.Duration(layer) * time.Hour)
		if e.Layer != layer || e.Stat.Mode&0o777 != 0o700+uint32(layer) || !time.Unix(e.Stat.Mtim.Unix()).Equal(modified) {
			t.Errorf("%s is of layer %d, with mode %o, modified at %v", name, e.Layer, e.Stat.Mode&0o777, time.Unix(e.Stat.Mtim.Unix()))
		}
	})
}

func TestAttributesOfALinkAreItsOwn(t *testing.T) {
	layer := build(t, "f a x", "l b a")
	must(t, unix.Lsetxattr(filepath.Join(layer, "a"), "user.note", []byte("x"), 0))
	disk := openLayers(t, []string{layer}, nil)
	entries, err := disk.Entries()
	testkit.NoError(t, "read the root", err)
	got, err := disk.Attributes(entries[1])
	testkit.NoError(t, "attributes", err)
	testkit.Diff(t, "attributes of the link", got, map[string][]byte(nil))
	if f, err := disk.Open(entries[1]); !errors.Is(err, unix.ELOOP) {
		t.Errorf("opened the link: %v, %v", f, err)
	}
}

// The kernel returns the names of a large folder in several parts. Entries may be called again.
func TestMergeOfLargeFolders(t *testing.T) {
	const files = 5000
	layers := make([]string, 2)
	for i := range layers {
		layers[i] = build(t, "d a")
		for n := range files {
			must(t, os.WriteFile(filepath.Join(layers[i], "a", fmt.Sprintf("file-with-a-longer-name-%05d", i*files/2+n)), nil, 0o600))
		}
	}
	disk := openLayers(t, layers, nil)
	root, err := disk.Entries()
	testkit.NoError(t, "read the root", err)
	folder, err := disk.Folder(root[0])
	testkit.NoError(t, "open the folder", err)
	defer folder.Close()
	for range 2 {
		entries, err := folder.Entries()
		testkit.NoError(t, "read the folder", err)
		if len(entries) != files*3/2 {
			t.Fatalf("there are %d entries, want %d", len(entries), files*3/2)
		}
		for i, e := range entries {
			if want := fmt.Sprintf("file-with-a-longer-name-%05d", i); e.Name != want || e.Layer != min(i/files, 1) {
				t.Fatalf("entry %d is %s of layer %d, want %s", i, e.Name, e.Layer, want)
			}
		}
	}
}

func TestOpenLayersNamesTheMissingLayer(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing")
	if _, err := tree.OpenLayers([]string{t.TempDir()}, []string{missing}); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), missing) {
		t.Errorf("got %v", err)
	}
}

func TestExtentsAreWhatIsNotAHole(t *testing.T) {
	const block = 1 << 20 // of any file system
	data := make([]byte, block)
	data[0] = 1
	type extents = []tree.Extent
	for name, c := range map[string]struct {
		data  []int64 // offsets
		size  int64
		want  extents
		holes bool
	}{
		"empty":                 {size: 0},
		"no hole":               {data: []int64{0, block}, size: 2 * block, want: extents{{0, 2 * block}}},
		"no hole, small":        {data: []int64{0}, size: 100, want: extents{{0, 100}}},
		"a hole alone":          {size: 3 * block, holes: true},
		"a hole at the start":   {data: []int64{block}, size: 2 * block, want: extents{{block, block}}, holes: true},
		"a hole at the end":     {data: []int64{0}, size: 2 * block, want: extents{{0, block}}, holes: true},
		"holes between":         {data: []int64{0, 2 * block, 4 * block}, size: 5 * block, want: extents{{0, block}, {2 * block, block}, {4 * block, block}}, holes: true},
		"an end within a block": {data: []int64{2 * block}, size: 2*block + 10, want: extents{{2 * block, 10}}, holes: true},
	} {
		t.Run(name, func(t *testing.T) {
			file, err := os.Create(filepath.Join(t.TempDir(), "file"))
			must(t, err)
			defer file.Close()
			for _, at := range c.data {
				_, err := file.WriteAt(data[:min(block, c.size-at)], at)
				must(t, err)
			}
			must(t, file.Truncate(c.size))
			got, holes, err := tree.Extents(file, c.size)
			testkit.NoError(t, "find extents", err)
			testkit.Diff(t, "extents", got, c.want)
			if holes != c.holes {
				t.Errorf("it has holes: %t", holes)
			}
		})
	}
}

// A reader must not get bytes beyond the size of the entry.
func TestExtentsEndAtTheSize(t *testing.T) {
	file, err := os.Create(filepath.Join(t.TempDir(), "file"))
	must(t, err)
	defer file.Close()
	_, err = file.Write(make([]byte, 2<<20))
	must(t, err)
	got, holes, err := tree.Extents(file, 1<<20)
	testkit.NoError(t, "find extents", err)
	testkit.Diff(t, "extents", got, []tree.Extent{{Length: 1 << 20}})
	if holes {
		t.Error("it has holes")
	}
}
