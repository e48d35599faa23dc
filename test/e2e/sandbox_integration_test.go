//go:build integration

package e2e

import (
	"bytes"
	"context"
	_ "embed"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

// webServer is a server for sandboxes; its routes are described in the file.
//
//go:embed testdata/server.js
var webServer []byte

const webPort = 8000

// box is a sandbox of a test.
type box struct {
	t    *testing.T
	node *node
	id   string
	// url of the web server's preview, without a slash at the end.
	url string
	web types.Process
}

var names atomic.Int64

func duration(d time.Duration) *types.Duration {
	v := types.Duration(d)
	return &v
}

// newBox creates a sandbox, with the request as edit changes it, and removes it when the test
// has ended. It sleeps only when that is requested.
func (n *node) newBox(t *testing.T, edit ...func(*types.CreateSandboxRequest)) *box {
	t.Helper()
	req := types.CreateSandboxRequest{Name: fmt.Sprint("box-", names.Add(1)), SleepAfter: duration(0)}
	for _, f := range edit {
		f(&req)
	}
	sb, created, err := n.API.Create(testkit.Context(t), req)
	if err != nil || !created {
		t.Fatalf("creating a sandbox: created %t, error %v", created, err)
	}
	return n.boxOf(t, sb.ID)
}

// boxOf returns a sandbox, and removes it when the test has ended.
func (n *node) boxOf(t *testing.T, id string) *box {
	t.Helper()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
		defer cancel()
		if err := n.API.Delete(ctx, id); err != nil && !problem.Has(err, problem.SandboxNotFound) {
			t.Error(err)
		}
	})
	return &box{t: t, node: n, id: id}
}

// sleepAfter is an edit for newBox.
func sleepAfter(d time.Duration) func(*types.CreateSandboxRequest) {
	return func(req *types.CreateSandboxRequest) { req.SleepAfter = duration(d) }
}

// newWebBox makes a sandbox with webServer declared, running and exposed.
func (n *node) newWebBox(t *testing.T, edit ...func(*types.CreateSandboxRequest)) *box {
	t.Helper()
	b := n.newBox(t, edit...)
	b.serve(types.ExposePortRequest{})
	return b
}

// serve starts webServer and exposes it.
func (b *box) serve(expose types.ExposePortRequest) {
	b.t.Helper()
	b.serveBy(expose, types.StartProcessRequest{Command: types.Command{Argv: []string{"node", "/srv/server.js", strconv.Itoa(webPort)}}})
}

func (b *box) serveBy(expose types.ExposePortRequest, process types.StartProcessRequest) {
	b.t.Helper()
	b.write("/srv/server.js", webServer)
	process.Name, process.Restart = "web", "on_wake"
	var err error
	b.web, err = b.node.API.StartProcess(testkit.Context(b.t), b.id, process)
	b.must(err)
	expose.Port, expose.WaitTimeout = webPort, types.Duration(testkit.Patience)
	port, err := b.node.API.Expose(testkit.Context(b.t), b.id, expose)
	b.must(err)
	b.url = strings.TrimSuffix(port.URL, "/")
}

// newSlowBox is newWebBox with a server that, when it is started, does not listen
// while there is a file /srv/slow.
func (n *node) newSlowBox(t *testing.T) *box {
	t.Helper()
	b := n.newBox(t)
	b.serveBy(types.ExposePortRequest{}, types.StartProcessRequest{Command: types.Command{Command: "while [ -e /srv/slow ]; do sleep 0.05; done; exec node /srv/server.js " + strconv.Itoa(webPort)}})
	return b
}

func (b *box) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b *box) write(path string, content []byte) {
	b.t.Helper()
	_, err := b.node.API.WriteFile(testkit.Context(b.t), b.id, path, 0, bytes.NewReader(content))
	b.must(err)
}

// exec runs a shell command that must succeed and returns what it printed.
func (b *box) exec(command string) string {
	b.t.Helper()
	result := b.try(command)
	if result.ExitCode != 0 {
		b.t.Fatalf("%s: exit code %d: %s%s", command, result.ExitCode, result.Stdout, result.Stderr)
	}
	return strings.TrimSpace(result.Stdout)
}

func (b *box) try(command string) types.ExecResult {
	b.t.Helper()
	result, err := b.node.API.Exec(testkit.Context(b.t), b.id, client.ExecRequest{Command: types.Command{Command: command}, Timeout: types.Duration(testkit.Patience)})
	b.must(err)
	return result
}

// get fetches a path of the preview, which must respond with that status.
func (b *box) get(c *http.Client, path string, status int) (text string, header http.Header) {
	b.t.Helper()
	text, header, err := fetch(b.t.Context(), c, b.url+path, status)
	b.must(err)
	return text, header
}

func fetch(ctx context.Context, c *http.Client, url string, status int) (text string, header http.Header, err error) {
	req, err := http.NewRequestWithContext(ctx, "GET", url, nil)
	if err != nil {
		return "", nil, err
	}
	resp, err := c.Do(req)
	if err != nil {
		return "", nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err == nil && resp.StatusCode != status {
		err = fmt.Errorf("%s: status %s, want %d: %s", url, resp.Status, status, body)
	}
	return string(body), resp.Header, err
}

func (b *box) show() types.Sandbox {
	b.t.Helper()
	sb, err := b.node.API.Get(testkit.Context(b.t), b.id)
	b.must(err)
	return sb
}

// processes are those that the node knows, also of earlier runs.
func (b *box) processes() []types.Process {
	b.t.Helper()
	list, err := b.node.API.Processes(testkit.Context(b.t), b.id)
	b.must(err)
	return list
}

func (b *box) state() types.State { return b.show().State }

// sleep puts it to sleep as soon as nothing is in flight any more: the lease of
// a request ends shortly after its response.
func (b *box) sleep() { b.t.Helper(); b.retryWhileBusy(b.node.API.Sleep) }
func (b *box) stop()  { b.t.Helper(); b.retryWhileBusy(b.node.API.Stop) }

func (b *box) retryWhileBusy(how func(context.Context, string) (types.Sandbox, error)) {
	b.t.Helper()
	testkit.Eventually(b.t, "it is not busy", func() bool {
		_, err := how(testkit.Context(b.t), b.id)
		if problem.Has(err, problem.SandboxBusy) {
			return false
		}
		b.must(err)
		return true
	})
}

func (b *box) awaitState(state types.State) {
	b.t.Helper()
	testkit.Eventually(b.t, "it is "+string(state), func() bool { return b.state() == state })
}

// events returns the events of a type.
func (b *box) events(kind types.EventType) []types.Event {
	b.t.Helper()
	all, err := b.node.API.Events(testkit.Context(b.t), b.id, 0)
	b.must(err)
	var list []types.Event
	for _, e := range all {
		if e.Type == kind {
			list = append(list, e)
		}
	}
	return list
}

// awaitEvents returns the events of a type once there are so many at least: a response
// may precede the event of its request.
func (b *box) awaitEvents(kind types.EventType, count int) (list []types.Event) {
	b.t.Helper()
	testkit.Eventually(b.t, fmt.Sprintf("there are %d events %s", count, kind), func() bool {
		list = b.events(kind)
		return len(list) >= count
	})
	return list
}

// hostPID is the sandbox's first process as the host sees it: the process in
// whose root the guest's folder is this sandbox's.
func (b *box) hostPID() int {
	b.t.Helper()
	for _, pid := range b.hostPIDs() {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(status)) {
			if ids, ok := strings.CutPrefix(line, "NSpid:"); ok {
				if fields := strings.Fields(ids); fields[len(fields)-1] == "1" {
					return pid
				}
			}
		}
	}
	b.t.Fatal("no process of the host is this sandbox's first")
	return 0
}

// hostPIDs are all its processes, found by its cgroup.
func (b *box) hostPIDs() []int {
	b.t.Helper()
	var pids []int
	root := filepath.Join(os.Getenv("DOZE_CGROUP"), "sandboxes", b.id)
	err := filepath.WalkDir(root, func(path string, _ os.DirEntry, err error) error {
		if err != nil || filepath.Base(path) != "cgroup.procs" {
			return nil // a cgroup may vanish meanwhile
		}
		text, _ := os.ReadFile(path)
		for _, field := range strings.Fields(string(text)) {
			if pid, err := strconv.Atoi(field); err == nil {
				pids = append(pids, pid)
			}
		}
		return nil
	})
	b.must(err)
	return pids
}
