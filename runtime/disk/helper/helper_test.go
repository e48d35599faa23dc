package helper

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"go.podman.io/storage"

	"github.com/doze-run/doze/runtime/disk/tree"
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

func TestFailuresHaveCodes(t *testing.T) {
	for _, c := range []struct {
		cause error
		want  wire.Code
	}{
		{syscall.ENOSPC, wire.Full},
		{syscall.EDQUOT, wire.Full},
		{storage.ErrContainerUnknown, wire.NoContainer},
		{errInUse, wire.InUse},
		{errNoImage, wire.NoImage},
		{tree.ErrNotFolder, wire.NotFolder},
		{tree.ErrTooDeep, wire.TooDeep},
		{&noPathError{error: errors.New("missing")}, wire.NoPath},
		{syscall.EIO, ""},
	} {
		failed := &os.PathError{Op: "write", Path: "file", Err: c.cause}
		var reply wire.Reply
		testkit.NoError(t, "respond", new(Disks).respond(&reply, func() error { return failed }))
		if reply.Code != c.want || reply.Error != failed.Error() {
			t.Errorf("%v: the reply is %+v, want the code %q", failed, reply, c.want)
		}
	}
}
