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

// stopPrograms stops the programs of a sandbox, calls capture, and returns the record of the backup.
type stopPrograms func(ctx context.Context, capture func(context.Context) error) (json.RawMessage, error)

// run runs the helper with a request, and returns its result. progress may be nil. For a request with Running, run
// calls stop once. When ctx ends, run stops the helper, and returns when the helper has exited.
func (c *Client) run(ctx context.Context, limit *semaphore.Weighted, request wire.Request, progress func(wire.Progress), stop stopPrograms) (wire.Result, error) {
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
	userNS, err := netns.UserNamespace(ctx, c.cfg.NetnsHelper)
	if err != nil {
		return wire.Result{}, fmt.Errorf("%w: start the backup helper: %w", sandbox.ErrEngineDown, err)
	}
	defer userNS.Close()
	p := process{cmd: netns.Command(context.WithoutCancel(ctx), userNS, c.cfg.Helper, "run"), progress: progress, stop: stop} // it ends with its input
	p.cmd.Stderr = &p.message
	return p.run(ctx, request)
}

// process is a running helper.
type process struct {
	cmd      *exec.Cmd
	message  netns.ErrorOutput
	progress func(wire.Progress) // may be nil
	stop     stopPrograms

	in  *json.Encoder
	out *json.Decoder
	// last is the last progress.
	last wire.Progress
}

func (p *process) run(ctx context.Context, request wire.Request) (wire.Result, error) {
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
	p.in, p.out = json.NewEncoder(in), json.NewDecoder(out)
	werr := p.in.Encode(request)
	result, err := p.read(ctx)
	in.Close()
	_, _ = io.Copy(io.Discard, out) // until the helper exits
	failed := p.cmd.Wait()
	if errors.Is(err, errNoMessage) {
		ended := fmt.Errorf("the backup helper ended without a result: %v: %s", errors.Join(failed, werr), &p.message)
		if err == errNoMessage {
			err = ended
		} else { // the programs of the sandbox may not continue
			err = errors.Join(ended, err)
		}
	}
	if err != nil {
		if ctx.Err() != nil {
			return wire.Result{}, ctx.Err()
		}
		return wire.Result{}, err
	}
	return result, nil
}

// errNoMessage: the helper has exited, or has written something that is not a message.
var errNoMessage = errors.New("no message from the backup helper")

// next returns the next message that is not progress. It returns the failure of a message with an Error.
func (p *process) next() (wire.Message, error) {
	for {
		var m wire.Message
		if err := p.out.Decode(&m); err != nil {
			return m, errNoMessage
		}
		if m.Error != nil {
			return m, failure(m.Error)
		}
		if m.Progress == nil {
			return m, nil
		}
		p.last = *m.Progress
		p.passOn()
	}
}

func (p *process) passOn() {
	if p.progress != nil {
		p.progress(p.last)
	}
}

// read reads messages until the result.
func (p *process) read(ctx context.Context) (wire.Result, error) {
	m, err := p.next()
	if err == nil && m.Ready {
		if err = p.capture(ctx); err == nil {
			m, err = p.next()
		}
	}
	if err == nil && m.Result == nil {
		err = errNoMessage
	}
	if err != nil {
		return wire.Result{}, err
	}
	p.last.Done = p.last.Total
	p.passOn()
	return *m.Result, nil
}

// capture stops the programs of the sandbox while the helper captures the disk.
func (p *process) capture(ctx context.Context) error {
	record, err := p.stop(ctx, func(ctx context.Context) error {
		ended := context.AfterFunc(ctx, func() { _ = p.cmd.Process.Kill() }) // the programs must not wait for it
		defer ended()
		if err := p.in.Encode(wire.Order{}); err != nil {
			return errNoMessage
		}
		m, err := p.next()
		if err == nil && !m.Captured {
			err = errNoMessage
		}
		if err != nil && ctx.Err() != nil {
			err = ctx.Err()
		}
		return err
	})
	if err == nil && p.in.Encode(wire.Order{Record: record}) != nil {
		err = errNoMessage
	}
	return err
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
		return sandbox.MissingPath("paths", e.Message)
	case wire.Full:
		return fmt.Errorf("%w: %w", sandbox.ErrStoreFull, e)
	case wire.Limit:
		return fmt.Errorf("%w (%d)", sandbox.ErrTooManyBackups, sandbox.MaxBackups)
	case wire.NeedsSnapshot:
		return fmt.Errorf("%w: %w", sandbox.ErrNeedsSnapshot, e)
	case wire.Unsupported:
		return fmt.Errorf("%w: %w", sandbox.ErrBackupUnsupported, e)
	}
	return e
}
