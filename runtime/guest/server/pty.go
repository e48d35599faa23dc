package server

import (
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/guest"
)

// pty is our end of a pseudoterminal (pty(7)). Its file is nonblocking, so that Close ends reads
// and writes.
type pty struct{ *os.File }

// openPTY makes a pseudoterminal. The slave is the program's end, which blocks.
func openPTY() (p pty, slave *os.File, err error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return pty{}, nil, &os.PathError{Op: "open", Path: "/dev/ptmx", Err: err}
	}
	p = pty{os.NewFile(uintptr(fd), "/dev/ptmx")}
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		slave, err = os.OpenFile("/dev/pts/"+strconv.Itoa(number), os.O_RDWR|unix.O_NOCTTY, 0)
	}
	if err != nil {
		p.Close()
		return pty{}, nil, err
	}
	return p, slave, nil
}

// control calls f with the descriptor, which it must not keep.
func (p pty) control(f func(fd int) error) error {
	raw, err := p.SyscallConn()
	if err != nil {
		return err
	}
	if e := raw.Control(func(fd uintptr) { err = f(int(fd)) }); e != nil {
		return e
	}
	return err
}

// resize sets the size, and sends SIGWINCH to the foreground if it is another.
func (p pty) resize(size guest.TerminalSize) error {
	return p.control(func(fd int) error {
		return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Col: size.Cols, Row: size.Rows})
	})
}

// foreground is the process group in the foreground.
func (p pty) foreground() (group int, err error) {
	err = p.control(func(fd int) (err error) {
		group, err = unix.IoctlGetInt(fd, unix.TIOCGPGRP)
		return err
	})
	return group, err
}

// dup returns another file for our end.
func (p pty) dup() (f *os.File, err error) {
	err = p.control(func(fd int) error {
		fd, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err == nil {
			f = os.NewFile(uintptr(fd), p.Name())
		}
		return err
	})
	return f, err
}
