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
	// If a helper ends before it served a request, the next start waits firstBackoff,
	// doubled with each such end up to lastBackoff.
	firstBackoff = 50 * time.Millisecond
	lastBackoff  = 5 * time.Second
)

// helper returns the running helper. It starts one if none is running or the running one is
// stale. Concurrent callers share a start; each waits until its ctx ends.
func (c *Client) helper(ctx context.Context, stale *helper) (*helper, error) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil, ErrClosed
	}
	if h := c.current; h != nil && h != stale {
		c.mu.Unlock()
		return h, nil
	}
	if c.starting == nil {
		c.startLocked()
	}
	s := c.starting
	c.mu.Unlock()
	select {
	case <-s.done:
		return s.helper, s.err
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for the namespace helper: %w", ctx.Err())
	}
}

// start is an attempt to start a helper.
type start struct {
	done   chan struct{} // closed when it has ended
	helper *helper
	err    error
}

// startLocked begins to start a helper, which then replaces the current one. The caller
// holds c.mu. The goroutine ends with the start, or on Close.
func (c *Client) startLocked() {
	s := &start{done: make(chan struct{})}
	c.starting = s
	wait := time.Until(c.notUntil)
	c.running.Go(func() {
		h, err := c.start(wait)
		c.mu.Lock()
		defer c.mu.Unlock()
		defer close(s.done)
		c.starting, s.helper, s.err = nil, h, err
		c.failures++ // until it has served a request
		c.notUntil = time.Now().Add(min(firstBackoff<<min(c.failures-1, 10), lastBackoff))
		if err != nil {
			if !c.closed {
				c.cfg.Log.Error("failed to start the namespace helper", "error", err)
			}
			return
		}
		if c.closed {
			h.close()
		}
		if c.current != nil { // stale; its pending requests may still succeed
			c.current.close()
		}
		c.current = h
		c.cfg.Log.Info("namespace helper started", "pid", h.cmd.Process.Pid)
		c.running.Go(func() { c.watch(h) })
	})
}

// watch serves one helper until it ends.
func (c *Client) watch(h *helper) {
	err := h.run()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.current == h {
		c.current = nil
		if !c.closed {
			c.cfg.Log.Warn("namespace helper ended; the next connection starts another", "error", err)
		}
	}
}

// served records that the helper works, so that it is restarted immediately after a crash.
func (c *Client) served() {
	c.mu.Lock()
	c.failures = 0
	c.notUntil = time.Time{}
	c.mu.Unlock()
}

// start finds Podman's user namespace and starts a helper in it, as a child of the node.
// No podman process remains.
func (c *Client) start(wait time.Duration) (*helper, error) {
	select {
	case <-time.After(wait):
	case <-c.ctx.Done():
		return nil, ErrClosed
	}
	ctx, cancel := context.WithTimeout(c.ctx, startLimit)
	defer cancel()
	userNS, err := c.userNamespace(ctx)
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

// userNamespace returns Podman's user namespace, from a probe process that Podman starts in
// it. Podman creates the namespace if necessary; its pause process keeps it open. The caller
// closes the file.
func (c *Client) userNamespace(ctx context.Context) (*os.File, error) {
	probe, fd, err := launch(ctx, []string{c.cfg.Podman, "unshare", "--", c.cfg.Helper, "probe"})
	if err != nil {
		return nil, fmt.Errorf("find Podman's user namespace: %w", err)
	}
	probe.close()
	kill := time.AfterFunc(time.Second, func() { _ = probe.cmd.Process.Kill() })
	defer kill.Stop()
	_ = probe.cmd.Wait() // its exit code does not matter: it has sent the namespace or none
	if fd < 0 {
		return nil, errors.New("find Podman's user namespace: the probe sent none")
	}
	return os.NewFile(uintptr(fd), "podman's user namespace"), nil
}
