// Package bucketfs is a FUSE file system whose files are the objects of a bucket in an S3-compatible object store.
package bucketfs

import (
	"context"
	"log/slog"
	"os"
	"runtime/debug"
	"sync"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// Server serves a file system until its mount ends or Close is called.
type Server struct {
	mount  *mount
	device *device
	cancel context.CancelFunc
	done   chan struct{}
	close  sync.Once
}

// Serve serves the file system on dev, an open /dev/fuse whose mount exists. It takes ownership of dev.
// It returns after the handshake with the kernel.
func Serve(dev *os.File, o Options) (*Server, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	store, err := newStore(o.Bucket)
	if err != nil {
		dev.Close()
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	s := &Server{mount: newMount(ctx, o, store), cancel: cancel, done: make(chan struct{})}
	s.device, err = openDevice(dev, fuse.NewProtocolServer(s.mount, s.mount.protocolOptions()))
	if err == nil {
		if err = s.device.handshake(); err != nil {
			s.device.file.Close()
		}
	}
	if err != nil {
		cancel()
		return nil, err
	}
	s.mount.device = s.device
	s.mount.share.add(s.mount)
	go s.serve()
	return s, nil
}

// serve ends with the connection.
func (s *Server) serve() {
	defer close(s.done)
	if err := s.device.serve(); err != nil {
		s.mount.log.Error("fuse connection failed", "error", err)
	}
	_ = s.disconnect()
	s.mount.discardFiles()
}

// Close ends the connection: operations fail with ENOTCONN. It does not wait for uploads. It returns
// after the last request has been handled.
func (s *Server) Close() error {
	err := s.disconnect()
	<-s.done
	return err
}

// Retire makes the paths of the file system unusable: requests other than for open files fail with ENOTCONN.
func (s *Server) Retire() { s.device.retired.Store(true) }

// Done is closed when the connection has ended, by Close or because the mount has ended.
func (s *Server) Done() <-chan struct{} { return s.done }

func (s *Server) disconnect() (err error) {
	s.close.Do(func() {
		s.cancel()
		err = s.device.file.Close()
	})
	return err
}

// protocolOptions returns the options of go-fuse.
func (m *mount) protocolOptions() *fuse.MountOptions {
	return &fuse.MountOptions{
		MaxWrite:          maxTransfer,
		MaxBackground:     2 * maxRequests,
		DisableXAttrs:     true,
		ExtraCapabilities: fuse.CAP_ATOMIC_O_TRUNC,
		Logger:            slog.NewLogLogger(m.log.Handler(), slog.LevelWarn),
		PanicHandler: func(v any) fuse.Status {
			m.log.Error("file system handler panicked", "error", v, "stack", string(debug.Stack()))
			return fuse.EIO
		},
	}
}
