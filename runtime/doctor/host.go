package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Host is the machine that the checks inspect. Paths are absolute.
type Host interface {
	UID() int
	ReadFile(path string) ([]byte, error)
	Stat(path string) (fs.FileInfo, error)
	// Access returns nil if this process may use the path in the given mode, a
	// combination of unix.R_OK, unix.W_OK and unix.X_OK.
	Access(path string, mode uint32) error
	// OpenDevice opens a device for reading and writing, and closes it again.
	OpenDevice(path string) error
	// Find returns the path of a command, or fs.ErrNotExist (wrapped).
	Find(command string) (string, error)
	// Run runs a command and returns its standard output.
	Run(ctx context.Context, command string, args ...string) (string, error)
	// Listen returns nil if this process could listen on a TCP port.
	Listen(port int) error
	// Free returns how many bytes this process may still write below path, which
	// does not have to exist yet.
	Free(path string) (uint64, error)
	// OpenFiles returns the limit of this process's open descriptors.
	OpenFiles() (uint64, error)
	// SuspendSeccomp suspends the seccomp filter of a process that it starts for this:
	// PTRACE_O_SUSPEND_SECCOMP of ptrace(2), by which CRIU dumps a process with a filter.
	// The errors of the kernel are EINVAL without CONFIG_CHECKPOINT_RESTORE, and EPERM
	// without CAP_SYS_ADMIN in the initial user namespace. If the process cannot be traced at all,
	// the error is ErrUntraced (wrapped).
	SuspendSeccomp() error
}

// ErrUntraced is returned by SuspendSeccomp if it cannot trace a process, for example because of Yama's
// ptrace_scope or of a seccomp filter. The cause may be EPERM too.
var ErrUntraced = errors.New("trace a process")

// Machine is the Host that this process runs on.
type Machine struct{}

func (Machine) UID() int                              { return os.Getuid() }
func (Machine) ReadFile(path string) ([]byte, error)  { return os.ReadFile(path) }
func (Machine) Stat(path string) (fs.FileInfo, error) { return os.Stat(path) }
func (Machine) Access(path string, mode uint32) error { return unix.Access(path, mode) }

func (Machine) OpenDevice(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return f.Close()
}

// Find also searches the folders that Podman searches and that are often missing from a
// user's PATH.
func (Machine) Find(command string) (string, error) {
	for _, dir := range []string{"", "/usr/local/bin", "/usr/bin", "/usr/local/sbin", "/usr/sbin", "/usr/libexec/podman", "/usr/lib/podman"} {
		if path, err := exec.LookPath(filepath.Join(dir, command)); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("command %s: %w", command, fs.ErrNotExist)
}

func (Machine) Run(ctx context.Context, command string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, command, args...)
	cmd.WaitDelay = time.Second // a process that the command has started may have its output open
	out, err := cmd.Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		text := strings.TrimSpace(string(exit.Stderr))
		if last := text[strings.LastIndexByte(text, '\n')+1:]; last != "" {
			err = fmt.Errorf("%w: %s", err, last)
		}
	}
	return string(out), err
}

func (Machine) Listen(port int) error {
	l, err := net.Listen("tcp", ":"+strconv.Itoa(port))
	if err != nil {
		return err
	}
	return l.Close()
}

func (Machine) Free(path string) (uint64, error) {
	for {
		var st unix.Statfs_t
		err := unix.Statfs(path, &st)
		if err == nil {
			return st.Bavail * uint64(st.Bsize), nil
		}
		parent := filepath.Dir(path)
		if !errors.Is(err, unix.ENOENT) || parent == path {
			return 0, &fs.PathError{Op: "statfs", Path: path, Err: err}
		}
		path = parent
	}
}

func (Machine) OpenFiles() (uint64, error) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 0, err
	}
	return limit.Cur, nil
}

func (Machine) SuspendSeccomp() error {
	runtime.LockOSThread() // the thread that has started the process traces it
	defer runtime.UnlockOSThread()
	process, err := os.StartProcess("/proc/self/exe", nil, &os.ProcAttr{Sys: &syscall.SysProcAttr{Ptrace: true, Pdeathsig: syscall.SIGKILL}})
	if err != nil {
		return fmt.Errorf("%w: %w", ErrUntraced, err)
	}
	defer func() {
		_ = process.Kill()
		_, _ = process.Wait()
	}()
	// A traced process stops before its first instruction.
	var status unix.WaitStatus
	if _, err := unix.Wait4(process.Pid, &status, 0, nil); err != nil {
		return fmt.Errorf("%w: %w", ErrUntraced, err)
	}
	if !status.Stopped() {
		return fmt.Errorf("%w: it did not stop: status %#x", ErrUntraced, uint32(status))
	}
	return os.NewSyscallError("ptrace", unix.PtraceSetOptions(process.Pid, unix.PTRACE_O_SUSPEND_SECCOMP))
}
