//go:build integration

package e2e

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/doze-run/doze/api/client"
)

// keepCopy copies the store of a node that does not run, and returns what puts
// the copy back.
func (n *node) keepCopy(t *testing.T) (restore func()) {
	t.Helper()
	store, backup := filepath.Join(n.Home, "store"), filepath.Join(t.TempDir(), "store")
	if err := os.CopyFS(backup, os.DirFS(store)); err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		if err := os.RemoveAll(store); err != nil {
			t.Fatal(err)
		}
		if err := os.CopyFS(store, os.DirFS(backup)); err != nil {
			t.Fatal(err)
		}
	}
}

func TestOlderCopyOfTheStoreDestroysNoSandbox(t *testing.T) {
	n := ownNode(t)
	older := n.newBox(t)
	older.must(n.Stop())
	restore := n.keepCopy(t)
	older.must(n.Start())
	b := n.newBox(t, func(req *client.CreateRequest) { req.Name, req.Env = "younger", map[string]string{"KEPT": "too"} })
	b.exec("echo kept > /root/file")
	pid := b.hostPID()
	b.must(n.Kill()) // its container runs on
	restore()
	b.must(n.Start())
	info, err := n.API.Node(within(t))
	b.must(err)
	if len(info.Quarantined) != 1 || info.Quarantined[0].ID != b.id || info.Quarantined[0].Name != "younger" || !info.Quarantined[0].Container {
		t.Fatalf("in quarantine: %+v", info.Quarantined)
	}
	eventually(t, "it is stopped", func() bool {
		_, err := os.Stat(filepath.Join("/proc", strconv.Itoa(pid)))
		return os.IsNotExist(err)
	})
	if _, err := n.API.Get(within(t), b.id); !client.HasCode(err, client.CodeSandboxNotFound) {
		t.Errorf("it is a sandbox without a record: %v", err)
	}
	adopted, err := n.API.Adopt(within(t), b.id, "")
	b.must(err)
	if adopted.ID != b.id || adopted.Name != "younger" || adopted.State != client.StateStopped {
		t.Errorf("adopted %+v", adopted)
	}
	if out := b.exec("cat /root/file; echo $KEPT"); out != "kept\ntoo" {
		t.Errorf("its file and environment: %q", out)
	}
	older.exec("true")
}
