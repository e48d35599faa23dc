// Package ociruntime is the OCI runtime of sandboxes: crun, in a user namespace that bounds
// each sandbox, between Podman's and the sandbox's own.
//
// The namespace in between bounds the sandbox as a whole. The kernel counts inotify
// instances, pending signals and similar resources by user and user namespace, and in
// addition in the parent namespace, for the user that created the child. The limits of a
// sandbox's own namespace apply to each of its 65,535 users separately; in the parent
// namespace, all of them count as one user.
//
// Sources: kernel/ucount.c; https://man7.org/linux/man-pages/man7/namespaces.7.html,
// "The /proc/sys/user directory".
package ociruntime

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/moby/sys/user"
	spec "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

const (
	// Name of the program as Podman calls it: doze-netns under this name is the
	// OCI runtime.
	Name = "doze-crun"
	// Annotation of a container with the path of its Quotas. A container without it is
	// not a sandbox, and crun runs it unchanged.
	Annotation = "doze.quotas"

	// bounding and holding are the names of two helper processes: one sets the quotas in
	// the parent of the sandbox's user namespace, the other keeps the sandbox's user
	// namespace until crun has joined it.
	bounding = Name + "-bounding"
	holding  = Name + "-holding"
)

// Quotas of a sandbox, all its users together.
type Quotas struct {
	// Sysctls are files of /proc/sys/user and their values. A file that the kernel lacks
	// is skipped: the kernel does not have that resource either.
	Sysctls map[string]int64 `json:"sysctls"`
	// NPROC, SIGPENDING and MSGQUEUE are resource limits; 0 means unlimited. The
	// caller's own limits apply if they are lower.
	NPROC      int64 `json:"nproc,omitempty"`
	SIGPENDING int64 `json:"sigpending,omitempty"`
	MSGQUEUE   int64 `json:"msgqueue,omitempty"`
}

// Write stores q at path atomically, for the container's next start. It does not write if the
// file already has these quotas.
func (q Quotas) Write(path string) error {
	want, err := json.Marshal(q)
	if err != nil {
		return err
	}
	if have, err := os.ReadFile(path); err == nil && string(have) == string(want) {
		return nil
	}
	return Replace(path, want, 0o600)
}

// Replace writes a file atomically.
func Replace(path string, content []byte, mode fs.FileMode) error {
	temporary := path + ".new"
	if err := os.WriteFile(temporary, content, mode); err != nil {
		return err
	}
	return os.Rename(temporary, path)
}

// readJSON reads a file of JSON into v.
func readJSON(path string, v any) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, v); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

func read(path string) (q Quotas, err error) {
	if err := readJSON(path, &q); err != nil {
		return q, err
	}
	for name := range q.Sysctls {
		if name != filepath.Base(name) {
			return q, fmt.Errorf("%s: invalid name %q", path, name)
		}
	}
	return q, nil
}

// Main runs the program with its arguments, whose first is its name, and returns its exit
// code, unless the process becomes crun.
func Main(args []string) int {
	var err error
	code := 1
	switch {
	case args[0] == bounding && len(args) == 2:
		err = bound(args[1])
	case args[0] == holding:
		_, err = io.Copy(io.Discard, os.Stdin)
	default:
		code, err = run(args[1:])
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", Name, err)
		return 1
	}
	return code
}

// run replaces the process with crun. To create a sandbox, it runs crun as a child instead,
// with a user namespace to join.
func run(args []string) (int, error) {
	path := configOf(args)
	if path == "" {
		return 1, execCrun(args)
	}
	var c config
	if err := readJSON(path, &c); err != nil {
		return 1, err
	}
	if c.Annotations[Annotation] == "" {
		return 1, execCrun(args)
	}
	quotas, err := read(c.Annotations[Annotation])
	if err != nil {
		return 1, err
	}
	namespace, release, err := namespaceWithin(task{quotas, c.Linux.UIDMappings, c.Linux.GIDMappings})
	if err != nil {
		return 1, fmt.Errorf("create the sandbox's user namespace: %w", err)
	}
	defer release()
	if err := joinNamespace(path, namespace); err != nil {
		return 1, err
	}
	program, err := findCrun()
	if err != nil {
		return 1, err
	}
	cmd := exec.Command(program, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	err = cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.Exited() {
		return exit.ExitCode(), nil // crun has printed the error
	}
	return 0, err
}

// task of the process that creates a sandbox's user namespace.
type task struct {
	Quotas Quotas
	UIDs   []syscall.SysProcIDMap
	GIDs   []syscall.SysProcIDMap
}

// namespaceWithin creates a user namespace with the quotas, and the sandbox's own inside it.
// It returns the path of the latter, which is valid until the caller calls release.
func namespaceWithin(t task) (path string, release func(), err error) {
	text, err := json.Marshal(t)
	if err != nil {
		return "", nil, err
	}
	uids, uidErr := identity("/proc/self/uid_map")
	gids, gidErr := identity("/proc/self/gid_map")
	if err := errors.Join(uidErr, gidErr); err != nil {
		return "", nil, err
	}
	cmd := inUserNamespace(uids, gids, bounding, string(text))
	hold, inErr := cmd.StdinPipe()
	output, outErr := cmd.StdoutPipe()
	if err := errors.Join(inErr, outErr); err != nil {
		return "", nil, err
	}
	if err := cmd.Start(); err != nil {
		return "", nil, err
	}
	release = func() {
		hold.Close()
		_ = cmd.Wait()
	}
	var pid int
	if _, err := fmt.Fscanln(output, &pid); err != nil {
		hold.Close()
		return "", nil, errors.Join(err, cmd.Wait())
	}
	return fmt.Sprintf("/proc/%d/ns/user", pid), release, nil
}

// bound sets the quotas, creates the sandbox's user namespace, prints the pid of a process in
// it, and waits for the end of standard input. It has all capabilities in its own user
// namespace, in which the sandbox's root has none.
func bound(text string) error {
	var t task
	if err := json.Unmarshal([]byte(text), &t); err != nil {
		return err
	}
	if err := t.Quotas.set(); err != nil {
		return fmt.Errorf("bound the sandbox: %w", err)
	}
	cmd := inUserNamespace(t.UIDs, t.GIDs, holding)
	cmd.Stdin = os.Stdin
	if err := cmd.Start(); err != nil {
		return err
	}
	fmt.Println(cmd.Process.Pid)
	return cmd.Wait()
}

// inUserNamespace returns a command that runs this program, under that name, in a new user
// namespace.
func inUserNamespace(uids, gids []syscall.SysProcIDMap, name string, args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = append([]string{name}, args...)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:                 syscall.CLONE_NEWUSER,
		UidMappings:                uids,
		GidMappings:                gids,
		GidMappingsEnableSetgroups: true,
	}
	return cmd
}

// set applies the quotas to this process's user namespace, and to those that it creates.
func (q Quotas) set() error {
	for _, name := range slices.Sorted(maps.Keys(q.Sysctls)) {
		err := os.WriteFile(filepath.Join("/proc/sys/user", name), strconv.AppendInt(nil, q.Sysctls[name], 10), 0)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	for _, limit := range []struct {
		resource int
		value    int64
	}{{unix.RLIMIT_NPROC, q.NPROC}, {unix.RLIMIT_SIGPENDING, q.SIGPENDING}, {unix.RLIMIT_MSGQUEUE, q.MSGQUEUE}} {
		if limit.value == 0 {
			continue
		}
		// The limit of the process that creates a user namespace bounds all users in it
		// together.
		var own unix.Rlimit
		if err := unix.Getrlimit(limit.resource, &own); err != nil {
			return err
		}
		n := min(uint64(limit.value), own.Max)
		if err := unix.Setrlimit(limit.resource, &unix.Rlimit{Cur: n, Max: n}); err != nil {
			return err
		}
	}
	return nil
}

// configOf returns the path of the container's configuration if args are crun's for the
// creation of a container, else "".
func configOf(args []string) string {
	create := slices.Index(args, "create")
	if create < 0 {
		return ""
	}
	bundle := "."
	for i, arg := range args[create:] {
		if value, ok := strings.CutPrefix(arg, "--bundle="); ok {
			bundle = value
		} else if (arg == "--bundle" || arg == "-b") && create+i+1 < len(args) {
			bundle = args[create+i+1]
		}
	}
	return filepath.Join(bundle, "config.json")
}

// config is the part of a container's configuration that is read.
type config struct {
	Annotations map[string]string `json:"annotations"`
	Linux       struct {
		UIDMappings []syscall.SysProcIDMap `json:"uidMappings"` // the fields have the same names
		GIDMappings []syscall.SysProcIDMap `json:"gidMappings"`
	} `json:"linux"`
}

// joinNamespace changes a container's configuration, which Podman writes before each start,
// to join an existing user namespace instead of creating one.
func joinNamespace(path, namespace string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	var container, linux map[string]json.RawMessage
	var namespaces []spec.LinuxNamespace
	if err := readJSON(path, &container); err != nil {
		return err
	}
	err = json.Unmarshal(container["linux"], &linux)
	if err == nil {
		err = json.Unmarshal(linux["namespaces"], &namespaces)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	i := slices.IndexFunc(namespaces, func(n spec.LinuxNamespace) bool { return n.Type == spec.UserNamespace })
	if i < 0 {
		return fmt.Errorf("%s: the sandbox has no user namespace", path)
	}
	namespaces[i].Path = namespace
	delete(linux, "uidMappings")
	delete(linux, "gidMappings")
	if linux["namespaces"], err = json.Marshal(namespaces); err != nil {
		return err
	}
	if container["linux"], err = json.Marshal(linux); err != nil {
		return err
	}
	text, err := json.Marshal(container)
	if err != nil {
		return err
	}
	return Replace(path, text, info.Mode().Perm())
}

// identity returns mappings of all ids of this user namespace to themselves.
func identity(file string) ([]syscall.SysProcIDMap, error) {
	mapped, err := user.ParseIDMapFile(file)
	if err != nil {
		return nil, err
	}
	list := make([]syscall.SysProcIDMap, len(mapped))
	for i, m := range mapped {
		list[i] = syscall.SysProcIDMap{ContainerID: int(m.ID), HostID: int(m.ID), Size: int(m.Count)}
	}
	return list, nil
}

// folders are those in which Podman itself searches crun. It runs its OCI runtime without
// PATH for some commands.
var folders = []string{"/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin", "/sbin", "/bin", "/run/current-system/sw/bin"}

// findCrun searches crun in PATH first, and then in folders.
func findCrun() (string, error) {
	for _, folder := range append([]string{""}, folders...) {
		if path, err := exec.LookPath(filepath.Join(folder, "crun")); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("crun is neither in PATH nor in %s", strings.Join(folders, ", "))
}

// execCrun replaces this process with crun.
func execCrun(args []string) error {
	path, err := findCrun()
	if err != nil {
		return err
	}
	err = syscall.Exec(path, append([]string{path}, args...), os.Environ())
	return fmt.Errorf("run %s: %w", path, err)
}
