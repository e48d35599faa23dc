// Package disk implements sandbox.Disks on Podman's storage.
//
// The files of a container belong to user ids that only Podman's user namespace has. Therefore
// a process in that namespace works on them, the disk helper (command doze-disk). It starts with
// the first request, and ends with the node.
package disk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/rpc"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/disk/wire"
	"github.com/doze-run/doze/runtime/netns"
	"github.com/doze-run/doze/runtime/podman"
	"github.com/doze-run/doze/runtime/sandbox"
)

const (
	// maxCopies bounds the copies of disks at the same time, which share one disk. Others wait.
	maxCopies = 4
	// startLimit bounds the start of the helper, which takes 20 ms, and 2 s if Podman has to
	// create its user namespace.
	startLimit = 20 * time.Second
	// cancelPause is the pause between two attempts to cancel a copy.
	cancelPause = 100 * time.Millisecond
)

// Config of a Client.
type Config struct {
	// Helper and NetnsHelper are the paths of doze-disk and doze-netns.
	Helper, NetnsHelper string
	// Storage describes Podman's storage.
	Storage podman.Storage
	// Folder is the helper's own, on the file system of the storage.
	Folder string
	// Run contains a folder for each sandbox that its programs can write to.
	Run string
	// Node is the id of the node.
	Node string
	Log  *slog.Logger
}

// Client makes snapshots. sandbox.Disks documents its methods. Create one with New.
type Client struct {
	cfg    Config
	copies *semaphore.Weighted // of maxCopies

	mu      sync.Mutex
	current *netns.Service // the helper
	closed  bool
}

// New returns a Client, which starts its helper with the first request. The caller closes it.
func New(cfg Config) *Client { return &Client{cfg: cfg, copies: semaphore.NewWeighted(maxCopies)} }

// Close ends the helper, also in the middle of requests, and waits for its exit. Idempotent.
func (c *Client) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	return c.stopLocked()
}

func (c *Client) stopLocked() error {
	if c.current == nil {
		return nil
	}
	c.current.Close(time.Second) // it copies
	c.current = nil
	return nil
}

// helped reports whether the helper supports the driver of Podman's storage: only overlay. With another driver, the node
// runs sandboxes, but takes no snapshots.
func (c *Client) helped() bool { return c.cfg.Storage.Driver == wire.Driver }

// Repair implements sandbox.Disks. It repairs only what the driver overlay stores.
func (c *Client) Repair(ctx context.Context) error {
	if !c.helped() {
		return nil
	}
	_, err := c.call(ctx, "Repair", "", "")
	return err
}

// Sync implements sandbox.Disks.
func (c *Client) Sync(ctx context.Context, id sandbox.ID) error {
	if !c.helped() {
		return c.syncStorage()
	}
	_, err := c.call(ctx, "Sync", id, "")
	return err
}

// syncStorage writes all that was changed in Podman's storage to the disk, whatever its driver.
func (c *Client) syncStorage() error {
	root, err := os.Open(c.cfg.Storage.GraphRoot)
	if err != nil {
		return fmt.Errorf("sync podman's storage: %w", err)
	}
	defer root.Close()
	err = unix.Syncfs(int(root.Fd()))
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		err = fmt.Errorf("%w: %w", sandbox.ErrStoreFull, err)
	}
	return fmt.Errorf("sync podman's storage: %w", err)
}

// Prefetch implements sandbox.Disks.
func (c *Client) Prefetch(ctx context.Context, id sandbox.ID, snapshot sandbox.SnapshotID, paths []string) error {
	if err := c.copies.Acquire(ctx, 1); err != nil {
		return err
	}
	defer c.copies.Release(1)
	_, err := c.callHelper(ctx, "Prefetch", id, wire.Request{Snapshot: string(snapshot), Paths: paths})
	return err
}

// Capture implements sandbox.Disks.
func (c *Client) Capture(ctx context.Context, id sandbox.ID, snapshot sandbox.SnapshotID, paths []string) (sandbox.DiskUsage, error) {
	reply, err := c.callHelper(ctx, "Capture", id, wire.Request{Snapshot: string(snapshot), Paths: paths})
	return sandbox.DiskUsage(reply.Usage), err
}

// Publish implements sandbox.Disks.
func (c *Client) Publish(ctx context.Context, id sandbox.ID, snapshot sandbox.SnapshotID, flatten bool) error {
	_, err := c.callHelper(ctx, "Publish", id, wire.Request{Snapshot: string(snapshot), Flatten: flatten})
	return err
}

// Move implements sandbox.Disks.
func (c *Client) Move(ctx context.Context, id sandbox.ID, snapshot sandbox.SnapshotID) error {
	_, err := c.call(ctx, "Move", id, snapshot)
	return err
}

// Stage implements sandbox.Disks.
func (c *Client) Stage(ctx context.Context, from, snapshot sandbox.SnapshotID) (sandbox.DiskUsage, error) {
	if err := c.copies.Acquire(ctx, 1); err != nil {
		return sandbox.DiskUsage{}, err
	}
	defer c.copies.Release(1)
	reply, err := c.callHelper(ctx, "Stage", "", wire.Request{Snapshot: string(snapshot), From: string(from)})
	return sandbox.DiskUsage(reply.Usage), err
}

// Overlay implements sandbox.Disks.
func (c *Client) Overlay(ctx context.Context, snapshot, below sandbox.SnapshotID, paths []string) error {
	_, err := c.callHelper(ctx, "Overlay", "", wire.Request{Snapshot: string(snapshot), Below: string(below), Paths: paths})
	return err
}

// Moved implements sandbox.Disks.
func (c *Client) Moved(ctx context.Context, snapshot sandbox.SnapshotID) (bool, error) {
	reply, err := c.call(ctx, "Moved", "", snapshot)
	return reply.Moved, err
}

// Discard implements sandbox.Disks.
func (c *Client) Discard(ctx context.Context, id sandbox.ID) error {
	_, err := c.call(ctx, "Discard", id, "")
	return err
}

// Delete implements sandbox.Disks.
func (c *Client) Delete(ctx context.Context, snapshot sandbox.SnapshotID) error {
	_, err := c.call(ctx, "Delete", "", snapshot)
	return err
}

// Measure implements sandbox.Disks.
func (c *Client) Measure(ctx context.Context, id sandbox.ID, snapshot sandbox.SnapshotID) (sandbox.DiskUsage, error) {
	reply, err := c.call(ctx, "Measure", id, snapshot)
	return sandbox.DiskUsage(reply.Usage), err
}

// Usage implements sandbox.Disks.
func (c *Client) Usage(ctx context.Context, id sandbox.ID, pid int, limit sandbox.DiskUsage) (sandbox.DiskUsage, error) {
	reply, err := c.callHelper(ctx, "Usage", id, wire.Request{RunFolder: string(id), PID: pid, Limit: wire.Usage(limit)})
	return sandbox.DiskUsage(reply.Usage), err
}

// Space implements sandbox.Disks. It needs no helper.
func (c *Client) Space() ([]sandbox.DiskSpace, error) {
	var spaces []sandbox.DiskSpace
	var have []unix.Fsid
	written := dirtied()
	for i, path := range []string{c.cfg.Storage.GraphRoot, c.cfg.Run} {
		var fs unix.Statfs_t
		if err := unix.Statfs(path, &fs); err != nil {
			return nil, fmt.Errorf("read the free space of %s: %w", path, err)
		}
		if slices.Contains(have, fs.Fsid) {
			continue
		}
		have = append(have, fs.Fsid)
		block := fs.Frsize
		spaces = append(spaces, sandbox.DiskSpace{
			Path:    path,
			Roots:   i == 0,
			Total:   sandbox.DiskUsage{Bytes: int64(fs.Blocks) * block, Entries: int64(fs.Files)},
			Used:    sandbox.DiskUsage{Bytes: int64(fs.Blocks-fs.Bfree) * block, Entries: int64(fs.Files - fs.Ffree)},
			Free:    sandbox.DiskUsage{Bytes: int64(fs.Bavail) * block, Entries: int64(fs.Ffree)},
			Written: written,
		})
	}
	return spaces, nil
}

// dirtied returns how many bytes of the page cache have been dirtied since boot (nr_dirtied of
// /proc/vmstat), or 0 if that is unknown. Direct I/O does not count.
func dirtied() int64 {
	text, err := os.ReadFile("/proc/vmstat")
	if err != nil {
		return 0
	}
	for line := range bytes.Lines(text) {
		if count, ok := bytes.CutPrefix(line, []byte("nr_dirtied ")); ok {
			pages, _ := strconv.ParseInt(string(bytes.TrimSpace(count)), 10, 64)
			return pages * int64(os.Getpagesize())
		}
	}
	return 0
}

// call is callHelper for a method that takes a container, a snapshot or both.
func (c *Client) call(ctx context.Context, method string, id sandbox.ID, snapshot sandbox.SnapshotID) (wire.Reply, error) {
	return c.callHelper(ctx, method, id, wire.Request{Snapshot: string(snapshot)})
}

// callHelper calls a method of the helper. When ctx ends, it cancels the copy or the measurement and
// returns when the helper has ended it.
func (c *Client) callHelper(ctx context.Context, method string, id sandbox.ID, request wire.Request) (wire.Reply, error) {
	if id != "" {
		request.Container = podman.ContainerName(id)
	}
	var reply wire.Reply
	if err := ctx.Err(); err != nil {
		return reply, err
	}
	err := c.send(ctx, method, request, &reply)
	if errors.Is(err, rpc.ErrShutdown) { // the helper had ended before
		err = c.send(ctx, method, request, &reply)
	}
	switch {
	case err != nil:
	case reply.Error == "":
		return reply, nil
	case ctx.Err() != nil:
		return reply, ctx.Err()
	case reply.Code == wire.NoPath:
		return reply, sandbox.MissingPath(fmt.Sprintf("paths[%d]", reply.Path), reply.Error)
	default:
		err = failure{reply}
	}
	if id == "" {
		return reply, fmt.Errorf("snapshot %s: %w", request.Snapshot, err)
	}
	return reply, fmt.Errorf("disk of %s: %w", id, err)
}

// send sends a request to the helper, and waits for the reply. It returns rpc.ErrShutdown (wrapped) if it has not sent the
// request, because the helper has ended.
func (c *Client) send(ctx context.Context, method string, request wire.Request, reply *wire.Reply) error {
	h, err := c.helper(ctx)
	if err != nil {
		return err
	}
	call := h.Go(wire.Service+"."+method, request, reply, make(chan *rpc.Call, 1))
	select {
	case <-call.Done:
	case <-ctx.Done():
		cancel(h, call, request)
	}
	if call.Error != nil {
		c.lost(h)
		return fmt.Errorf("%w: the disk helper ended: %w", sandbox.ErrEngineDown, call.Error)
	}
	return nil
}

// cancel cancels the copy of a call until the call has ended. The helper serves requests
// concurrently: it may find nothing to cancel yet.
func cancel(h *netns.Service, call *rpc.Call, request wire.Request) {
	again := time.NewTicker(cancelPause)
	defer again.Stop()
	for {
		h.Go(wire.Service+".Cancel", request, new(wire.Reply), make(chan *rpc.Call, 1))
		select {
		case <-call.Done:
			return
		case <-again.C:
		}
	}
}

// failure is a failure that the helper reported.
type failure struct{ wire.Reply }

func (f failure) Error() string { return f.Reply.Error }

// Is maps the helper's codes to the errors of package sandbox.
func (f failure) Is(target error) bool {
	switch f.Code {
	case wire.NoContainer:
		return target == sandbox.ErrNoContainer
	case wire.InUse:
		return target == sandbox.ErrSnapshotInUse
	case wire.Full:
		return target == sandbox.ErrStoreFull
	case wire.TooDeep:
		return target == sandbox.ErrTooDeep
	case wire.NoImage:
		return target == ErrNoImage
	case wire.NotFolder:
		return target == sandbox.ErrNotFolder
	}
	return false
}

// lost forgets a helper that has ended.
func (c *Client) lost(h *netns.Service) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.current == h {
		_ = c.stopLocked()
	}
}

// helper returns the running helper, and starts one if necessary.
func (c *Client) helper(ctx context.Context) (*netns.Service, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, sandbox.ErrClosed
	}
	if c.current != nil {
		return c.current, nil
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	h, err := c.start(ctx)
	if err != nil {
		return nil, fmt.Errorf("%w: start the disk helper: %w", sandbox.ErrEngineDown, err)
	}
	c.current = h
	return h, nil
}

// start starts a helper and configures it. Podman's storage makes mounts private, for which the helper needs a mount
// namespace of its own.
func (c *Client) start(ctx context.Context) (*netns.Service, error) {
	h, err := netns.StartService(ctx, c.cfg.NetnsHelper, "disk helper", c.cfg.Log, "unshare", "--mount", "--", c.cfg.Helper, "serve")
	if err != nil {
		return nil, err
	}
	var reply wire.Reply
	err = h.CallWithin(ctx, wire.Service+".Configure", c.config(), &reply)
	if err == nil && reply.Error != "" {
		err = errors.New(reply.Error)
	}
	if err != nil {
		h.Close(0)
		return nil, err
	}
	return h, nil
}

// command returns a command that runs the helper in Podman's user namespace until ctx ends.
func (c *Client) command(ctx context.Context, userNS *os.File, name string) *exec.Cmd {
	cmd := netns.Command(ctx, userNS, "unshare", "--mount", "--", c.cfg.Helper, name)
	cmd.WaitDelay = time.Second
	return cmd
}

// config returns the helper's configuration.
func (c *Client) config() wire.Config {
	storage := c.cfg.Storage
	return wire.Config{
		GraphRoot: storage.GraphRoot, RunRoot: storage.RunRoot, Driver: storage.Driver, Options: storage.Options,
		Transient: storage.Transient, Folder: c.cfg.Folder, Run: c.cfg.Run, Node: c.cfg.Node, IDs: wire.IDs{Container: podman.MappedIDs.ContainerID, Host: podman.MappedIDs.HostID, Size: podman.MappedIDs.Size},
	}
}

var (
	_ sandbox.Disks = (*Client)(nil)
	_ io.Closer     = (*Client)(nil)
)
