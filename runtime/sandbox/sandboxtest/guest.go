package sandboxtest

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync/atomic"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/guest/server"
)

// guestRun is a guest server from the start of its container to its end.
type guestRun struct {
	cancel context.CancelFunc
	done   chan error
}

// startGuest serves a guest in runDir, as the first process of a container does.
func (e *Engine) startGuest(runDir string) (*guestRun, error) {
	e.mu.Lock()
	h := e.guest
	e.mu.Unlock()
	serve := func(ctx context.Context) error { return serveHandler(ctx, runDir, h) }
	if h == nil {
		// The test's PATH has the interpreters. A separate HOME excludes the settings of the test's user.
		srv, err := server.New(server.Config{RunDir: runDir, LogDir: filepath.Join(runDir, "log"), Env: []string{"PATH=" + os.Getenv("PATH"), "HOME=" + runDir}, AnyPeer: true, Trim: func() { e.trims.Add(1) }})
		if err != nil {
			return nil, fmt.Errorf("start a guest: %w", err)
		}
		serve = srv.Serve
	}
	ctx, cancel := context.WithCancel(context.Background())
	run := &guestRun{cancel: cancel, done: make(chan error, 1)}
	go func() { run.done <- serve(ctx) }() // ended by stop
	return run, nil
}

// serveHandler serves h as a guest until ctx ends.
func serveHandler(ctx context.Context, runDir string, h http.Handler) error {
	socket := filepath.Join(runDir, guest.SocketName)
	if err := os.Remove(socket); err != nil && !os.IsNotExist(err) { // of the run before
		return err
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	srv := &http.Server{Handler: h}
	context.AfterFunc(ctx, func() { srv.Close() })
	return srv.Serve(l)
}

// stop ends the guest with all of its processes.
func (r *guestRun) stop() {
	r.cancel()
	<-r.done
}

var lastPID atomic.Int64

// nextPID makes up the pid of a container's first process. No process has it:
// pids end at 2^22.
func nextPID() int { return 1<<30 + int(lastPID.Add(1)) }
