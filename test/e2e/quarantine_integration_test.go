//go:build integration

package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/test/testnode"
	"github.com/doze-run/doze/testkit"
)

// copyStore copies the store of a node that does not run, and returns a function that
// restores the copy.
func (n *node) copyStore(t *testing.T) (restore func()) {
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
	restore := n.copyStore(t)
	older.must(n.Start())
	b := n.newBox(t, func(req *types.CreateSandboxRequest) { req.Name, req.Env = "younger", map[string]string{"KEPT": "too"} })
	b.exec("echo kept > /root/file")
	public, err := n.API.Expose(testkit.Context(t), b.id, types.ExposePortRequest{Port: 3000, Access: "public", Wake: "never", HostHeader: "preserve"})
	b.must(err)
	private, err := n.API.Expose(testkit.Context(t), b.id, types.ExposePortRequest{Port: 4000})
	b.must(err)
	_, err = n.API.StartProcess(testkit.Context(t), b.id, types.StartProcessRequest{Command: types.Command{Argv: []string{"sleep", "3600"}}, Name: "web", Restart: "on_wake"})
	b.must(err)
	name, ttl := "renamed", types.Duration(time.Hour)
	_, err = n.API.Update(testkit.Context(t), b.id, types.UpdateSandboxRequest{Name: &name, TTL: &ttl})
	b.must(err)
	pid := b.hostPID()
	b.must(n.Kill()) // its container runs on
	restore()
	b.must(n.Start())
	info, err := n.API.Node(testkit.Context(t))
	b.must(err)
	if !info.DataRestored {
		t.Error("the restored older copy is not reported")
	}
	if len(info.Quarantined) != 1 || info.Quarantined[0].ID != b.id || info.Quarantined[0].Name != "renamed" || !info.Quarantined[0].HasContainer {
		t.Fatalf("in quarantine: %+v", info.Quarantined)
	}
	testkit.Eventually(t, "it is stopped", func() bool {
		_, err := os.Stat(filepath.Join("/proc", strconv.Itoa(pid)))
		return os.IsNotExist(err)
	})
	if _, err := n.API.Get(testkit.Context(t), b.id); !problem.Has(err, problem.SandboxNotFound) {
		t.Errorf("it is a sandbox without a record: %v", err)
	}
	adopted, err := n.API.Adopt(testkit.Context(t), b.id, "")
	b.must(err)
	if adopted.ID != b.id || adopted.Name != "renamed" || adopted.State != types.StateStopped || adopted.TTL != ttl {
		t.Errorf("adopted %+v", adopted)
	}
	if diff := cmp.Diff([]types.Port{public, private}, adopted.Ports); diff != "" {
		t.Errorf("its ports (-before +after):\n%s", diff)
	}
	if out := b.exec("cat /root/file; echo $KEPT"); out != "kept\ntoo" {
		t.Errorf("its file and environment: %q", out)
	}
	processes, err := n.API.Processes(testkit.Context(t), b.id)
	b.must(err)
	if len(processes) != 1 || processes[0].Name != "web" || processes[0].State != "running" {
		t.Errorf("its declared process: %+v", processes)
	}
	older.exec("true")
}

func TestNodeOnACopyOfAHomeDoesNotStart(t *testing.T) {
	n := ownNode(t)
	b := n.newBox(t)
	b.exec("echo kept > /root/file")
	b.must(n.Stop())
	copied, err := testnode.New(testnode.Config{})
	b.must(err)
	t.Cleanup(func() {
		if err := os.RemoveAll(copied.Home); err != nil { // it has no sandboxes of its own
			t.Error(err)
		}
	})
	if out, err := exec.Command("cp", "-a", n.Home+"/.", copied.Home).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	b.must(n.Start())
	if err := copied.Start(); err == nil || !strings.Contains(err.Error(), "is a copy of it") {
		t.Errorf("a node on the copy started: %v", err)
	}
	if out := b.exec("cat /root/file"); out != "kept" {
		t.Errorf("the file has %q", out)
	}
}

func TestNodeReportsADamagedStoreAndLosesNoSandbox(t *testing.T) {
	n := ownNode(t)
	b := n.newBox(t, func(req *types.CreateSandboxRequest) { req.Name = "damaged" })
	b.exec("echo kept > /root/file")
	b.must(n.Stop())
	tables, err := filepath.Glob(filepath.Join(n.Home, "store", "*.sst"))
	if err != nil || len(tables) == 0 {
		t.Fatalf("tables: %v, %v", tables, err)
	}
	table := slices.MaxFunc(tables, func(a, b string) int { return int(size(t, a) - size(t, b)) })
	f, err := os.OpenFile(table, os.O_RDWR, 0)
	b.must(err)
	_, err = f.WriteAt(make([]byte, 64), size(t, table)/3)
	b.must(err)
	b.must(f.Close())
	if err := n.Start(); err == nil || !strings.Contains(err.Error(), table) || !strings.Contains(err.Error(), "--reset") || strings.Contains(err.Error(), "panic") {
		t.Fatalf("the node starts, or does not name the damage: %v", err)
	}
	doctor := func(args ...string) string {
		out, _ := n.Command(append([]string{"doctor", "--store"}, args...)...).CombinedOutput()
		return string(out)
	}
	if out := doctor(); !strings.Contains(out, table) {
		t.Errorf("doze doctor --store: %s", out)
	}
	if out := doctor("--reset"); !strings.Contains(out, ".damaged-") {
		t.Errorf("doze doctor --store --reset: %s", out)
	}
	b.must(n.Start())
	out, err := n.Command("adopt", b.id).CombinedOutput()
	if err != nil || string(out) != fmt.Sprintln("damaged  stopped") {
		t.Errorf("doze adopt: %v, %s", err, out)
	}
	if out := b.exec("cat /root/file"); out != "kept" {
		t.Errorf("the file has %q", out)
	}
}

func size(t *testing.T, path string) int64 {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return info.Size()
}
