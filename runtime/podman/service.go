package podman

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/containers/podman/v5/libpod/define"
	"github.com/containers/podman/v5/pkg/bindings/system"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/sandbox"
)

const (
	// pingEvery is how often a service is asked for a sign of life, and
	// pingLimit how long it may take: less than a caller waits for a wake, more
	// than a service needs that starts 50 containers on two cores.
	pingEvery = 5 * time.Second
	pingLimit = 10 * time.Second
	// pingTries is how many signs of life may be missing in a row before a
	// service that still accepts connections is taken for hung and ended.
	pingTries = 3
	// startLimit is how long a new service may take until it answers. After a
	// reboot Podman first looks at every container: 5 s for 1,000.
	startLimit = 60 * time.Second
	// backoffMin and backoffMax space the attempts to start a service. The
	// first one is short, since a wake may wait for it.
	backoffMin = 50 * time.Millisecond
	backoffMax = 2 * time.Second // less than restartLimit, so that a call sees an attempt
	// stopLimit is how long a service may take to end before it is killed.
	stopLimit = 5 * time.Second
)

// service keeps an API service of Podman at hand: one that answers already, be
// it the user's own or what a killed node left behind, else a child of this
// process. Containers do not depend on it: they belong to their conmon, which
// has left the service's process group and session.
type service struct {
	command string // the podman to start
	runtime string // the OCI runtime of sandboxes
	shared  string // socket of the user's own service, used if it fits; may be empty
	own     string // socket of the service that nodes on this data start
	log     *slog.Logger

	lost chan struct{} // a call found nobody; capacity 1
	done chan struct{} // closed when supervise has ended
	end  context.CancelFunc

	mu      sync.Mutex
	conn    *connection   // nil while no service answers
	why     error         // why conn is nil
	changed chan struct{} // closed when conn or why changes

	// Of supervise alone.
	child *child
}

// child is a service that this process started.
type child struct {
	cmd    *exec.Cmd
	exited chan struct{} // closed after Wait
	err    error         // valid once exited is closed
}

func newService(command, runtime, shared, own string, log *slog.Logger) *service {
	return &service{
		command: command,
		runtime: runtime,
		shared:  shared,
		own:     own,
		log:     log,
		lost:    make(chan struct{}, 1),
		done:    make(chan struct{}),
		changed: make(chan struct{}),
	}
}

// start begins supervision, which ends with close.
func (s *service) start() {
	ctx, cancel := context.WithCancel(context.Background())
	s.end = cancel
	go s.supervise(ctx)
}

// close ends supervision and the service of this node, whoever started it.
// A service of the user's own goes on.
func (s *service) close() {
	s.end()
	<-s.done
}

// connection returns the connection to the service. While none answers it waits
// for one, no longer than limit.
func (s *service) connection(ctx context.Context, limit time.Duration) (*connection, error) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for {
		s.mu.Lock()
		conn, why, changed := s.conn, s.why, s.changed
		s.mu.Unlock()
		if conn != nil {
			return conn, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-s.done:
			return nil, fmt.Errorf("%w: the engine is closed", sandbox.ErrEngineDown)
		case <-timer.C:
			return nil, fmt.Errorf("%w: %v", sandbox.ErrEngineDown, why)
		}
	}
}

// report says that conn found nobody. Calls wait until it has been looked into.
func (s *service) report(conn *connection) {
	s.mu.Lock()
	current := s.conn == conn
	s.mu.Unlock()
	if !current {
		return
	}
	s.set(nil, errors.New("it went away"))
	select {
	case s.lost <- struct{}{}:
	default:
	}
}

func (s *service) set(conn *connection, why error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conn, s.why = conn, why
	close(s.changed)
	s.changed = make(chan struct{})
}

// supervise finds or starts a service, watches it and begins again when it is
// gone, until ctx ends.
func (s *service) supervise(ctx context.Context) {
	defer close(s.done)
	backoff := backoffMin
	for ctx.Err() == nil {
		conn, err := s.connect(ctx)
		if err == nil {
			s.set(conn, nil)
			since := time.Now()
			err = fmt.Errorf("it is gone: %w", s.watch(ctx, conn))
			conn.close()
			if time.Since(since) > backoffMax {
				backoff = backoffMin
			}
		}
		s.set(nil, err)
		if ctx.Err() == nil {
			s.log.Error("podman service", "error", err, "retry_in", backoff)
		}
		wait(ctx, backoff)
		backoff = min(2*backoff, backoffMax)
	}
	s.stop()
}

// connect returns a connection to the first service that answers: the user's
// own, one that is left behind, a new one.
func (s *service) connect(ctx context.Context) (*connection, error) {
	if s.shared != "" {
		conn, err := dial(ctx, s.shared, pingLimit)
		if err == nil {
			if err = s.fits(ctx, conn); err == nil {
				return conn, nil
			}
			s.log.Info("not using the user's podman service", "socket", s.shared, "reason", err)
			conn.close()
		}
	}
	if conn, err := dial(ctx, s.own, pingLimit); err == nil {
		var other misfit
		if !errors.As(s.fits(ctx, conn), &other) { // without an answer, watch finds out why
			return conn, nil
		}
		s.log.Info("replacing the podman service of an earlier node", "reason", other)
		conn.close()
	}
	return s.spawn(ctx)
}

// misfit is why a service cannot be used.
type misfit string

func (m misfit) Error() string { return string(m) }

// fits says whether a service that was not started here runs containers by the OCI
// runtime of sandboxes, and below the cgroup that it is told. With systemd as cgroup
// manager it does not. It returns a misfit, or why the service did not answer.
func (s *service) fits(ctx context.Context, conn *connection) error {
	ctx, cancel := context.WithTimeout(ctx, pingLimit)
	defer cancel()
	var info *define.Info
	err := conn.call(ctx, func(ctx context.Context) (err error) {
		info, err = system.Info(ctx, nil)
		return err
	})
	if err != nil {
		return err
	}
	if m := info.Host.CgroupManager; m != "cgroupfs" {
		return misfit(fmt.Sprintf("its cgroup manager is %s, not cgroupfs", m))
	}
	path := ""
	if r := info.Host.OCIRuntime; r != nil {
		path = r.Path
	}
	if path != s.runtime {
		return misfit(fmt.Sprintf("its OCI runtime is %q; set runtime = %q under [engine] in its containers.conf", path, s.runtime))
	}
	return nil
}

// spawn starts a service and waits until it answers.
func (s *service) spawn(ctx context.Context) (*connection, error) {
	s.stop() // one that hangs holds the socket
	if err := os.Remove(s.own); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	child, err := s.startChild()
	if err != nil {
		return nil, fmt.Errorf("starting the podman service: %w", err)
	}
	s.child = child
	began := time.Now()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		conn, err := dial(ctx, s.own, pingLimit)
		if err == nil {
			s.log.Info("podman service started", "pid", child.cmd.Process.Pid,
				"took", time.Since(began).Round(time.Millisecond), "socket", s.own)
			return conn, nil
		}
		select {
		case <-child.exited:
			return nil, fmt.Errorf("the podman service ended at once: %v; %s", child.err, lastLine(s.logFile()))
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-tick.C:
		}
		if time.Since(began) > startLimit {
			return nil, fmt.Errorf("the podman service does not answer within %v: %w", startLimit, err)
		}
	}
}

// startChild runs podman system service in a process group of its own, so that
// a signal for the node's group does not reach it. It outlives a killed node,
// for the next one to use; hence its log is a file and no pipe, which would
// break with the node and end the service at its next word.
func (s *service) startChild() (*child, error) {
	log, err := os.OpenFile(s.logFile(), os.O_CREATE|os.O_WRONLY|os.O_TRUNC|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	// A path by way of the working directory may be of any length.
	cmd := exec.Command(s.command, "--cgroup-manager=cgroupfs", "--runtime="+s.runtime, "--log-level=warn",
		"system", "service", "--time=0", "unix:///proc/self/cwd/"+filepath.Base(s.own))
	cmd.Dir = filepath.Dir(s.own)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	c := &child{cmd: cmd, exited: make(chan struct{})}
	go func() { // ends with the child, which stop kills
		c.err = cmd.Wait()
		close(c.exited)
	}()
	return c, nil
}

func (s *service) logFile() string { return strings.TrimSuffix(s.own, ".sock") + ".log" }

// watch returns why conn is no longer of use.
func (s *service) watch(ctx context.Context, conn *connection) error {
	var exited chan struct{}
	if s.child != nil && conn.socket == s.own {
		exited = s.child.exited
	}
	log := newLogTail(s.logFile(), s.log)
	defer log.drain()
	tick := time.NewTicker(pingEvery)
	defer tick.Stop()
	for failed := 0; ; {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-exited:
			return fmt.Errorf("it ended: %v", s.child.err)
		case <-s.lost:
		case <-tick.C:
		}
		log.drain()
		pctx, cancel := context.WithTimeout(ctx, pingLimit)
		err := conn.ping(pctx)
		cancel()
		switch {
		case err == nil:
			failed = 0
			s.set(conn, nil)
		case !errors.Is(err, context.DeadlineExceeded):
			return err
		default:
			if failed++; failed == pingTries {
				return fmt.Errorf("it hangs: %d signs of life are missing", failed)
			}
		}
	}
}

// stop ends the service behind the node's own socket, child or left behind, and
// kills what does not end in time.
func (s *service) stop() {
	pid, err := listener(s.own)
	if err != nil && s.child == nil {
		return
	}
	signal := func(sig syscall.Signal) {
		if pid > 0 {
			_ = syscall.Kill(pid, sig)
		}
		if s.child != nil {
			_ = s.child.cmd.Process.Signal(sig)
		}
	}
	gone := func() bool {
		if s.child != nil {
			select {
			case <-s.child.exited:
			default:
				return false
			}
		}
		return pid <= 0 || errors.Is(syscall.Kill(pid, 0), syscall.ESRCH)
	}
	began := time.Now()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	killed := false
	for signal(syscall.SIGTERM); !gone(); <-tick.C {
		if !killed && time.Since(began) > stopLimit {
			signal(syscall.SIGKILL)
			killed = true
		}
		if time.Since(began) > 2*stopLimit {
			s.log.Error("the podman service does not end", "pid", pid)
			break
		}
	}
	s.child = nil
}

// listener is the process that listens on the socket, if anybody does.
func listener(socket string) (pid int, err error) {
	conn, err := dialUnix(context.Background(), socket)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var peer *unix.Ucred
	if cerr := raw.Control(func(fd uintptr) {
		peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); cerr != nil {
		return 0, cerr
	}
	if err != nil {
		return 0, err
	}
	return int(peer.Pid), nil
}

// wait returns after d or when ctx ends.
func wait(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
