package podman

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containers/podman/v5/libpod/define"
	"github.com/containers/podman/v5/pkg/errorhandling"
	"github.com/doze-run/doze/runtime/guest"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/podman/ociruntime"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

const id = sandbox.ID("k3f9x2m7q1az")

func TestHostname(t *testing.T) {
	for _, c := range []struct{ name, want string }{
		{"app", "app"},
		{"My_App v1.2", "my-app-v1-2"},
		{"--x--", "x"},
		{"日本", string(id)},
		{"", string(id)},
		{strings.Repeat("a", 100), strings.Repeat("a", 63)},
		{strings.Repeat("a", 62) + ".b", strings.Repeat("a", 62)},
	} {
		if got := hostname(c.name, id); got != c.want {
			t.Errorf("hostname(%q) = %q, want %q", c.name, got, c.want)
		}
	}
}

func TestFullDiskOfTheServiceIsErrStoreFull(t *testing.T) {
	for _, c := range []struct {
		message string
		status  int
		want    bool
	}{
		{"mounting storage for container x: mkdir /storage/overlay/y/work: no space left on device", 500, true},
		{"crun: write to `/run/x/config.json`: No space left on device: OCI runtime error", 500, true},
		{"write /storage/x: disk quota exceeded", 500, true},
		{"container x: no space left on device", 404, false},
		{"mkdir /storage/x: permission denied", 500, false},
	} {
		service := &connection{values: t.Context()}
		err := service.call(t.Context(), func(context.Context) error {
			return fmt.Errorf("start: %w", &errorhandling.ErrorModel{Message: c.message, ResponseCode: c.status})
		})
		if errors.Is(err, sandbox.ErrStoreFull) != c.want || !strings.Contains(err.Error(), c.message) || status(err) != c.status {
			t.Errorf("status %d, %q: %v", c.status, c.message, err)
		}
	}
}

func TestContainerCgroupIsNamedAfterTheContainer(t *testing.T) {
	for _, c := range []struct{ cgroups, want string }{
		{"0::/doze/sandboxes/x/libpod-abc\n", "/sys/fs/cgroup/doze/sandboxes/x/libpod-abc"},
		{"12:pids:/y\n0::/user.slice/libpod-abc.scope/container/web\n", "/sys/fs/cgroup/user.slice/libpod-abc.scope"},
		{"0::/doze/sandboxes/x/libpod-other\n", ""},
		{"12:pids:/libpod-abc\n", ""},
		{"", ""},
	} {
		if got, err := containerCgroup(c.cgroups, "abc"); got != c.want || (err == nil) != (c.want != "") {
			t.Errorf("containerCgroup(%q) = %q, %v; want %q", c.cgroups, got, err, c.want)
		}
	}
}

func TestSpecRestrictsTheContainer(t *testing.T) {
	data, err := json.Marshal(generate("node1", "/x/seccomp.json", files{"/run"}, sandbox.ContainerSpec{
		ID: id, Name: "app", ImageRef: "localhost/a:b",
		CgroupParent: "/sys/fs/cgroup/doze/sandboxes/x",
		GuestBinary:  "/bin/guest", RunDir: "/run/x",
	}))
	if err != nil {
		t.Fatal(err)
	}
	var s map[string]any
	if err := json.Unmarshal(data, &s); err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]string{
		"name":                 "doze-" + string(id),
		"entrypoint":           "[" + guest.BinaryPath + "]",
		"user":                 "0:0",
		"no_new_privileges":    "true",
		"privileged":           "false",
		"seccomp_profile_path": "/x/seccomp.json",
		"cap_drop":             "[ALL]",
		"cgroup_parent":        "/doze/sandboxes/x",
		"image_volume_mode":    "ignore",
		"resource_limits":      "<nil>",
		"command":              "<nil>",
		"labels":               "map[doze.node:node1 doze.sandbox:" + string(id) + "]",
	} {
		if got := fmt.Sprint(s[key]); got != want {
			t.Errorf("%s is %s, want %s", key, got, want)
		}
	}
}

func TestProfileIsPodmansDefaultForOneArchitecture(t *testing.T) {
	path, err := writeProfile(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if path == "" {
		return // this machine's operator has a profile
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var p struct {
		DefaultAction string
		ArchMap       []struct{ SubArchitectures []string }
		Syscalls      []struct{ Names []string }
	}
	if err := json.Unmarshal(data, &p); err != nil {
		t.Fatal(err)
	}
	if p.DefaultAction != "SCMP_ACT_ERRNO" || len(p.Syscalls) == 0 {
		t.Errorf("default action %q, %d rules", p.DefaultAction, len(p.Syscalls))
	}
	for _, a := range p.ArchMap {
		if len(a.SubArchitectures) > 0 {
			t.Errorf("it allows %v", a.SubArchitectures)
		}
	}
}

func TestOnLoopback(t *testing.T) {
	for ref, want := range map[string]bool{
		"localhost:5000/a":         true,
		"127.0.0.1:5000/a:b":       true,
		"127.9.9.9:1/a":            true,
		"[::1]:5000/a":             true,
		"localhost/doze/base":      false, // not a registry
		"192.0.2.1:5000/a":         false,
		"localhost.example:5000/a": false,
		"debian:trixie":            false,
		"docker.example/127.0.0.1": false,
	} {
		if got := onLoopback(ref); got != want {
			t.Errorf("onLoopback(%q) = %v", ref, got)
		}
	}
}

func TestIsInit(t *testing.T) {
	for _, c := range []struct {
		name, status string
		want         bool
	}{
		{"first of a namespace", "State:\tS (sleeping)\nNSpid:\t4711\t1\n", true},
		{"frozen", "State:\tD (disk sleep)\nNSpid:\t4711\t1\n", true},
		{"of the host", "State:\tS (sleeping)\nNSpid:\t1\n", false},
		{"another one", "State:\tS (sleeping)\nNSpid:\t4711\t17\n", false},
		{"zombie", "State:\tZ (zombie)\nNSpid:\t4711\t1\n", false},
		{"nothing", "", false},
	} {
		if got := isInit(c.status); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

func TestNoProcessIsFirstOfAnUnknownContainer(t *testing.T) {
	for _, pid := range []int{0, -1, os.Getpid(), 1 << 22} {
		if first, err := isFirstProcess(pid, "abc"); first || err != nil {
			t.Errorf("process %d: %v, %v", pid, first, err)
		}
	}
}

// Without a free file descriptor, a process cannot be inspected.
func TestContainerIsNotReportedAsExitedWithoutDescriptors(t *testing.T) {
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 0, Max: before.Max}); err != nil {
		t.Fatal(err)
	}
	c, err := actual(sandbox.Container{State: sandbox.ContainerRunning, PID: os.Getpid()}, "abc")
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(err, unix.EMFILE) {
		t.Errorf("got %+v, %v", c, err)
	}
}

func TestCallsWaitLongerThanTheBackoffOfAService(t *testing.T) {
	if restartLimit < 2*backoffMax {
		t.Errorf("a call waits %v, and the next attempt is up to %v away", restartLimit, backoffMax)
	}
}

// A service that responds once and dies is not restarted without pauses.
func TestRestartsOfAFailingServiceAreSpaced(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "podman.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	var pings atomic.Int32
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Libpod-API-Version", "4.3.1")
		switch {
		case r.URL.Path == "/_ping" && pings.Add(1)%2 == 0:
			w.WriteHeader(http.StatusInternalServerError) // it responded once, and is dead now
		case strings.HasSuffix(r.URL.Path, "/info"):
			io.WriteString(w, `{"host":{"cgroupManager":"cgroupfs","ociRuntime":{"path":"/run/doze-crun"}}}`)
		}
	})}
	go server.Serve(l) // until Close
	defer server.Close()
	var log strings.Builder
	s := &service{
		command: "no-such-podman", runtime: "/run/doze-crun", shared: socket, own: filepath.Join(t.TempDir(), "podman.sock"),
		log: slog.New(slog.NewTextHandler(io.MultiWriter(t.Output(), &log), nil)),
	}
	if err := os.WriteFile(s.logFile(), []byte("of an earlier service\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.start()
	defer s.close()
	const deaths = 4
	began := time.Now()
	for range deaths {
		conn, err := s.connection(t.Context(), startLimit)
		if err != nil {
			t.Fatal(err)
		}
		s.report(conn) // so that it is checked immediately
	}
	if _, err := s.connection(t.Context(), startLimit); err != nil {
		t.Fatal(err)
	}
	if took, least := time.Since(began), (1<<deaths-1)*backoffMin; took < least {
		t.Errorf("%d services in %v, which is less than %v", deaths+1, took, least)
	}
	s.close()
	if n := strings.Count(log.String(), "of an earlier service"); n != 1 {
		t.Errorf("the line of the service's log was logged %d times", n)
	}
}

// The files are mounted in sandboxes that run when a node starts.
func TestFilesOfRunningSandboxesAreNotWrittenAgain(t *testing.T) {
	f := files{t.TempDir()}
	if err := errors.Join(f.prepare("/bin/true"), f.write(id, "app")); err != nil {
		t.Fatal(err)
	}
	all := []string{f.resolvConf(), f.containerEnv(), f.hosts(id), f.hostname(id)}
	before := time.Unix(1_000_000_000, 0)
	for _, path := range all {
		if err := os.Chtimes(path, before, before); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(f.prepare("/bin/true"), f.write(id, "app")); err != nil {
		t.Fatal(err)
	}
	for _, path := range all {
		if info, err := os.Stat(path); err != nil || !info.ModTime().Equal(before) || info.Mode().Perm() != 0o644 {
			t.Errorf("%s: %+v, %v", path, info, err)
		}
	}
	if err := f.write(id, "other"); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(f.hostname(id)); err != nil || string(text) != "other\n" {
		t.Errorf("the host name is %q, %v", text, err)
	}
}

func TestPullIsSharedAndReportsEveryLine(t *testing.T) {
	var p pulls
	var runs atomic.Int32
	release := make(chan struct{})
	run := func(_ context.Context, out *lines) error {
		runs.Add(1)
		fmt.Fprint(out, "one\ntwo")
		<-release
		fmt.Fprint(out, " and more\nthree\n")
		return sandbox.ErrImageMissing
	}
	const waiters = 5
	type outcome struct {
		lines []string
		err   error
	}
	outcomes := make(chan outcome, waiters)
	reported := make(chan struct{}, 100)
	for range waiters {
		go func() {
			var o outcome
			o.err = p.join(t.Context(), "a", func(line string) {
				o.lines = append(o.lines, line)
				reported <- struct{}{}
			}, run)
			outcomes <- o
		}()
	}
	for range waiters {
		<-reported // the first line
	}
	close(release)
	for range waiters {
		o := <-outcomes
		if !errors.Is(o.err, sandbox.ErrImageMissing) {
			t.Errorf("join: %v", o.err)
		}
		if want := []string{"one", "two and more", "three"}; !slices.Equal(o.lines, want) {
			t.Errorf("progress %q, want %q", o.lines, want)
		}
	}
	if n := runs.Load(); n != 1 {
		t.Errorf("%d pulls", n)
	}
}

func TestPullEndsWithItsLastWaiter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p pulls
		ended := false
		run := func(ctx context.Context, _ *lines) error {
			<-ctx.Done()
			ended = true
			return ctx.Err()
		}
		first, cancelFirst := context.WithCancel(t.Context())
		second, cancelSecond := context.WithCancel(t.Context())
		left := make(chan error, 2)
		go func() { left <- p.join(first, "a", nil, run) }()
		go func() { left <- p.join(second, "a", nil, run) }()
		if synctest.Wait(); p.waiting("a") != 2 {
			t.Errorf("%d callers wait for the pull", p.waiting("a"))
		}
		cancelFirst()
		if err := <-left; !errors.Is(err, context.Canceled) {
			t.Errorf("the first caller got %v", err)
		}
		if synctest.Wait(); ended {
			t.Error("the pull ended although a caller waits")
		}
		cancelSecond()
		<-left
		if synctest.Wait(); !ended {
			t.Error("the pull continues although no caller waits")
		}
	})
}

// waiting returns the number of callers that wait for the pull of ref.
func (p *pulls) waiting(ref string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if one := p.byRef[ref]; one != nil {
		return one.waiters
	}
	return 0
}

func TestCloseEndsPulls(t *testing.T) {
	var p pulls
	started := make(chan struct{})
	left := make(chan error, 1)
	go func() {
		left <- p.join(t.Context(), "a", nil, func(ctx context.Context, _ *lines) error {
			close(started)
			<-ctx.Done()
			return ctx.Err()
		})
	}()
	<-started
	p.close()
	if err := <-left; !errors.Is(err, context.Canceled) {
		t.Errorf("join: %v", err)
	}
	if err := p.join(t.Context(), "a", nil, nil); err == nil {
		t.Error("join after close succeeded")
	}
}

func TestLinesAreBounded(t *testing.T) {
	l := newLines()
	for range 2 * maxLines {
		fmt.Fprintln(l, strings.Repeat("x", 3*maxLine))
	}
	fmt.Fprint(l, strings.Repeat("y", 10*maxLine))
	all, _ := l.after(0)
	if len(all) != maxLines || len(all[0]) != maxLine || cap(l.partial) > 16*maxLine {
		t.Errorf("%d lines, the first of %d bytes, %d bytes of a partial one", len(all), len(all[0]), cap(l.partial))
	}
}

func TestLogTailLogsEachLineOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	write := func(text string) {
		t.Helper()
		f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := io.WriteString(f, text); err != nil {
			t.Fatal(err)
		}
	}
	var out strings.Builder
	l := &logTail{path: path, log: slog.New(slog.NewTextHandler(&out, nil))}
	l.drain() // no file yet
	write("one\ntwo\nhal")
	l.drain()
	l.drain()
	write("f\n")
	l.drain()
	for _, line := range []string{"one", "two", "half"} {
		if n := strings.Count(out.String(), "line="+line+"\n"); n != 1 {
			t.Errorf("%q was logged %d times:\n%s", line, n, out.String())
		}
	}
	write(strings.Repeat("x", 2*maxServiceLog))
	l.drain()
	l.drain()
	if info, err := os.Stat(path); err != nil || info.Size() > maxServiceLog {
		t.Errorf("the file is not emptied: %v, %v", info, err)
	}
	write("\nafter\n")
	l.drain()
	if !strings.Contains(out.String(), "line=after") {
		t.Error("nothing is logged after the file was emptied")
	}
}

// With another runtime, sandboxes would have no quotas.
func TestServiceWithAnotherRuntimeIsNotUsed(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "podman.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Libpod-API-Version", "4.3.1")
		if strings.HasSuffix(r.URL.Path, "/info") {
			io.WriteString(w, `{"host":{"cgroupManager":"cgroupfs","ociRuntime":{"name":"crun","path":"/usr/bin/crun"}}}`)
		}
	})}
	go server.Serve(l) // until Close
	defer server.Close()
	s := &service{
		command: "no-such-podman", runtime: "/run/doze-crun", shared: socket, own: filepath.Join(t.TempDir(), "podman.sock"),
		log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	}
	conn, err := dial(t.Context(), socket, startLimit)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.close()
	if err := s.fits(t.Context(), conn); err == nil || !strings.Contains(err.Error(), `set runtime = "/run/doze-crun"`) {
		t.Errorf("the service of another runtime: %v", err)
	}
	if conn, err := s.connect(t.Context()); err == nil { // it tries to start its own
		conn.close()
		t.Error("it is used")
	}
}

// Podman's database can lose a container whose disk still exists.
func TestDiskOfAContainerThatPodmanLostIsRemovedOnlyForANewSandbox(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "podman.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	run := t.TempDir()
	var removed atomic.Int32
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Libpod-API-Version", "4.3.1")
		w.Header().Set("Content-Type", "application/json")
		switch path := r.URL.Path; {
		case strings.HasSuffix(path, "/_ping"):
		case strings.HasSuffix(path, "/info"):
			fmt.Fprintf(w, `{"host":{"cgroupManager":"cgroupfs","ociRuntime":{"path":%q}}}`, filepath.Join(run, ociruntime.Name))
		case strings.HasSuffix(path, "/containers/create") && removed.Load() == 0:
			w.WriteHeader(http.StatusInternalServerError)
			fmt.Fprint(w, `{"message":"the container name \"doze-abcdefghijkl\" is already in use by 123","response":500}`)
		case strings.HasSuffix(path, "/containers/create"):
			w.WriteHeader(http.StatusCreated)
			fmt.Fprint(w, `{"Id":"456"}`)
		case r.Method == http.MethodDelete:
			removed.Add(1)
			fmt.Fprint(w, `[]`)
		default:
			w.WriteHeader(http.StatusNotFound)
			fmt.Fprint(w, `{"message":"container not found","response":404}`)
		}
	})}
	go server.Serve(l) // until Close
	defer server.Close()
	e, err := Open(t.Context(), Config{Node: "node1", RunDir: run, Socket: socket, Command: "true", Helper: "true", Log: slog.New(slog.NewTextHandler(t.Output(), nil))})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	spec := sandbox.ContainerSpec{ID: "abcdefghijkl", RunDir: t.TempDir()}
	if err := e.Create(t.Context(), spec); err == nil || !strings.Contains(err.Error(), "podman mount doze-abcdefghijkl") || removed.Load() != 0 {
		t.Errorf("a sandbox that had a container: %v, %d removed", err, removed.Load())
	}
	spec.New = true
	if err := e.Create(t.Context(), spec); err != nil || removed.Load() != 1 {
		t.Errorf("a new sandbox: %v, %d removed", err, removed.Load())
	}
}

// TestTransientStorageIsReported: the transient storage lists containers elsewhere, so that the disk helper would take
// their layers for what was left of removed ones.
func TestTransientStorageIsReported(t *testing.T) {
	for text, want := range map[string]Storage{
		`{"graphRoot":"/g","runRoot":"/r","graphDriverName":"overlay","transientStore":true}`: {GraphRoot: "/g", RunRoot: "/r", Driver: "overlay", Transient: true},
		`{"graphRoot":"/g","runRoot":"/r","graphDriverName":"overlay"}`:                       {GraphRoot: "/g", RunRoot: "/r", Driver: "overlay"}, // Podman 4.3
	} {
		var info define.StoreInfo
		testkit.NoError(t, "decode", json.Unmarshal([]byte(text), &info))
		testkit.Diff(t, text, storageOf(&info), want)
	}
}
