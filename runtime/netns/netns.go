// Package netns reaches into the network namespaces of sandboxes.
//
// A Go process cannot enter a user namespace, and only within Podman's may one
// enter the network namespace of a rootless container. So a small process does,
// the namespace helper (command doze-netns): it makes a socket inside the
// sandbox and hands over its descriptor, and the node connects that socket and
// uses it like any other. Connections do not pass through the helper and
// outlive it. The sandbox's own network device comes the same way.
package netns

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/doze-run/doze/runtime/netns/wire"
	"github.com/doze-run/doze/runtime/sandbox"
)

// ErrClosed is returned after Close.
var ErrClosed = errors.New("the namespace helper was shut down")

// maxRequests bounds the requests that wait for the helper. It serves one in
// some 20 µs; who finds the queue full waits for a place, as long as his context
// allows. The socket must hold them all, for one that is full counts as that of
// a helper which hangs: Linux gives it 212,992 bytes (net.core.wmem_default), and
// counts some 770 for a request with a cgroup's name of up to 100 bytes, 1,280 with
// one of up to 400.
const maxRequests = 128

// Config of a Client.
type Config struct {
	// Helper is the path of doze-netns. Its folder must be open to the node's
	// user only as far as executing goes.
	Helper string
	// Podman is the command; default "podman", searched in PATH.
	Podman string
	// Cgroup is the parent of all sandboxes' cgroups as the kernel names it,
	// such as /doze/sandboxes. If it is set, the process of sandbox id has to
	// be in <Cgroup>/<id> or below: so a process number that was used again
	// never leads into another sandbox.
	Cgroup string
	Log    *slog.Logger
}

// Client dials into sandboxes. Make one with Open; it is safe for concurrent use.
type Client struct {
	cfg   Config
	slots chan struct{} // one for each request in flight

	mu       sync.Mutex
	current  *helper       // nil before the first start and after a crash
	starting chan struct{} // closed when the start under way ends; nil without one
	startErr error         // of the last start
	failures int           // starts in a row that did not lead to a served request
	notUntil time.Time     // no start before
	closed   bool
	end      context.CancelFunc // ends a start under way
	ctx      context.Context
	running  sync.WaitGroup // goroutines of starts and helpers
}

// Open returns a Client and begins to start its helper. Dials wait for that,
// and a start that fails is tried again when somebody dials.
func Open(cfg Config) (*Client, error) {
	if cfg.Helper == "" {
		return nil, errors.New("the path of the namespace helper is not set")
	}
	if cfg.Podman == "" {
		cfg.Podman = "podman"
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	c := &Client{cfg: cfg, slots: make(chan struct{}, maxRequests)}
	c.ctx, c.end = context.WithCancel(context.Background())
	c.mu.Lock()
	c.startLocked()
	c.mu.Unlock()
	return c, nil
}

// Close ends the helper and waits until it is gone. Connections live on.
// Idempotent.
func (c *Client) Close() error {
	c.mu.Lock()
	c.closed = true
	c.end()
	if c.current != nil {
		c.current.close()
	}
	c.mu.Unlock()
	c.running.Wait()
	return nil
}

// Dial connects to a TCP port of the sandbox whose first process has this pid:
// on 127.0.0.1, and if nothing listens there on whichever of the sandbox's
// addresses a server listens, such as ::1, 127.0.0.2 or its network device's.
// The connection has TCP_NODELAY.
//
// Errors wrap syscall.ECONNREFUSED when nothing listens on the port, and
// syscall.ESRCH when the process is gone.
func (c *Client) Dial(ctx context.Context, id sandbox.ID, pid int, port uint16) (net.Conn, error) {
	conn, err := c.dialAddress(ctx, id, pid, netip.AddrPortFrom(loopback4, port))
	if errors.Is(err, syscall.ECONNREFUSED) {
		for _, addr := range listeners(pid, port) {
			other, otherErr := c.dialAddress(ctx, id, pid, netip.AddrPortFrom(addr, port))
			if otherErr == nil {
				return other, nil
			}
			// It closed meanwhile, or the address is of no use inside either:
			// that is a refusal too, for which the first error stands.
			if ctx.Err() != nil || errors.Is(otherErr, syscall.ESRCH) {
				err = otherErr
				break
			}
		}
	}
	if err != nil {
		return nil, fmt.Errorf("dialling port %d of %s: %w", port, id, err)
	}
	return conn, nil
}

func (c *Client) dialAddress(ctx context.Context, id sandbox.ID, pid int, to netip.AddrPort) (net.Conn, error) {
	family := wire.IPv4
	if to.Addr().Is6() {
		family = wire.IPv6
	}
	fd, err := c.inside(ctx, id, pid, wire.Request{Op: wire.OpSocket, Family: family})
	if err != nil {
		return nil, err
	}
	return connect(ctx, fd, to)
}

// inside asks for a descriptor that is made in the sandbox whose first process has
// this pid.
func (c *Client) inside(ctx context.Context, id sandbox.ID, pid int, r wire.Request) (fd int, err error) {
	if pid <= 0 {
		return -1, fmt.Errorf("it has no process: %w", syscall.ESRCH)
	}
	r.PID, r.ID = uint32(pid), string(id)
	if c.cfg.Cgroup != "" {
		r.Cgroup = c.cfg.Cgroup + "/" + string(id)
	}
	return c.request(ctx, r)
}

// Forget drops what the helper keeps for the sandbox.
func (c *Client) Forget(id sandbox.ID) {
	c.mu.Lock()
	h := c.current
	c.mu.Unlock()
	if h == nil {
		return // a new helper knows nothing
	}
	// Only what the helper keeps open would be lost with this, until the
	// sandbox is the one that was used longest ago.
	h.post(wire.Request{Op: wire.OpForget, ID: string(id)})
}

// request asks the helper and returns the descriptor that it answers with. If
// the helper goes away meanwhile, or is in a user namespace that Podman has
// left, it asks once more.
func (c *Client) request(ctx context.Context, r wire.Request) (int, error) {
	select {
	case c.slots <- struct{}{}:
		defer func() { <-c.slots }()
	case <-ctx.Done():
		return -1, ctx.Err()
	}
	var stale *helper
	for attempt := 0; ; attempt++ {
		h, err := c.helper(ctx, stale)
		if err != nil {
			return -1, err
		}
		fd, err := h.ask(ctx, r)
		if err == nil {
			c.served()
			return fd, nil
		}
		var answer *AnswerError
		foreign := errors.As(err, &answer) && answer.Status == wire.StatusForeign
		if attempt > 0 || !(foreign || errors.Is(err, errGone)) {
			return -1, err
		}
		stale = h
	}
}

// AnswerError is the helper's word that it did not do what was asked.
type AnswerError struct {
	Status wire.Status
	Errno  syscall.Errno // 0 if it was no system call that failed
	Text   string
}

func (e *AnswerError) Error() string { return "namespace helper: " + e.Text }

func (e *AnswerError) Unwrap() error {
	if e.Errno == 0 {
		return nil
	}
	return e.Errno
}

var _ sandbox.Network = (*Client)(nil)
