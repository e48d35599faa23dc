package netns

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"
)

const (
	// startLimit bounds one start: Podman takes 0.1 s, but 2 s if it has to create
	// its user namespace, and more on a loaded machine.
	startLimit = 20 * time.Second
	// If a start fails or a helper ends before it served a request, the next start waits
	// firstBackoff, doubled with each such end up to lastBackoff.
	firstBackoff = 50 * time.Millisecond
	lastBackoff  = 5 * time.Second
)

// helper returns the running helper, and waits for a start, until its ctx ends, if none is
// running or the running one is stale. It returns the error of a start that fails meanwhile.
func (c *Client) helper(ctx context.Context, stale *helper) (*helper, error) {
	for waited := false; ; waited = true {
		c.mu.Lock()
		h, err, changed := c.current, c.startErr, c.changed
		c.mu.Unlock()
		switch {
		case c.ctx.Err() != nil:
			return nil, ErrClosed
		case h != nil && h != stale:
			return h, nil
		case h != nil:
			h.close()
		case waited && err != nil:
			return nil, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for the namespace helper: %w", ctx.Err())
		}
	}
}

// set publishes a started helper, the error of a start, or neither while the next one starts.
func (c *Client) set(h *helper, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.current, c.startErr = h, err
	close(c.changed)
	c.changed = make(chan struct{})
}

// supervise starts a helper and serves it, again and again, until Close.
func (c *Client) supervise() {
	defer close(c.done)
	for backoff := firstBackoff; c.ctx.Err() == nil; {
		h, err := c.start()
		c.set(h, err)
		if err == nil {
			c.cfg.Log.Info("namespace helper started", "pid", h.cmd.Process.Pid)
			stop := context.AfterFunc(c.ctx, h.close)
			err = h.run()
			stop()
			c.set(nil, nil)
			if h.served.Load() {
				backoff = 0
			}
		}
		if c.ctx.Err() == nil {
			c.cfg.Log.Error("namespace helper failed", "error", err, "retry_in", backoff)
		}
		select {
		case <-time.After(backoff):
		case <-c.ctx.Done():
		}
		backoff = min(max(2*backoff, firstBackoff), lastBackoff)
	}
	c.set(nil, nil)
}

// start finds Podman's user namespace and starts a helper in it, as a child of the node.
// No podman process remains.
func (c *Client) start() (*helper, error) {
	ctx, cancel := context.WithTimeout(c.ctx, startLimit)
	defer cancel()
	userNS, err := UserNamespace(ctx, c.cfg.Helper)
	if err != nil {
		return nil, err
	}
	defer userNS.Close()
	h, extra, err := launch(ctx, []string{
		"nsenter", "--user=/proc/self/fd/3", "--preserve-credentials", "--", c.cfg.Helper, "serve",
	}, userNS)
	if err != nil {
		return nil, err
	}
	closeFD(extra)
	return h, nil
}

// UserNamespace returns Podman's user namespace, from a probe process that Podman starts in it:
// doze-netns, whose path is helper. Podman creates the namespace if necessary; its pause process
// keeps it open. The caller closes the file.
func UserNamespace(ctx context.Context, helper string) (*os.File, error) {
	probe, fd, err := launch(ctx, []string{"podman", "unshare", "--", helper, "probe"})
	if err != nil {
		return nil, fmt.Errorf("find Podman's user namespace: %w", err)
	}
	_ = probe.reap() // its exit code does not matter: it has sent the namespace or none
	if fd < 0 {
		return nil, errors.New("find Podman's user namespace: the probe sent none")
	}
	return os.NewFile(uintptr(fd), "podman's user namespace"), nil
}
