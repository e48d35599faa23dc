package helper

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"go.podman.io/storage"

	"github.com/doze-run/doze/runtime/disk/wire"
	"github.com/doze-run/doze/testkit"
)

// TestTransientContainersAreNotOrphans: with transient_store in storage.conf, the lists of containers and of their layers
// are in the folder RunRoot.
func TestTransientContainersAreNotOrphans(t *testing.T) {
	config := wire.Config{GraphRoot: t.TempDir(), RunRoot: t.TempDir(), Driver: "vfs", Transient: true} // overlay needs mounts
	const layer = "a"
	for kind, list := range map[string]any{
		"layers":     []storage.Layer{{ID: layer}},
		"containers": []storage.Container{{ID: "c", LayerID: layer}},
	} {
		folder := filepath.Join(config.RunRoot, "vfs-"+kind)
		testkit.NoError(t, "make the folder", os.MkdirAll(folder, 0o700))
		text, err := json.Marshal(list)
		testkit.NoError(t, "encode", err)
		testkit.NoError(t, "write the list", os.WriteFile(filepath.Join(folder, "volatile-"+kind+".json"), text, 0o600))
	}
	testkit.NoError(t, "make the layer", os.MkdirAll(filepath.Join(config.GraphRoot, "vfs", "dir", layer), 0o755))
	store, err := storage.GetStore(storeOptions(config))
	testkit.NoError(t, "open the storage", err)
	defer store.Free()
	d := newDisks(t)
	d.store = store
	orphans, listed, err := d.orphans()
	if err != nil || len(orphans) != 0 || !listed[layer] || !listed["c"] {
		t.Errorf("orphans %v, listed %v, %v", orphans, listed, err)
	}
}
