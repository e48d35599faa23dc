package server

import (
	"bytes"
	"io"
	"os"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// killLimit bounds how long a tree is hunted. One that outlives it forks
	// faster than this process gets to run, or hangs in the kernel.
	killLimit = 10 * time.Second
	// stopRounds bounds how often a tree is listed until all of it is stopped, about a
	// millisecond each: each round stops the members that it finds, so trees that can be
	// stopped at all are stopped after a few.
	stopRounds = 32
	// hangUpGrace is more than a shell that runs no command takes to end.
	hangUpGrace = 500 * time.Millisecond
	// pollPause is the pause between two lists of processes that are ending.
	pollPause = 2 * time.Millisecond
	// maxEnviron bounds what is read of a process's environment.
	maxEnviron = 1 << 20
)

// tree is a command and everything that it started, directly or not.
type tree struct {
	root *child
	mark []byte // NAME=value in the environment of its members

	mu sync.Mutex
	// known are the members that were found before. A member with neither mark nor
	// session is found by its parents only, and not after they have ended.
	known map[identity]bool
}

func (t *tree) pid() int              { return t.root.pid }
func (t *tree) done() <-chan struct{} { return t.root.done }
func (t *tree) running() bool         { return t.root.running() }
func (t *tree) exit() (int, string)   { return exitOf(t.root.status) }

// halt stops every member and returns them. A stopped member cannot fork, or end and leave
// a child that only its parents identify, while others are searched. The process group of
// the root, where most of them are, is stopped first by one signal.
func (t *tree) halt() []proc {
	deadline := time.Now().Add(killLimit)
	t.root.signal(syscall.SIGSTOP, true)
	stopped := map[identity]bool{}
	for round := 1; ; round++ {
		members, moving := t.living(), 0
		for _, p := range members {
			if !stopped[p.identity] {
				stopped[p.identity] = true
				p.signal(syscall.SIGSTOP)
			}
			if !p.stopped {
				moving++
			}
		}
		if moving == 0 || round == stopRounds || time.Now().After(deadline) {
			return members
		}
	}
}

// kill ends the whole tree.
func (t *tree) kill() {
	deadline := time.Now().Add(killLimit)
	t.halt()
	t.root.signal(syscall.SIGKILL, true)
	for {
		members := t.living()
		for _, p := range members {
			p.signal(syscall.SIGKILL)
		}
		if len(members) == 0 && !t.root.running() || time.Now().After(deadline) {
			return
		}
		t.pause(pollPause)
	}
}

// stop sends SIGTERM to the tree and kills the members that are left after grace.
func (t *tree) stop(grace time.Duration) {
	deadline := time.Now().Add(grace)
	if grace > 0 {
		members := t.halt()
		for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGCONT} { // stopped, they receive nothing
			for _, p := range members {
				p.signal(sig)
			}
		}
		for wait := pollPause; ; wait = min(2*wait, 50*time.Millisecond) {
			left := time.Until(deadline)
			if left <= 0 {
				break
			}
			if !t.root.running() && len(t.living()) == 0 {
				return
			}
			t.pause(min(wait, left))
		}
	}
	t.kill()
}

// stopShell is stop for a tree whose root may be a shell, which ignores SIGTERM.
func (t *tree) stopShell(grace time.Duration) {
	if grace > 0 {
		t.hangUp()
		t.pause(min(grace, hangUpGrace))
	}
	t.stop(grace)
}

// hangUp sends SIGHUP to the root, by which shells end.
func (t *tree) hangUp() {
	t.root.signal(syscall.SIGHUP, false)
	t.root.signal(syscall.SIGCONT, false)
}

// pause waits for d, or until the root ends if it still runs.
func (t *tree) pause(d time.Duration) {
	done := t.root.done
	if !t.root.running() {
		done = nil
	}
	select {
	case <-done:
	case <-time.After(d):
	}
}

// identity distinguishes a process from a later one with the same number.
type identity struct {
	pid   int
	start uint64 // clock ticks after boot
}

// bootTicks is the time since the boot in the unit of identity.start.
func bootTicks() uint64 {
	var ts unix.Timespec
	unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts)
	return uint64(ts.Nano()) / uint64(time.Second/userHZ)
}

// userHZ is the number of ticks per second in /proc, on every architecture of Linux that Go
// supports.
const userHZ = 100

// proc is a process as /proc/<pid>/stat shows it.
type proc struct {
	identity
	parent  int
	session int
	dead    bool
	stopped bool // by a signal or a debugger
}

// living finds the living members of the tree, including the root: processes with its
// mark or in its session, members that were found before, and their descendants.
func (t *tree) living() []proc {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := listProcs()
	rootRuns := t.root.running()
	in := make(map[int]bool, 8)
	for _, p := range all {
		if p.dead || p.pid == 1 || p.pid == os.Getpid() {
			continue
		}
		if rootRuns && p.pid == t.root.pid {
			in[p.pid] = true
			continue
		}
		// Once the root is gone its number may name a stranger's session, but
		// every stranger that the guest started carries a mark of its own.
		ours, marked := t.marked(p.pid)
		in[p.pid] = ours || t.known[p.identity] || p.session == t.root.pid && (rootRuns || !marked)
	}
	for grew := true; grew; {
		grew = false
		for _, p := range all {
			if !in[p.pid] && in[p.parent] {
				in[p.pid], grew = true, true
			}
		}
	}
	var found []proc
	t.known = make(map[identity]bool, len(t.known))
	for _, p := range all {
		if in[p.pid] && !p.dead {
			found = append(found, p)
			t.known[p.identity] = true
		}
	}
	return found
}

// marked reports whether the process has this tree's mark, and whether it has any.
func (t *tree) marked(pid int) (ours, any bool) {
	environ := environOf(pid)
	return hasVariable(environ, t.mark), bytes.Contains(environ, []byte(markName+"="))
}

// environOf returns the environment that a process was started with, if it can be read.
func environOf(pid int) []byte {
	f, err := os.Open("/proc/" + strconv.Itoa(pid) + "/environ")
	if err != nil {
		return nil
	}
	defer f.Close()
	environ, _ := io.ReadAll(io.LimitReader(f, maxEnviron))
	return environ
}

// hasVariable reports whether an environment, as the kernel shows it, has kv.
func hasVariable(environ, kv []byte) bool {
	zero := []byte{0}
	return bytes.Contains(slices.Concat(zero, environ, zero), slices.Concat(zero, kv, zero))
}

// listProcs reads the state of every process that is visible.
func listProcs() []proc {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
	procs := make([]proc, 0, len(names))
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		if p, ok := readProc(pid); ok {
			procs = append(procs, p)
		}
	}
	return procs
}

// readProc reads the state of one process.
func readProc(pid int) (proc, bool) {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return proc{}, false
	}
	return parseStat(pid, stat)
}

// parseStat parses /proc/<pid>/stat. The name in it may hold anything, so fields
// are counted from its closing parenthesis.
func parseStat(pid int, stat []byte) (proc, bool) {
	i := bytes.LastIndexByte(stat, ')')
	if i < 0 {
		return proc{}, false
	}
	f := bytes.Fields(stat[i+1:])
	if len(f) < 20 {
		return proc{}, false
	}
	state, threads := f[0][0], string(f[17])
	p := proc{identity: identity{pid: pid}}
	// The first thread may be a zombie while others go on.
	p.dead = state == 'X' || state == 'Z' && (threads == "0" || threads == "1")
	p.stopped = state == 'T' || state == 't'
	p.parent, _ = strconv.Atoi(string(f[1]))
	p.session, _ = strconv.Atoi(string(f[3]))
	var err error
	p.start, err = strconv.ParseUint(string(f[19]), 10, 64)
	return p, err == nil
}

// signal delivers a signal to exactly this process: a pidfd pins it while its
// identity is checked.
func (p proc) signal(sig syscall.Signal) {
	fd, err := unix.PidfdOpen(p.pid, 0)
	if err != nil {
		return // it has ended
	}
	defer unix.Close(fd)
	if now, ok := readProc(p.pid); ok && now.identity == p.identity {
		unix.PidfdSendSignal(fd, sig, nil, 0)
	}
}
