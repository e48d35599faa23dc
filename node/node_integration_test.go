//go:build integration

package node_test

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/doze-run/doze/egress"
	"github.com/doze-run/doze/node"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/store"
)

// programs is the folder of doze-guest and doze-netns; `make test-integration` sets it.
func programs(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("DOZE_BIN")
	if dir == "" {
		t.Fatal("DOZE_BIN is not set: run this by `make test-integration PACKAGES=./node`")
	}
	return dir
}

func open(t *testing.T, home, bin string) *node.Node {
	t.Helper()
	cfg := sandbox.DefaultConfig()
	cfg.Images.Names = map[string]string{"base": "localhost/doze/base:latest"}
	n, err := node.Open(context.Background(), node.Config{
		Home: home, Guest: filepath.Join(bin, "doze-guest"), NetnsHelper: filepath.Join(bin, "doze-netns"), DiskHelper: filepath.Join(bin, "doze-disk"), Sandbox: cfg, Egress: egress.DefaultSettings(),
	}, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestNodeRemovesEmptyCgroupsOfSandboxesThatAreGone(t *testing.T) {
	bin := programs(t)
	home, err := os.MkdirTemp(os.Getenv("HOME"), "node")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(home) })
	// No other node of the tests uses it.
	subtree := filepath.Join(os.Getenv("DOZE_CGROUP"), "test-stale")
	gone := filepath.Join(subtree, "sandboxes", "gone00000000")
	if err := os.MkdirAll(gone, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, dir := range []string{gone, filepath.Dir(gone), subtree} {
			syscall.Rmdir(dir)
		}
	})
	t.Setenv("DOZE_CGROUP", subtree)
	shut(t, open(t, home, bin))
	if _, err := os.Lstat(gone); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the cgroup of a removed sandbox remains: %v", err)
	}
	shut(t, open(t, home, bin)) // Close released the lock
}

func shut(t *testing.T, n *node.Node) {
	t.Helper()
	if err := n.Close(context.Background()); err != nil {
		t.Error(err)
	}
}

func run(t *testing.T, m *sandbox.Manager, id sandbox.ID, argv ...string) string {
	t.Helper()
	lease, err := m.Acquire(t.Context(), id, sandbox.CauseExec)
	if err != nil {
		t.Fatal(err)
	}
	defer lease.Release()
	stream, err := lease.Guest().Exec(t.Context(), guest.ExecRequest{Command: guest.Command{Argv: argv}})
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	var out []byte
	for {
		ev, err := stream.Next()
		if errors.Is(err, io.EOF) {
			return string(out)
		}
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, ev.Data...)
		if ev.Result != nil && ev.Result.ExitCode != 0 {
			t.Fatalf("%v: exit code %d: %s", argv, ev.Result.ExitCode, out)
		}
	}
}

// TestNodeFromStartToRestart takes one sandbox through every state on real
// Podman, cgroups and namespaces.
func TestNodeFromStartToRestart(t *testing.T) {
	bin := programs(t)
	home, err := os.MkdirTemp(os.Getenv("HOME"), "node")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(home) })
	n := open(t, home, bin)
	m := n.Sandboxes
	sb, _, err := m.Create(t.Context(), sandbox.CreateRequest{Owner: "o", Name: "app"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		last := open(t, home, bin)
		defer shut(t, last)
		if err := last.Sandboxes.Destroy(context.Background(), sb.ID); err != nil {
			t.Error(err)
		}
	})
	run(t, m, sb.ID, "sh", "-c", "echo kept > /root/file")
	if _, err := m.StartProcess(t.Context(), sb.ID, guest.ProcessSpec{Command: guest.Command{Argv: []string{"python3", "-m", "http.server", "8000", "--bind", "127.0.0.1"}}, Name: "web", Restart: guest.RestartOnWake}); err != nil {
		t.Fatal(err)
	}

	if _, err := node.Open(t.Context(), node.Config{Home: home, Guest: filepath.Join(bin, "doze-guest"), NetnsHelper: filepath.Join(bin, "doze-netns"), Sandbox: sandbox.DefaultConfig()}, slog.Default()); err == nil {
		t.Fatal("a second node opened the same home")
	} else if !errors.Is(err, store.ErrInUse) {
		t.Errorf("a second node on the same home: %v", err)
	}

	dial := func(m *sandbox.Manager) {
		t.Helper()
		lease, err := m.Acquire(t.Context(), sb.ID, sandbox.CausePreview)
		if err != nil {
			t.Fatal(err)
		}
		defer lease.Release()
		if err := lease.Guest().PortReady(t.Context(), 8000, 20*time.Second); err != nil {
			t.Fatal(err)
		}
		conn, err := lease.Dial(t.Context(), 8000)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := conn.Write([]byte("GET / HTTP/1.0\r\n\r\n")); err != nil {
			t.Fatal(err)
		}
		if response, err := io.ReadAll(conn); err != nil || len(response) == 0 {
			t.Errorf("response of %d bytes, error %v", len(response), err)
		}
	}
	dial(m)
	if _, err := m.Sleep(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	dial(m) // warm
	if _, err := m.Stop(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	dial(m) // cold
	shut(t, n)

	n = open(t, home, bin)
	got, err := n.Sandboxes.Get("o", "app")
	if err != nil || got.State != sandbox.StateRunning {
		t.Errorf("after a restart: state %s, error %v", got.State, err)
	}
	dial(n.Sandboxes)
	if out := run(t, n.Sandboxes, sb.ID, "cat", "/root/file"); out != "kept\n" {
		t.Errorf("the file has %q", out)
	}
	shut(t, n)
}
