//go:build integration

package podman

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/containers/podman/v5/pkg/bindings/images"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// registry is Debian's docker-registry on loopback, behind a reverse proxy that counts pulls
// and can block them.
type registry struct {
	host  string       // of the proxy
	pulls atomic.Int32 // requests of a manifest by its tag
	// shut blocks the responses with blobs while it is locked.
	shut sync.RWMutex
}

func startRegistry(t *testing.T) *registry {
	t.Helper()
	dir := t.TempDir()
	behind := freeAddress(t)
	config := filepath.Join(dir, "config.yml")
	err := os.WriteFile(config, fmt.Appendf(nil, `version: 0.1
log: {level: error, accesslog: {disabled: true}}
storage: {filesystem: {rootdirectory: %s}}
http: {addr: "%s"}
`, dir, behind), 0o600)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("docker-registry", "serve", config)
	log := testkit.NewLog(t)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatalf("%v: apt-get install docker-registry", err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	testkit.Eventually(t, "the registry responds", func() bool {
		resp, err := http.Get("http://" + behind + "/v2/")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	return newRegistryProxy(t, behind)
}

func (r *registry) image(name string) string { return r.host + "/" + name }

// push copies a local image into the registry and returns its name there.
func (r *registry) push(t *testing.T, image, name string) string {
	t.Helper()
	podman(t, "push", "--quiet", "--tls-verify=false", image, r.image(name))
	ref := r.image(name)
	t.Cleanup(func() { podman(t, "image", "rm", "--force", ref) })
	return ref
}

func podman(t *testing.T, arguments ...string) {
	t.Helper()
	if out, err := exec.Command("podman", arguments...).CombinedOutput(); err != nil {
		t.Fatalf("podman %s: %v: %s", strings.Join(arguments, " "), err, out)
	}
}

// freeAddress returns an address on which no process listens.
func freeAddress(t *testing.T) string {
	t.Helper()
	return fmt.Sprintf("127.0.0.1:%d", testkit.FreePort(t))
}

func TestImageIsPulledOnceForAllWaitingCallers(t *testing.T) {
	n, r := open(t), startRegistry(t)
	ref := r.push(t, "localhost/doze/test-noshell:latest", "tiny:1")
	r.pulls.Store(0)
	var group sync.WaitGroup
	for range 5 {
		group.Go(func() {
			var lines []string
			if err := n.EnsureImage(testkit.Context(t), ref, func(line string) { lines = append(lines, line) }); err != nil {
				t.Error(err)
			}
			if len(lines) == 0 {
				t.Error("no line of progress")
			}
		})
	}
	group.Wait()
	if count := r.pulls.Load(); count != 1 {
		t.Errorf("the image was requested %d times from the registry", count)
	}
	if err := n.EnsureImage(testkit.Context(t), ref, func(line string) { t.Errorf("an existing image is pulled: %s", line) }); err != nil {
		t.Fatal(err)
	}
	spec := n.spec(t, sandbox.NewID())
	spec.ImageRef, spec.GuestBinary = ref, guestBinary(t)
	ctx := testkit.Context(t)
	if err := n.Create(ctx, spec); err != nil {
		t.Fatal(err)
	}
	defer n.Remove(ctx, spec.ID)
	if _, err := n.Start(ctx, spec.ID, limits); err != nil {
		t.Fatal(err)
	}
}

func TestPullContinuesWithoutItsFirstCaller(t *testing.T) {
	n, r := open(t), startRegistry(t)
	ref := r.push(t, "localhost/doze/test-noshell:latest", "tiny:2")
	r.shut.Lock()
	begun := make(chan struct{}, 100)
	first, cancel := context.WithCancel(testkit.Context(t))
	left, got := make(chan error, 1), make(chan error, 1)
	go func() { left <- n.EnsureImage(first, ref, func(string) { begun <- struct{}{} }) }()
	<-begun
	go func() { got <- n.EnsureImage(testkit.Context(t), ref, nil) }()
	testkit.Eventually(t, "two callers wait for the pull", func() bool { return n.pulls.waiting(ref) == 2 })
	cancel()
	if err := <-left; !errors.Is(err, context.Canceled) {
		t.Errorf("the canceled caller got %v", err)
	}
	r.shut.Unlock()
	if err := <-got; err != nil {
		t.Errorf("the other caller got %v", err)
	}
}

func TestPullEndsWithItsLastCaller(t *testing.T) {
	n, r := open(t), startRegistry(t)
	ref := r.push(t, "localhost/doze/test-noshell:latest", "tiny:3")
	r.shut.Lock()
	begun := make(chan struct{}, 100)
	ctx, cancel := context.WithCancel(testkit.Context(t))
	left := make(chan error, 1)
	go func() { left <- n.EnsureImage(ctx, ref, func(string) { begun <- struct{}{} }) }()
	<-begun
	cancel()
	if err := <-left; !errors.Is(err, context.Canceled) {
		t.Errorf("EnsureImage: %v", err)
	}
	n.pulls.group.Wait() // no pull runs any longer
	r.shut.Unlock()
	exists, err := request(testkit.Context(t), n.Engine, func(ctx context.Context) (bool, error) { return images.Exists(ctx, ref, nil) })
	if err != nil || exists {
		t.Errorf("the image exists: %v, %v", exists, err)
	}
	if err := n.EnsureImage(testkit.Context(t), ref, nil); err != nil {
		t.Errorf("the next pull: %v", err)
	}
}

func TestErrorOfTheRegistryIsReported(t *testing.T) {
	n, r := open(t), startRegistry(t)
	for ref, want := range map[string]string{
		r.image("nothing:here"):           "manifest unknown",
		freeAddress(t) + "/nobody:latest": syscall.ECONNREFUSED.Error(),
		"localhost/doze/nothing:here":     "built on the node's machine",
	} {
		err := n.EnsureImage(testkit.Context(t), ref, nil)
		if !errors.Is(err, sandbox.ErrImageMissing) || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), ref) {
			t.Errorf("EnsureImage(%s): %v, want ErrImageMissing with %q", ref, err, want)
		}
	}
}

func TestServiceKilledDuringAPullIsReported(t *testing.T) {
	n, r := open(t), startRegistry(t)
	ref := r.push(t, "localhost/doze/test-noshell:latest", "tiny:4")
	r.shut.Lock()
	begun := make(chan struct{}, 100)
	got := make(chan error, 1)
	go func() { got <- n.EnsureImage(testkit.Context(t), ref, func(string) { begun <- struct{}{} }) }()
	<-begun
	n.killService(t)
	r.shut.Unlock()
	if err := <-got; !errors.Is(err, sandbox.ErrEngineDown) {
		t.Errorf("EnsureImage: %v, want ErrEngineDown", err)
	}
	if err := n.EnsureImage(testkit.Context(t), ref, nil); err != nil {
		t.Errorf("the next pull: %v", err)
	}
}
