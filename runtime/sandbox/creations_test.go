package sandbox

import (
	"path/filepath"
	"testing"

	"github.com/doze-run/doze/testkit"
)

func TestFolderOfCreationsIsCreatedWhenItIsOpened(t *testing.T) {
	c := creations{filepath.Join(t.TempDir(), "nodes", "creating")}
	id := NewID()
	for range 2 { // also by the next node
		testkit.NoError(t, "open", c.open())
		testkit.NoError(t, "add", c.add(id))
		if !c.pending(id) {
			t.Error("the creation is not pending")
		}
	}
	testkit.NoError(t, "remove", c.remove(id))
	if c.pending(id) {
		t.Error("the creation is pending after its end")
	}
}
