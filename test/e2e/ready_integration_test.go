//go:build integration

package e2e

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

// start starts a process in the background.
func (b *box) start(name, command string, ready *types.ReadyCondition) types.Process {
	b.t.Helper()
	p, err := b.node.API.StartProcess(testkit.Context(b.t), b.id, types.StartProcessRequest{Command: types.Command{Command: command}, Name: name, Ready: ready})
	b.must(err)
	return p
}

// wait waits for a condition in the background. The function that it returns returns the
// response.
func (b *box) wait(process string, c types.ReadyCondition) func() (types.ReadyProcess, error) {
	type response struct {
		types.ReadyProcess
		error
	}
	c.Timeout = types.Duration(testkit.Patience)
	result := make(chan response, 1)
	go func() {
		r, err := b.node.API.WaitProcess(testkit.Context(b.t), b.id, process, c)
		result <- response{r, err}
	}()
	return func() (types.ReadyProcess, error) { r := <-result; return r.ReadyProcess, r.error }
}

// ports returns the ports on which processes listen, as last known.
func (b *box) ports() []types.ListeningPort {
	b.t.Helper()
	list, err := b.node.API.Ports(testkit.Context(b.t), b.id)
	b.must(err)
	return list.Listening
}

const conditionServer = "exec python3 -c 'import http.server; s=http.server.HTTPServer((\"%s\", %d), http.server.SimpleHTTPRequestHandler); print(\"serving\", flush=True); s.serve_forever()'"

func TestServerIsReady(t *testing.T) {
	b := commonNode(t).newBox(t)
	p := b.start("web", fmt.Sprintf(conditionServer, "127.0.0.1", 3000), &types.ReadyCondition{HTTP: &types.ReadyHTTP{Port: 3000}, Timeout: types.Duration(testkit.Patience)})
	for _, c := range []types.ReadyCondition{{Port: 3000}, {Log: "^serving$"}, {HTTP: &types.ReadyHTTP{Port: 3000, Path: "/no-file", Status: "404"}}} {
		r, err := b.wait("web", c)()
		if err != nil || r.Process.ID != p.ID {
			t.Errorf("%+v: %+v, %v", c, r, err)
		}
	}
	testkit.Eventually(t, "the port is known", func() bool { return len(b.ports()) == 1 })
	if l := b.ports()[0]; l.Port != 3000 || l.Process != p.ID || l.PID != p.PID || l.Program != "python3" || fmt.Sprint(l.Addresses) != "[127.0.0.1]" {
		t.Errorf("listening: %+v, the process is %+v", l, p)
	}
	if opened := b.awaitEvents("port_opened", 1); opened[0].Port != 3000 || opened[0].Listening == nil || opened[0].Listening.Process != p.ID {
		t.Errorf("opened: %+v", opened)
	}
	b.sleep()
	if len(b.ports()) != 1 || b.state() != types.StateAsleep {
		t.Errorf("asleep: %+v, it is %s", b.ports(), b.state())
	}
	if r, err := b.wait("web", types.ReadyCondition{Port: 3000})(); err != nil || r.Listening.PID != p.PID || b.state() != types.StateRunning {
		t.Errorf("after waking it: %+v, %v", r, err)
	}
	_, err := b.node.API.StopProcess(testkit.Context(t), b.id, "web", "")
	b.must(err)
	if closed := b.awaitEvents("port_closed", 1); closed[0].Port != 3000 {
		t.Errorf("closed: %+v", closed)
	}
	if list := b.ports(); len(list) != 0 {
		t.Errorf("after its end: %+v", list)
	}
	// Reading /proc/net/tcp instead is right, but takes a hundred times as long.
	if log := b.node.podman(t, "logs", "doze-"+b.id); strings.Contains(log, "sock_diag") {
		t.Errorf("the guest's log: %s", log)
	}
}

// Of another user, whose processes the guest cannot inspect, on the other stack, and in the
// terms of a wait that sleep interrupts.
func TestWaitGoesOnAfterSleep(t *testing.T) {
	b := commonNode(t).newBox(t)
	b.start("web", `while [ ! -e /tmp/go ]; do sleep 0.01; done; exec setpriv --reuid 65534 sh -c '`+strings.ReplaceAll(fmt.Sprintf(conditionServer, "127.0.0.2", 3000), "'", `'\''`)+`'`, nil)
	result := b.wait("web", types.ReadyCondition{Port: 3000})
	testkit.Eventually(t, "the wait keeps it awake", func() bool {
		_, err := b.node.API.Sleep(testkit.Context(t), b.id)
		return problem.Has(err, problem.SandboxBusy)
	})
	_, err := b.node.API.ForceSleep(testkit.Context(t), b.id)
	b.must(err)
	b.exec("touch /tmp/go")
	r, err := result()
	if err != nil || r.Listening.Port != 3000 || r.Listening.PID != 0 || fmt.Sprint(r.Listening.Addresses) != "[127.0.0.2]" {
		t.Errorf("got %+v, %+v, %v", r, r.Listening, err)
	}
}

func TestWaitReportsTheLastLines(t *testing.T) {
	b := commonNode(t).newBox(t)
	b.start("web", "echo compiling; while [ ! -e /tmp/go ]; do sleep 0.01; done; echo 'Error: no module' >&2; exit 3", nil)
	_, err := b.node.API.WaitProcess(testkit.Context(t), b.id, "web", types.ReadyCondition{Port: 3000, Timeout: types.Duration(50 * time.Millisecond)})
	if !problem.Has(err, problem.ProcessNotReady) {
		t.Errorf("got %v", err)
	}
	var waits []func() (types.ReadyProcess, error)
	for i := range 200 {
		waits = append(waits, b.wait("web", []types.ReadyCondition{{Port: 3000}, {Log: "never"}, {HTTP: &types.ReadyHTTP{Port: 3000}}, {Exit: true}}[i%4]))
	}
	b.exec("touch /tmp/go")
	var each sync.WaitGroup
	for i, wait := range waits {
		each.Go(func() {
			r, err := wait()
			p, _ := err.(*problem.Problem)
			switch {
			case i%4 == 3 && (err != nil || *r.Process.ExitCode != 3):
				t.Errorf("exit: %+v, %v", r, err)
			case i%4 != 3 && (p == nil || p.Code != problem.ProcessExited || !strings.HasSuffix(p.Process.Output, "Error: no module")):
				t.Errorf("got %v", err)
			}
		})
	}
	each.Wait()
}

func TestWaitOfANodeThatIsRestarted(t *testing.T) {
	n := ownNode(t)
	b := n.newBox(t)
	p := b.start("web", "while [ ! -e /tmp/go ]; do sleep 0.01; done; "+fmt.Sprintf(conditionServer, "127.0.0.1", 3000), nil)
	result := b.wait("web", types.ReadyCondition{Port: 3000})
	testkit.Eventually(t, "the wait is under way", func() bool {
		_, err := n.API.Sleep(testkit.Context(t), b.id)
		return problem.Has(err, problem.SandboxBusy)
	})
	b.must(n.Kill())
	if r, err := result(); err == nil {
		t.Errorf("the wait outlived the node: %+v", r)
	}
	b.must(n.Start())
	result = b.wait("web", types.ReadyCondition{Port: 3000})
	b.exec("touch /tmp/go")
	if r, err := result(); err != nil || r.Process.ID != p.ID || r.Listening == nil {
		t.Errorf("got %+v, %v", r, err)
	}
	testkit.Eventually(t, "the port is known", func() bool { return len(b.ports()) == 1 })
	if opened := b.events("port_opened"); len(opened) != 1 {
		t.Errorf("opened: %+v", opened)
	}
}

// switches counts how often the threads of a process have gone to sleep.
func switches(t *testing.T, pid int) (total int) {
	t.Helper()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil || len(tasks) == 0 {
		t.Fatalf("process %d has no threads: %v", pid, err)
	}
	for _, task := range tasks {
		status, err := os.ReadFile(task)
		if err != nil {
			continue // the thread has ended
		}
		var n int
		_, value, _ := strings.Cut(string(status), "\nvoluntary_ctxt_switches:")
		if _, err := fmt.Sscan(value, &n); err != nil {
			t.Fatalf("%s: %v", task, err)
		}
		total += n
	}
	return total
}

func TestGuestWithoutProcessesRests(t *testing.T) {
	b := commonNode(t).newBox(t)
	pid := b.hostPID()
	const window, most = 5 * time.Second, 5 // a poll a second, of several switches, would be more than 20
	testkit.Eventually(t, "the guest rests", func() bool {
		before := switches(t, pid)
		time.Sleep(window)
		return switches(t, pid)-before <= most
	})
	// A daemon, whose parent has ended.
	b.exec(`setsid sh -c 'sleep 3; exec python3 -m http.server 3000' >/dev/null 2>&1 &`)
	testkit.Eventually(t, "the port of a daemon is known", func() bool { return len(b.ports()) == 1 })
	b.exec("pkill -f '[h]ttp.server'")
	testkit.Eventually(t, "and is not after its end", func() bool { return len(b.ports()) == 0 })
}

// warmServer listens immediately and responds with 503 until /tmp/warm exists.
const warmServer = `exec python3 -c '
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        warm = os.path.exists("/tmp/warm")
        self.send_response(200 if warm else 503)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"hello" if warm else b"later")
http.server.ThreadingHTTPServer(("127.0.0.1", 3000), Handler).serve_forever()'`

// Processes start in their order, each when the one before is ready; a preview waits for the
// one that owns its port, and a command for none.
func TestColdWakeAwaitsTheReadinessOfProcesses(t *testing.T) {
	b := commonNode(t).newBox(t)
	b.exec("touch /tmp/up /tmp/warm")
	for _, p := range []types.StartProcessRequest{
		{Name: "database", Command: types.Command{Command: "until [ -e /tmp/up ]; do sleep 0.01; done; echo up; exec sleep 100000"}, Ready: &types.ReadyCondition{Log: "^up$"}},
		{Name: "web", Command: types.Command{Command: warmServer}, Ready: &types.ReadyCondition{HTTP: &types.ReadyHTTP{Port: 3000, Status: "200"}}},
	} {
		p.Restart, p.Ready.Timeout = types.RestartOnWake, types.Duration(testkit.Patience)
		_, err := b.node.API.StartProcess(testkit.Context(t), b.id, p)
		b.must(err)
	}
	exposed, err := b.node.API.Expose(testkit.Context(t), b.id, types.ExposePortRequest{Port: 3000})
	b.must(err)
	b.url = exposed.URL
	b.exec("rm /tmp/up /tmp/warm")
	b.stop()

	c := b.node.browser(t, "h2")
	visit := func() <-chan string {
		result := make(chan string, 1)
		go func() {
			text, _, err := fetch(testkit.Context(t), c, b.url, http.StatusOK)
			result <- fmt.Sprint(text, err)
		}()
		return result
	}
	first := visit()
	b.exec("true") // wakes it, if the visitor has not
	for _, p := range b.processes() {
		if p.Name == "web" && p.State == types.ProcessStateRunning {
			t.Error("the server was started before the database was ready")
		}
	}
	b.exec("touch /tmp/up")
	testkit.Eventually(t, "the server listens", func() bool { return len(b.ports()) == 1 })
	second := visit()
	b.exec("touch /tmp/warm")
	for _, response := range []<-chan string{first, second} {
		if got := testkit.Receive(t, "the response", response); got != "hello<nil>" {
			t.Errorf("the response is %s", got)
		}
	}
	if failed := b.events(types.EventTypeWakeFailed); len(failed) != 0 {
		t.Errorf("failures: %+v", failed)
	}
}
