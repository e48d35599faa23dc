//go:build unix

package main

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// become replaces this process by a program. It returns only if it failed.
func become(program string, argv []string) error {
	return fmt.Errorf("exec %s: %w", program, unix.Exec(program, argv, os.Environ()))
}
