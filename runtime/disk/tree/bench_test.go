package tree_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/doze-run/doze/runtime/disk/tree"
	"github.com/doze-run/doze/testkit"
)

// BenchmarkComplete is the time for which programs stop while a tree of 20,000 files is copied that does not change.
func BenchmarkComplete(b *testing.B) {
	source := b.TempDir()
	for n := range 20_000 {
		folder := filepath.Join(source, fmt.Sprintf("%04d", n/100))
		if n%100 == 0 {
			testkit.NoError(b, "make a folder", os.Mkdir(folder, 0o755))
		}
		testkit.NoError(b, "make a file", os.WriteFile(filepath.Join(folder, fmt.Sprint(n)), nil, 0o644))
	}
	c := tree.New(source, filepath.Join(b.TempDir(), "copy"))
	testkit.NoError(b, "prefetch", c.Prefetch(b.Context()))
	_, err := c.Complete(b.Context()) // copies what had just been made during Prefetch
	testkit.NoError(b, "complete", err)
	for b.Loop() {
		_, err := c.Complete(b.Context())
		testkit.NoError(b, "complete", err)
	}
}
