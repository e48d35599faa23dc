// Package testpty makes pseudoterminals for tests and measurements.
package testpty

import (
	"os"
	"os/exec"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// Open makes a pseudoterminal: the end of a person, whose reads end when it is closed, and the
// end of a program.
func Open(columns, rows int) (person, program *os.File, err error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("open /dev/ptmx", err)
	}
	person = os.NewFile(uintptr(fd), "/dev/ptmx")
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		program, err = os.OpenFile("/dev/pts/"+strconv.Itoa(number), os.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	}
	if err == nil {
		err = Resize(program, columns, rows)
	}
	if err != nil {
		person.Close()
		return nil, nil, err
	}
	return person, program, nil
}

// Resize sets the size, by the end of the program.
func Resize(program *os.File, columns, rows int) error {
	return unix.IoctlSetWinsize(int(program.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: uint16(columns), Row: uint16(rows)})
}

// Start starts a command on the pseudoterminal.
func Start(cmd *exec.Cmd, program *os.File) error {
	cmd.Stdin, cmd.Stdout, cmd.Stderr = program, program, program
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	return cmd.Start()
}
