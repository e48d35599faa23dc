package disk

import (
	"errors"
	"io/fs"
	"path/filepath"
	"testing"

	"github.com/doze-run/doze/runtime/disk/wire"
	"github.com/doze-run/doze/runtime/podman"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// TestSandboxesNeedNoHelperWithAnotherDriver: the helper refuses a storage without the driver overlay, with
// which a node runs too.
func TestSandboxesNeedNoHelperWithAnotherDriver(t *testing.T) {
	root := t.TempDir()
	const noHelper = "/nonexistent"
	for _, driver := range []string{"vfs", "btrfs"} {
		c := New(Config{Helper: noHelper, NetnsHelper: noHelper, Storage: podman.Storage{GraphRoot: root, Driver: driver}})
		testkit.NoError(t, "Repair", c.Repair(t.Context()))
		testkit.NoError(t, "Sync", c.Sync(t.Context(), sandbox.NewID()))
		c.cfg.Storage.GraphRoot = filepath.Join(root, "missing")
		testkit.ErrorIs(t, "Sync without a storage", c.Sync(t.Context(), sandbox.NewID()), fs.ErrNotExist)
	}
	c := New(Config{Helper: noHelper, NetnsHelper: noHelper, Storage: podman.Storage{GraphRoot: root, Driver: "overlay"}})
	testkit.ErrorIs(t, "Sync with the driver overlay", c.Sync(t.Context(), sandbox.NewID()), sandbox.ErrEngineDown)
}

// TestHelperUsesPodmansLists: see podman.Storage.
func TestHelperUsesPodmansLists(t *testing.T) {
	for _, transient := range []bool{false, true} {
		c := New(Config{Storage: podman.Storage{Transient: transient}})
		if got := c.config().Transient; got != transient {
			t.Errorf("transient is %v, want %v", got, transient)
		}
	}
}

func TestFailuresOfTheHelperAreErrorsOfSandboxes(t *testing.T) {
	for code, want := range map[wire.Code]error{
		wire.Full: sandbox.ErrStoreFull, wire.NoContainer: sandbox.ErrNoContainer, wire.InUse: sandbox.ErrSnapshotInUse,
		wire.TooDeep: sandbox.ErrTooDeep, wire.NoImage: ErrNoImage, wire.NotFolder: sandbox.ErrNotFolder,
	} {
		testkit.ErrorIs(t, string(code), failure{wire.Reply{Code: code}}, want)
	}
	if errors.Is(failure{}, sandbox.ErrStoreFull) {
		t.Error("a failure without a code is a full disk")
	}
}
