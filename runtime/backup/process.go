package backup

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/doze-run/doze/runtime/backup/wire"
	"github.com/doze-run/doze/runtime/netns"
	"github.com/doze-run/doze/runtime/sandbox"
)

// stopLimit is how long the helper may take to exit after its operation is canceled, before it is killed.
const stopLimit = 5 * time.Second

// run runs the helper with a request, and returns its result. progress may be nil. When ctx ends, run stops the
// helper, and returns when the helper has exited.
func (c *Client) run(ctx context.Context, limit *semaphore.Weighted, request wire.Request, progress func(wire.Progress)) (wire.Result, error) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return wire.Result{}, sandbox.ErrClosed
	}
	c.running.Add(1)
	c.mu.Unlock()
	defer c.running.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(c.ctx, cancel)()
	if err := limit.Acquire(ctx, 1); err != nil {
		return wire.Result{}, err
	}
	defer limit.Release(1)
	if err := c.complete(&request); err != nil {
		return wire.Result{}, err
	}
	text, err := json.Marshal(request)
	if err != nil {
		return wire.Result{}, err
	}
	userNS, err := netns.UserNamespace(ctx, c.cfg.NetnsHelper)
	if err != nil {
		return wire.Result{}, fmt.Errorf("%w: start the backup helper: %w", sandbox.ErrEngineDown, err)
	}
	defer userNS.Close()
	p := process{cmd: netns.Command(context.WithoutCancel(ctx), userNS, c.cfg.Helper, "run")} // it ends with its input
	p.cmd.Stderr = &p.message
	return p.run(ctx, text, progress)
}

// process is a running helper.
type process struct {
	cmd     *exec.Cmd
	message netns.ErrorOutput
}

func (p *process) run(ctx context.Context, request []byte, progress func(wire.Progress)) (wire.Result, error) {
	in, err := p.cmd.StdinPipe()
	if err != nil {
		return wire.Result{}, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return wire.Result{}, err
	}
	if err := p.cmd.Start(); err != nil {
		return wire.Result{}, fmt.Errorf("start the backup helper: %w", err)
	}
	// The helper cancels its operation when its standard input is closed, which also happens when the node dies.
	stop := context.AfterFunc(ctx, func() {
		in.Close()
		time.AfterFunc(stopLimit, func() { _ = p.cmd.Process.Kill() })
	})
	defer stop()
	_, werr := in.Write(request)
	result, err := read(out, progress)
	in.Close()
	_, _ = io.Copy(io.Discard, out) // until the helper exits
	if failed := p.cmd.Wait(); err == nil && result == nil {
		err = fmt.Errorf("the backup helper ended without a result: %v: %s", errors.Join(failed, werr), &p.message)
	}
	if err != nil {
		if ctx.Err() != nil {
			return wire.Result{}, ctx.Err()
		}
		return wire.Result{}, err
	}
	return *result, nil
}

// read reads messages until the result, which is nil if there is none.
func read(out io.Reader, progress func(wire.Progress)) (*wire.Result, error) {
	var last wire.Progress
	for messages := json.NewDecoder(out); ; {
		var m wire.Message
		if err := messages.Decode(&m); err != nil {
			return nil, nil // the caller reports the exit status and the error output
		}
		switch {
		case m.Error != nil:
			return nil, failure(m.Error)
		case m.Result != nil:
			if progress != nil {
				last.Done = last.Total
				progress(last)
			}
			return m.Result, nil
		case m.Progress != nil && progress != nil:
			last = *m.Progress
			progress(last)
		}
	}
}

// failure converts a failure that the helper reported.
func failure(e *wire.Error) error {
	kinds := map[wire.Code]sandbox.ObjectStoreFailure{
		wire.Unreachable: sandbox.ObjectStoreUnreachable, wire.Denied: sandbox.ObjectStoreDenied, wire.NoBucket: sandbox.ObjectStoreNoBucket,
		wire.Password: sandbox.ObjectStorePassword, wire.Damaged: sandbox.ObjectStoreDamaged,
	}
	if kind, ok := kinds[e.Code]; ok {
		return &sandbox.ObjectStoreError{Failure: kind, Err: e}
	}
	switch e.Code {
	case wire.NotFound:
		return fmt.Errorf("%w: %w", sandbox.ErrBackupNotFound, e)
	case wire.NoPath:
		return &sandbox.InvalidError{Field: "paths", Reason: e.Message, Want: "name files and folders that exist in the sandbox"}
	case wire.Full:
		return fmt.Errorf("%w: %w", sandbox.ErrStoreFull, e)
	case wire.Unsupported:
		return fmt.Errorf("%w: %w", sandbox.ErrBackupUnsupported, e)
	}
	return e
}
