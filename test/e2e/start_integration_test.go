//go:build integration

package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/test/testnode"
	"github.com/doze-run/doze/testkit"
)

// fails runs a node that must end by itself, and returns its output.
func (n *node) fails(t *testing.T, edit func(*exec.Cmd)) string {
	t.Helper()
	cmd := n.RunCommand()
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	edit(cmd)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	hung := time.AfterFunc(testkit.Patience, func() { cmd.Process.Kill() })
	err := cmd.Wait()
	var exit *exec.ExitError
	if !hung.Stop() || !errors.As(err, &exit) || exit.ExitCode() <= 0 {
		t.Fatalf("the node ended with %v\n%s", err, out.String())
	}
	return out.String()
}

func TestSecondNodeOnTheSameHomeEndsAndHarmsNothing(t *testing.T) {
	n := ownNode(t)
	b := n.newWebBox(t)
	c := n.browser(t, "h2")
	before := b.hostPID()
	port, err := testnode.FreePort()
	b.must(err)
	out := n.fails(t, func(cmd *exec.Cmd) { cmd.Env = append(cmd.Env, fmt.Sprint("DOZE_HTTPS_PORT=", port)) })
	if !strings.Contains(out, "another node uses this folder") || !strings.Contains(out, n.Home) || !strings.Contains(out, fmt.Sprint(n.PID())) {
		t.Errorf("it printed:\n%s", out)
	}
	b.get(c, "/", http.StatusOK)
	b.exec("true")
	n.newBox(t).exec("true")
	b.sleep()
	b.get(c, "/", http.StatusOK)
	if after := b.hostPID(); after != before {
		t.Errorf("its first process was %d and is %d", before, after)
	}
	n.admin(t, "/metrics") // the socket is still the first node's
}

func TestNodeReportsAMissingPodman(t *testing.T) {
	made, err := testnode.New(testnode.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := made.Remove(); err != nil {
			t.Error(err)
		}
	})
	n := &node{made}
	out := n.fails(t, func(cmd *exec.Cmd) { cmd.Env = append(cmd.Env, "PATH=/nonexistent") })
	if !strings.Contains(out, `exec: \"podman\": executable file not found`) || !strings.Contains(out, "install Podman") {
		t.Errorf("it printed:\n%s", out)
	}
}

func TestNodeThatWasStoppedResumesItsSandboxes(t *testing.T) {
	n := ownNode(t)
	b := n.newWebBox(t)
	asleep := n.newBox(t)
	asleep.sleep()
	started, _ := b.get(n.browser(t, "h2"), "/started", http.StatusOK)
	before := b.hostPID()
	b.must(n.Stop())
	b.must(n.Start())
	if state := b.state(); state != types.StateRunning {
		t.Errorf("the running one is %s", state)
	}
	if state := asleep.state(); state != types.StateAsleep {
		t.Errorf("the sleeping one is %s", state)
	}
	if again, _ := b.get(n.browser(t, "h2"), "/started", http.StatusOK); again != started || b.hostPID() != before {
		t.Error("the server was started again")
	}
}
