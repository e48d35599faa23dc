package main

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/doze-run/doze/archive/ociimage/imagetest"
	"github.com/doze-run/doze/cmd/internal/usage"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
	"github.com/doze-run/doze/testkit/testterm"
)

// snapshotRig has a snapshot s of a sandbox a with a file.
func snapshotRig(t *testing.T) *rig {
	t.Helper()
	r := newRig(t)
	id := strings.Fields(r.ok("create", "a"))[1]
	r.node.Engine.Write(sandbox.ID(id), "f", "content")
	r.ok("snapshot", "create", "a", "s")
	return r
}

func TestSnapshotIsPushedToEachDestination(t *testing.T) {
	r := snapshotRig(t)
	dir := t.TempDir()
	check := func(archive io.Reader) {
		t.Helper()
		image := imagetest.Read(t, archive)
		if image.Files["srv/f"].Content != "content" || image.Names[0] != "localhost/a:s" {
			t.Errorf("pushed %+v", image)
		}
	}
	for _, transport := range []string{"oci-archive", "docker-archive"} {
		for range 2 { // the second replaces the first
			file := filepath.Join(dir, transport)
			if out := r.ok("snapshot", "push", "s", transport+":"+file); !strings.HasPrefix(out, transport+":"+file+"  ") {
				t.Errorf("push printed %q", out)
			}
			archive, err := os.Open(file)
			if err != nil {
				t.Fatal(err)
			}
			check(archive)
			archive.Close()
		}
		check(strings.NewReader(r.ok("snapshot", "push", "s", transport+":-")))
	}
	folder := filepath.Join(dir, "oci")
	r.ok("snapshot", "push", "s", "oci:"+folder)
	if blobs, err := os.ReadDir(filepath.Join(folder, "blobs", "sha256")); err != nil || len(blobs) != 3 {
		t.Errorf("%v, %v", blobs, err)
	}
	r.refused("exists; name a new folder", "snapshot", "push", "s", "oci:"+folder)
	if left, err := os.ReadDir(dir); err != nil || len(left) != 3 {
		t.Errorf("left: %v, %v", left, err)
	}
}

func TestWrongDestinationsOfAPushAreRefused(t *testing.T) {
	r := &rig{t: t, env: map[string]string{"DOZE_HOME": t.TempDir(), "DOZE_API": "http://127.0.0.1:1/api/v1", "DOZE_TOKEN": "x"}}
	wrong := func(want string, args ...string) {
		t.Helper()
		if got := r.doze(append([]string{"snapshot", "push", "s"}, args...)...); got.code != usage.ExitCode || !strings.Contains(got.err, want) {
			t.Errorf("push %v: exit code %d, error %q, want %q", args, got.code, got.err, want)
		}
	}
	for to, want := range map[string]string{
		"docker:registry.example.com/shop:1":           "use docker://registry.example.com/shop:1, for example",
		"docker://shop:1":                              "docker://shop:1: \"shop:1\" does not begin with a registry; use registry.example.com/shop:1 or, on Docker Hub, docker.io/USER/shop:1",
		"docker://https://registry.example.com/shop:1": "omit https://",
		"docker://registry.example.com/Shop":           "use \"shop\"",
		"registry.example.com/shop:1":                  "use docker://REGISTRY/REPOSITORY:TAG, oci-archive:FILE, docker-archive:FILE or oci:FOLDER",
		"shop.tar":                                     "use docker://REGISTRY/REPOSITORY:TAG, oci-archive:FILE, docker-archive:FILE or oci:FOLDER",
		"oci:":                                         "has no path",
		"oci:-":                                        "has no path",
		"oci:shop:1":                                   "omit the tag",
	} {
		wrong(want, to)
	}
	wrong("omit it for oci:shop", "oci:shop", "--tls-verify=false")
	wrong("omit --json", "oci-archive:-", "--json")
}

func TestFailedPushLeavesNothing(t *testing.T) {
	r := snapshotRig(t)
	dir := t.TempDir()
	destinations := []string{"oci:" + filepath.Join(dir, "oci"), "oci-archive:" + filepath.Join(dir, "file")}
	refused := func(want, snapshot string) {
		t.Helper()
		for _, to := range destinations {
			r.refused(want, "snapshot", "push", snapshot, to)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
			t.Errorf("left: %v, %v", left, err)
		}
	}
	refused("snapshot_not_found: ", "unknown")
	whole := r.ok("snapshot", "push", "s", "oci-archive:-")
	// A node that fails in the middle.
	node := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, whole[:len(whole)/2])
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}))
	defer node.Close()
	r.env["DOZE_API"] = node.URL + "/api/v1"
	refused("EOF", "s")
}

// TestRegistryIsReachedBeforeTheNodeExports: an export takes seconds and one of the owner's slots.
func TestRegistryIsReachedBeforeTheNodeExports(t *testing.T) {
	exported := false
	node := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { exported = true }))
	defer node.Close()
	host := fmt.Sprintf("localhost:%d", testkit.FreePort(t))
	r := &rig{t: t, env: map[string]string{"DOZE_HOME": t.TempDir(), "DOZE_API": node.URL + "/api/v1", "DOZE_TOKEN": "x"}}
	r.refused("doze: connect to "+host+": dial tcp", "snapshot", "push", "s", "docker://"+host+"/shop:1")
	if exported {
		t.Error("the node has exported the snapshot")
	}
}

// TestPushToARegistryShowsItsProgress until Ctrl-C ends it.
func TestPushToARegistryShowsItsProgress(t *testing.T) {
	r := snapshotRig(t)
	r.env["TMPDIR"] = t.TempDir()
	blocked, release := make(chan struct{}), make(chan struct{})
	// It has no blobs and stores none.
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		switch {
		case req.Method == http.MethodHead:
			w.WriteHeader(http.StatusNotFound)
		case req.Method == http.MethodPost:
			w.Header().Set("Location", req.URL.Path+"1")
			w.WriteHeader(http.StatusAccepted)
		case req.Method == http.MethodPut:
			select {
			case blocked <- struct{}{}:
			case <-release:
			}
			select {
			case <-release:
			case <-t.Context().Done():
			}
			w.WriteHeader(http.StatusCreated)
		}
	}))
	t.Cleanup(server.Close)
	host := strings.TrimPrefix(server.URL, "http://")
	push := []string{"snapshot", "push", "s", "docker://" + host + "/team/shop:1"}
	term := testterm.New(t, 100, 24)
	r.start(term, push...)
	testkit.Receive(t, "an upload waits", blocked)
	term.Await("it shows the progress", func(s testterm.Screen) bool { return s.Matches(`\Aread [0-9.]+ \w+, uploaded [0-9.]+ \w+\n\z`) })
	term.Press("\x03") // the terminal makes a signal of it
	term.ExpectExit(exitInterrupted)
	term.AwaitText("nothing is left", "")
	term.ExpectRestored()
	close(release)
	if out := r.ok(push...); !regexp.MustCompile(`^` + regexp.QuoteMeta(host) + `/team/shop@sha256:[0-9a-f]{64}  [0-9.]+ \w+ uploaded\n$`).MatchString(out) {
		t.Errorf("push printed %q", out)
	}
	if left, err := os.ReadDir(r.env["TMPDIR"]); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}
