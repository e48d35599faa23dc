package helper

import (
	"testing"

	"github.com/doze-run/doze/runtime/bucket/bucketfs"
)

func TestMountsOfASandboxHaveOneShare(t *testing.T) {
	s := newSandboxes(bucketfs.NewResources(t.TempDir(), 1<<20))
	first, second, other := s.join("a"), s.join("a"), s.join("b")
	if first.share != second.share || first.share == other.share {
		t.Error("the shares are not one for each sandbox")
	}
	s.drop("a")
	if s.join("a") != first {
		t.Error("a sandbox with a mount has another share")
	}
	s.drop("a")
	s.drop("a")
	s.drop("b")
	if len(s.byID) != 0 {
		t.Errorf("%d sandboxes without mounts are stored", len(s.byID))
	}
}
