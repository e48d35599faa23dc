//go:build integration

package e2e

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

// inSession runs a command in a session.
func (b *box) inSession(session, command string) (types.ExecResult, error) {
	return b.node.API.Exec(testkit.Context(b.t), b.id, client.ExecRequest{Session: session, Command: types.Command{Command: command}})
}

func TestSessionKeepsItsStateThroughSleep(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	s, err := n.API.OpenSession(testkit.Context(t), b.id, types.OpenSessionRequest{ID: "dev", Cwd: "/tmp", Env: map[string]string{"A": "1"}})
	b.must(err)
	if s.Shell != "bash" || s.Cwd != "/tmp" {
		t.Errorf("session %+v", s)
	}
	_, err = b.inSession("dev", "mkdir dev; cd dev; f() { echo f$A; }; sleep 1000 & mkfifo begun go")
	b.must(err)
	b.sleep()
	if list, err := n.API.Sessions(testkit.Context(t), b.id); err != nil || len(list) != 1 || list[0].State != types.ProcessStateRunning || b.state() != types.StateAsleep {
		t.Errorf("sessions %+v, %v, in state %s", list, err, b.state())
	}
	cmd := n.Command("exec", "-n", "--session", "dev", b.id, "-c", "f; pwd; kill -0 $! && echo alive; (exit 3)")
	out, err := cmd.Output()
	if string(out) != "f1\n/tmp/dev\nalive\n" || cmd.ProcessState.ExitCode() != 3 {
		t.Errorf("%q, %v", out, err)
	}
	result, err := n.API.Exec(testkit.Context(t), b.id, client.ExecRequest{
		Session: "dev", Timeout: types.Duration(300 * time.Millisecond), Command: types.Command{Command: "A=2; set -e; sleep 1000; echo after"},
	})
	if err != nil || !result.TimedOut || result.Stdout != "" {
		t.Errorf("%+v, %v", result, err)
	}
	// Asleep in the middle of a command.
	type ended struct {
		types.ExecResult
		error
	}
	command := make(chan ended, 1)
	go func() {
		r, err := b.inSession("dev", "echo >begun; cat go; f; sh -c 'exit 4'; echo not reached")
		command <- ended{r, err}
	}()
	b.exec("cat /tmp/dev/begun")
	_, err = n.API.ForceSleep(testkit.Context(t), b.id)
	b.must(err)
	b.exec("echo on >/tmp/dev/go")
	if e := <-command; e.error != nil || e.Stdout != "on\nf2\n" || e.ExitCode != 4 {
		t.Errorf("%+v, %v", e.ExecResult, e.error)
	}
	b.stop()
	_, err = b.inSession("dev", "true")
	if p, ok := errors.AsType[*problem.Problem](err); !ok || p.Code != problem.SessionLost || p.Status != 410 || !strings.Contains(p.Detail, "requested") {
		t.Errorf("after a stop: %v", err)
	}
	if b.state() != types.StateStopped {
		t.Error("the refused command started the sandbox")
	}
	_, err = n.API.OpenSession(testkit.Context(t), b.id, types.OpenSessionRequest{ID: "dev"})
	b.must(err)
	if r, err := b.inSession("dev", "exit 3"); err != nil || r.ExitCode != 3 {
		t.Errorf("%+v, %v", r, err)
	}
	_, err = b.inSession("dev", "true")
	if p, ok := errors.AsType[*problem.Problem](err); !ok || p.Code != problem.SessionLost || !strings.Contains(p.Detail, "code 3") {
		t.Errorf("after exit: %v", err)
	}
}

func TestThousandSessionsLeaveNothing(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	count := func() string {
		return b.exec("ls /proc | grep -c '^[0-9]'; ls /.doze/run/sessions 2>/dev/null | wc -l")
	}
	before := count()
	var workers sync.WaitGroup
	for w := range 8 {
		workers.Go(func() {
			for i := range 125 {
				id := fmt.Sprintf("s%d-%d", w, i)
				if _, err := n.API.OpenSession(testkit.Context(t), b.id, types.OpenSessionRequest{ID: id}); err != nil {
					t.Error(err)
					return
				}
				if r, err := b.inSession(id, "sleep 1000 & echo "+id); err != nil || r.Stdout != id+"\n" {
					t.Errorf("%+v, %v", r, err)
				}
				if _, err := n.API.CloseSession(testkit.Context(t), b.id, id); err != nil {
					t.Error(err)
				}
			}
		})
	}
	workers.Wait()
	testkit.Eventually(t, "nothing is left", func() bool { return count() == before })
	testkit.Eventually(t, "no session is known", func() bool {
		list, err := n.API.Sessions(testkit.Context(t), b.id)
		b.must(err)
		return len(list) == 0
	})
}
