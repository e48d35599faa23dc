//go:build integration

package e2e

import (
	"errors"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

// A stop ends everything in progress by signals, whose exit codes are reported. When the guest is
// killed, the ends are unknown, and no exit code is invented.
func TestStopEndsWhatIsInProgress(t *testing.T) {
	n := commonNode(t)
	shared := n.newBox(t, image("python"))
	type ended struct {
		exec types.ExecExit
		err  error
	}
	for _, stop := range []struct {
		name   string
		how    func(*box)
		reason types.StateReason
		// codes of the requests in progress; the zero Code is an exit by a signal.
		exec, session, wait, code problem.Code
	}{
		{
			"forced", func(b *box) {
				_, err := n.API.ForceStop(testkit.Context(b.t), b.id)
				b.must(err)
			}, types.StateReasonForced,
			problem.Code{}, problem.Code{}, problem.ProcessExited, problem.ContextLost,
		},
		{
			"guest killed", func(b *box) { b.killFirst(n) }, types.StateReasonContainerExited,
			problem.GuestLost, problem.GuestLost, problem.GuestLost, problem.ContextLost,
		},
	} {
		t.Run(stop.name, func(t *testing.T) {
			b := &box{t: t, node: n, id: shared.id}
			_, err := n.API.OpenSession(testkit.Context(t), b.id, types.OpenSessionRequest{ID: "dev"})
			b.must(err)
			p := b.start("", "exec sleep 1000", nil)
			leases := func(count float64) func() bool {
				return func() bool { return n.metric(t, "doze_sandbox_leases") == count }
			}
			results := map[string]chan ended{}
			begin := func(name string, call func() ended) {
				result := make(chan ended, 1)
				results[name] = result
				go func() { result <- call() }()
			}
			testkit.Eventually(t, "nothing is in progress", leases(0))
			begin("wait", func() ended {
				_, err := n.API.WaitProcess(testkit.Context(t), b.id, p.ID, types.ReadyCondition{Port: 3000, Timeout: types.Duration(testkit.Patience)})
				return ended{err: err}
			})
			testkit.Eventually(t, "the wait has begun", leases(1))
			begin("exec", func() ended {
				r, err := n.API.Exec(testkit.Context(t), b.id, client.ExecRequest{Command: types.Command{Command: "touch /tmp/exec; sleep 1000"}})
				return ended{r.ExecExit, err}
			})
			begin("session", func() ended {
				r, err := b.inSession("dev", "touch /tmp/session; sleep 1000")
				return ended{r.ExecExit, err}
			})
			begin("code", func() ended {
				_, err := n.API.RunCode(testkit.Context(t), b.id, client.RunCodeRequest{Context: "python", Code: "open('/tmp/code', 'w')\nwhile True: pass"})
				return ended{err: err}
			})
			b.exec("cd /tmp; until [ -e exec ] && [ -e session ] && [ -e code ]; do sleep 0.01; done; rm exec session code")
			stop.how(b)
			for name, want := range map[string]problem.Code{"exec": stop.exec, "session": stop.session, "wait": stop.wait, "code": stop.code} {
				got := testkit.Receive(t, "the end of "+name, results[name])
				p, _ := errors.AsType[*problem.Problem](got.err)
				switch {
				case want != (problem.Code{}) && (p == nil || p.Code != want):
					t.Errorf("%s: %+v, %v; want %s", name, got.exec, got.err, want)
				case want == (problem.Code{}) && (got.err != nil || got.exec.Signal == "" || got.exec.ExitCode <= 128):
					t.Errorf("%s: %+v, %v; want a signal", name, got.exec, got.err)
				}
			}
			b.awaitState(types.StateStopped)
			if reason := b.show().StateReason; reason != stop.reason {
				t.Errorf("it is stopped: %s, want %s", reason, stop.reason)
			}
			_, err = b.inSession("dev", "true")
			if p, ok := errors.AsType[*problem.Problem](err); !ok || p.Code != problem.SessionLost || p.Status != 410 || !strings.Contains(p.Detail, string(stop.reason)) {
				t.Errorf("the next command of the session: %v", err)
			}
			_, err = n.API.RunCode(testkit.Context(t), b.id, client.RunCodeRequest{Context: "python", Code: "1"})
			b.wantContextLost(err, string(stop.reason))
			if b.state() != types.StateStopped {
				t.Error("a refused request started the sandbox")
			}
			_, err = n.API.WaitProcess(testkit.Context(t), b.id, p.ID, types.ReadyCondition{Port: 3000}) // wakes it
			if !problem.Has(err, problem.ProcessExited) {
				t.Errorf("the next wait: %v", err)
			}
			b.exec("true")
			_, err = n.API.RestartContext(testkit.Context(t), b.id, "python")
			b.must(err)
			if got := b.value("python", "6 * 7"); got != "42" {
				t.Errorf("code after the restart: %s", got)
			}
		})
	}
}
