// Package bucket implements sandbox.Buckets: it mounts buckets of S3-compatible object stores as folders of sandboxes.
//
// A mount is a FUSE file system. The bucket helper (command doze-bucket) creates it in Podman's user namespace, and
// attaches it in the mount namespace of the sandbox. The helper has the credentials, the sandbox does not. It
// starts with the first mount, and ends with the node. Package bucketfs is the file system.
package bucket

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/rpc"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/doze-run/doze/runtime/bucket/wire"
	"github.com/doze-run/doze/runtime/netns"
	"github.com/doze-run/doze/runtime/podman"
	"github.com/doze-run/doze/runtime/sandbox"
)

const (
	// startLimit bounds the start of the helper, which takes 20 ms, and 2 s if Podman has to create its user namespace.
	startLimit = 20 * time.Second
	// stopLimit is how long the helper may take to exit before it is killed.
	stopLimit = time.Second
	// startInterval is the minimum time from the start of a helper that ended to the next start, so that a helper that
	// fails is not started all the time.
	startInterval = time.Second
	// defaultScratch is the default of Config.ScratchLimit.
	defaultScratch = 10 << 30
)

// Bucket is a bucket that sandboxes may mount.
type Bucket struct {
	// Endpoint is the URL of the object store. Region may be empty.
	Endpoint, Region string
	Bucket           string
	Prefix           string // empty, or ends in a slash
	AccessKey        string
	SecretKey        string
	ReadOnly         bool // all mounts are read-only
}

// Config of a Client.
type Config struct {
	// Buckets are the buckets by the names that clients of the API use.
	Buckets map[string]Bucket
	// Helper and NetnsHelper are the paths of doze-bucket and doze-netns.
	Helper, NetnsHelper string
	// Cgroup is the parent of the sandboxes' cgroups, as /proc/PID/cgroup names it. Empty: the processes of sandboxes
	// are not checked.
	Cgroup string
	// Scratch is a folder of the helper for files that programs write, until they are uploaded.
	Scratch string
	// ScratchLimit bounds the size of these files in bytes. 0: 10 GiB.
	ScratchLimit int64
	Log          *slog.Logger
}

// Client mounts buckets. sandbox.Buckets documents its methods. Create one with New.
type Client struct {
	cfg Config

	starting   sync.Mutex // held while a helper starts
	mu         sync.Mutex
	current    *netns.Service // the helper
	generation int64          // how many helpers have ended
	notBefore  time.Time      // the next helper does not start earlier
	closed     bool
	lost       chan struct{}   // of one value: a second loss is the same
	ctx        context.Context // ends with Close
	end        context.CancelFunc
	watching   sync.WaitGroup
}

// New returns a Client, which starts its helper with the first request. The caller closes it.
func New(cfg Config) *Client {
	cfg.ScratchLimit = cmp.Or(cfg.ScratchLimit, defaultScratch)
	c := &Client{cfg: cfg, lost: make(chan struct{}, 1)}
	c.ctx, c.end = context.WithCancel(context.Background())
	return c
}

// Close ends the helper with all mounts, and waits for its exit. Idempotent.
func (c *Client) Close() error {
	c.end()
	c.mu.Lock()
	h := c.current
	c.closed = true
	c.mu.Unlock()
	if h != nil {
		h.Close(stopLimit)
	}
	c.watching.Wait()
	return nil
}

// Names implements sandbox.Buckets.
func (c *Client) Names() []string { return slices.Sorted(maps.Keys(c.cfg.Buckets)) }

// Check implements sandbox.Buckets.
func (c *Client) Check(ctx context.Context, m sandbox.Mount) error {
	bucket, err := c.bucket(m)
	if err != nil {
		return err
	}
	return c.call(ctx, "Check", bucket)
}

// Mount implements sandbox.Buckets.
func (c *Client) Mount(ctx context.Context, id sandbox.ID, pid int, m sandbox.Mount) (int64, error) {
	bucket, err := c.bucket(m)
	if err != nil {
		return 0, err
	}
	h, generation, err := c.helper(ctx)
	if err != nil {
		return 0, err
	}
	return generation, call(ctx, h, "Mount", wire.MountRequest{Mount: c.mount(id, pid, m.Path), Bucket: bucket})
}

// Unmount implements sandbox.Buckets.
func (c *Client) Unmount(ctx context.Context, id sandbox.ID, pid int, path string) error {
	return c.call(ctx, "Unmount", c.mount(id, pid, path))
}

// Generation implements sandbox.Buckets.
func (c *Client) Generation() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.generation
}

// Lost implements sandbox.Buckets.
func (c *Client) Lost() <-chan struct{} { return c.lost }

// Forget implements sandbox.Buckets. It does not wait. The kernel ends the mounts with the sandbox's mount namespace;
// this ends them also if a process cannot end because it waits for a file.
func (c *Client) Forget(id sandbox.ID, pid int) {
	c.mu.Lock()
	h := c.current
	c.mu.Unlock()
	if h != nil {
		h.Go(wire.Service+".Forget", c.mount(id, pid, ""), &wire.Reply{}, make(chan *rpc.Call, 1))
	}
}

func (c *Client) mount(id sandbox.ID, pid int, path string) wire.Mount {
	m := wire.Mount{Sandbox: string(id), PID: pid, Path: path}
	if c.cfg.Cgroup != "" {
		m.Cgroup = c.cfg.Cgroup + "/" + m.Sandbox
	}
	return m
}

// bucket returns the folder of the bucket of a mount.
func (c *Client) bucket(m sandbox.Mount) (wire.Bucket, error) {
	b, ok := c.cfg.Buckets[m.Bucket]
	if !ok {
		return wire.Bucket{}, fmt.Errorf("bucket %q: %w", m.Bucket, sandbox.ErrBucketNotFound)
	}
	prefix := b.Prefix + m.Prefix
	if prefix != "" && !strings.HasSuffix(prefix, "/") {
		prefix += "/"
	}
	return wire.Bucket{
		Endpoint: b.Endpoint, Region: b.Region, Bucket: b.Bucket, Prefix: prefix, AccessKey: b.AccessKey, SecretKey: b.SecretKey,
		ReadOnly: b.ReadOnly || m.ReadOnly,
	}, nil
}

// call calls a method of the helper, and starts one if necessary.
func (c *Client) call(ctx context.Context, method string, request any) error {
	h, _, err := c.helper(ctx)
	if err != nil {
		return err
	}
	return call(ctx, h, method, request)
}

func call(ctx context.Context, h *netns.Service, method string, request any) error {
	var reply wire.Reply
	if err := h.CallWithin(ctx, wire.Service+"."+method, request, &reply); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return fmt.Errorf("%w: the bucket helper ended: %w", sandbox.ErrEngineDown, err)
	}
	return failure(reply)
}

// failure converts a failure that the helper reported.
func failure(r wire.Reply) error {
	kinds := map[wire.Code]sandbox.ObjectStoreFailure{
		wire.Unreachable: sandbox.ObjectStoreUnreachable, wire.Denied: sandbox.ObjectStoreDenied, wire.NoBucket: sandbox.ObjectStoreNoBucket,
	}
	if r.Error == "" {
		return nil
	}
	err := errors.New(r.Error)
	if kind, ok := kinds[r.Code]; ok {
		return &sandbox.ObjectStoreError{Failure: kind, Err: err}
	}
	switch r.Code {
	case wire.NoFolder:
		return fmt.Errorf("%w: %w", sandbox.ErrNoMountPoint, err)
	case wire.NoFUSE:
		return fmt.Errorf("%w: %w", sandbox.ErrNoFUSE, err)
	}
	return err
}

// helper returns the running helper, and starts one if necessary. The generation is the one of its mounts.
func (c *Client) helper(ctx context.Context) (h *netns.Service, generation int64, err error) {
	c.starting.Lock()
	defer c.starting.Unlock()
	c.mu.Lock()
	h, generation = c.current, c.generation
	closed, pause := c.closed, time.Until(c.notBefore)
	c.mu.Unlock()
	if closed {
		return nil, 0, sandbox.ErrClosed
	}
	if h != nil {
		return h, generation, nil
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	defer context.AfterFunc(c.ctx, cancel)()
	select {
	case <-time.After(pause):
	case <-ctx.Done():
		return nil, 0, ctx.Err()
	}
	started := time.Now()
	h, err = c.start(ctx)
	if err != nil {
		return nil, 0, fmt.Errorf("%w: start the bucket helper: %w", sandbox.ErrEngineDown, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		h.Close(stopLimit)
		return nil, 0, sandbox.ErrClosed
	}
	c.current, c.notBefore = h, started.Add(startInterval)
	c.watching.Go(func() { c.superviseHelper(h) }) // ends with the helper
	return h, generation, nil
}

func (c *Client) start(ctx context.Context) (*netns.Service, error) {
	// The kernel creates mounts only for processes whose mount namespace belongs to their user namespace.
	h, err := netns.StartService(ctx, c.cfg.NetnsHelper, "bucket helper", c.cfg.Log, "unshare", "--mount", "--", c.cfg.Helper, "serve")
	if err != nil {
		return nil, err
	}
	root := uint32(podman.MappedIDs.HostID)
	config := wire.Config{Scratch: c.cfg.Scratch, ScratchLimit: c.cfg.ScratchLimit, UID: root, GID: root}
	if err := call(ctx, h, "Configure", config); err != nil {
		h.Close(0)
		return nil, err
	}
	return h, nil
}

// superviseHelper waits until the helper has ended, and reports the loss of its mounts. The next call starts another one.
func (c *Client) superviseHelper(h *netns.Service) {
	<-h.Done()
	h.Close(0)
	c.mu.Lock()
	c.current = nil
	c.generation++ // now: no sandbox may wake without its buckets
	c.mu.Unlock()
	if c.ctx.Err() != nil {
		return
	}
	c.cfg.Log.Error("bucket helper ended unexpectedly, mounting all buckets again")
	select {
	case c.lost <- struct{}{}:
	default: // a loss that was not received yet
	}
}

var (
	_ sandbox.Buckets = (*Client)(nil)
	_ io.Closer       = (*Client)(nil)
)
