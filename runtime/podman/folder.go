package podman

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"syscall"
	"time"
)

// RemoveFolder removes a folder of the host with rm in the user namespace of Podman, whose
// root may remove files of the sandboxes' users. It needs two descriptors, regardless of the
// folder's depth.
func (e *Engine) RemoveFolder(ctx context.Context, path string) error {
	cmd := exec.CommandContext(ctx, e.command, "unshare", "rm", "-rf", "--", path)
	cmd.Dir = "/" // the node's own folder may be inaccessible to this user namespace's root
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) } // rm as well
	cmd.WaitDelay = time.Second
	_, err := cmd.Output() // Output stores the first and last of the errors
	switch exit, ok := errors.AsType[*exec.ExitError](err); {
	case ctx.Err() != nil:
		return ctx.Err()
	case ok:
		return fmt.Errorf("remove %s: %w: %s", path, err, oneLine(string(exit.Stderr)))
	case err != nil:
		return fmt.Errorf("remove %s: %w", path, err)
	}
	return nil
}
