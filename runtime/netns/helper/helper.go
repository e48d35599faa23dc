// Package helper is the namespace helper: it runs in the user namespace of
// rootless Podman, where it may enter the network namespaces of sandboxes, and
// creates sockets and network devices there for the node. It is kept small, in memory and
// in what it can be asked for, because it holds privileges that the node lacks.
package helper

import (
	"errors"
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/netns/tun"
	"github.com/doze-run/doze/runtime/netns/wire"
)

// Serve answers requests on the packet socket control until its other end is
// closed, which is no error: with the node its helper ends. It serves one
// request at a time, each some 20 µs, a network device 0.8 ms; the node bounds how
// many wait.
//
// It keeps the calling goroutine's thread for itself. Between requests that
// thread is in an empty network namespace of its own: a socket made by mistake
// would reach nothing.
func Serve(control int) error {
	runtime.LockOSThread() // never unlocked: the thread is not for others
	s, err := newServer()
	if err != nil {
		return err
	}
	if err := send(control, wire.Answer{}, -1); err != nil {
		return fmt.Errorf("greeting the node: %w", err)
	}
	buf := make([]byte, wire.MaxPacket)
	for {
		n, err := unix.Read(control, buf)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return fmt.Errorf("reading a request: %w", err)
		case n == 0:
			return nil
		}
		request, err := wire.ParseRequest(buf[:n])
		if err != nil {
			return fmt.Errorf("reading a request: %w", err)
		}
		fd, err := s.serve(request)
		if errors.Is(err, errLost) {
			return err
		}
		err = send(control, answer(request.Seq, err), fd)
		if fd >= 0 {
			unix.Close(fd)
		}
		switch {
		case errors.Is(err, unix.EPIPE):
			return nil
		case err != nil:
			return fmt.Errorf("answering: %w", err)
		}
	}
}

// errLost: the thread could not leave a sandbox's namespace, so nothing that it
// does may be trusted any more.
var errLost = errors.New("cannot return to the helper's own network namespace")

// refusal is an error whose status tells the node more than an errno would.
type refusal struct {
	status wire.Status
	reason string
}

func (r *refusal) Error() string { return r.reason }

func refuse(format string, args ...any) error {
	return &refusal{wire.StatusRefused, fmt.Sprintf(format, args...)}
}

func answer(seq uint32, err error) wire.Answer {
	if err == nil {
		return wire.Answer{Seq: seq}
	}
	if r := (*refusal)(nil); errors.As(err, &r) {
		return wire.Answer{Status: r.status, Seq: seq, Text: r.reason}
	}
	a := wire.Answer{Status: wire.StatusFailed, Seq: seq, Text: err.Error()}
	if errno := unix.Errno(0); errors.As(err, &errno) {
		a.Errno = uint32(errno)
	}
	return a
}

// send sends an answer, with a descriptor unless fd is -1.
func send(control int, a wire.Answer, fd int) error {
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
	home  int   // descriptor of the empty network namespace
	host  inode // the network namespace that the helper was started in
	user  inode // its user namespace
	boxes *cache
}

func newServer() (*server, error) {
	s := &server{boxes: newCache(maxBoxes)}
	for path, ns := range map[string]*inode{
		"/proc/thread-self/ns/net":  &s.host,
		"/proc/thread-self/ns/user": &s.user,
	} {
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			return nil, fmt.Errorf("finding the helper's namespaces: %w", err)
		}
		*ns = inode{uint64(st.Dev), st.Ino}
	}
	// The way back to the host's would be barred: it belongs to a user
	// namespace above.
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return nil, fmt.Errorf("making a network namespace (is this Podman's user namespace?): %w", err)
	}
	var err error
	if s.home, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
		return nil, fmt.Errorf("opening the helper's network namespace: %w", err)
	}
	return s, nil
}

func (s *server) serve(r wire.Request) (fd int, err error) {
	switch r.Op {
	case wire.OpSocket:
		return s.socket(r)
	case wire.OpTUN:
		return s.inside(r, tun.Make)
	case wire.OpListener:
		return s.inside(r, tun.Listen)
	case wire.OpForget:
		s.boxes.forget(r.ID)
		return -1, nil
	default:
		return -1, refuse("unknown operation %d", r.Op)
	}
}

// socket makes an unconnected, non-blocking TCP socket in the sandbox's network
// namespace.
func (s *server) socket(r wire.Request) (int, error) {
	var family int
	switch r.Family {
	case wire.IPv4:
		family = unix.AF_INET
	case wire.IPv6:
		family = unix.AF_INET6
	default:
		return -1, refuse("unknown address family %d", r.Family)
	}
	return s.inside(r, func() (int, error) {
		fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return -1, fmt.Errorf("making a socket: %w", err)
		}
		return fd, nil
	})
}

// inside makes a descriptor in the sandbox's network namespace.
func (s *server) inside(r wire.Request, make func() (fd int, err error)) (int, error) {
	b, err := s.box(r)
	if err != nil {
		return -1, err
	}
	if err := unix.Setns(b.netns, unix.CLONE_NEWNET); err != nil {
		return -1, fmt.Errorf("entering the sandbox's network namespace: %w", err)
	}
	fd, err := make()
	if back := unix.Setns(s.home, unix.CLONE_NEWNET); back != nil {
		return -1, fmt.Errorf("%w: %w", errLost, back)
	}
	return fd, err
}

// box returns the sandbox's namespace, from the cache as long as its first
// process lives.
func (s *server) box(r wire.Request) (*box, error) {
	key := boxKey{r.ID, r.PID}
	if b := s.boxes.get(key); b != nil {
		if b.alive() {
			return b, nil
		}
		s.boxes.forget(r.ID)
	}
	b, err := s.open(r)
	if err != nil {
		return nil, err
	}
	s.boxes.put(key, b)
	return b, nil
}
