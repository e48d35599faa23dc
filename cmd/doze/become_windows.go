package main

import (
	"errors"
	"os"
	"os/exec"
)

// become runs a program and exits with its exit code: Windows has no exec.
func become(program string, argv []string) error {
	cmd := exec.Command(program, argv[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	err := cmd.Run()
	var ended *exec.ExitError
	if errors.As(err, &ended) {
		return exitCode(ended.ExitCode())
	}
	return err
}
