package server

import (
	"cmp"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// reaper is the one place that waits for children. As init it takes in every
// child that the kernel hands it, orphans included; otherwise it waits only for
// children that it started, so that a test binary keeps its own.
//
// Its lock covers both the wait and every kill, so that no signal ever reaches a
// process that got the number of one which was waited for.
type reaper struct {
	init  bool
	onEnd func() // called for each process that was waited for; must be quick
	wake  chan os.Signal
	stop  chan struct{}
	done  chan struct{}

	mu       sync.Mutex
	children map[int]*child
	starts   map[*starting]bool // under way
}

// starting is a start under way. It notes how unknown children end meanwhile,
// because one of them may be the child that is not known yet. Those that ended
// before are of no interest: their numbers may be used again.
type starting struct{ ended map[int]syscall.WaitStatus }

// child is a process that the reaper started.
type child struct {
	pid  int
	done chan struct{} // closed when it was waited for; status is valid then

	reaper *reaper
	ended  bool // guarded by reaper.mu
	status syscall.WaitStatus
}

func newReaper(init bool, onEnd func()) *reaper {
	r := &reaper{
		init: init, onEnd: onEnd,
		wake: make(chan os.Signal, 1),
		stop: make(chan struct{}), done: make(chan struct{}),
		children: map[int]*child{}, starts: map[*starting]bool{},
	}
	signal.Notify(r.wake, syscall.SIGCHLD)
	go r.run() // ended by close
	return r
}

func (r *reaper) close() {
	close(r.stop)
	<-r.done
}

func (r *reaper) run() {
	defer close(r.done)
	defer signal.Stop(r.wake)
	for {
		select {
		case <-r.stop:
			return
		case <-r.wake:
			r.reap()
		}
	}
}

// alone reports whether the sandbox has no process but init: all others descend from children of
// init, which is also the parent of orphans. Without init it returns false.
func (r *reaper) alone() bool {
	return r.init && unix.Waitid(unix.P_ALL, 0, nil, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil) == unix.ECHILD
}

// start starts a program.
func (r *reaper) start(path string, argv []string, attr *syscall.ProcAttr) (*child, error) {
	begun := r.begin()
	pid, err := syscall.ForkExec(path, argv, attr)
	return r.register(begun, pid, err)
}

func (r *reaper) begin() *starting {
	r.mu.Lock()
	defer r.mu.Unlock()
	begun := &starting{ended: map[int]syscall.WaitStatus{}}
	r.starts[begun] = true
	return begun
}

// register makes the child known that a start has brought, unless it failed.
func (r *reaper) register(begun *starting, pid int, err error) (*child, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.starts, begun)
	if err != nil {
		return nil, err
	}
	c := &child{pid: pid, done: make(chan struct{}), reaper: r}
	r.children[pid] = c
	if status, ok := begun.ended[pid]; ok {
		r.ended(pid, status)
	} else if !r.init {
		r.reapOne(pid) // its SIGCHLD may have come before it was known
	}
	return c, nil
}

// reap waits for every child that has ended.
func (r *reaper) reap() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.init {
		for pid := range r.children {
			r.reapOne(pid)
		}
		return
	}
	for r.reapOne(-1) {
	}
}

// reapOne waits for the child pid, or any with -1, if it has ended. r.mu is held.
func (r *reaper) reapOne(pid int) bool {
	var status syscall.WaitStatus
	ended, err := syscall.Wait4(pid, &status, syscall.WNOHANG, nil) // without EINTR, because it does not wait
	if err != nil || ended <= 0 {
		return false
	}
	r.ended(ended, status)
	r.onEnd()
	return true
}

func (r *reaper) ended(pid int, status syscall.WaitStatus) {
	c, ok := r.children[pid]
	if !ok {
		for begun := range r.starts {
			begun.ended[pid] = status
		}
		return
	}
	delete(r.children, pid)
	c.status, c.ended = status, true
	close(c.done)
}

// signal delivers a signal to the child, or with group to the process group that
// it leads. It returns ESRCH once the child was waited for.
func (c *child) signal(sig syscall.Signal, group bool) error {
	c.reaper.mu.Lock()
	defer c.reaper.mu.Unlock()
	if c.ended {
		return syscall.ESRCH
	}
	if group {
		return syscall.Kill(-c.pid, sig)
	}
	return syscall.Kill(c.pid, sig)
}

// running reports whether the child was not reaped yet.
func (c *child) running() bool {
	c.reaper.mu.Lock()
	defer c.reaper.mu.Unlock()
	return !c.ended
}

// exitOf is what a shell would say of a wait status: the code, or 128+n and the
// name for signal n.
func exitOf(status syscall.WaitStatus) (code int, signal string) {
	if status.Signaled() {
		return 128 + int(status.Signal()), cmp.Or(unix.SignalName(status.Signal()), fmt.Sprintf("SIG%d", int(status.Signal())))
	}
	return status.ExitStatus(), ""
}
