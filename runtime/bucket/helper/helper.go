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
	return respond(reply, b.mount(request))
}

func (b *Buckets) mount(request wire.MountRequest) error {
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
	sb := b.sandboxes.join(request.Sandbox)
	server, err := bucketfs.Serve(dev, b.options(bucket, sb.share))
	if err != nil {
		b.sandboxes.drop(request.Sandbox)
		return err
	}
	go func() {
		<-server.Done()
		b.sandboxes.drop(request.Sandbox)
	}()
	if err := attach(mount, request.PID, request.Path); err != nil {
		return errors.Join(err, server.Close())
	}
	return nil
}

// Unmount detaches a mount. Open files remain usable. It does nothing if there is none.
func (b *Buckets) Unmount(m wire.Mount, reply *wire.Reply) error {
	return respond(reply, detach(m.PID, m.Path))
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

// deviceError: the helper cannot open /dev/fuse.
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
