//go:build integration

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/archive/ociimage/registry/registrytest"
	"github.com/doze-run/doze/test/testnode"
	"github.com/doze-run/doze/testkit"
)

// pushClient pushes snapshots of a node to a registry.
type pushClient struct {
	*node
	t         *testing.T
	server    *registrytest.Server
	auth      string // the file with the credentials
	temporary string // the folder for temporary files
}

func (n *node) pushClient(t *testing.T) *pushClient {
	t.Helper()
	server := registrytest.Start(t)
	p := &pushClient{n, t, server, server.AuthFile(t, server.Password), t.TempDir()}
	t.Cleanup(p.expectNoTemporaryFiles)
	return p
}

func (p *pushClient) expectNoTemporaryFiles() {
	p.t.Helper()
	if left, err := os.ReadDir(p.temporary); err != nil || len(left) > 0 {
		p.t.Errorf("the client has left %v, %v", left, err)
	}
}

// command returns a push to team/shop:TAG.
func (p *pushClient) command(snapshot, tag string, flags ...string) *exec.Cmd {
	cmd := p.Command(append([]string{"snapshot", "push", snapshot, fmt.Sprintf("docker://%s/team/shop:%s", p.server.Host, tag)}, flags...)...)
	cmd.Env = append(cmd.Env, "REGISTRY_AUTH_FILE="+p.auth, "TMPDIR="+p.temporary)
	return cmd
}

// push runs a push, and returns what it printed.
func (p *pushClient) push(snapshot, tag string, flags ...string) string {
	p.t.Helper()
	out, err := p.command(snapshot, tag, flags...).CombinedOutput()
	if err != nil {
		p.t.Fatalf("push %s: %v: %s", tag, err, out)
	}
	return string(out)
}

// TestPushedSnapshotIsAnImageForAnotherNode: a sandbox of another node, created from the image that
// Podman has pulled from the registry, has the same files.
func TestPushedSnapshotIsAnImageForAnotherNode(t *testing.T) {
	n := commonNode(t)
	p := n.pushClient(t)
	s, want := n.changedSnapshot(t)
	out := p.push(s.ID, "1")
	image, uploaded, ok := strings.Cut(strings.TrimSpace(out), "  ")
	if name := p.server.Host + "/team/shop@sha256:"; !ok || !strings.HasPrefix(image, name) || !strings.HasSuffix(uploaded, " MiB uploaded") {
		t.Errorf("push printed %q", out)
	}
	if blobs, content := p.server.Uploaded(); blobs < 4 || content < 10<<20 {
		t.Errorf("%d blobs with %d bytes were uploaded", blobs, content)
	}

	b := n.newBoxOf(t, s.ID)
	b.exec("echo later >/srv/later")
	var later struct {
		Image, Digest string
		Bytes         int64
		Uploaded      int64 `json:"uploaded_bytes"`
	}
	testkit.NoError(t, "decode", json.Unmarshal([]byte(p.push(b.snapshot(types.CreateSnapshotRequest{}).ID, "2", "--json")), &later))
	if blobs, content := p.server.Uploaded(); blobs != 2 || content > 1<<20 || later.Uploaded > content || later.Bytes < 100<<20 || !strings.HasSuffix(later.Image, later.Digest) {
		t.Errorf("the next snapshot uploaded %d blobs with %d bytes, want its configuration and its layer; push printed %+v", blobs, content, later)
	}

	id := strings.TrimSpace(n.podman(t, "pull", "--quiet", "--tls-verify=false", "--authfile", p.auth, image))
	t.Cleanup(func() { _ = exec.Command("podman", "rmi", "--force", id).Run() })
	n.expectLayersOfSnapshots(t, image)
	// The other node pulls the tag itself.
	t.Setenv("XDG_CONFIG_HOME", p.configOfNodeUser())
	other := &node{testnode.Start(t, testnode.Config{Caddyfile: caddyfile(t, "allow_images "+p.server.Host+"/team/*")})}
	tag := p.server.Host + "/team/shop:1"
	for _, name := range []string{image, tag} {
		sb, _, err := other.API.Create(testkit.Context(t), types.CreateSandboxRequest{Image: name})
		testkit.NoError(t, "create from "+name, err)
		testkit.Diff(t, "files of "+name, other.boxOf(t, sb.ID).exec(describeExported), want)
	}
	if got := strings.TrimSpace(n.podman(t, "image", "inspect", "--format", "{{.Id}}", tag)); got != id {
		t.Errorf("the node has pulled %s, want %s", got, id)
	}
}

// configOfNodeUser returns a copy of the configuration of the node's user, with the credentials for the
// registry that podman login --authfile ~/.config/containers/auth.json writes.
func (p *pushClient) configOfNodeUser() string {
	p.t.Helper()
	folder := p.t.TempDir()
	containers := filepath.Join(folder, "containers")
	home, err := os.UserHomeDir()
	testkit.NoError(p.t, "home folder", err)
	testkit.NoError(p.t, "copy", os.CopyFS(containers, os.DirFS(filepath.Join(home, ".config", "containers"))))
	auth, err := os.ReadFile(p.auth)
	testkit.NoError(p.t, "read", err)
	testkit.NoError(p.t, "write", os.WriteFile(filepath.Join(containers, "auth.json"), auth, 0o600))
	return folder
}

// TestPushEndsWithItsClient: neither the node nor the client retains files, and the registry has no tag.
func TestPushEndsWithItsClient(t *testing.T) {
	n := ownNode(t)
	p := n.pushClient(t)
	s := n.newBox(t).snapshot(types.CreateSnapshotRequest{})
	for _, signal := range []syscall.Signal{syscall.SIGINT, syscall.SIGKILL} {
		waits, ended := make(chan struct{}), make(chan struct{})
		var once sync.Once
		p.server.Fail(func(u registrytest.Upload) bool {
			if u.Read < 1<<20 {
				return false
			}
			once.Do(func() { close(waits) })
			select {
			case <-ended:
			case <-t.Context().Done():
			}
			return true
		})
		push := p.command(s.ID, "1")
		testkit.NoError(t, "start", push.Start())
		testkit.Closed(t, "an upload waits", waits)
		p.expectNoTemporaryFiles() // they have no names
		testkit.NoError(t, "signal", push.Process.Signal(signal))
		_ = push.Wait()
		close(ended)
		if code := push.ProcessState.ExitCode(); signal == syscall.SIGINT && code != 130 {
			t.Errorf("after Ctrl-C: exit code %d", code)
		}
		p.expectNoTemporaryFiles()
		testkit.Eventually(t, "the export has ended", func() bool { return n.exports() == 0 })
	}
	p.server.Fail(nil)
	pull := exec.Command("podman", "pull", "--quiet", "--tls-verify=false", "--authfile", p.auth, p.server.Host+"/team/shop:1")
	if out, err := pull.CombinedOutput(); err == nil || !strings.Contains(string(out), "manifest unknown") {
		t.Errorf("pull: %v: %s", err, out)
	}
}

// TestFailedPushesNameTheirReason runs pushes that fail.
func TestFailedPushesNameTheirReason(t *testing.T) {
	n := commonNode(t)
	p := n.pushClient(t)
	s := n.newBox(t).snapshot(types.CreateSnapshotRequest{})
	refused := func(want string, push *exec.Cmd) {
		t.Helper()
		out, err := push.CombinedOutput()
		if failed, ok := errors.AsType[*exec.ExitError](err); !ok || failed.ExitCode() != 1 || !strings.HasPrefix(string(out), "doze: ") || !strings.Contains(string(out), want) {
			t.Errorf("%v: %s, want %q", err, out, want)
		}
	}
	right := p.auth
	p.auth = p.server.AuthFile(t, "wrong")
	refused(p.server.Host+" does not permit the push to team/shop: it refused user pusher of "+p.auth, p.command(s.ID, "1"))
	p.auth = right
	refused("snapshot_not_found: ", p.command("unknown", "1"))

	full := p.command(s.ID, "1")
	// A folder with less space than the image needs, in a mount namespace.
	full.Args = append([]string{"podman", "unshare", "sh", "-c", `mount -t tmpfs -o size=1m none "$TMPDIR" && exec "$@"`, "sh", full.Path}, full.Args[1:]...)
	full.Path, full.Err = exec.LookPath("podman")
	refused("no space left on device; set TMPDIR to a folder with space for the compressed image", full)

	p.server.Fail(func(u registrytest.Upload) bool {
		if u.Read < 1<<20 {
			return false
		}
		p.server.Kill()
		return true
	})
	refused(" to "+p.server.Host+": ", p.command(s.ID, "1"))
}
