// Package netns opens connections and network devices in the network namespaces of
// sandboxes.
//
// Only a process in Podman's user namespace may enter the network namespace of a rootless
// container, and a Go process cannot enter a user namespace. Therefore a small process does,
// the namespace helper (command doze-netns): it creates a socket inside the sandbox and
// passes its descriptor to the node, which connects it and uses it like any other socket.
// Connections do not pass through the helper and outlive it. The sandbox's network device
// is passed in the same way.
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

	"golang.org/x/sync/semaphore"

	"github.com/doze-run/doze/runtime/netns/wire"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sockets"
)

// ErrClosed is returned after Close.
var ErrClosed = errors.New("the namespace helper was shut down")

// maxRequests bounds the requests in flight. The helper serves one in some 20 µs; callers
// beyond the bound wait for it until their context ends. The socket must hold all requests,
// because send treats a full socket as a helper that hangs. Its buffer on Linux has 212,992
// bytes (net.core.wmem_default). A request uses some 770 of them with a cgroup's name of up
// to 100 bytes, and 1,280 with one of up to 400.
const maxRequests = 128

var loopback4 = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// Config of a Client.
type Config struct {
	// Helper is the path of doze-netns. The node's user needs only execute permission
	// for its folder.
	Helper string
	// Cgroup is the parent of all sandboxes' cgroups as the kernel names it, such as
	// /doze/sandboxes. If it is set, the process of sandbox id must be in <Cgroup>/<id>
	// or below, so that a reused pid never reaches another sandbox.
	Cgroup string
	Log    *slog.Logger
}

// Client connects to sandboxes. Its methods may be called concurrently. Create one with
// Open.
type Client struct {
	cfg      Config
	inFlight *semaphore.Weighted // of maxRequests

	ctx  context.Context // ended by Close
	end  context.CancelFunc
	done chan struct{} // closed when supervise has ended

	mu       sync.Mutex
	current  *helper       // nil while none runs
	startErr error         // of the last start, until the next helper has ended
	changed  chan struct{} // closed when current or startErr changes
}

// Open returns a Client and begins to start its helper. Dials wait for the start. If it
// fails, it tries again. The caller closes the Client.
func Open(cfg Config) (*Client, error) {
	if cfg.Helper == "" {
		return nil, errors.New("the path of the namespace helper is not set")
	}
	c := &Client{cfg: cfg, inFlight: semaphore.NewWeighted(maxRequests), done: make(chan struct{}), changed: make(chan struct{})}
	c.ctx, c.end = context.WithCancel(context.Background())
	go c.supervise() // ends with Close
	return c, nil
}

// Close ends the helper and waits for its exit. Open connections and devices remain usable.
// Idempotent.
func (c *Client) Close() error {
	c.end()
	<-c.done
	return nil
}

// Dial connects to a TCP port of the sandbox whose first process has this pid: on
// 127.0.0.1, and if no server listens there, on any other address of the sandbox on which
// one does, such as ::1, 127.0.0.2 or the address of its network device. The connection has
// TCP_NODELAY, and outlives the Client.
//
// Errors wrap syscall.ECONNREFUSED if no server listens on the port, syscall.ESRCH if the
// process has ended, ErrClosed, and a wire.Response if the helper refused.
func (c *Client) Dial(ctx context.Context, id sandbox.ID, pid int, port uint16) (net.Conn, error) {
	conn, err := c.dialAddress(ctx, id, pid, netip.AddrPortFrom(loopback4, port))
	if errors.Is(err, syscall.ECONNREFUSED) {
		// It only reads, so a pid that was reused is harmless: the helper refuses a
		// connection to another sandbox.
		for _, addr := range sockets.Listeners(fmt.Sprintf("/proc/%d", pid), port) {
			other, otherErr := c.dialAddress(ctx, id, pid, netip.AddrPortFrom(addr, port))
			if otherErr == nil {
				return other, nil
			}
			// The listener closed meanwhile, or its address cannot be used inside
			// either: that is a refusal too, which the first error represents.
			if ctx.Err() != nil || errors.Is(otherErr, syscall.ESRCH) {
				err = otherErr
				break
			}
		}
	}
	if err != nil {
		return nil, fmt.Errorf("dial port %d of %s: %w", port, id, err)
	}
	return conn, nil
}

func (c *Client) dialAddress(ctx context.Context, id sandbox.ID, pid int, to netip.AddrPort) (net.Conn, error) {
	op := wire.OpSocket
	if to.Addr().Is6() {
		op = wire.OpSocket6
	}
	fd, err := c.request(ctx, id, pid, op)
	if err != nil {
		return nil, err
	}
	return connect(ctx, fd, to)
}

// Forget closes the namespaces that the helper has open for the sandbox.
func (c *Client) Forget(id sandbox.ID) {
	c.mu.Lock()
	h := c.current
	c.mu.Unlock()
	if h == nil {
		return // a new helper has none open
	}
	// If the request is lost, the helper closes them when the sandbox is the least
	// recently used one.
	h.post(wire.Request{Op: wire.OpForget, ID: string(id)})
}

// request sends a request about the sandbox whose first process has this pid, and returns the
// descriptor of the response, which the caller owns. If the helper ends meanwhile, or is in a
// user namespace that Podman no longer uses, it tries a second time with a new helper.
func (c *Client) request(ctx context.Context, id sandbox.ID, pid int, op wire.Op) (int, error) {
	if pid <= 0 {
		return -1, fmt.Errorf("it has no process: %w", syscall.ESRCH)
	}
	r := wire.Request{Op: op, PID: uint32(pid), ID: string(id)}
	if c.cfg.Cgroup != "" {
		r.Cgroup = c.cfg.Cgroup + "/" + string(id)
	}
	if err := c.inFlight.Acquire(ctx, 1); err != nil {
		return -1, err
	}
	defer c.inFlight.Release(1)
	var stale *helper
	for attempt := 0; ; attempt++ {
		h, err := c.helper(ctx, stale)
		if err != nil {
			return -1, err
		}
		fd, err := h.request(ctx, r)
		refused, _ := errors.AsType[wire.Response](err)
		if attempt > 0 || refused.Status != wire.StatusForeign && !errors.Is(err, errGone) {
			return fd, err
		}
		stale = h
	}
}

var _ sandbox.Network = (*Client)(nil)
