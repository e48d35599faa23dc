//go:build integration

package e2e

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/testkit"
)

// acknowledged are the requests of concurrent clients that a node has acknowledged.
type acknowledged struct {
	mu        sync.Mutex
	sandboxes map[string]string // id by name
	files     map[string]string // content by path, in the sandbox "base"
	ports     map[uint16]string // url by port, of the sandbox "base"
	declared  map[string]bool   // processes of the sandbox "base"
}

func (a *acknowledged) note(f func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f()
}

// count returns how many sandboxes, files, ports and processes these are.
func (a *acknowledged) count() [4]int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return [4]int{len(a.sandboxes), len(a.files), len(a.ports), len(a.declared)}
}

// Each round of load exposes ports of its own, fewer than a sandbox may have in all.
const (
	firstPort = 10_000
	portsEach = 20
)

// load does everything concurrently to a sandbox of the node until ctx ends. Errors are the
// point of it: a failed request promised nothing.
func (a *acknowledged) load(ctx context.Context, n *node, b *box, c *http.Client, round int) {
	var all sync.WaitGroup
	repeat := func(f func(i int)) {
		all.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				f(i)
			}
		})
	}
	for range 4 {
		repeat(func(int) { fetch(ctx, c, b.url, http.StatusOK) })
	}
	repeat(func(int) {
		n.API.Exec(ctx, b.id, client.ExecRequest{Command: types.Command{Argv: []string{"sleep", "0.01"}}})
	})
	repeat(func(i int) {
		name := fmt.Sprintf("made-%d-%d", round, i)
		if sb, _, err := n.API.Create(ctx, types.CreateSandboxRequest{Name: name, Size: "lite", SleepAfter: duration(0)}); err == nil {
			a.note(func() { a.sandboxes[name] = sb.ID })
		}
	})
	for writer := range 2 {
		repeat(func(i int) {
			path := fmt.Sprintf("/srv/kept/%d-%d-%d", round, writer, i)
			content := strings.Repeat(path+"\n", 1+i%2000)
			if _, err := n.API.WriteFile(ctx, b.id, path, 0, strings.NewReader(content)); err == nil {
				a.note(func() { a.files[path] = content })
			}
		})
	}
	repeat(func(i int) {
		number := uint16(firstPort + portsEach*round + i%portsEach)
		if port, err := n.API.Expose(ctx, b.id, types.ExposePortRequest{Port: number}); err == nil {
			a.note(func() { a.ports[number] = port.URL })
		}
	})
	repeat(func(i int) {
		name := fmt.Sprintf("kept-%d-%d", round, i)
		if i >= 8 { // of the 64 that a sandbox may declare
			<-ctx.Done()
			return
		}
		req := types.StartProcessRequest{Command: types.Command{Argv: []string{"sleep", "100000"}}, Name: name, Restart: "always"}
		if _, err := n.API.StartProcess(ctx, b.id, req); err == nil {
			a.note(func() { a.declared[name] = true })
		}
	})
	all.Wait()
}

func TestKilledNodeLosesNothingItAcknowledged(t *testing.T) {
	n := ownNode(t)
	b := n.newWebBox(t)
	started, _ := b.get(n.browser(t, "h2"), "/started", http.StatusOK)
	const rounds = 3
	serveAll := fmt.Sprintf(`for (let p = %d; p < %d; p++) require("http").createServer((_, res) => res.end("port " + p)).listen(p, "127.0.0.1")`, firstPort, firstPort+rounds*portsEach)
	_, err := n.API.StartProcess(testkit.Context(t), b.id, types.StartProcessRequest{Command: types.Command{Argv: []string{"node", "-e", serveAll}}, Name: "ports", Restart: "always"})
	b.must(err)
	_, err = n.API.Expose(testkit.Context(t), b.id, types.ExposePortRequest{Port: firstPort + rounds*portsEach - 1, WaitTimeout: types.Duration(testkit.Patience)})
	b.must(err)
	asleep := n.newBox(t)
	asleep.sleep()
	pids := map[*box]int{b: b.hostPID(), asleep: asleep.hostPID()}
	kept := &acknowledged{sandboxes: map[string]string{}, files: map[string]string{}, ports: map[uint16]string{}, declared: map[string]bool{}}
	for round := range rounds {
		before := kept.count()
		ctx, cancel := context.WithCancel(t.Context())
		c := n.browser(t, "h2")
		var loaded sync.WaitGroup
		loaded.Go(func() { kept.load(ctx, n, b, c, round) })
		// Killed in the middle, and each time in another moment of it.
		testkit.Eventually(t, "enough is under way", func() bool {
			now := kept.count()
			return now[0] > before[0]+round && now[1] > before[1] && now[2] > before[2] && now[3] > before[3]
		})
		b.must(n.Kill())
		cancel()
		loaded.Wait()
		b.must(n.Start())
		kept.check(t, n, b)
		for b, before := range pids {
			if after := b.hostPID(); after != before {
				t.Errorf("round %d: the first process of %s was %d and is %d", round, b.id, before, after)
			}
		}
		if state := asleep.state(); state != types.StateAsleep {
			t.Errorf("round %d: the sleeping one is %s", round, state)
		}
		if again, _ := b.get(n.browser(t, "h2"), "/started", http.StatusOK); again != started {
			t.Errorf("round %d: the server was started again", round)
		}
	}
	asleep.exec("true")
	// Nothing that was not acknowledged is half there.
	all, err := n.API.List(testkit.Context(t), client.Filter{})
	b.must(err)
	known := map[string]bool{}
	for _, sb := range all {
		known[sb.ID] = true
		if sb.State == types.StateStarting {
			t.Errorf("%s is half-made", sb.Name)
		}
	}
	testkit.Eventually(t, "unfinished sandboxes are gone", func() bool { return len(unknown(t, n, known)) == 0 })
	// Declared is what a cold wake starts again.
	b.stop()
	b.get(n.browser(t, "h2"), "/", http.StatusOK)
	running := map[string]bool{}
	for _, p := range b.processes() {
		if p.State == types.ProcessStateRunning {
			running[p.Name] = true
		}
	}
	for name := range kept.declared {
		if !running[name] {
			t.Errorf("the declared process %s was not started again", name)
		}
	}
	t.Logf("acknowledged: %d sandboxes, %d files, %d ports, %d declared processes", len(kept.sandboxes), len(kept.files), len(kept.ports), len(kept.declared))
}

// unknown returns folders of sandboxes that the API does not know.
func unknown(t *testing.T, n *node, known map[string]bool) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(n.Home, "run"))
	if err != nil {
		t.Fatal(err)
	}
	var list []string
	for _, e := range entries {
		if e.IsDir() && len(e.Name()) == 12 && !known[e.Name()] {
			list = append(list, e.Name())
		}
	}
	return list
}

func (a *acknowledged) check(t *testing.T, n *node, b *box) {
	t.Helper()
	for name, id := range a.sandboxes {
		sb, err := n.API.Get(testkit.Context(t), name)
		if err != nil || sb.ID != id || sb.State != types.StateRunning {
			t.Errorf("sandbox %s: %+v, %v", name, sb, err)
		}
	}
	urls := map[uint16]string{}
	for _, port := range b.show().Ports {
		urls[port.Port] = port.URL
	}
	c := n.browser(t, "h2")
	for number, url := range a.ports {
		if urls[number] != url {
			t.Errorf("port %d had %q and has %q", number, url, urls[number])
		}
		if text, _, err := fetch(t.Context(), c, url, http.StatusOK); err != nil || text != fmt.Sprint("port ", number) {
			t.Errorf("the preview of port %d: %q, %v", number, text, err)
		}
	}
	a.checkFiles(t, b)
}

// checkFiles compares all files by one command: their number is large.
func (a *acknowledged) checkFiles(t *testing.T, b *box) {
	t.Helper()
	var sizes strings.Builder
	for _, path := range slices.Sorted(maps.Keys(a.files)) {
		fmt.Fprintf(&sizes, "%s\t%d\n", path, len(a.files[path]))
	}
	b.write("/srv/expected", []byte(sizes.String()))
	// Each file repeats its own path in every line.
	out := b.exec(`python3 - <<'EOF'
for line in open("/srv/expected"):
    path, size = line.rstrip("\n").split("\t")
    try:
        text = open(path).read()
        if len(text) != int(size) or text.replace(path + "\n", ""):
            print(path, "has", len(text), "bytes, want", size)
    except OSError as e:
        print(e)
EOF`)
	if out != "" {
		t.Errorf("files: %s", out)
	}
	testkit.Eventually(t, "nothing is left of uploads that were cut off", func() bool {
		return b.exec("ls -A /srv/kept | grep -v '^[0-9-]*$' || true") == ""
	})
}

// The guest is the first process of a sandbox: with it all others end.
func TestKilledGuestIsStartedByTheNextRequest(t *testing.T) {
	n := ownNode(t)
	b := n.newWebBox(t)
	c := n.browser(t, "h2")
	for round := range 2 {
		started, _ := b.get(c, "/started", http.StatusOK)
		b.killFirst(n)
		if round > 0 { // the first request comes before the node has noticed
			b.awaitEvents("stopped", round+1)
			// The exit of its server was not observed, so no exit code is reported.
			if list := b.processes(); len(list) == 0 || slices.ContainsFunc(list, func(p types.Process) bool { return p.State != "lost" || p.ExitCode != nil }) {
				t.Errorf("its guest was killed, its processes: %+v", list)
			}
		}
		text, _ := b.get(c, "/started", http.StatusOK)
		if text == started {
			t.Fatal("it was not killed")
		}
		stopped, woke := b.awaitEvents("stopped", round+1), b.awaitEvents("woke", round+1)
		if len(stopped) != round+1 || len(woke) != round+1 || woke[round].Kind != "cold" {
			t.Errorf("events: stopped %+v, woke %+v", stopped, woke)
		}
	}
	// While it sleeps the end goes unnoticed, and the next request still gets its response.
	b.sleep()
	b.killFirst(n)
	b.get(c, "/", http.StatusOK)
	b.exec("true")
}

// A request that waits for a server fails immediately when the server cannot come up.
func TestWaitForAServerEndsWithItsSandbox(t *testing.T) {
	n := commonNode(t)
	b := n.newSlowBox(t)
	b.write("/srv/slow", nil)
	b.stop()
	type visitResult struct {
		text string
		err  error
	}
	answers := make(chan visitResult, 3)
	for range cap(answers) {
		go func() { // ends with its response
			text, _, err := fetch(t.Context(), n.browser(t, "h2"), b.url+"/", http.StatusBadGateway)
			answers <- visitResult{text, err}
		}()
	}
	testkit.Eventually(t, "all of them wait", func() bool {
		return n.metric(t, "doze_sandbox_leases")+n.metric(t, "doze_wake_waiters") == float64(cap(answers))
	})
	b.awaitState(types.StateRunning)
	b.killFirst(n)
	for range cap(answers) {
		if a := <-answers; a.err != nil || !strings.Contains(a.text, `"code":"wake_failed"`) {
			t.Errorf("a visitor got %v, %s", a.err, a.text)
		}
	}
}

// killFirst kills the first process of a sandbox as its host's administrator
// could: it belongs to another user, so a process in Podman's user namespace does it.
func (b *box) killFirst(n *node) {
	b.t.Helper()
	pid := b.hostPID()
	n.podman(b.t, "unshare", "kill", "-9", strconv.Itoa(pid))
	// The others end after it, and may respond until then.
	testkit.Eventually(b.t, "its processes are gone", func() bool { return !testkit.Alive(pid) && len(b.hostPIDs()) == 0 })
}

func TestKilledPodmanServiceIsStartedAgain(t *testing.T) {
	n := ownNode(t)
	b := n.newWebBox(t)
	pid := n.child(t, "podman")
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	c := n.browser(t, "h2")
	b.get(c, "/", http.StatusOK)
	b.exec("true")
	b.sleep()
	b.get(c, "/", http.StatusOK)
	other := n.newBox(t) // waits for the next service
	other.exec("true")
	b.stop()
	b.get(c, "/", http.StatusOK)
	if after := n.child(t, "podman"); after == pid {
		t.Error("the service was not killed")
	}
}

func TestKilledNamespaceHelperIsStartedAgain(t *testing.T) {
	n := ownNode(t)
	b := n.newWebBox(t)
	for range 3 {
		pid := n.child(t, "doze-netns")
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		// Of a client of its own: connections that exist need no helper.
		b.get(n.browser(t, "h1"), "/", http.StatusOK)
		b.stop() // no connection into it is left
		b.get(n.browser(t, "h1"), "/", http.StatusOK)
		if after := n.child(t, "doze-netns"); after == pid {
			t.Error("the helper was not killed")
		}
	}
}

// child returns the node's child process that runs a program.
func (n *node) child(t *testing.T, name string) int {
	t.Helper()
	for _, pid := range n.children() {
		command, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		first, _, _ := strings.Cut(string(command), "\x00")
		if filepath.Base(first) == name {
			return pid
		}
	}
	t.Fatalf("the node has no child %s", name)
	return 0
}

// children are the node's child processes, without those that have ended.
func (n *node) children() []int {
	var pids []int
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", n.PID()))
	for _, task := range tasks {
		text, _ := os.ReadFile(task)
		for _, field := range strings.Fields(string(text)) {
			if pid, err := strconv.Atoi(field); err == nil && testkit.Alive(pid) {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// The kill comes when the container runs and its guest may be asked already to start
// what is declared.
func TestNodeKilledDuringAColdWakeFinishesIt(t *testing.T) {
	n := ownNode(t)
	b := n.newWebBox(t)
	_, err := n.API.StartProcess(testkit.Context(t), b.id, types.StartProcessRequest{Command: types.Command{Argv: []string{"sleep", "100000"}}, Name: "second", Restart: "on_wake"})
	b.must(err)
	for range 3 {
		b.stop()
		ctx, cancel := context.WithCancel(t.Context())
		var waking sync.WaitGroup
		waking.Go(func() { n.API.Wake(ctx, b.id) })
		testkit.Eventually(t, "its container runs", func() bool { return len(b.hostPIDs()) > 0 })
		b.must(n.Kill())
		cancel()
		waking.Wait()
		b.must(n.Start())
		b.get(n.browser(t, "h2"), "/started", http.StatusOK)
		testkit.Eventually(t, "all declared processes run", func() bool {
			running := map[string]bool{}
			for _, p := range b.processes() {
				running[p.Name] = running[p.Name] || p.State == types.ProcessStateRunning
			}
			return len(running) == 2 && running["second"] && !slices.Contains(slices.Collect(maps.Values(running)), false)
		})
	}
}

// The service is stopped first, so that the destruction waits in it when it is killed.
func TestDestructionDuringWhichPodmanIsKilledIsFinished(t *testing.T) {
	n := ownNode(t)
	b := n.newBox(t)
	first, service := b.hostPID(), n.child(t, "podman")
	b.must(syscall.Kill(service, syscall.SIGSTOP))
	ctx, ended := testkit.Context(t), make(chan error, 1)
	go func() { ended <- n.API.Delete(ctx, b.id) }()
	testkit.Eventually(t, "the destruction has begun", func() bool {
		sb, err := n.API.Get(ctx, b.id)
		b.must(err)
		return sb.State == "destroyed"
	})
	b.must(syscall.Kill(service, syscall.SIGKILL))
	t.Logf("the destruction ended with %v", <-ended)
	testkit.Eventually(t, "it is finished", func() bool {
		info, err := n.API.Node(testkit.Context(t))
		b.must(err)
		return len(info.PendingOperations) == 0 && !testkit.Alive(first)
	})
	if left := strings.TrimSpace(n.podman(t, "ps", "--all", "--quiet", "--filter", "name=doze-"+b.id)); left != "" {
		t.Errorf("its container exists: %s", left)
	}
	n.newBox(t).exec("true")
}
