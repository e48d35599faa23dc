package caddymodule

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/egress/policy/policytest"
	"github.com/doze-run/doze/node"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// A reload of the proxy must not end streams.
func TestAReloadTouchesNoSandboxAndDropsNoStream(t *testing.T) {
	s := newSite(t)
	more := make(chan struct{})
	sb, address := s.sandbox(devServer(more), sandbox.Port{})
	c := s.dial(address)
	say(t, c, "before")
	var streams []*bufio.Reader
	for _, h2 := range []bool{false, true} {
		res := s.fetch(s.client(h2), address+"events")
		lines := bufio.NewReader(res.Body)
		if line, err := lines.ReadString('\n'); err != nil || line != "data: one\n" {
			t.Fatalf("%q, %v", line, err)
		}
		streams = append(streams, lines)
	}

	s.mustLoad("sleep_after 5m", "")
	s.mustLoad("sleep_after 6m", "")

	say(t, c, "after")
	close(more)
	for _, lines := range streams {
		if rest, err := io.ReadAll(lines); err != nil || string(rest) != "\ndata: two\n\n" {
			t.Errorf("the stream ended with %q, %v", rest, err)
		}
	}
	if now := s.get(sb.ID); now.State != sandbox.StateRunning || !now.StateSince.Equal(sb.StateSince) || !now.StartedAt.Equal(sb.StartedAt) {
		t.Errorf("the sandbox became %+v", now)
	}
	s.mustServe()
	if got := s.sleepAfter(); got != 6*time.Minute {
		t.Errorf("sleep_after is %s", got)
	}
	// A WebSocket from before the reloads still lets the sandbox sleep, and wakes it.
	testkit.Eventually(t, "it sleeps", func() bool { _, err := s.Manager.Sleep(t.Context(), sb.ID); return err == nil })
	say(t, c, "good morning")
}

// A port is exposed and closed in the configuration that runs: its preview is
// available and gone immediately, and Caddy does not load anything.
func TestExposingAPortReloadsNothing(t *testing.T) {
	s := newSite(t)
	sb, address := s.sandbox(hello, sandbox.Port{})
	before := caddy.ActiveContext().Context
	path := "/api/v1/sandbox/" + string(sb.ID)
	port := strconv.Itoa(int(sb.Ports[0].Port))
	if res := s.api("DELETE", path+"/ports/"+port, ""); res.StatusCode != http.StatusNoContent {
		t.Fatalf("closing it: %s", res.Status)
	}
	if res := s.fetch(s.client(true), address); res.StatusCode != http.StatusNotFound {
		t.Errorf("a closed port responds with %d", res.StatusCode)
	}
	var exposed struct{ URL string }
	if err := json.NewDecoder(s.api("POST", path+"/expose", `{"port":`+port+`}`).Body).Decode(&exposed); err != nil || exposed.URL == address {
		t.Fatalf("exposed at %q, %v", exposed.URL, err)
	}
	if res := s.fetch(s.client(true), exposed.URL); testkit.Body(t, res) != "hello" {
		t.Errorf("an exposed port responds with %d", res.StatusCode)
	}
	if caddy.ActiveContext().Context != before || before.Err() != nil {
		t.Error("Caddy has loaded a configuration")
	}
}

func TestRequestsGoOnDuringReloads(t *testing.T) {
	s := newSite(t)
	_, address := s.sandbox(hello, sandbox.Port{})
	stop := make(chan struct{})
	var visitors sync.WaitGroup
	for range 2 {
		visitors.Go(func() {
			client := s.client(true)
			for {
				select {
				case <-stop:
					return
				default:
				}
				req, _ := http.NewRequestWithContext(t.Context(), "GET", address, nil)
				res, err := send(client, req)
				if err != nil {
					t.Error(err)
					return
				}
				if b, err := io.ReadAll(res.Body); err != nil || string(b) != "hello" {
					t.Errorf("status %d: %q, %v", res.StatusCode, b, err)
				}
				res.Body.Close()
			}
		})
	}
	for range 5 {
		s.mustLoad("", "")
	}
	close(stop)
	visitors.Wait()
}

func TestASettingThatCannotChangeFailsTheReloadAndChangesNothing(t *testing.T) {
	s := newSite(t)
	_, address := s.sandbox(hello, sandbox.Port{})
	page, err := os.ReadFile("../docs/reference/caddyfile.md")
	if err != nil {
		t.Fatal(err)
	}
	_, listed, _ := strings.Cut(string(page), "All options apply immediately except ")
	listed, _, _ = strings.Cut(listed, ":")
	for _, option := range []string{"token_file", "guest", "netns_helper", "disk_helper", "backup_helper", "podman_socket", "cgroup"} {
		if !strings.Contains(listed, "`"+option+"`") {
			t.Errorf("docs/reference/caddyfile.md does not list %s", option)
		}
		err := s.load(option+" /elsewhere\nsleep_after 9m", "")
		if err == nil || !strings.Contains(err.Error(), option+" cannot change from ") || !strings.Contains(err.Error(), "while the node runs: restart it") {
			t.Fatalf("%s: the reload gave %v", option, err)
		}
		if got := testkit.Body(t, s.fetch(s.client(true), address)); got != "hello" {
			t.Errorf("%s: then the preview sent %q", option, got)
		}
		if got := s.sleepAfter(); got != time.Minute {
			t.Errorf("%s: sleep_after is %s", option, got)
		}
		s.mustServe()
	}
	err = s.load("backups {\n\tendpoint http://127.0.0.1:9\n\tbucket disks\n\taccess_key id\n\tsecret_key hush\n\tpassword hush-hush-hush\n}\nsleep_after 9m", "")
	if want := `backups cannot change from "none" to "http://127.0.0.1:9/disks/"`; err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "hush") {
		t.Errorf("an object store: the reload gave %v, want %s", err, want)
	}
	s.mustServe()
	s.mustLoad("sleep_after 2m", "")
	if got := s.sleepAfter(); got != 2*time.Minute {
		t.Errorf("after a good reload sleep_after is %s", got)
	}
}

func TestAReloadDoesNotMoveTheNodeToAnotherFolder(t *testing.T) {
	s := newSite(t)
	_, address := s.sandbox(hello, sandbox.Port{})
	home, other := s.home, t.TempDir()
	s.home = other
	err := s.load("", "")
	s.home = home
	if want := (node.FixedError{Option: "data", Have: home, Want: other}).Error(); err == nil || !strings.Contains(err.Error(), want) {
		t.Fatalf("the reload gave %v, want %s", err, want)
	}
	if !strings.Contains(err.Error(), "provision") {
		t.Errorf("%v: servers without a node may have started", err)
	}
	s.mustServe()
	if got := testkit.Body(t, s.fetch(s.client(true), address)); got != "hello" {
		t.Errorf("then the preview sent %q", got)
	}
	s.mustLoad("sleep_after 2m", "")
}

func TestAReloadThatFailsElsewhereTakesItsSettingsBack(t *testing.T) {
	s := newSite(t)
	_, address := s.sandbox(hello, sandbox.Port{})
	for range 8 { // apps start in any order
		if err := s.load("sleep_after 9m", "http://:99999 {\n\trespond hello\n}"); err == nil {
			t.Fatal("a listener on port 99999 was made")
		}
		if got := s.sleepAfter(); got != time.Minute {
			t.Fatalf("sleep_after is %s", got)
		}
	}
	if got := testkit.Body(t, s.fetch(s.client(true), address)); got != "hello" {
		t.Errorf("then the preview sent %q", got)
	}
}

// Elsewhere a sandbox was awake but responded with 502 after the node restarted.
func TestPreviewsWorkAfterTheNodeRestarted(t *testing.T) {
	s := newSite(t)
	sb, address := s.sandbox(hello, sandbox.Port{})
	if got := testkit.Body(t, s.fetch(s.client(true), address)); got != "hello" {
		t.Fatalf("before: %q", got)
	}
	if err := caddy.Stop(); err != nil {
		t.Fatal(err)
	}
	s.start("")
	res := s.fetch(s.client(true), address)
	if got := testkit.Body(t, res); got != "hello" {
		t.Errorf("after: %d %q", res.StatusCode, got)
	}
	if got := s.get(sb.ID).State; got != sandbox.StateRunning {
		t.Errorf("the sandbox is %s", got)
	}
}

func TestValidationOpensNoNode(t *testing.T) {
	for settings, want := range map[string]string{ // as JSON, which no parsing of a Caddyfile has checked
		`"data": "` + t.TempDir() + `"`:                         "",
		`"default_size": "huge"`:                                "default_size",
		`"default_image": "nope"`:                               "default_image",
		`"preview_port": 70000`:                                 "preview_port",
		`"preview_domain": "localhost"`:                         "preview_domain",
		`"preview_domain": "foo_bar!"`:                          "preview_domain",
		`"preview_domain": "a..b"`:                              "preview_domain",
		`"preview_domain": "` + strings.Repeat("a.", 95) + `b"`: "preview_domain",
		`"sizes": {"s": {"memory": 1}}`:                         "size s: memory",
		`"sleep_after": "1ms"`:                                  "sleep_after",
	} {
		t.Setenv("DOZE_HOME", t.TempDir())
		config := `{"admin": {"disabled": true}, "apps": {
			"doze": {` + settings + `},
			"http": {"servers": {"api": {"listen": ["localhost:8080"], "routes": [{"handle": [{"handler": "doze_api"}]}]}}}
		}}`
		cfg := new(caddy.Config)
		if err := caddy.StrictUnmarshalJSON([]byte(config), cfg); err != nil {
			t.Fatal(err)
		}
		err := caddy.Validate(cfg)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v", settings, err)
		}
		nodes.Range(func(home, _ any) bool {
			t.Errorf("%s: the node in %s is open", settings, home)
			return true
		})
	}
}

// listenEnv makes the test binary a process that listens on the address as Caddy does.
const listenEnv = "DOZE_TEST_LISTEN"

func TestMain(m *testing.M) {
	if address := os.Getenv(listenEnv); address != "" {
		config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
			return c.Control(func(fd uintptr) { unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
		}}
		if _, err := config.Listen(context.Background(), "tcp", address); err != nil {
			panic(err)
		}
		os.Stdout.WriteString("listening\n")
		io.Copy(io.Discard, os.Stdin)
		return
	}
	os.Exit(runTests(m))
}

// policyCompiler compiles policies for all tests.
var policyCompiler string

func runTests(m *testing.M) int {
	dir, err := os.MkdirTemp("", "doze-compiler-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	if policyCompiler, err = policytest.BuildCompiler(dir); err != nil {
		panic(err)
	}
	return m.Run()
}

func TestAReloadToAnAddressOfAnotherProcessIsRefused(t *testing.T) {
	s := newSite(t)
	_, address := s.sandbox(hello, sandbox.Port{})
	theirs := fmt.Sprintf("127.0.0.1:%d", testkit.FreePort(t))
	other := exec.Command(os.Args[0])
	other.Env = append(os.Environ(), listenEnv+"="+theirs, "GORACE=atexit_sleep_ms=0") // or -race makes it wait for a second
	in, err := other.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := other.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { in.Close(); other.Wait() })
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatalf("%q, %v", line, err)
	}
	site := "http://" + theirs + " {\n\trespond here\n}\n"
	if err := s.load("", site); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("process %d (caddymodule", other.Process.Pid)) || !strings.Contains(err.Error(), "tcp/"+theirs) {
		t.Errorf("got %v", err)
	}
	if res := s.fetch(s.client(true), address); testkit.Body(t, res) != "hello" {
		t.Errorf("after a reload that failed: %s", res.Status)
	}
	in.Close()
	other.Wait()
	s.mustLoad("", site)
	s.mustLoad("sleep_after 5m", site) // our own, from before
}

func TestTheAdminEndpointChecksPolicies(t *testing.T) {
	s := newSite(t)
	rule := func(policy string) string {
		return fmt.Sprintf(`{"data": %q, "egress": {"rules": [{"name": "r", "hosts": ["a.example"], "policies": [%s]}]}}`, s.home, policy)
	}
	for body, want := range map[string]string{
		rule(`{"name": "header", "config": {"name": "X-A"}}`): "",
		rule(`{"name": "header"}`):                            `"name" is missing`,
		rule(`{"name": "nope"}`):                              "no policy has this name",
		`{"dota": "x"}`:                                       "unknown field",
		`{"data": "/nowhere/at/all"}`:                         fmt.Sprintf(`data cannot change from %q to "/nowhere/at/all" while the node runs: restart it`, s.home),
		fmt.Sprintf(`{"data": %q, "podman_socket": "/elsewhere.sock"}`, s.home): `podman_socket cannot change from "" to "/elsewhere.sock" while the node runs: restart it`,
		fmt.Sprintf(`{"data": %q, "sizes": {"tiny": null}}`, s.home):            `size "tiny" is null; write {} for one without limits of its own`,
		`{"egress": {"default": "x"}}`:                                          "default is",
	} {
		err := handleCheck(httptest.NewRecorder(), httptest.NewRequest("POST", "/doze/check", strings.NewReader(body)))
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v", body, err)
		}
	}
	s.mustLoad("sleep_after 5m", "") // the checks have released the node
	s.mustServe()
}

func TestTheNodesFolderIsNeeded(t *testing.T) {
	t.Setenv("DOZE_HOME", "")
	if _, err := new(App).home(); err == nil || !strings.Contains(err.Error(), "DOZE_HOME") {
		t.Errorf("%v", err)
	}
}
