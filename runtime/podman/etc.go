package podman

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/doze-run/doze/runtime/netns/link"
	"github.com/doze-run/doze/runtime/podman/ociruntime"
	"github.com/doze-run/doze/runtime/sandbox"
)

// files are the node's own for what Podman would mount into a sandbox from its
// runtime folder, writable: who writes to it fills the host's /run, and
// Podman's /etc/hosts is a copy of the host's. They are mounted read-only, and
// are below the engine's RunDir, so that they outlive a reboot as containers do.
type files struct{ run string }

// containerEnv says by its existence that this is a container. Of all sandboxes.
func (f files) containerEnv() string { return filepath.Join(f.run, "containerenv") }

// resolvConf names the node as the name server. Of all sandboxes.
func (f files) resolvConf() string { return filepath.Join(f.run, "resolv.conf") }

// ociRuntime is the program that Podman runs containers with. Podman remembers this path
// for each container, which therefore is not where the program is installed.
func (f files) ociRuntime() string { return filepath.Join(f.run, ociruntime.Name) }

// quotas are read by the OCI runtime at each start.
func (f files) quotas(id sandbox.ID) string { return f.path(id, "quotas") }

func (f files) hosts(id sandbox.ID) string    { return f.path(id, "hosts") }
func (f files) hostname(id sandbox.ID) string { return f.path(id, "hostname") }

func (f files) path(id sandbox.ID, name string) string {
	return filepath.Join(f.run, "etc", string(id)+"."+name)
}

// resolvConf is the content of every sandbox's /etc/resolv.conf. The name server
// is at the other end of the sandbox's only device and answers at once or has no
// upstream that does; the C library's 5 seconds for each try would only hide that.
// Without a device the kernel refuses the question at once. The second server is the
// same one, and says of a name that is refused that there is no such name: musl waits
// for another answer when it gets REFUSED.
var resolvConf = fmt.Sprintf("nameserver %s\nnameserver %s\noptions timeout:2 attempts:2\n", link.Gateway, link.SecondServer)

// prepare makes what is of all sandboxes.
func (f files) prepare(helper string) error {
	if err := os.MkdirAll(filepath.Join(f.run, "etc"), 0o700); err != nil {
		return err
	}
	return errors.Join(
		linkTo(helper, f.ociRuntime()),
		writeReadable(f.containerEnv(), ""),
		writeReadable(f.resolvConf(), resolvConf))
}

// write makes a sandbox's files, before its container: Podman wants to see them.
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

// linkTo makes path a symbolic link to the program, or replaces it.
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

// writeReadable writes a file that sandboxes can read, whatever the umask: their
// root is another user.
func writeReadable(path, content string) error {
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		return err
	}
	return os.Chmod(path, 0o644)
}
