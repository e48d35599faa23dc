package helper

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/doze-run/doze/runtime/disk/wire"
	"github.com/doze-run/doze/testkit"
)

// TestRepairMakesShortNamesAgree: a loss of power may empty the file link, and Podman then removes the folder l.
func TestRepairMakesShortNamesAgree(t *testing.T) {
	const first, second = "AAAAAAAAAAAAAAAAAAAAAAAAAA", "BBBBBBBBBBBBBBBBBBBBBBBBBB"
	for _, c := range []struct {
		name  string
		link  string // the content of the file; empty: power was lost
		names []string
		lower string // of a layer above; empty: there is none
		want  string // empty: any
	}{
		{"nothing to do", first, []string{first}, "l/" + first, first},
		{"empty file", "", []string{first}, "", first},
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
				if err != nil || len(name) != linkNameLength || c.want != "" && string(name) != c.want {
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
