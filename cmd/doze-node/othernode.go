package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/cmd/internal/home"
	"github.com/doze-run/doze/runtime/peercred"
)

// runningNode is the process of a node on this machine.
type runningNode struct {
	proc       string // its folder in /proc
	credential syscall.Credential
}

// findNode finds the node that listens on the admin socket in a folder. It returns nil
// if none does.
func findNode(folder string) *runningNode {
	conn, err := net.Dial("unix", filepath.Join(folder, "admin.sock"))
	if err != nil {
		return nil
	}
	defer conn.Close()
	peer, err := peercred.Of(conn.(*net.UnixConn))
	if err != nil {
		return nil
	}
	return &runningNode{
		proc:       filepath.Join("/proc", strconv.Itoa(int(peer.Pid))),
		credential: syscall.Credential{Uid: peer.Uid, Gid: peer.Gid},
	}
}

// runsAsOther reports whether the node runs as another user than this process.
func (n *runningNode) runsAsOther() bool { return int(n.credential.Uid) != os.Geteuid() }

// callersVariables are the caller's variables that also apply to a program in the node's
// environment.
var callersVariables = []string{"DOZE_API", "DOZE_TOKEN", "DOZE_CA", "DOZE_HTTPS_PORT", "TERM"}

// environment is the node's own, with the caller's variables about its API.
func (n *runningNode) environment(folder string, caller []string) ([]string, error) {
	text, err := os.ReadFile(filepath.Join(n.proc, "environ"))
	if err != nil {
		return nil, err
	}
	all := strings.Split(strings.TrimRight(string(text), "\x00"), "\x00")
	all = append(all, home.Variable+"="+folder)
	for _, variable := range caller {
		if name, _, _ := strings.Cut(variable, "="); slices.Contains(callersVariables, name) {
			all = append(all, variable)
		}
	}
	return all, nil // of equal names the last counts
}

// groups are the node's supplementary groups.
func (n *runningNode) groups() (groups []uint32, err error) {
	text, err := os.ReadFile(filepath.Join(n.proc, "status"))
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(text)) {
		list, ok := strings.CutPrefix(line, "Groups:")
		if !ok {
			continue
		}
		for _, field := range strings.Fields(list) {
			id, err := strconv.ParseUint(field, 10, 32)
			if err != nil {
				return nil, err
			}
			groups = append(groups, uint32(id))
		}
	}
	return groups, nil
}

// runAsNode runs the node's program as the node's user, in the node's environment and
// its mount namespace, where its cgroups are. This program may be in a folder that the
// other user cannot read. It requires root.
func (a *app) runAsNode(ctx context.Context, n *runningNode, folder string, args []string) error {
	var err error
	fail := func(err error) error { return fmt.Errorf("run as the node of %s: %w", folder, err) }
	if n.credential.Groups, err = n.groups(); err != nil {
		return fail(err)
	}
	program, err := os.Open(filepath.Join(n.proc, "exe"))
	if err != nil {
		return fail(err)
	}
	defer program.Close()
	cmd := exec.CommandContext(ctx, "/proc/self/fd/3", args...)
	cmd.ExtraFiles = []*os.File{program}
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = a.out, a.err
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &n.credential}
	if cmd.Env, err = n.environment(folder, os.Environ()); err != nil {
		return fail(err)
	}
	namespace, err := os.Open(filepath.Join(n.proc, "ns", "mnt"))
	if err != nil {
		return fail(err)
	}
	defer namespace.Close()
	// The process may have ended, and another have its number.
	var owner unix.Stat_t
	if err := unix.Stat(n.proc, &owner); err != nil || owner.Uid != n.credential.Uid {
		return fail(errors.New("it has just ended"))
	}
	if err := startInNamespace(cmd, namespace); err != nil {
		return fail(err)
	}
	err = cmd.Wait()
	if cmd.ProcessState.ExitCode() == exitFailed {
		return errReported
	}
	if err != nil {
		return fail(err)
	}
	return nil
}

// startInNamespace starts a process in a mount namespace.
func startInNamespace(cmd *exec.Cmd, namespace *os.File) error {
	started := make(chan error, 1)
	go func() {
		// The process inherits the namespace of this thread, which ends with the goroutine
		// because it is not unlocked.
		runtime.LockOSThread()
		started <- func() error {
			if err := unix.Unshare(unix.CLONE_FS); err != nil {
				return err
			}
			if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNS); err != nil {
				return err
			}
			return cmd.Start()
		}()
	}()
	return <-started
}

// checkOwner returns an error if user is root and the folder belongs to another user,
// whose node could not open files that root makes. command is for the remedy.
func checkOwner(user int, dir, command string) error {
	var info unix.Stat_t
	if user != 0 || unix.Stat(dir, &info) != nil || info.Uid == 0 {
		return nil
	}
	return fmt.Errorf("%s belongs to user %d, not to root; run this command as that user, such as by packaging/host/enter -- doze %s …", dir, info.Uid, command)
}
