//go:build integration

package doctor

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// On a host that packaging/host/setup has prepared, entered by
// packaging/host/enter, a sandbox can run.
func TestAPreparedHostCanRunSandboxes(t *testing.T) {
	findings := Check(t.Context(), Config{NetnsHelper: filepath.Join(os.Getenv("DOZE_BIN"), "doze-netns")})
	for _, f := range findings {
		t.Logf("%+v", f)
		if !f.OK && f.Level == LevelError {
			t.Errorf("%s: %s; %s", f.Name, f.Detail, f.Remedy)
		}
	}
	if !CanRun(findings) {
		t.Error("it cannot run")
	}
}

// These two obstacles are the same on each host with a Podman of up to 5.8 and a kernel that supports checkpoints.
func TestTheKernelAndPodmanRefuseRootlessCheckpoints(t *testing.T) {
	kernel := "the kernel suspends their seccomp filters, as CRIU requires, only with CAP_SYS_ADMIN on the host"
	switch err := (Machine{}).SuspendSeccomp(); {
	case errors.Is(err, ErrUntraced):
		t.Skipf("this host denies tracing: %v", err)
	case errors.Is(err, syscall.EINVAL):
		kernel = "the kernel has no CONFIG_CHECKPOINT_RESTORE"
	}
	f := checkpoint(t.Context(), Config{Host: Machine{}})
	want := "a reboot ends the memory of sandboxes: " + kernel + "; podman refuses: checkpointing a container requires root"
	if !f.OK || f.Level != LevelInfo || !strings.HasPrefix(f.Detail, want) {
		t.Errorf("%+v; want %q", f, want)
	}
}
