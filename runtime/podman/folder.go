package podman

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
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
	var errOut prefix
	cmd.Stderr = &errOut
	err := cmd.Run()
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return fmt.Errorf("remove %s: %w: %s", path, err, strings.TrimSpace(string(errOut)))
	}
	return nil
}

// prefix stores the first 1,000 bytes that are written: rm may print a line for each file.
type prefix []byte

func (w *prefix) Write(p []byte) (int, error) {
	const maxBytes = 1000
	*w = append(*w, p[:min(len(p), maxBytes-len(*w))]...)
	return len(p), nil
}
