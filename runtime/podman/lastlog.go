package podman

import (
	"context"
	"fmt"
	"strings"

	"github.com/containers/podman/v5/pkg/bindings/containers"

	"github.com/doze-run/doze/runtime/sandbox"
)

// LastLog returns the last line that the container's first process wrote, truncated to 1,000
// bytes.
func (e *Engine) LastLog(ctx context.Context, id sandbox.ID) (string, error) {
	handle, err := e.handle(ctx, id)
	if err != nil {
		return "", err
	}
	last, err := request(ctx, e, func(ctx context.Context) (string, error) { return lastFrame(ctx, handle) })
	if err != nil {
		return "", fmt.Errorf("read the log of %s: %w", id, e.known(id, err))
	}
	return strings.TrimRight(last, "\r\n"), nil
}

// lastFrame requests the last line, which Podman returns in parts if it is long, and truncates it
// to maxLine bytes. A container without a log has never started.
func lastFrame(ctx context.Context, handle string) (string, error) {
	frames := make(chan string)
	read := make(chan string)
	go func() { // ends when frames is closed
		var line strings.Builder
		for frame := range frames {
			line.WriteString(frame[:min(len(frame), maxLine-line.Len())])
		}
		read <- line.String()
	}()
	options := new(containers.LogOptions).WithStdout(true).WithStderr(true).WithTail("1")
	err := containers.Logs(ctx, handle, options, frames, frames)
	close(frames)
	return <-read, err
}
