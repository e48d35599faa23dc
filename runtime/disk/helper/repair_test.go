package helper

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.podman.io/storage"
	"go.podman.io/storage/pkg/idtools"

	"github.com/doze-run/doze/runtime/disk/wire"
	"github.com/doze-run/doze/testkit"
)

// TestRepairMakesShortNamesAgree: a loss of power may leave the file link empty or with zeros.
func TestRepairMakesShortNamesAgree(t *testing.T) {
	const first, second = "AAAAAAAAAAAAAAAAAAAAAAAAAA", "BBBBBBBBBBBBBBBBBBBBBBBBBB"
	zeros := strings.Repeat("\x00", linkNameLength)
	for _, c := range []struct {
		name  string
		link  string // the content of the file
		names []string
		lower string // of a layer above; empty: there is none
		want  string // empty: any
	}{
		{"nothing to do", first, []string{first}, "l/" + first, first},
		{"empty file", "", []string{first}, "", first},
		{"zeros", zeros, []string{first}, "", first},
		{"zeros and no folder", zeros, nil, "", ""},
		{"zeros and no folder, with a layer above", zeros, nil, "l/" + first, first},
		{"zeros and no folder, with zeros in the layer above", zeros, nil, "l/" + zeros, ""},
		{"a path", "/../" + first[4:], []string{first}, "", first},
		{"no folder", first, nil, "", first},
		{"neither", "", nil, "", ""},
		{"neither, with a layer above", "", nil, "l/" + first, first},
		{"neither, with layers above and below", "", nil, "l/" + first + ":l/" + second, first},
		{"neither, with a damaged layer above", "", nil, "l/../" + first[3:], ""},
		{"name of a layer that was removed", first, []string{first, second}, "", first},
	} {
		t.Run(c.name, func(t *testing.T) {
			overlay := t.TempDir()
			links, layer := filepath.Join(overlay, "l"), filepath.Join(overlay, "layer")
			testkit.NoError(t, "Mkdir", os.MkdirAll(filepath.Join(layer, "diff"), 0o755))
			testkit.NoError(t, "Mkdir", os.Mkdir(filepath.Join(overlay, "tempdirs"), 0o755)) // not a layer
			testkit.NoError(t, "WriteFile", os.WriteFile(filepath.Join(layer, "link"), []byte(c.link), 0o644))
			for i, name := range c.names {
				target := "../layer/diff"
				if i > 0 {
					target = "../removed/diff"
				}
				testkit.NoError(t, "Mkdir", os.MkdirAll(links, 0o755))
				testkit.NoError(t, "Symlink", os.Symlink(target, filepath.Join(links, name)))
			}
			children := map[string][]string{"other": {"layer"}}
			if c.lower != "" {
				children["layer"] = []string{"without the file", "above"}
				testkit.NoError(t, "Mkdir", os.Mkdir(filepath.Join(overlay, "above"), 0o755))
				testkit.NoError(t, "WriteFile", os.WriteFile(filepath.Join(overlay, "above", "lower"), []byte(c.lower), 0o644))
			}
			for range 2 {
				testkit.NoError(t, "repair", repairLinks(overlay, children))
				name, err := os.ReadFile(filepath.Join(layer, "link"))
				if err != nil || !isLinkName(string(name)) || c.want != "" && string(name) != c.want {
					t.Fatalf("the file has %q, %v; want %q", name, err, c.want)
				}
				list, err := os.ReadDir(links)
				if err != nil || len(list) != 1 || list[0].Name() != string(name) {
					t.Fatalf("the names are %v, %v; want %s", list, err, name)
				}
				if target, err := os.Readlink(filepath.Join(links, string(name))); err != nil || target != "../layer/diff" {
					t.Errorf("the name leads to %q, %v", target, err)
				}
			}
		})
	}
}

func TestChildrenAreReadFromTheListsInUse(t *testing.T) {
	for _, transient := range []bool{false, true} {
		d := &Disks{config: wire.Config{GraphRoot: t.TempDir(), RunRoot: t.TempDir(), Driver: "overlay", Transient: transient}}
		got, err := d.children()
		testkit.NoError(t, "children without lists", err)
		testkit.Diff(t, "children without lists", got, map[string][]string{})
		volatile := map[bool]string{false: d.config.GraphRoot, true: d.config.RunRoot}[transient]
		for list, text := range map[string]string{
			filepath.Join(d.config.GraphRoot, "overlay-layers", "layers.json"): `[{"id":"image"},{"id":"snapshot","parent":"image"}]`,
			filepath.Join(volatile, "overlay-layers", "volatile-layers.json"):  `[{"id":"container","parent":"image"}]`,
		} {
			testkit.NoError(t, "Mkdir", os.MkdirAll(filepath.Dir(list), 0o700))
			testkit.NoError(t, "WriteFile", os.WriteFile(list, []byte(text), 0o600))
		}
		got, err = d.children()
		testkit.NoError(t, "children", err)
		testkit.Diff(t, "children", got, map[string][]string{"": {"image"}, "image": {"snapshot", "container"}})
	}
}

func TestOnlyLayersOfContainersAreOfSandboxes(t *testing.T) {
	d := &Disks{config: wire.Config{IDs: wire.IDs{Container: 0, Host: 1, Size: 65536}}}
	ids := []idtools.IDMap{{ContainerID: 0, HostID: 1, Size: 65536}}
	for name, c := range map[string]struct {
		layer storage.Layer
		want  bool
	}{
		"of a sandbox":              {storage.Layer{UIDMap: ids}, true},
		"of another container":      {storage.Layer{}, false},
		"with other ids":            {storage.Layer{UIDMap: []idtools.IDMap{{ContainerID: 0, HostID: 1, Size: 1000}}}, false},
		"with more ids":             {storage.Layer{UIDMap: append(ids, idtools.IDMap{ContainerID: 65536, HostID: 70000, Size: 1})}, false},
		"of a snapshot":             {storage.Layer{UIDMap: ids, Names: []string{"snapshot"}}, false},
		"of an image":               {storage.Layer{UIDMap: ids, UncompressedDigest: "sha256:00"}, false},
		"of a compressed image":     {storage.Layer{UIDMap: ids, CompressedDigest: "sha256:00"}, false},
		"of a partly pulled image":  {storage.Layer{UIDMap: ids, TOCDigest: "sha256:00"}, false},
		"of a sandbox on any image": {storage.Layer{UIDMap: ids, Parent: "image"}, true},
	} {
		if got := d.ofSandbox(c.layer); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

func TestOnlyOldFoldersOfIdsAreFound(t *testing.T) {
	before := time.Now().Add(-orphanAge)
	parent := t.TempDir()
	id := func(letter string) string { return strings.Repeat(letter, idLength) }
	var want []string
	for _, c := range []struct {
		name  string
		at    time.Time
		file  bool
		found bool
	}{
		{id("a"), before.Add(-time.Second), false, true},
		{id("b"), before, false, false},
		{id("c"), before.Add(time.Second), false, false},
		{id("d"), before.Add(-time.Second), true, false},
		{id("e") + "-init", before.Add(-time.Second), false, false},
		{"l", before.Add(-time.Second), false, false},
		{"tempdirs", before.Add(-time.Second), false, false},
	} {
		path := filepath.Join(parent, c.name)
		if c.file {
			testkit.NoError(t, "WriteFile", os.WriteFile(path, nil, 0o600))
		} else {
			testkit.NoError(t, "Mkdir", os.Mkdir(path, 0o700))
		}
		testkit.NoError(t, "Chtimes", os.Chtimes(path, c.at, c.at))
		if c.found {
			want = append(want, path)
		}
	}
	got, err := foldersBefore(parent, before)
	testkit.NoError(t, "foldersBefore", err)
	testkit.Diff(t, "folders", got, want)
	_, err = foldersBefore(filepath.Join(parent, "missing"), before)
	testkit.ErrorIs(t, "foldersBefore of no folder", err, fs.ErrNotExist)
}

func TestListsOfTheStorage(t *testing.T) {
	graph, run := t.TempDir(), t.TempDir()
	d := Disks{config: wire.Config{GraphRoot: graph, RunRoot: run, Driver: wire.Driver}}
	check := func(folder string) {
		t.Helper()
		list := d.containersList()
		testkit.Diff(t, "folder of the list", filepath.Dir(filepath.Dir(list)), folder)
		testkit.NoError(t, "create", os.MkdirAll(filepath.Dir(list), 0o700))
		if hasList(list) {
			t.Error("a missing list is one")
		}
		for content, want := range map[string]bool{"": false, "[]": true} {
			testkit.NoError(t, "write", os.WriteFile(list, []byte(content), 0o600))
			if got := hasList(list); got != want {
				t.Errorf("a list with the content %q: got %t", content, got)
			}
		}
	}
	check(graph)
	d.config.Transient = true
	check(run)
}
