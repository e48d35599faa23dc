package podman

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/doze-run/doze/internal/durable"
	"github.com/doze-run/doze/runtime/netns/link"
	"github.com/doze-run/doze/runtime/podman/ociruntime"
	"github.com/doze-run/doze/runtime/sandbox"
)

// files are the node's replacements for files that Podman would mount into a sandbox from
// its runtime folder, writable: writing to them would fill the host's /run, and Podman's
// /etc/hosts is a copy of the host's. The node's are mounted read-only. They are below the
// engine's RunDir, so that they survive a reboot like containers.
type files struct{ run string }

// containerEnv is the path of a file whose existence marks a container; all sandboxes share
// it.
func (f files) containerEnv() string { return filepath.Join(f.run, "containerenv") }

// resolvConf is the path of /etc/resolv.conf, with the node as name server; all sandboxes
// share it.
func (f files) resolvConf() string { return filepath.Join(f.run, "resolv.conf") }

// ociRuntime is the path of the OCI runtime. Podman stores it for each container, so it is
// a link, which remains valid if the program is installed elsewhere.
func (f files) ociRuntime() string { return filepath.Join(f.run, ociruntime.Name) }

// quotas is the path of a sandbox's quotas, which the OCI runtime reads at each start.
func (f files) quotas(id sandbox.ID) string { return f.path(id, "quotas") }

func (f files) hosts(id sandbox.ID) string    { return f.path(id, "hosts") }
func (f files) hostname(id sandbox.ID) string { return f.path(id, "hostname") }

func (f files) path(id sandbox.ID, name string) string {
	return filepath.Join(f.run, "etc", string(id)+"."+name)
}

// resolvConf is the content of every sandbox's /etc/resolv.conf. The name server is at the
// other end of the sandbox's only device and responds immediately unless its upstreams do
// not; the C library's 5 seconds for each try would only hide that. Without a device the
// kernel refuses the query immediately. The second server is the same one, but returns
// NXDOMAIN for a refused name, because musl waits for another answer after REFUSED.
var resolvConf = fmt.Sprintf("nameserver %s\nnameserver %s\noptions timeout:2 attempts:2\n", link.Gateway, link.SecondServer)

// prepare creates the files that all sandboxes share.
func (f files) prepare(helper string) error {
	if err := os.MkdirAll(filepath.Join(f.run, "etc"), 0o700); err != nil {
		return err
	}
	return errors.Join(
		linkTo(helper, f.ociRuntime()),
		writeReadable(f.containerEnv(), ""),
		writeReadable(f.resolvConf(), resolvConf))
}

// write creates a sandbox's files. It must be called before the creation of the container,
// because Podman checks that they exist.
func (f files) write(id sandbox.ID, hostname string) error {
	return errors.Join(
		writeReadable(f.hosts(id), fmt.Sprintf("127.0.0.1 localhost %s\n::1 localhost\n", hostname)),
		writeReadable(f.hostname(id), hostname+"\n"))
}

// remove removes a sandbox's files. Idempotent.
func (f files) remove(id sandbox.ID) error {
	var errs []error
	for _, path := range []string{f.hosts(id), f.hostname(id), f.quotas(id)} {
		if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// linkTo atomically makes path a symbolic link to the program.
func linkTo(program, path string) error {
	program, err := filepath.Abs(program)
	if err != nil {
		return err
	}
	temporary := path + ".new" // a container may start meanwhile
	if err := os.Remove(temporary); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Symlink(program, temporary); err != nil {
		return err
	}
	return os.Rename(temporary, path)
}

// writeReadable writes a file that sandboxes can read regardless of the umask: their root is
// another user. It does not write to a file that has the content: it is mounted in sandboxes that run,
// and on a full disk they would be left an empty one. The file is durable, because containers that have it are.
func writeReadable(path, content string) error {
	if have, err := os.ReadFile(path); err != nil || string(have) != content {
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			return err
		}
	}
	return errors.Join(os.Chmod(path, 0o644), durable.Sync(path), durable.Sync(filepath.Dir(path)))
}
