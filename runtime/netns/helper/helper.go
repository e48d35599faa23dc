// Package helper is the namespace helper: it runs in the user namespace of
// rootless Podman, where it may enter the network namespaces of sandboxes, and
// creates sockets and network devices there for the node. It uses little memory and has
// few operations, because it has privileges that the node lacks.
package helper

import (
	"errors"
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/netns/tun"
	"github.com/doze-run/doze/runtime/netns/wire"
)

// Serve serves requests on the packet socket control until its other end is closed, and
// then returns nil: the helper ends with the node. It serves one request at a time; a socket
// takes some 20 µs, a network device 0.8 ms. The node bounds how many requests wait.
//
// It locks the calling goroutine to its thread permanently. Between requests that thread is
// in an empty network namespace, so a socket created by mistake would reach nothing.
func Serve(control int) error {
	runtime.LockOSThread() // never unlocked: other goroutines must not use the thread
	s, err := newServer()
	if err != nil {
		return err
	}
	if err := send(control, wire.Response{}, -1); err != nil {
		return fmt.Errorf("send the greeting: %w", err)
	}
	buf := make([]byte, wire.MaxPacket)
	for {
		n, err := unix.Read(control, buf)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return fmt.Errorf("read a request: %w", err)
		case n == 0:
			return nil
		}
		request, err := wire.ParseRequest(buf[:n])
		if err != nil {
			return fmt.Errorf("read a request: %w", err)
		}
		fd, err := s.serve(request)
		if errors.Is(err, errLost) {
			return err
		}
		err = send(control, response(request.Seq, err), fd)
		if fd >= 0 {
			unix.Close(fd)
		}
		switch {
		case errors.Is(err, unix.EPIPE):
			return nil
		case err != nil:
			return fmt.Errorf("send a response: %w", err)
		}
	}
}

// errLost: the thread could not leave a sandbox's namespace, so the helper must not serve
// further requests.
var errLost = errors.New("cannot return to the helper's own network namespace")

func refuse(format string, args ...any) error {
	return wire.Response{Status: wire.StatusRefused, Text: fmt.Sprintf(format, args...)}
}

func response(seq uint32, err error) wire.Response {
	if err == nil {
		return wire.Response{Seq: seq}
	}
	r, refused := errors.AsType[wire.Response](err)
	if !refused {
		r = wire.Response{Status: wire.StatusFailed, Text: err.Error()}
		r.Errno, _ = errors.AsType[unix.Errno](err)
	}
	r.Seq = seq
	return r
}

// send sends a response, with a descriptor unless fd is -1.
func send(control int, a wire.Response, fd int) error {
	var rights []byte
	if fd >= 0 {
		rights = unix.UnixRights(fd)
	}
	for {
		err := unix.Sendmsg(control, a.AppendTo(nil), rights, nil, unix.MSG_NOSIGNAL)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

type server struct {
	home       int   // descriptor of the empty network namespace
	host       inode // the network namespace that the helper was started in
	user       inode // its user namespace
	namespaces cache
}

func newServer() (*server, error) {
	s := &server{namespaces: cache{max: maxNamespaces}}
	for path, ns := range map[string]*inode{
		"/proc/thread-self/ns/net":  &s.host,
		"/proc/thread-self/ns/user": &s.user,
	} {
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			return nil, fmt.Errorf("find the helper's namespaces: %w", err)
		}
		*ns = inode{uint64(st.Dev), st.Ino}
	}
	// The thread could not return to the host's network namespace, because that
	// belongs to the parent user namespace.
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return nil, fmt.Errorf("create a network namespace (is this Podman's user namespace?): %w", err)
	}
	var err error
	if s.home, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
		return nil, fmt.Errorf("open the helper's network namespace: %w", err)
	}
	return s, nil
}

func (s *server) serve(r wire.Request) (fd int, err error) {
	switch r.Op {
	case wire.OpSocket:
		return s.socket(r, unix.AF_INET)
	case wire.OpSocket6:
		return s.socket(r, unix.AF_INET6)
	case wire.OpTUN:
		return s.inNamespace(r, tun.Make)
	case wire.OpListener:
		return s.inNamespace(r, tun.Listen)
	case wire.OpForget:
		s.namespaces.forget(r.ID)
		return -1, nil
	default:
		return -1, refuse("unknown operation %d", r.Op)
	}
}

// socket creates an unconnected, non-blocking TCP socket in the sandbox's network
// namespace.
func (s *server) socket(r wire.Request, family int) (int, error) {
	return s.inNamespace(r, func() (int, error) {
		fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return -1, fmt.Errorf("create a socket: %w", err)
		}
		return fd, nil
	})
}

// inNamespace calls create in the sandbox's network namespace, and returns its descriptor.
func (s *server) inNamespace(r wire.Request, create func() (fd int, err error)) (int, error) {
	n, err := s.namespace(r)
	if err != nil {
		return -1, err
	}
	if err := unix.Setns(n.netns, unix.CLONE_NEWNET); err != nil {
		return -1, fmt.Errorf("enter the sandbox's network namespace: %w", err)
	}
	fd, err := create()
	if back := unix.Setns(s.home, unix.CLONE_NEWNET); back != nil {
		return -1, fmt.Errorf("%w: %w", errLost, back)
	}
	return fd, err
}

// namespace returns the sandbox's namespace, from the cache while its first process runs. The
// cache owns it.
func (s *server) namespace(r wire.Request) (*namespace, error) {
	key := namespaceKey{r.ID, r.PID}
	if n := s.namespaces.get(key); n != nil {
		if n.alive() {
			return n, nil
		}
		s.namespaces.forget(r.ID)
	}
	n, err := s.open(r)
	if err != nil {
		return nil, err
	}
	s.namespaces.put(key, n)
	return n, nil
}
