package netns

import (
	"context"
	"log/slog"
	"net"
	"net/rpc"
	"net/rpc/jsonrpc"
	"os"
	"os/exec"
	"time"

	"golang.org/x/sys/unix"
)

// Service is a process in the user namespace that serves JSON-RPC 1.0 on its standard input, a socket, until that is
// closed. The caller closes it.
type Service struct {
	*rpc.Client
	cmd  *exec.Cmd
	done chan struct{}
}

// StartService starts a program in the user namespace of the helper at netnsHelper. name identifies the program in log
// messages; what it prints to standard error is logged as warnings. ctx bounds only the start.
func StartService(ctx context.Context, netnsHelper, name string, log *slog.Logger, program string, args ...string) (*Service, error) {
	userNS, err := UserNamespace(ctx, netnsHelper)
	if err != nil {
		return nil, err
	}
	defer userNS.Close()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), name), os.NewFile(uintptr(fds[1]), name)
	defer ours.Close()
	defer theirs.Close()
	conn, err := net.FileConn(ours)
	if err != nil {
		return nil, err
	}
	s := &Service{Client: jsonrpc.NewClient(conn), cmd: Command(context.Background(), userNS, program, args...), done: make(chan struct{})}
	s.cmd.WaitDelay = time.Second
	s.cmd.Stdin = theirs
	s.cmd.Stderr = lines{log, name}
	if err := s.cmd.Start(); err != nil {
		_ = s.Client.Close()
		return nil, err
	}
	go func() { // ends with the process
		_ = s.cmd.Wait() // its exit code has no meaning
		close(s.done)
	}()
	log.Info("helper started", "helper", name, "pid", s.cmd.Process.Pid)
	return s, nil
}

// CallWithin is like Call, but returns ctx.Err() if ctx ends first. The service still completes the call.
func (s *Service) CallWithin(ctx context.Context, method string, request, reply any) error {
	call := s.Go(method, request, reply, make(chan *rpc.Call, 1))
	select {
	case <-call.Done:
		return call.Error
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Done returns a channel that is closed when the process has exited.
func (s *Service) Done() <-chan struct{} { return s.done }

// Close ends the process, which is killed if it does not exit within grace, and waits for its exit. Idempotent.
func (s *Service) Close(grace time.Duration) {
	_ = s.Client.Close()
	kill := time.AfterFunc(grace, func() { _ = s.cmd.Process.Kill() })
	defer kill.Stop()
	<-s.done
}

// lines writes what a service prints to the log.
type lines struct {
	log  *slog.Logger
	name string
}

func (l lines) Write(p []byte) (int, error) {
	l.log.Warn("helper printed a warning", "helper", l.name, "text", string(p[:min(len(p), 1000)]))
	return len(p), nil
}
