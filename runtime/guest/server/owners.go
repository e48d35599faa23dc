package server

import (
	"bytes"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/guest"
)

const (
	// maxOwned bounds the sockets whose owners are searched at a time, and maxDescriptors the
	// descriptors that are inspected for them, a microsecond each.
	maxOwned       = 1024
	maxDescriptors = 100_000
	// maxAncestors bounds how far the parents of a process are followed.
	maxAncestors = 64
)

// owner is the process that has a socket. Its pid is 0 if that is unknown, as of another
// user's process, whose descriptors are visible to CAP_SYS_PTRACE only.
type owner struct {
	pid     int
	program string
	process string // id of the background process that it belongs to
	foreign bool   // it belongs to a command that is not a background process
}

// findPIDs finds, for each of the inodes, the first process that has the socket.
func findPIDs(owners map[uint32]owner) {
	left, links := len(owners), maxDescriptors
	for _, pid := range listPIDs() {
		if left == 0 || links <= 0 {
			return
		}
		if pid == os.Getpid() {
			continue
		}
		program := ""
		eachSocket(pid, &links, func(inode uint32) {
			o, wanted := owners[inode]
			if !wanted || o.pid != 0 {
				return
			}
			if program == "" {
				program = programOf(pid)
			}
			owners[inode] = owner{pid: pid, program: program}
			left--
		})
	}
}

// listPIDs returns the visible processes, the oldest first unless pids wrapped around.
func listPIDs() []int {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
	var pids []int
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	return pids
}

// eachSocket calls f with the inodes of a process's sockets. It inspects at most links
// descriptors, and subtracts their number.
func eachSocket(pid int, links *int, f func(inode uint32)) {
	dir, err := os.Open("/proc/" + strconv.Itoa(pid) + "/fd")
	if err != nil {
		return
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(*links)
	*links -= len(names)
	var target [64]byte
	for _, name := range names {
		n, err := unix.Readlinkat(int(dir.Fd()), name, target[:])
		if err != nil {
			continue
		}
		if inode, ok := socketInode(target[:n]); ok {
			f(inode)
		}
	}
}

// socketInode parses the target of a descriptor, which is "socket:[INODE]" for a socket.
func socketInode(target []byte) (uint32, bool) {
	digits, ok := bytes.CutPrefix(target, []byte("socket:["))
	digits, closed := bytes.CutSuffix(digits, []byte("]"))
	inode, err := strconv.ParseUint(string(digits), 10, 32)
	return uint32(inode), ok && closed && err == nil
}

// programOf returns the name that the kernel has for a process's program.
func programOf(pid int) string {
	comm, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/comm")
	name := strings.Map(func(r rune) rune {
		if r < ' ' || r == '\u007f' {
			return -1
		}
		return r
	}, strings.ToValidUTF8(string(comm), "?"))
	return name[:min(len(name), guest.MaxListenProgram)]
}

// markOf returns the mark in the environment of a process, see markName; empty without one.
func markOf(pid int) string {
	for variable := range bytes.SplitSeq(environOf(pid), []byte{0}) {
		if bytes.HasPrefix(variable, []byte(markName+"=")) {
			return string(variable)
		}
	}
	return ""
}

// owning returns the id of the background process that a process belongs to: by its mark,
// its session or its parents. foreign: it belongs to another command.
func (ps *processes) owning(pid int) (id string, foreign bool) {
	mark := markOf(pid)
	session := 0
	var line []int // the process and its parents
	for at := pid; at > 1 && len(line) < maxAncestors; {
		p, ok := readProc(at)
		if !ok {
			break
		}
		if at == pid {
			session = p.session
		}
		line, at = append(line, at), p.parent
	}
	ps.mu.Lock()
	defer ps.mu.Unlock()
	for _, p := range ps.all() {
		if p.run == nil {
			continue
		}
		t := p.run.tree
		if mark != "" && mark == string(t.mark) {
			return p.view.ID, false
		}
		if p.view.State == guest.ProcessRunning && (session == t.root.pid || slices.Contains(line, t.root.pid)) {
			return p.view.ID, false
		}
	}
	return "", mark != ""
}
