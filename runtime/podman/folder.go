package podman

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// RemoveFolder removes a folder of the host, by rm in the user namespace of
// Podman, whose root may remove what belongs to the sandboxes' users. It needs
// two descriptors, however deep the folder is.
func (e *Engine) RemoveFolder(ctx context.Context, path string) error {
	cmd := exec.CommandContext(ctx, e.command, "unshare", "rm", "-rf", "--", path)
	cmd.Dir = "/" // wherever the node is, this user namespace's root can go there
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) } // rm too
	cmd.WaitDelay = time.Second
	var words firstWords
	cmd.Stderr = &words
	err := cmd.Run()
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return fmt.Errorf("removing %s: %w: %s", path, err, strings.TrimSpace(string(words)))
	}
	return nil
}

// firstWords keeps the begin of what is written: rm may have a line for each file.
type firstWords []byte

func (w *firstWords) Write(p []byte) (int, error) {
	const most = 1000
	*w = append(*w, p[:min(len(p), most-len(*w))]...)
	return len(p), nil
}
