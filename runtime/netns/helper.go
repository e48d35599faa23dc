package netns

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/netns/wire"
)

// errGone: the helper ended before it responded.
var errGone = errors.New("the namespace helper ended")

// responseLimit bounds the wait for a response. Responses take less than 0.1 ms; a helper
// that takes this long hangs, and is replaced. Tests reduce it.
var responseLimit = 5 * time.Second

// helper is one running helper process.
type helper struct {
	cmd     *exec.Cmd
	control *net.UnixConn
	stderr  *tail
	seq     atomic.Uint32
	served  atomic.Bool // a request; if the helper ends then, the next one starts immediately

	mu sync.Mutex
	// waiting has the pending responses by seq, including those that no caller waits for
	// any longer. It is nil after the helper ended.
	waiting map[uint32]chan reply
}

// reply is the outcome of a request: a descriptor, which is -1 if err is set.
type reply struct {
	fd  int
	err error
}

// launch starts command with one end of a packet socket as its standard input, and waits
// for its greeting. The caller owns the returned descriptor, which came with the greeting;
// it is -1 if none did.
func launch(ctx context.Context, command []string, extra ...*os.File) (_ *helper, greeting int, err error) {
	control, theirs, err := packetPair()
	if err != nil {
		return nil, -1, err
	}
	defer theirs.Close()
	h := &helper{
		cmd:     exec.Command(command[0], command[1:]...),
		control: control,
		stderr:  &tail{},
		waiting: make(map[uint32]chan reply),
	}
	h.cmd.Stdin = theirs
	h.cmd.Stderr = h.stderr
	h.cmd.WaitDelay = time.Second
	h.cmd.ExtraFiles = extra
	// Only the node handles signals of its terminal.
	h.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := h.cmd.Start(); err != nil {
		control.Close()
		return nil, -1, fmt.Errorf("start the namespace helper: %w", err)
	}
	theirs.Close()
	stop := context.AfterFunc(ctx, func() { _ = control.SetReadDeadline(time.Unix(1, 0)) })
	_, greeting, err = h.receive()
	if !stop() && err == nil {
		closeFD(greeting)
		err = ctx.Err()
	}
	if err != nil {
		_ = h.cmd.Process.Kill()
		_ = h.reap()
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, -1, fmt.Errorf("start the namespace helper with %s: %w%s", command[0], err, h.stderr.suffix())
	}
	return h, greeting, nil
}

// packetPair creates the control socket. Both ends are close-on-exec.
func packetPair() (ours *net.UnixConn, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("create the namespace helper's socket: %w", err)
	}
	theirs = os.NewFile(uintptr(fds[1]), "control")
	file := os.NewFile(uintptr(fds[0]), "control")
	defer file.Close()
	conn, err := net.FileConn(file)
	if err != nil {
		theirs.Close()
		return nil, nil, fmt.Errorf("create the namespace helper's socket: %w", err)
	}
	return conn.(*net.UnixConn), theirs, nil
}

// receive reads one response and the descriptor that came with it, or -1.
func (h *helper) receive() (wire.Response, int, error) {
	var buf [wire.MaxPacket]byte
	rights := make([]byte, unix.CmsgSpace(4))
	n, oobn, _, _, err := h.control.ReadMsgUnix(buf[:], rights) // close-on-exec
	if err != nil {
		return wire.Response{}, -1, err
	}
	fd, err := descriptor(rights[:oobn])
	if err != nil {
		return wire.Response{}, -1, err
	}
	response, err := wire.ParseResponse(buf[:n])
	if n == 0 {
		err = errGone
	}
	if err != nil {
		closeFD(fd)
		return wire.Response{}, -1, err
	}
	return response, fd, nil
}

func descriptor(rights []byte) (int, error) {
	messages, err := unix.ParseSocketControlMessage(rights)
	if err != nil {
		return -1, fmt.Errorf("read a descriptor: %w", err)
	}
	for _, message := range messages {
		// The helper sends no more than one.
		if fds, err := unix.ParseUnixRights(&message); err == nil && len(fds) > 0 {
			return fds[0], nil
		}
	}
	return -1, nil
}

func closeFD(fd int) {
	if fd >= 0 {
		unix.Close(fd)
	}
}

// run delivers responses until the helper ends, and reaps it. It is the only reader of
// the control socket.
func (h *helper) run() error {
	var err error
	for {
		var response wire.Response
		var fd int
		if response, fd, err = h.receive(); err != nil {
			break
		}
		h.deliver(response, fd)
	}
	ended := errGone
	if errors.Is(err, os.ErrDeadlineExceeded) {
		ended = fmt.Errorf("%w: it did not respond for %v", errGone, responseLimit)
		_ = h.cmd.Process.Kill()
	}
	h.mu.Lock()
	waiting := h.waiting
	h.waiting = nil
	h.mu.Unlock()
	for _, c := range waiting {
		c <- reply{-1, ended}
	}
	if exit := h.reap(); exit != nil {
		return fmt.Errorf("%w%s", exit, h.stderr.suffix())
	}
	return err
}

// reap ends the process and waits for that. It ends by itself because its socket is closed,
// unless it hangs.
func (h *helper) reap() error {
	h.close()
	kill := time.AfterFunc(time.Second, func() { _ = h.cmd.Process.Kill() })
	defer kill.Stop()
	return h.cmd.Wait()
}

func (h *helper) deliver(response wire.Response, fd int) {
	h.mu.Lock()
	c := h.waiting[response.Seq]
	delete(h.waiting, response.Seq)
	limit := time.Time{}
	if len(h.waiting) > 0 {
		limit = time.Now().Add(responseLimit)
	}
	_ = h.control.SetReadDeadline(limit)
	h.mu.Unlock()
	switch {
	case c == nil: // the response to a post
		closeFD(fd)
	case response.Status != wire.StatusOK:
		closeFD(fd)
		c <- reply{-1, response}
	case fd < 0:
		c <- reply{-1, errors.New("the namespace helper sent no descriptor")}
	default:
		c <- reply{fd, nil}
	}
}

// request sends a request and waits for its response. The caller owns the returned
// descriptor. Errors wrap errGone if the helper ended or hangs.
func (h *helper) request(ctx context.Context, r wire.Request) (int, error) {
	r.Seq = h.seq.Add(1)
	packet, err := r.AppendTo(nil)
	if err != nil {
		return -1, err
	}
	c := make(chan reply, 1) // deliver never waits
	h.mu.Lock()
	if h.waiting == nil {
		h.mu.Unlock()
		return -1, errGone
	}
	h.waiting[r.Seq] = c
	if len(h.waiting) == 1 {
		_ = h.control.SetReadDeadline(time.Now().Add(responseLimit))
	}
	h.mu.Unlock()
	if err := h.send(packet); err != nil {
		return -1, err
	}
	select {
	case got := <-c:
		if got.err == nil {
			h.served.Store(true)
		}
		return got.fd, got.err
	case <-ctx.Done():
		go func() { closeFD((<-c).fd) }() // ends with the response, or with run
		return -1, ctx.Err()
	}
}

// post sends a request without waiting for its response.
func (h *helper) post(r wire.Request) {
	r.Seq = h.seq.Add(1)
	if packet, err := r.AppendTo(nil); err == nil {
		_ = h.send(packet) // if the helper has ended, the request is moot
	}
}

// send never waits: if the socket is full, the helper hangs.
func (h *helper) send(packet []byte) error {
	raw, err := h.control.SyscallConn()
	if err != nil {
		return fmt.Errorf("%w: %w", errGone, err)
	}
	var sent error
	err = raw.Write(func(fd uintptr) bool {
		sent = unix.Send(int(fd), packet, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		return true
	})
	if err = errors.Join(err, sent); err != nil {
		return fmt.Errorf("%w: %w", errGone, err)
	}
	return nil
}

// close ends the helper by closing its socket; run then reaps it.
func (h *helper) close() { h.control.Close() }

// tail stores the last bytes that a process writes to standard error.
type tail struct {
	mu   sync.Mutex
	last []byte
}

const tailSize = 1024

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.last = append(t.last, p...)
	t.last = t.last[max(0, len(t.last)-tailSize):]
	return len(p), nil
}

// suffix returns the stored bytes, after a colon, to end the text of an error.
func (t *tail) suffix() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	text := bytes.TrimSpace(t.last)
	if len(text) == 0 {
		return ""
	}
	return ": " + string(text)
}
