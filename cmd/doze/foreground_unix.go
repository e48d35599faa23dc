//go:build unix

package main

import "golang.org/x/sys/unix"

// inForeground reports whether this program may read its terminal: one in the
// background that tries is stopped.
func inForeground(terminal int) bool {
	group, err := unix.IoctlGetInt(terminal, unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}
