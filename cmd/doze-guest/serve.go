package main

import (
	"context"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"syscall"

	"github.com/doze-run/doze/runtime/guest/server"
)

const (
	// gcPercent trades CPU that the guest rarely needs for memory that every
	// sleeping sandbox holds.
	gcPercent = 50
	// maxThreadsRunning is enough to move files at full speed; each more costs
	// memory, and one of the sandbox's process limit.
	maxThreadsRunning = 2
)

// serve is the life of the guest. It ends with SIGTERM, when every process of
// the sandbox has ended.
func serve(ctx context.Context, runDir, logDir string) error {
	debug.SetGCPercent(gcPercent)
	runtime.GOMAXPROCS(maxThreadsRunning)
	ctx, stop := onTerm(ctx)
	defer stop()
	workdir, err := os.Getwd()
	if err != nil {
		workdir = "/"
	}
	srv, err := server.New(server.Config{
		RunDir: runDir, LogDir: logDir, Workdir: workdir, Env: environment(), Version: buildVersion,
		Init: os.Getpid() == 1, ReportPorts: true,
		Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
	if err != nil {
		return err
	}
	debug.FreeOSMemory()
	return srv.Serve(ctx)
}

// environment is what commands get: the container's, with a home.
func environment() []string {
	env := os.Environ()
	if _, ok := os.LookupEnv("HOME"); !ok {
		env = append(env, "HOME=/root")
	}
	return env
}

// onTerm returns a context that ends with SIGTERM. All other signals that could end this
// process are delivered to a channel without a reader: signals that are ignored outright
// would also be ignored in commands.
func onTerm(ctx context.Context) (context.Context, func()) {
	ignored := make(chan os.Signal, 1)
	for sig := syscall.Signal(1); sig <= 31; sig++ {
		switch sig {
		case syscall.SIGCHLD, syscall.SIGURG, // the reaper's and the runtime's own
			syscall.SIGKILL, syscall.SIGSTOP: // the kernel keeps these from PID 1
		case syscall.SIGTERM:
		default:
			signal.Notify(ignored, sig)
		}
	}
	return signal.NotifyContext(ctx, syscall.SIGTERM)
}
