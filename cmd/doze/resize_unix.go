//go:build unix

package main

import (
	"os"
	"os/signal"

	"golang.org/x/sys/unix"
)

// notifyResized has a signal sent to resized when the terminal changes its size.
func notifyResized(resized chan<- os.Signal) { signal.Notify(resized, unix.SIGWINCH) }
