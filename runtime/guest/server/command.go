package server

import (
	"crypto/rand"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/guest"
)

const (
	shell       = "/bin/sh"
	defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	// markName is the environment variable by which a command's descendants are
	// found after they left its process group, its session and their parents.
	markName = "DOZE_TREE"
	// oomScore makes the kernel's OOM killer prefer any command to the guest,
	// which is small but may be larger than each process of a fork bomb.
	oomScore = "300"
)

// command is a program that is ready to be started.
type command struct {
	path string
	argv []string
	env  []string
	dir  string
	mark string
	sh   bool // argv was made from a line for the shell
}

// command checks the command of a request. It starts nothing.
func (s *Server) command(req guest.Command) (*command, error) { return s.commandIn(nil, req) }

// commandIn is command with the surroundings, unless they are nil, in place of the request's
// environment and of the sandbox's working directory.
func (s *Server) commandIn(in *surroundings, req guest.Command) (*command, error) {
	c := &command{argv: req.Argv, mark: rand.Text()}
	switch {
	case req.Command != "" && len(req.Argv) > 0:
		return nil, refuse(guest.CodeInvalid, "command and argv are both set; set one of them")
	case req.Command != "":
		c.argv, c.sh = []string{shell, "-c", req.Command}, true
	case len(req.Argv) == 0 || req.Argv[0] == "":
		return nil, refuse(guest.CodeInvalid, "nothing to run: set command or argv")
	case len(req.Argv) > guest.MaxArgs:
		return nil, refuse(guest.CodeTooLarge, "argv has %d elements, at most %d are allowed", len(req.Argv), guest.MaxArgs)
	}
	for _, arg := range c.argv {
		if strings.IndexByte(arg, 0) >= 0 {
			return nil, refuse(guest.CodeInvalid, "an argument holds a zero byte")
		}
	}
	var err error
	if in != nil {
		c.env = append([]string{markName + "=" + c.mark}, in.env...)
	} else if c.env, err = s.environment(req, c.mark); err != nil {
		return nil, err
	}
	if in != nil && req.Cwd == "" {
		c.dir = in.dir
	} else if c.dir, err = s.folder(req.Cwd); err != nil {
		return nil, err
	}
	c.path = c.argv[0]
	if !strings.Contains(c.path, "/") {
		path, _ := lookup(c.env, "PATH")
		if c.path, err = find(c.path, path, c.dir); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// shellCommand is commandIn with a program of its own: bash, or sh in an image without bash.
func (s *Server) shellCommand(in *surroundings, c guest.Command, bash, sh []string) (cmd *command, isBash bool, err error) {
	c.Argv = bash
	cmd, err = s.commandIn(in, c)
	if e, ok := errors.AsType[*guest.Error](err); !ok || e.Code != guest.CodeNoCommand && e.Code != guest.CodeNotExecutable {
		return cmd, true, err
	}
	c.Argv = sh
	if cmd, err = s.commandIn(in, c); err == nil {
		cmd.sh = true
	}
	return cmd, false, err
}

// folder returns the working directory of a command.
func (s *Server) folder(cwd string) (string, error) {
	if cwd == "" {
		cwd = s.cfg.Workdir
	} else if !filepath.IsAbs(cwd) {
		return "", refuse(guest.CodeInvalid, "cwd %q is relative; give an absolute path", cwd)
	}
	dir, err := s.path(cwd)
	if err != nil {
		return "", err
	}
	var st unix.Stat_t
	switch err := unix.Stat(dir, &st); {
	case errors.Is(err, unix.ENOENT):
		return "", refuse(guest.CodeNotFound, "cwd %q does not exist", cwd)
	case err != nil:
		return "", refuse(codeOf(err), "cwd %q: %v", cwd, err)
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return "", refuse(guest.CodeNotDirectory, "cwd %q is not a folder", cwd)
	}
	return dir, nil
}

// environment returns, in order of precedence, the request's variables, its changes to the
// sandbox's, the sandbox's, the request's defaults, and the variables that name the node's CAs.
// The mark comes first, where it is found fastest.
func (s *Server) environment(req guest.Command, mark string) ([]string, error) {
	trust := s.trust.last.Load().variables
	env := make([]string, 1, 1+len(s.cfg.Env)+len(req.Env)+len(req.Changes)+len(req.Defaults)+len(trust))
	env[0] = markName + "=" + mark
	add := func(name, value string) error {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.IndexByte(value, 0) >= 0 {
			return refuse(guest.CodeInvalid, "env %q is unusable: a name has no \"=\", and neither name nor value a zero byte", name)
		}
		if name != markName {
			env = append(env, name+"="+value)
		}
		return nil
	}
	for _, kv := range s.cfg.Env {
		name, _, _ := strings.Cut(kv, "=")
		_, replaced := req.Env[name]
		_, changed := req.Changes[name]
		if !replaced && !changed && name != markName {
			env = append(env, kv)
		}
	}
	for name, value := range req.Env {
		if err := add(name, value); err != nil {
			return nil, err
		}
	}
	for name, value := range req.Changes {
		if _, replaced := req.Env[name]; replaced || value == nil {
			continue
		}
		if err := add(name, *value); err != nil {
			return nil, err
		}
	}
	for _, layer := range []map[string]string{req.Defaults, trust} {
		for name, value := range layer {
			if _, ok := lookup(env, name); ok {
				continue
			}
			if err := add(name, value); err != nil {
				return nil, err
			}
		}
	}
	return env, nil
}

// lookup finds a variable in an environment.
func lookup(env []string, name string) (string, bool) {
	for _, kv := range env {
		if value, ok := strings.CutPrefix(kv, name); ok && strings.HasPrefix(value, "=") {
			return value[1:], true
		}
	}
	return "", false
}

// find searches the folders of path for a program, as execvp does.
func find(name, path, dir string) (string, error) {
	var denied string
	for _, folder := range filepath.SplitList(path) {
		if !filepath.IsAbs(folder) {
			folder = filepath.Join(dir, folder)
		}
		full := filepath.Join(folder, name)
		var st unix.Stat_t
		if unix.Stat(full, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
			continue
		}
		if st.Mode&0o111 != 0 {
			return full, nil
		}
		denied = full
	}
	if denied != "" {
		return "", refuse(guest.CodeNotExecutable, "%s is not executable", denied)
	}
	return "", refuse(guest.CodeNoCommand, "%q was not found in PATH (%s)", name, path)
}

// running is a command that was started, with our ends of its outputs.
type running struct {
	tree *tree
	outputs
}

// start starts the command with a standard input, which stays the caller's to close.
func (s *Server) start(c *command, in *os.File) (*running, error) {
	run := &running{}
	files := []uintptr{in.Fd()}
	for i := range run.outputs {
		file, fd, err := newPipe(readEnd)
		if err != nil {
			run.close()
			return nil, err
		}
		defer syscall.Close(fd)
		run.outputs[i], files = &outputPipe{file: file, drain: s.cfg.drain}, append(files, uintptr(fd))
	}
	var err error
	if run.tree, err = s.startTree(c, files, &syscall.SysProcAttr{Setsid: true}); err != nil {
		run.close()
		return nil, err
	}
	return run, nil
}

// startTree starts the command with the files as its own.
func (s *Server) startTree(c *command, files []uintptr, attr *syscall.SysProcAttr) (*tree, error) {
	root, err := s.reaper.start(c.path, c.argv, &syscall.ProcAttr{Dir: c.dir, Env: c.env, Files: files, Sys: attr})
	if err != nil {
		return nil, c.explain(err)
	}
	if s.cfg.Init {
		preferForOOM(root.pid)
	}
	s.ports.kick()
	return &tree{root: root, mark: []byte(markName + "=" + c.mark)}, nil
}

// wait waits for the command itself and then begins to drain its outputs.
func (r *running) wait() {
	<-r.tree.root.done
	r.commandEnded()
}

// explain returns the refusal for a program that could not be started.
func (c *command) explain(err error) error {
	var errno syscall.Errno
	errors.As(err, &errno)
	switch errno {
	case syscall.ENOENT, syscall.ENOTDIR:
		if c.sh {
			return refuse(guest.CodeNoShell, "this image has no %s; give the program and its arguments as argv", shell)
		}
		path := c.path // as the kernel sees it after chdir
		if !filepath.IsAbs(path) {
			path = filepath.Join(c.dir, path)
		}
		if _, statErr := os.Stat(path); statErr == nil {
			return refuse(guest.CodeNotExecutable, "%s exists, but the interpreter or loader that it names does not", c.path)
		}
		return refuse(guest.CodeNoCommand, "%s does not exist", c.path)
	case syscall.ENOEXEC:
		return refuse(guest.CodeNotExecutable, "%s is not a program for this machine and has no #! line", c.path)
	case syscall.EACCES, syscall.EPERM:
		return refuse(guest.CodeNotExecutable, "%s may not be executed", c.path)
	case syscall.E2BIG:
		return refuse(guest.CodeTooLarge, "arguments and environment are too large")
	case syscall.EAGAIN:
		return refuse(guest.CodeTooMany, "the sandbox has as many processes as it may have")
	}
	return refuse(guest.CodeInternal, "start %s: %v", c.path, err)
}

// shown is the command in at most n bytes.
func (c *command) shown(n int) string {
	words := c.argv
	if c.sh && len(words) > 2 {
		words = words[2:] // after sh -c
	}
	return guest.Shorten(strings.ToValidUTF8(strings.Join(words, " "), "\uFFFD"), n-len("…"))
}

func preferForOOM(pid int) {
	fd, err := unix.Open("/proc/"+strconv.Itoa(pid)+"/oom_score_adj", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return // it has ended
	}
	unix.Write(fd, []byte(oomScore))
	unix.Close(fd)
}

// stdin returns a file with the input of a command: the null device without input, otherwise
// a file in memory, which needs no goroutine to feed a pipe.
func stdin(data []byte) (*os.File, error) {
	if len(data) == 0 {
		if f, err := os.Open(os.DevNull); err == nil {
			return f, nil
		}
	}
	fd, err := unix.MemfdCreate("stdin", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	f := os.NewFile(uintptr(fd), "stdin")
	if _, err := f.WriteAt(data, 0); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}
