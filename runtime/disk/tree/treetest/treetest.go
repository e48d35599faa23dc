// Package treetest helps to test copies of trees that change.
package treetest

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/disk/tree"
	"github.com/doze-run/doze/testkit"
)

// AwaitSettled waits until each file that has been changed before has settled: see tree.Stamp.Settled.
func AwaitSettled(t testing.TB) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "last")
	testkit.NoError(t, "write", os.WriteFile(file, nil, 0o600))
	var st unix.Stat_t
	testkit.NoError(t, "stat", unix.Stat(file, &st))
	testkit.Eventually(t, "the files have settled", func() bool { return tree.StampOf(&st).Settled(time.Now()) })
}
