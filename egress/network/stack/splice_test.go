package stack

import (
	"bytes"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/testkit"
)

// sockets returns both ends of a connection on the loopback.
func sockets(t *testing.T) (ours, theirs *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	dialed, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	accepted, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dialed.Close(); accepted.Close() })
	return dialed.(*net.TCPConn), accepted.(*net.TCPConn)
}

// bare hides that a reader is a socket.
type bare struct{ io.Reader }

func TestReadFromCopiesUntilEOF(t *testing.T) {
	sent := make([]byte, 20<<20)
	_, _ = rand.Read(sent)
	for name, from := range map[string]func(io.Reader) io.Reader{
		"a socket": func(r io.Reader) io.Reader { return r },
		"a reader": func(r io.Reader) io.Reader { return bare{r} },
	} {
		t.Run(name, func(t *testing.T) {
			h, conns := accepted(t)
			_, k := start(t, Config{Handler: h})
			client, server := pair(t, k, conns)
			ours, theirs := sockets(t)
			failed := make(chan error, 2)
			go func() { // ends with the connection
				_, err := theirs.Write(sent)
				failed <- errors.Join(err, theirs.CloseWrite())
			}()
			go func() { // ends with the connection
				n, err := server.ReadFrom(from(ours))
				if err == nil && n != int64(len(sent)) {
					err = io.ErrShortWrite
				}
				failed <- errors.Join(err, server.CloseWrite())
			}()
			got, err := io.ReadAll(client)
			if err = errors.Join(err, <-failed, <-failed); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, sent) {
				t.Error("something else arrived")
			}
		})
	}
}

// Whichever connection it waits for, it ends when either one does, and returns that one's error.
func TestReadFromEndsWithEitherConnection(t *testing.T) {
	full := func(theirs *net.TCPConn) { // sends more than the buffers to an idle reader hold
		go func() { // ends with the connection
			_, _ = theirs.Write(make([]byte, 64<<20))
		}()
	}
	for name, c := range map[string]struct {
		before func(theirs *net.TCPConn)
		ends   func(ours, theirs *net.TCPConn, server *Conn)
		want   error
	}{
		"the socket is closed":       {nil, func(ours, _ *net.TCPConn, _ *Conn) { ours.Close() }, net.ErrClosed},
		"the socket's deadline":      {nil, func(ours, _ *net.TCPConn, _ *Conn) { _ = ours.SetReadDeadline(time.Unix(1, 0)) }, os.ErrDeadlineExceeded},
		"the socket is reset":        {nil, func(_, theirs *net.TCPConn, _ *Conn) { _ = theirs.SetLinger(0); theirs.Close() }, syscall.ECONNRESET},
		"the sandbox takes nothing":  {full, func(_, _ *net.TCPConn, server *Conn) { _ = server.SetWriteDeadline(time.Unix(1, 0)) }, os.ErrDeadlineExceeded},
		"the sandbox's is closed":    {full, func(_, _ *net.TCPConn, server *Conn) { server.Abort() }, net.ErrClosed},
		"the socket, when full":      {full, func(ours, _ *net.TCPConn, server *Conn) { ours.Close(); server.Abort() }, net.ErrClosed},
		"the sandbox's, and no data": {nil, func(_, theirs *net.TCPConn, server *Conn) { server.Abort(); _, _ = theirs.Write([]byte("x")) }, net.ErrClosed},
	} {
		t.Run(name, func(t *testing.T) {
			h, conns := accepted(t)
			_, k := start(t, Config{Handler: h})
			_, server := pair(t, k, conns)
			ours, theirs := sockets(t)
			ended := make(chan error, 1)
			go func() { // ends with either connection
				_, err := server.ReadFrom(ours)
				ended <- err
			}()
			if c.before != nil {
				c.before(theirs)
				testkit.Eventually(t, "the send buffer is full", func() bool {
					return !writable(t, server.tcp)
				})
			}
			c.ends(ours, theirs, server)
			if err := <-ended; !errors.Is(err, c.want) {
				t.Errorf("it ended with %v, not %v", err, c.want)
			}
		})
	}
}

// writable reports whether a socket's send buffer has space.
func writable(t *testing.T, conn *net.TCPConn) bool {
	t.Helper()
	raw, err := conn.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	err = errors.Join(raw.Control(func(fd uintptr) {
		n, err = testkit.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, 0)
	}), err)
	if err != nil {
		t.Fatal(err)
	}
	return n > 0
}
