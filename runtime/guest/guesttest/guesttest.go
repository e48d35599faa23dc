// Package guesttest has calls to a guest that only tests need.
package guesttest

import (
	"context"
	"fmt"
	"slices"

	"github.com/doze-run/doze/runtime/guest"
)

// Output is what a command wrote, and how it ended.
type Output struct {
	Stdout, Stderr []byte
	Result         guest.ExecResult
}

// Run runs a command to its end.
func Run(ctx context.Context, c *guest.Client, req guest.ExecRequest) (out Output, err error) {
	s, err := c.Exec(ctx, req)
	if err != nil {
		return out, err
	}
	defer s.Close()
	for {
		ev, err := s.Next()
		if err != nil {
			return out, err
		}
		switch ev.Kind {
		case guest.FrameStdout:
			out.Stdout = append(out.Stdout, ev.Data...)
		case guest.FrameStderr:
			out.Stderr = append(out.Stderr, ev.Data...)
		case guest.FrameComplete:
			out.Result = *ev.Result
			return out, nil
		}
	}
}

// Process returns one of the processes that the guest knows.
func Process(ctx context.Context, c *guest.Client, id string) (guest.Process, error) {
	all, err := c.Processes(ctx)
	if err != nil {
		return guest.Process{}, err
	}
	i := slices.IndexFunc(all, func(p guest.Process) bool { return p.ID == id })
	if i < 0 {
		return guest.Process{}, &guest.Error{Code: guest.CodeNoProcess, Message: fmt.Sprintf("no process %q", id)}
	}
	return all[i], nil
}
