// Package helper is the disk helper, a process in Podman's user namespace. It makes snapshots of
// the disks of containers: layers and images of Podman's own storage (go.podman.io/storage), so
// that Podman creates containers from them as from any image. See package disk.
package helper

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/rpc"
	"net/rpc/jsonrpc"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"

	"go.podman.io/storage"
	"go.podman.io/storage/types"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/internal/durable"
	"github.com/doze-run/doze/runtime/disk/tree"
	"github.com/doze-run/doze/runtime/disk/wire"
)

// Serve serves requests on the socket that is the descriptor fd, until it is closed. The first
// request configures the helper.
func Serve(fd uintptr) error {
	file := os.NewFile(fd, "requests")
	conn, err := net.FileConn(file)
	if err != nil {
		return fmt.Errorf("use standard input, which must be a socket: %w", err)
	}
	file.Close()
	syscall.Umask(0)
	server := rpc.NewServer()
	if err := server.RegisterName(wire.Service, &Disks{copies: map[string]*copying{}, measurements: map[measurementKey]context.CancelFunc{}}); err != nil {
		return err
	}
	server.ServeCodec(jsonrpc.NewServerCodec(conn))
	return nil
}

// Disks is the service. Its methods have the contracts of the methods of sandbox.Disks.
type Disks struct {
	config wire.Config
	store  storage.Store
	// layers is the folder of layers, opened before the storage mounts it onto itself: files
	// cannot be moved from one mount to another.
	layers *os.File

	mu     sync.Mutex
	copies map[string]*copying // by snapshot
	// measurements under way
	measurements map[measurementKey]context.CancelFunc

	trash trash

	// durable are the layers below containers that are known to be durable.
	durable sync.Map
}

// copying is the copy of a disk under way.
type copying struct {
	base  base
	paths []string // empty: the whole disk
	ctx   context.Context
	end   context.CancelFunc
	tree  *tree.Copy
}

// Configure opens the storage. It must be the first call, and return before the next one.
func (d *Disks) Configure(config wire.Config, reply *wire.Reply) error {
	return d.respond(reply, func() error {
		if err := d.open(config); err != nil {
			return err
		}
		for _, dir := range []string{d.staging(""), d.discarded()} {
			if err := os.MkdirAll(dir, 0o700); err != nil {
				return err
			}
		}
		d.trash.emptyings.Go(d.emptyTrash) // of an earlier run
		return nil
	})
}

// open opens the storage.
func (d *Disks) open(config wire.Config) (err error) {
	if config.Driver != wire.Driver {
		return fmt.Errorf("podman stores containers with the driver %q; snapshots need %s", config.Driver, wire.Driver)
	}
	d.config = config
	if d.layers, err = os.Open(filepath.Join(config.GraphRoot, config.Driver)); err != nil {
		return err
	}
	d.store, err = storage.GetStore(storeOptions(config))
	if err != nil {
		return fmt.Errorf("open podman's storage: %w", err)
	}
	return nil
}

// storeOptions returns Podman's own options of the storage. With others, the lists may lack containers that exist.
func storeOptions(config wire.Config) types.StoreOptions {
	return types.StoreOptions{
		GraphRoot: config.GraphRoot, RunRoot: config.RunRoot, GraphDriverName: config.Driver, GraphDriverOptions: config.Options,
		TransientStore: config.Transient,
	}
}

// respond writes the failure of f, if any, to reply.
func (d *Disks) respond(reply *wire.Reply, f func() error) error {
	err := f()
	if err == nil {
		return nil
	}
	reply.Error = err.Error()
	switch {
	case errors.Is(err, storage.ErrContainerUnknown):
		reply.Code = wire.NoContainer
	case errors.Is(err, errInUse):
		reply.Code = wire.InUse
	case errors.Is(err, errNoImage):
		reply.Code = wire.NoImage
	case errors.Is(err, tree.ErrNotFolder):
		reply.Code = wire.NotFolder
	case errors.Is(err, tree.ErrTooDeep):
		reply.Code = wire.TooDeep
	case errors.As(err, new(*noPathError)):
		missing, _ := errors.AsType[*noPathError](err)
		reply.Code, reply.Path = wire.NoPath, missing.index
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		reply.Code = wire.Full
	}
	return nil
}

// staging returns the folder of a copy that is not a snapshot yet.
func (d *Disks) staging(snapshot string) string {
	return filepath.Join(d.config.Folder, "staging", snapshot)
}

// flat returns the folder of a flattened copy that is not a snapshot yet.
func (d *Disks) flat(snapshot string) string { return d.staging(snapshot) + ".flat" }

// files returns the folder with the files of a layer.
func (d *Disks) files(layer string) string { return filepath.Join(d.layerFolder(layer), "diff") }

// layerFolder returns the folder that the storage has for a layer.
func (d *Disks) layerFolder(layer string) string {
	return filepath.Join("/proc/self/fd", strconv.Itoa(int(d.layers.Fd())), layer)
}

// listFolder returns the folder with the storage's list of a kind: layers, images or containers.
func (d *Disks) listFolder(kind string) string {
	return filepath.Join(d.config.GraphRoot, d.config.Driver+"-"+kind)
}

// base is what the disk of a container is based on.
type base struct {
	image string
	layer *storage.Layer // with the container's changes
}

// disk returns the base of a container's disk.
func (d *Disks) disk(container string) (base, error) {
	c, err := d.store.Container(container)
	if err != nil {
		return base{}, err
	}
	layer, err := d.store.Layer(c.LayerID)
	return base{image: c.ImageID, layer: layer}, err
}

// Prefetch copies the disk of a container whose programs may run.
func (d *Disks) Prefetch(r wire.Request, reply *wire.Reply) error {
	return d.respond(reply, func() error {
		c, err := d.startCopy(r)
		if err != nil {
			return err
		}
		if err := d.checkPaths(c); err != nil { // before the programs stop
			return err
		}
		return c.tree.Prefetch(c.ctx)
	})
}

// startCopy begins a copy from nothing.
func (d *Disks) startCopy(r wire.Request) (*copying, error) {
	base, err := d.disk(r.Container)
	if err != nil {
		return nil, err
	}
	d.end(r.Snapshot)
	if err := d.discard(d.staging(r.Snapshot)); err != nil {
		return nil, err
	}
	c := &copying{base: base, paths: r.Paths, tree: tree.NewPartial(d.files(base.layer.ID), d.staging(r.Snapshot), pathsOf(r.Paths))}
	d.begin(r.Snapshot, c)
	return c, nil
}

// pathsOf returns paths as a tree, or nil without any.
func pathsOf(list []string) tree.Paths {
	if len(list) == 0 {
		return nil
	}
	return tree.NewPaths(list)
}

// begin registers a copy, which Cancel can end then.
func (d *Disks) begin(snapshot string, c *copying) {
	c.ctx, c.end = context.WithCancel(context.Background())
	d.mu.Lock()
	defer d.mu.Unlock()
	d.copies[snapshot] = c
}

// end ends and forgets the copy of a snapshot.
func (d *Disks) end(snapshot string) *copying {
	d.mu.Lock()
	defer d.mu.Unlock()
	c := d.copies[snapshot]
	delete(d.copies, snapshot)
	if c != nil {
		c.end()
	}
	return c
}

// Cancel ends the copy of a snapshot, or a measurement, whose calls then fail.
func (d *Disks) Cancel(r wire.Request, reply *wire.Reply) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if c := d.copies[r.Snapshot]; c != nil {
		c.end()
	}
	if end := d.measurements[measured(r)]; end != nil {
		end()
	}
	return nil
}

// Capture completes the copy of a container's disk, which does not change meanwhile.
func (d *Disks) Capture(r wire.Request, reply *wire.Reply) error {
	return d.respond(reply, func() error {
		d.mu.Lock()
		c := d.copies[r.Snapshot]
		d.mu.Unlock()
		if c == nil { // not prefetched, or by a helper that has ended
			var err error
			if c, err = d.startCopy(r); err != nil {
				return err
			}
		}
		usage, err := c.tree.Complete(c.ctx)
		reply.Usage = wire.Usage(usage)
		return err
	})
}

// Sync makes the creation or the removal of a container durable. It syncs only what the storage has written for the container:
// a sync of the file system would wait for the writes of all sandboxes.
func (d *Disks) Sync(r wire.Request, reply *wire.Reply) error {
	return d.respond(reply, func() error {
		base, err := d.disk(r.Container)
		switch {
		case errors.Is(err, storage.ErrContainerUnknown):
		case err != nil:
			return err
		default:
			if err := d.syncLayer(base.layer); err != nil {
				return err
			}
		}
		return d.syncLists()
	})
}

// syncLayer makes the layer of a new container durable.
func (d *Disks) syncLayer(layer *storage.Layer) error {
	if err := d.syncBelow(layer.Parent); err != nil {
		return err
	}
	folder := d.layerFolder(layer.ID)
	for _, path := range []string{filepath.Join(folder, "link"), filepath.Join(folder, "lower"), folder, d.layerFolder("l"), d.layerFolder("")} {
		if err := durable.Sync(path); err != nil {
			return err
		}
	}
	return nil
}

// syncLists makes the names of the storage's lists durable. The storage replaces the lists by renames, and syncs the
// files only.
func (d *Disks) syncLists() error {
	for _, kind := range []string{"layers", "images", "containers"} {
		if err := durable.Sync(d.listFolder(kind)); err != nil {
			return err
		}
	}
	return nil
}

// syncBelow makes the layer that containers are based on durable. For the first container of an image, the storage copies
// the image's files and does not sync them.
func (d *Disks) syncBelow(layer string) error {
	if _, done := d.durable.Load(layer); done || layer == "" {
		return nil
	}
	l, err := d.store.Layer(layer)
	if err != nil {
		return err
	}
	if !d.isSnapshot(l) { // they are durable
		if err := d.sync(); err != nil {
			return err
		}
	}
	d.durable.Store(layer, true)
	return nil
}

// sync writes all that was changed in the storage to the disk.
func (d *Disks) sync() error {
	if err := unix.Syncfs(int(d.layers.Fd())); err != nil {
		return fmt.Errorf("sync podman's storage: %w", err)
	}
	return nil
}
