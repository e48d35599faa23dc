package podman

import (
	"cmp"
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

	"github.com/doze-run/doze/runtime/peercred"
	"github.com/doze-run/doze/runtime/sandbox"
)

const (
	// pingEvery is the interval between pings of the service, and pingLimit their
	// timeout: less than a caller waits for a wake, and more than a service needs while
	// it starts 50 containers on two cores.
	pingEvery = 5 * time.Second
	pingLimit = 10 * time.Second
	// pingTries is after how many consecutive timeouts a service that still accepts
	// connections is considered hung, and ended.
	pingTries = 3
	// startLimit is how long a new service may take until it responds. After a reboot
	// Podman first checks every container: 5 s for 1,000.
	startLimit = 60 * time.Second
	// backoffMin and backoffMax bound the pause between attempts to start a service.
	// The first pause is short, because a wake may wait for it.
	backoffMin = 50 * time.Millisecond
	backoffMax = 2 * time.Second // less than restartLimit, so that a call sees an attempt
	// stopLimit is how long a service may take to end before it is killed.
	stopLimit = 5 * time.Second
)

// service supervises an API service of Podman: a running one, either the user's own or left
// over from a killed node, or else a child of this process. Containers do not depend on it:
// they belong to their conmon, which has left the service's process group and session.
type service struct {
	command string // the podman to start
	runtime string // the OCI runtime of sandboxes
	shared  string // socket of the user's own service, used if it fits; may be empty
	own     string // socket of the service that nodes on this home start
	log     *slog.Logger

	lost chan struct{} // a call found no service; capacity 1
	done chan struct{} // closed when supervise has ended
	end  context.CancelFunc

	mu      sync.Mutex
	conn    *connection   // nil while no service responds
	why     error         // why conn is nil
	changed chan struct{} // closed when conn or why changes

	// Only supervise uses these.
	child *child
	tail  logTail // of logFile
}

// child is a service that this process started.
type child struct {
	*exec.Cmd
	exited chan struct{} // closed after Wait
}

// start begins supervision, which ends with close.
func (s *service) start() {
	s.lost, s.done, s.changed = make(chan struct{}, 1), make(chan struct{}), make(chan struct{})
	s.tail = logTail{path: s.logFile(), log: s.log}
	ctx, cancel := context.WithCancel(context.Background())
	s.end = cancel
	go s.supervise(ctx)
}

// close ends supervision, and the service behind the node's own socket, even if an earlier
// node started it. The user's own service continues.
func (s *service) close() {
	s.end()
	<-s.done
}

// connection returns the connection to the service. It waits for one until ctx ends, or for
// limit, and then returns sandbox.ErrEngineDown (wrapped).
func (s *service) connection(ctx context.Context, limit time.Duration) (*connection, error) {
	expired := time.After(limit)
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
		case <-expired:
			return nil, fmt.Errorf("%w: %v", sandbox.ErrEngineDown, why)
		}
	}
}

// report notifies supervise that conn found no service. Calls wait until supervise has
// checked it.
func (s *service) report(conn *connection) {
	s.mu.Lock()
	current := s.conn == conn
	s.mu.Unlock()
	if !current {
		return
	}
	s.set(nil, errors.New("the service does not respond"))
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

// supervise finds or starts a service, watches it, and starts over when it has ended, until
// ctx ends.
func (s *service) supervise(ctx context.Context) {
	defer close(s.done)
	backoff := backoffMin
	for ctx.Err() == nil {
		conn, err := s.connect(ctx)
		if err == nil {
			s.set(conn, nil)
			since := time.Now()
			err = fmt.Errorf("lost the service: %w", s.watch(ctx, conn))
			conn.close()
			if time.Since(since) > backoffMax {
				backoff = backoffMin
			}
		}
		s.set(nil, err)
		if ctx.Err() == nil {
			s.log.Error("podman service failed", "error", err, "retry_in", backoff)
		}
		wait(ctx, backoff)
		backoff = min(2*backoff, backoffMax)
	}
	s.stop()
}

// connect returns a connection to the first service that responds and fits: the user's own,
// one left over from an earlier node, a new one.
func (s *service) connect(ctx context.Context) (*connection, error) {
	if s.shared != "" {
		conn, err := dial(ctx, s.shared, pingLimit)
		if err == nil {
			if err = s.fits(ctx, conn); err == nil {
				return conn, nil
			}
			s.log.Info("ignoring the user's podman service", "socket", s.shared, "reason", err)
			conn.close()
		}
	}
	if conn, err := dial(ctx, s.own, pingLimit); err == nil {
		var other misfit
		if !errors.As(s.fits(ctx, conn), &other) { // without a response, watch finds the cause
			return conn, nil
		}
		s.log.Info("podman service of an earlier node is being replaced", "reason", other)
		conn.close()
	}
	return s.spawn(ctx)
}

// misfit is the reason for which a service cannot be used.
type misfit string

func (m misfit) Error() string { return string(m) }

// fits returns nil if a service of another process runs containers with doze's OCI runtime
// and below the requested cgroup, which it does not with systemd as cgroup manager. Otherwise
// it returns a misfit, or the error of a service that did not respond.
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
	if path := cmp.Or(info.Host.OCIRuntime, &define.OCIRuntimeInfo{}).Path; path != s.runtime {
		return misfit(fmt.Sprintf("its OCI runtime is %q; set runtime = %q under [engine] in its containers.conf", path, s.runtime))
	}
	return nil
}

// spawn starts a service and waits until it responds.
func (s *service) spawn(ctx context.Context) (*connection, error) {
	s.stop() // a hung service has the socket
	if err := os.Remove(s.own); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	child, err := s.startChild()
	if err != nil {
		return nil, fmt.Errorf("start the podman service: %w", err)
	}
	s.child = child
	began := time.Now()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		conn, err := dial(ctx, s.own, pingLimit)
		if err == nil {
			s.log.Info("podman service started", "pid", child.Process.Pid,
				"duration_ms", time.Since(began).Milliseconds(), "socket", s.own)
			return conn, nil
		}
		select {
		case <-child.exited:
			return nil, fmt.Errorf("the podman service ended immediately: %v; %s", child.ProcessState, lastLine(s.logFile()))
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-tick.C:
		}
		if time.Since(began) > startLimit {
			return nil, fmt.Errorf("the podman service does not respond within %v: %w", startLimit, err)
		}
	}
}

// startChild runs podman system service in its own process group, so that signals for the
// node's group do not reach it. It outlives a killed node, and the next node uses it.
// Therefore its log is a file: a pipe would break with the node and end the service at its
// next line.
func (s *service) startChild() (*child, error) {
	log, err := os.OpenFile(s.logFile(), os.O_CREATE|os.O_WRONLY|os.O_TRUNC|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	s.tail.offset = 0 // it is empty now
	// The path relative to the working directory is short enough for a socket.
	cmd := exec.Command(s.command, "--cgroup-manager=cgroupfs", "--runtime="+s.runtime, "--log-level=warn",
		"system", "service", "--time=0", "unix:///proc/self/cwd/"+filepath.Base(s.own))
	cmd.Dir = filepath.Dir(s.own)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	c := &child{cmd, make(chan struct{})}
	go func() { // ends with the child, which stop kills
		_ = cmd.Wait()
		close(c.exited)
	}()
	return c, nil
}

func (s *service) logFile() string { return strings.TrimSuffix(s.own, ".sock") + ".log" }

// watch pings the service until it fails, and returns the reason.
func (s *service) watch(ctx context.Context, conn *connection) error {
	var exited chan struct{}
	if s.child != nil && conn.socket == s.own {
		exited = s.child.exited
	}
	defer s.tail.drain()
	tick := time.NewTicker(pingEvery)
	defer tick.Stop()
	for failed := 0; ; {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-exited:
			return fmt.Errorf("it ended: %v", s.child.ProcessState)
		case <-s.lost:
		case <-tick.C:
		}
		s.tail.drain()
		pctx, cancel := context.WithTimeout(ctx, pingLimit)
		err := ping(pctx, conn.client)
		cancel()
		switch {
		case err == nil:
			failed = 0
			s.set(conn, nil)
		case !errors.Is(err, context.DeadlineExceeded):
			return err
		default:
			if failed++; failed == pingTries {
				return fmt.Errorf("it hangs: %d consecutive pings timed out", failed)
			}
		}
	}
}

// stop ends the service behind the node's own socket, whether it is a child or an earlier
// node's, and kills it if it does not end in time.
func (s *service) stop() {
	var processes []*os.Process // the child, and the process that listens, which may be another
	if s.child != nil {
		processes = append(processes, s.child.Process)
		s.child = nil
	}
	if p, err := listener(s.own); err == nil && p.Pid > 0 {
		defer p.Release()
		processes = append(processes, p)
	}
	signal := func(sig syscall.Signal) (running bool) {
		for _, p := range processes {
			running = !errors.Is(p.Signal(sig), os.ErrProcessDone) || running
		}
		return running
	}
	began := time.Now()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for signal(syscall.SIGTERM); signal(0); <-tick.C {
		switch waited := time.Since(began); {
		case waited > 2*stopLimit:
			s.log.Error("failed to end the podman service", "socket", s.own)
			return
		case waited > stopLimit:
			signal(syscall.SIGKILL)
		}
	}
}

// listener returns the process that listens on the socket.
func listener(socket string) (*os.Process, error) {
	conn, err := dialUnix(context.Background(), socket)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	peer, err := peercred.Of(conn.(*net.UnixConn))
	if err != nil {
		return nil, err
	}
	return os.FindProcess(int(peer.Pid))
}

// wait returns after d or when ctx ends.
func wait(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
