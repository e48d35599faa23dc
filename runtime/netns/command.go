package netns

import (
	"context"
	"os"
	"os/exec"
	"strings"
	"syscall"
)

// Command returns a command that runs a program in the user namespace until ctx ends. userNS must stay open until the
// command has started.
func Command(ctx context.Context, userNS *os.File, program string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{"--user=/proc/self/fd/3", "--preserve-credentials", "--", program}, args...)...)
	cmd.ExtraFiles = []*os.File{userNS}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // only the node handles signals of its terminal
	return cmd
}

// ErrorOutput receives the standard error of a command, and stores the beginning. The zero value is ready for use.
type ErrorOutput struct{ text strings.Builder }

// maxErrorOutput exceeds the length of all messages of helpers, except those with a very long path.
const maxErrorOutput = 2000

func (o *ErrorOutput) Write(p []byte) (int, error) {
	o.text.Write(p[:min(len(p), maxErrorOutput-o.text.Len())])
	return len(p), nil
}

func (o *ErrorOutput) String() string { return strings.TrimSpace(o.text.String()) }
