package disk

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"

	"github.com/doze-run/doze/runtime/disk/wire"
	"github.com/doze-run/doze/runtime/netns"
	"github.com/doze-run/doze/runtime/sandbox"
)

// exportBuffer is the buffer size for reading the output of the process.
const exportBuffer = 64 << 10

// Export implements sandbox.Disks. Each export runs in a separate process, which changes nothing and
// can therefore be killed at any time.
func (c *Client) Export(ctx context.Context, snapshot sandbox.SnapshotID, name string) (io.ReadCloser, error) {
	userNS, err := netns.UserNamespace(ctx, c.cfg.NetnsHelper)
	if err != nil {
		return nil, fmt.Errorf("%w: export snapshot %s: %w", sandbox.ErrEngineDown, snapshot, err)
	}
	defer userNS.Close()
	request, err := json.Marshal(wire.Export{Config: c.config(), Snapshot: string(snapshot), Name: name})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	e := &export{ctx: ctx, cancel: cancel, snapshot: snapshot, cmd: c.command(ctx, userNS, "export")}
	e.cmd.Stdin = bytes.NewReader(request)
	e.cmd.Stderr = &e.message
	out, err := e.cmd.StdoutPipe()
	if err == nil {
		err = e.cmd.Start()
	}
	if err != nil {
		cancel()
		return nil, fmt.Errorf("export snapshot %s: %w", snapshot, err)
	}
	e.out = bufio.NewReaderSize(out, exportBuffer)
	if _, err := e.out.Peek(1); err != nil {
		return nil, e.end(err)
	}
	return e, nil
}

// export is a running export. Its methods must not be called concurrently.
type export struct {
	ctx      context.Context
	cancel   context.CancelFunc
	snapshot sandbox.SnapshotID
	cmd      *exec.Cmd
	out      *bufio.Reader
	message  netns.ErrorOutput
	err      error // set when the process has ended
}

func (e *export) Read(p []byte) (int, error) {
	if e.err != nil {
		return 0, e.err
	}
	n, err := e.out.Read(p)
	if err != nil {
		err = e.end(err)
	}
	return n, err
}

// Close kills the process if it is running, and waits for it. Close is idempotent.
func (e *export) Close() error {
	e.cancel()
	if e.err == nil {
		_ = e.cmd.Wait() // it was killed
		e.err = io.ErrClosedPipe
	}
	return nil
}

// end waits for the process, whose output has ended with err, and returns the reason.
func (e *export) end(err error) error {
	defer e.cancel()
	failed := e.cmd.Wait()
	exit, _ := errors.AsType[*exec.ExitError](failed)
	switch {
	case failed == nil && err == io.EOF:
		e.err = io.EOF
	case e.ctx.Err() != nil:
		e.err = e.ctx.Err()
	case exit != nil && exit.ExitCode() == wire.Unexportable:
		e.err = fmt.Errorf("snapshot %s: %w: %s", e.snapshot, sandbox.ErrUnexportable, &e.message)
	case exit != nil:
		e.err = fmt.Errorf("export snapshot %s: %w: %s", e.snapshot, failed, &e.message)
	default:
		e.err = fmt.Errorf("export snapshot %s: %w", e.snapshot, errors.Join(err, failed))
	}
	return e.err
}

var _ io.ReadCloser = (*export)(nil)
