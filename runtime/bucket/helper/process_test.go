package helper

import (
	"bytes"
	"os"
	"os/exec"
	"testing"

	"github.com/doze-run/doze/runtime/bucket/wire"
	"github.com/doze-run/doze/testkit"
)

// A reused pid may belong to another sandbox.
func TestProcessOfAnotherSandboxIsRefused(t *testing.T) {
	cgroups, err := os.ReadFile("/proc/self/cgroup")
	testkit.NoError(t, "read", err)
	var own string
	for line := range bytes.Lines(cgroups) {
		if path, ok := bytes.CutPrefix(bytes.TrimSpace(line), []byte("0::/")); ok {
			own = "/" + string(path)
		}
	}
	allowed := map[string]bool{"": true, "/doze/sandboxes/other0000000": false}
	if own != "" { // the system has cgroup v2
		allowed[own] = true
	}
	for cgroup, want := range allowed {
		p, err := openProcess(wire.Mount{PID: os.Getpid(), Cgroup: cgroup})
		if err == nil {
			p.close()
		}
		if (err == nil) != want && cgroup != "/" { // below the root, each path begins with a slash more
			t.Errorf("cgroup %q: got %v", cgroup, err)
		}
	}
}

// After the end of the process, nothing is read of a later process with its pid.
func TestProcessThatHasEndedIsNotReplaced(t *testing.T) {
	cmd := exec.Command("cat")
	stdin, err := cmd.StdinPipe()
	testkit.NoError(t, "pipe", err)
	testkit.NoError(t, "start", cmd.Start())
	p, err := openProcess(wire.Mount{PID: cmd.Process.Pid})
	testkit.NoError(t, "open", err)
	defer p.close()
	f, err := p.open("mountinfo")
	testkit.NoError(t, "open mountinfo", err)
	f.Close()
	testkit.NoError(t, "close", stdin.Close())
	testkit.NoError(t, "wait", cmd.Wait())
	if f, err := p.open("mountinfo"); err == nil {
		f.Close()
		t.Error("the process has ended, and its mounts can be read")
	}
}
