// Package helper is the bucket helper, a process in Podman's user namespace. It serves buckets as file systems that
// it mounts in sandboxes. See package bucket.
package helper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/rpc"
	"net/rpc/jsonrpc"
	"os"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/bucket/bucketfs"
	"github.com/doze-run/doze/runtime/bucket/wire"
	"github.com/doze-run/doze/runtime/objectstore"
)

// Serve serves requests on the socket that is the descriptor fd, until it is closed. The first request configures
// the helper. The mounts end with the process.
func Serve(fd uintptr) error {
	file := os.NewFile(fd, "requests")
	conn, err := net.FileConn(file)
	if err != nil {
		return fmt.Errorf("use standard input, which must be a socket: %w", err)
	}
	file.Close()
	server := rpc.NewServer()
	b := &Buckets{log: slog.New(slog.NewTextHandler(os.Stderr, nil))}
	if err := server.RegisterName(wire.Service, b); err != nil {
		return err
	}
	server.ServeCodec(jsonrpc.NewServerCodec(conn))
	return nil
}

// Buckets is the service.
type Buckets struct {
	log       *slog.Logger
	config    wire.Config
	sandboxes *sandboxes
}

// Configure must be the first call, and return before the next one.
func (b *Buckets) Configure(config wire.Config, reply *wire.Reply) error {
	b.config = config
	b.sandboxes = newSandboxes(bucketfs.NewResources(config.Scratch, config.ScratchLimit))
	return respond(reply, os.MkdirAll(config.Scratch, 0o700))
}

// Check reports whether a bucket can be used.
func (b *Buckets) Check(bucket wire.Bucket, reply *wire.Reply) error {
	return respond(reply, bucketfs.Check(context.Background(), b.options(bucket, nil)))
}

// Mount mounts a bucket in a sandbox. It does not contact the object store. The file system ends when the mount is
// detached and no file is open, or with the sandbox.
func (b *Buckets) Mount(request wire.MountRequest, reply *wire.Reply) error {
	p, err := openProcess(request.Mount)
	if err != nil {
		return respond(reply, err)
	}
	defer p.close()
	sb := b.sandboxes.join(request.Sandbox)
	defer b.sandboxes.drop(request.Sandbox)
	sb.mounting.Lock()
	defer sb.mounting.Unlock()
	return respond(reply, b.mount(p, sb, request))
}

func (b *Buckets) mount(p *process, sb *sandbox, request wire.MountRequest) error {
	dev, err := os.OpenFile(device, os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return &deviceError{err}
	}
	bucket := request.Bucket
	mount, err := create(dev, bucket.Bucket+"/"+bucket.Prefix, bucket.ReadOnly)
	if err != nil {
		dev.Close()
		return err
	}
	defer mount.Close()
	fs, err := b.serve(dev, mount, request)
	if err != nil {
		return err
	}
	if err := p.attach(mount, request.Path); err != nil {
		return errors.Join(err, fs.server.Close())
	}
	b.retire(p, sb.served[request.Path])
	sb.served[request.Path] = fs
	return nil
}

// serve serves the file system of a mount until its end. The caller holds the lock of the sandbox's mounts.
func (b *Buckets) serve(dev, mount *os.File, request wire.MountRequest) (*fileSystem, error) {
	id, path := request.Sandbox, request.Path
	sb := b.sandboxes.join(id)
	server, err := bucketfs.Serve(dev, b.options(request.Bucket, sb.share))
	if err != nil {
		b.sandboxes.drop(id)
		return nil, err
	}
	fs := &fileSystem{server: server, pid: request.PID}
	sb.all[fs] = true
	go func() { // ends with the file system
		<-server.Done()
		sb.mounting.Lock()
		if sb.served[path] == fs {
			delete(sb.served, path) // another file system may get its device number
		}
		delete(sb.all, fs)
		sb.mounting.Unlock()
		b.sandboxes.drop(id)
	}()
	var stat unix.Stat_t
	if err := unix.Fstat(int(mount.Fd()), &stat); err != nil {
		return nil, errors.Join(os.NewSyscallError("fstat", err), server.Close())
	}
	fs.device = stat.Dev
	return fs, nil
}

// Unmount detaches a mount. Open files remain usable. It does nothing if there is none.
func (b *Buckets) Unmount(m wire.Mount, reply *wire.Reply) error {
	p, err := openProcess(m)
	if err != nil {
		return respond(reply, err)
	}
	defer p.close()
	sb := b.sandboxes.join(m.Sandbox)
	defer b.sandboxes.drop(m.Sandbox)
	sb.mounting.Lock()
	defer sb.mounting.Unlock()
	b.retire(p, sb.served[m.Path])
	delete(sb.served, m.Path)
	return respond(reply, p.detach(func(have *mountinfo.Info) bool { return have.Mountpoint == m.Path })) // an earlier helper's
}

// Forget ends the file systems of a sandbox's process, also those with open files. Path is empty.
func (b *Buckets) Forget(m wire.Mount, reply *wire.Reply) error {
	sb := b.sandboxes.join(m.Sandbox)
	defer b.sandboxes.drop(m.Sandbox)
	sb.mounting.Lock()
	var ended []*bucketfs.Server
	for fs := range sb.all {
		if fs.pid == m.PID {
			ended = append(ended, fs.server)
		}
	}
	sb.mounting.Unlock()
	var err error
	for _, server := range ended {
		err = errors.Join(err, server.Close())
	}
	return respond(reply, err)
}

// retire ends a file system except for open files, also if the sandbox prevents the unmount or has copied the mount to
// another mount namespace. fs may be nil.
func (b *Buckets) retire(p *process, fs *fileSystem) {
	if fs == nil {
		return
	}
	fs.server.Retire()
	if err := p.detach(fs.has); err != nil {
		b.log.Warn("failed to unmount a bucket whose files cannot be opened any more", "pid", p.pid, "error", err)
	}
}

func (b *Buckets) options(bucket wire.Bucket, share *bucketfs.Share) bucketfs.Options {
	return bucketfs.Options{
		Bucket: bucketfs.Bucket{
			Endpoint: bucket.Endpoint, Region: bucket.Region, Bucket: bucket.Bucket, Prefix: bucket.Prefix,
			AccessKey: bucket.AccessKey, SecretKey: bucket.SecretKey,
		},
		ReadOnly: bucket.ReadOnly, UID: b.config.UID, GID: b.config.GID, Share: share, Log: b.log,
	}
}

// deviceError means that the helper cannot open /dev/fuse.
type deviceError struct{ error }

func (e *deviceError) Unwrap() error { return e.error }

// respond writes the failure, if any, to reply.
func respond(reply *wire.Reply, err error) error {
	if err == nil {
		return nil
	}
	reply.Error = err.Error()
	folder, noFolder := errors.AsType[*folderError](err)
	_, noDevice := errors.AsType[*deviceError](err)
	store, failed := errors.AsType[*objectstore.Error](err)
	switch {
	case failed:
		reply.Code = wire.Code(store.Code)
	case noFolder:
		reply.Code = wire.NoFolder
		reply.Error = folder.Error()
	case noDevice:
		reply.Code = wire.NoFUSE
	}
	return nil
}
