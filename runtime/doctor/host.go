package doctor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Host is what the checks ask. Paths are absolute.
type Host interface {
	UID() int
	ReadFile(path string) ([]byte, error)
	Stat(path string) (fs.FileInfo, error)
	// Access returns nil if this process may use the path so: unix.R_OK,
	// unix.W_OK, unix.X_OK.
	Access(path string, mode uint32) error
	// OpenDevice opens a device for reading and writing, and closes it.
	OpenDevice(path string) error
	// Find returns the path of a command; fs.ErrNotExist (wrapped) without one.
	Find(command string) (string, error)
	// Run returns what a command writes to standard output.
	Run(ctx context.Context, command string, args ...string) (string, error)
	// Listen says whether this process could listen on a TCP port.
	Listen(port int) error
	// Free is how many bytes this process may still write below path, which
	// need not exist yet.
	Free(path string) (uint64, error)
	// OpenFiles is how many descriptors this process may have at once.
	OpenFiles() (uint64, error)
}

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

// Find also looks where Podman does and where a user's PATH often does not.
func (Machine) Find(command string) (string, error) {
	if path, err := exec.LookPath(command); err == nil {
		return path, nil
	}
	for _, dir := range []string{"/usr/local/bin", "/usr/bin", "/usr/local/sbin", "/usr/sbin", "/usr/libexec/podman", "/usr/lib/podman"} {
		path := filepath.Join(dir, command)
		if unix.Access(path, unix.X_OK) == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("command %s: %w", command, fs.ErrNotExist)
}

func (Machine) Run(ctx context.Context, command string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, command, args...)
	var out, complaint bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaint
	if err := cmd.Run(); err != nil {
		lines := strings.Split(strings.TrimSpace(complaint.String()), "\n")
		if last := lines[len(lines)-1]; last != "" {
			return "", fmt.Errorf("%w: %s", err, last)
		}
		return "", err
	}
	return out.String(), nil
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
