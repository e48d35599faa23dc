package server

import (
	"bytes"
	"cmp"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/guest"
)

const (
	// interruptGrace is what a command gets after SIGINT until its processes are killed.
	interruptGrace = 2 * time.Second
	// killGrace is what the shell gets after that until it is killed, too.
	killGrace = 2 * time.Second
	killPause = 50 * time.Millisecond
	// A process is young for 5 ticks, 50 ms; an interrupt of one is repeated after youngPause.
	youngTicks = 5
	youngPause = 50 * time.Millisecond
	// commandName is the environment variable with the number of the command of a session
	// that started a process.
	commandName = "DOZE_COMMAND"
	// statusName is the variable of a shell with the status of a command that set -e ended.
	statusName = "DOZE_STATUS"
)

// sessionCommand is a command that a session executes. It is a program.
type sessionCommand struct {
	session *session
	number  int
	began   uint64 // in boot ticks
	shown   string
	outputs outputs
	ended   chan struct{}

	input   *os.File // the FIFO of a streamed input, which is neither read nor written by it
	unblock *os.File // ends the wait for a reader of that FIFO

	// Guarded by session.mu:
	code     int // valid once ended is closed
	signal   string
	holds    []*os.File // keep the FIFOs of the outputs open
	requests int        // of a report

	interrupts sync.WaitGroup // that other requests have sent
}

// execInSession is exec of a request with a session.
func (s *Server) execInSession(w http.ResponseWriter, r *http.Request, req guest.ExecRequest) error {
	script, err := sessionScript(req.Command)
	if err != nil {
		return err
	}
	ss, err := s.sessions.find(req.Session)
	if err != nil {
		return err
	}
	began := time.Now()
	if err := ss.acquire(r.Context(), req.Timeout); err != nil {
		return err
	}
	defer ss.release()
	c, in, err := ss.begin(script, req, s.cfg.drain)
	if err != nil {
		return err
	}
	defer c.close()
	x := &execution{program: c, outputs: c.outputs, server: s, stdin: in, endures: true, began: time.Now()}
	if req.Timeout > 0 {
		x.timeout = max(1, req.Timeout-x.began.Sub(began))
	}
	return x.respond(w, r)
}

// sessionScript returns what the shell executes.
func sessionScript(c guest.Command) (string, error) {
	switch {
	case c.Cwd != "" || len(c.Env) > 0:
		return "", refuse(guest.CodeInvalid, "a session has a working directory and an environment of its own; use cd and export in the session, without cwd and env")
	case c.Command != "" && len(c.Argv) > 0:
		return "", refuse(guest.CodeInvalid, "command and argv are both set; set one of them")
	case c.Command == "" && (len(c.Argv) == 0 || c.Argv[0] == ""):
		return "", refuse(guest.CodeInvalid, "nothing to run: set command or argv")
	case len(c.Argv) > guest.MaxArgs:
		return "", refuse(guest.CodeTooLarge, "argv has %d elements, at most %d are allowed", len(c.Argv), guest.MaxArgs)
	}
	script := c.Command
	if script == "" {
		words := make([]string, len(c.Argv))
		for i, word := range c.Argv {
			words[i] = quote(word)
		}
		script = strings.Join(words, " ")
	}
	if strings.IndexByte(script, 0) >= 0 {
		return "", refuse(guest.CodeInvalid, "an argument holds a zero byte")
	}
	return script + "\n", nil
}

// Names of the files of a command in the folder of its session.
const (
	fileScript = "script"
	fileStdin  = "stdin"
	fileStdout = "stdout"
	fileStderr = "stderr"
)

// begin has the shell execute a script, with the input of the request. The caller has
// acquired the session, and calls close.
func (ss *session) begin(script string, req guest.ExecRequest, drain time.Duration) (_ *sessionCommand, in *stdinPipe, err error) {
	ss.mu.Lock()
	ss.number++
	c := &sessionCommand{session: ss, number: ss.number, began: bootTicks(), ended: make(chan struct{}), shown: shownScript(script)}
	ss.mu.Unlock()
	defer func() {
		if err == nil {
			return
		}
		c.outputs.close()
		c.close()
		if !ss.tree.root.running() { // err may be that run has removed the folder
			<-ss.over
			err = ss.goneError()
		}
	}()
	if err = os.WriteFile(c.path(fileScript), []byte(script), 0o600); err != nil {
		return nil, nil, err
	}
	for i, name := range []string{fileStdout, fileStderr} {
		own, hold, err := newFIFO(c.path(name))
		if err != nil {
			return nil, nil, err
		}
		c.outputs[i], c.holds = &outputPipe{file: own, drain: drain}, append(c.holds, hold)
	}
	stdin := os.DevNull
	switch {
	case req.StreamStdin:
		stdin = c.path(fileStdin)
		in, err = c.newInput(stdin)
	case len(req.Stdin) > 0:
		stdin = c.path(fileStdin)
		err = os.WriteFile(stdin, req.Stdin, 0o600)
	}
	if err != nil {
		return nil, nil, err
	}
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if ss.ended {
		return nil, nil, ss.goneErrorLocked()
	}
	ss.current = c
	ss.input.WriteString(ss.commandLine(c, stdin)) // fails if the shell has just ended, which run notices
	return c, in, nil
}

// commandLine is what the shell reads to execute the command and report its status. A
// command that is interrupted is dropped with the rest of its line. bash reads the next line
// then; see session.read for sh.
func (ss *session) commandLine(c *sessionCommand, stdin string) string {
	execute, separator := shBuiltin+" .", ";"
	if ss.bash {
		execute, separator = `\.`, "\n"
	}
	return fmt.Sprintf(`%s=%d %s=;%s %s <%s >%s 2>%s%s%s`, commandName, c.number, statusName, execute,
		quote(c.path(fileScript)), quote(stdin), quote(c.path(fileStdout)), quote(c.path(fileStderr)), separator, ss.reportLine(c.number))
}

func quote(word string) string { return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'" }

func shownScript(script string) string {
	return guest.Shorten(strings.ToValidUTF8(strings.TrimSpace(script), "\uFFFD"), guest.MaxSessionCommand-len("…"))
}

// newFIFO makes a FIFO and opens it for reading. It has no end as long as hold is open.
func newFIFO(path string) (own, hold *os.File, err error) {
	if err := unix.Mkfifo(path, 0o600); err != nil {
		return nil, nil, &os.PathError{Op: "mkfifo", Path: path, Err: err}
	}
	if own, err = os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0); err != nil {
		return nil, nil, err
	}
	if hold, err = os.OpenFile(path, os.O_WRONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0); err != nil {
		own.Close()
		return nil, nil, err
	}
	return own, hold, nil
}

// newInput makes the FIFO of a streamed input. Opening it waits until the shell has opened it,
// or the command has ended.
func (c *sessionCommand) newInput(path string) (*stdinPipe, error) {
	if err := unix.Mkfifo(path, 0o600); err != nil {
		return nil, &os.PathError{Op: "mkfifo", Path: path, Err: err}
	}
	fifo, err := os.OpenFile(path, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	c.input = fifo
	self := fmt.Sprintf("/proc/self/fd/%d", fifo.Fd()) // also when the sandbox removes the path
	in := newStdinPipe(nil)
	in.open = func() (*os.File, error) { return os.OpenFile(self, os.O_WRONLY, 0) }
	return in, nil
}

func (c *sessionCommand) path(name string) string { return filepath.Join(c.session.folder, name) }

// recordEnd records how the command has ended. session.mu is held.
func (c *sessionCommand) recordEnd(code int, signal string) {
	if !c.running() {
		return
	}
	c.code, c.signal = code, signal
	c.closeHolds()
	if c.input != nil {
		c.unblock, _ = os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", c.input.Fd()), os.O_RDONLY|unix.O_NONBLOCK, 0)
	}
	close(c.ended)
}

func (c *sessionCommand) closeHolds() {
	for _, f := range c.holds {
		f.Close()
	}
	c.holds = nil
}

// close forgets the command, which has ended or was not begun.
func (c *sessionCommand) close() {
	ss := c.session
	ss.mu.Lock()
	if ss.current == c {
		ss.current = nil
	}
	ss.mu.Unlock()
	c.interrupts.Wait() // they must not reach the next command
	ss.mu.Lock()
	defer ss.mu.Unlock()
	c.closeHolds()
	for _, f := range []*os.File{c.input, c.unblock} {
		if f != nil {
			f.Close()
		}
	}
	for _, name := range []string{fileScript, fileStdin, fileStdout, fileStderr} {
		os.Remove(c.path(name))
	}
}

func (c *sessionCommand) pid() int              { return c.session.tree.root.pid }
func (c *sessionCommand) done() <-chan struct{} { return c.ended }
func (c *sessionCommand) exit() (int, string)   { return c.code, c.signal }

func (c *sessionCommand) running() bool {
	select {
	case <-c.ended:
		return false
	default:
		return true
	}
}

// kill ends the command and keeps the shell: SIGINT, and SIGKILL to the processes of the
// command that are left after interruptGrace. A shell that does not return to its prompt even
// then is killed.
func (c *sessionCommand) kill() {
	c.interrupt()
	if c.awaitEnd(interruptGrace) {
		return
	}
	for deadline := time.Now().Add(killGrace); time.Now().Before(deadline); {
		c.session.abort()
		c.deliver(syscall.SIGKILL)
		if c.awaitEnd(killPause) {
			return
		}
	}
	c.session.mu.Lock()
	c.session.view.Unresponsive = true
	c.session.mu.Unlock()
	c.session.tree.root.signal(syscall.SIGKILL, false)
	<-c.ended
	c.deliver(syscall.SIGKILL)
}

func (c *sessionCommand) awaitEnd(limit time.Duration) bool {
	select {
	case <-c.ended:
		return true
	case <-time.After(limit):
		return false
	}
}

// interrupt sends SIGINT to the shell and to the processes of the command, but not to those
// that earlier commands left in the background. The shell is notified before its children:
// it drops what it executes if it has received SIGINT when its child was ended by that.
func (c *sessionCommand) interrupt() {
	c.session.tree.root.signal(syscall.SIGINT, false)
	sent := c.deliver(syscall.SIGINT)
	// A child that was about to execute its program may have got the signal while it still
	// had the handler of the shell.
	latest := bootTicks()
	if c.awaitEnd(youngPause) {
		return
	}
	for _, p := range c.processes() {
		if !sent[p.identity] || p.start+youngTicks >= latest {
			p.signal(syscall.SIGINT)
		}
	}
}

// deliver sends a signal to all processes of the command at the same time, so that none of a pipeline
// ends because of the end of another, and returns them: it stops them first.
func (c *sessionCommand) deliver(sig syscall.Signal) map[identity]bool {
	sent := map[identity]bool{}
	processes := c.processes()
	for range stopRounds {
		moving := 0
		for _, p := range processes {
			if !sent[p.identity] {
				sent[p.identity] = true
				p.signal(syscall.SIGSTOP)
			}
			if !p.stopped {
				moving++
			}
		}
		if moving == 0 {
			break
		}
		processes = c.processes()
	}
	for _, sig := range []syscall.Signal{sig, syscall.SIGCONT} {
		for _, p := range processes {
			p.signal(sig)
		}
	}
	return sent
}

// processes are the processes that the command has started and that are alive, the oldest first.
// The shell is not one of them.
func (c *sessionCommand) processes() []proc {
	living := c.session.tree.living()
	slices.SortFunc(living, func(a, b proc) int {
		return cmp.Or(cmp.Compare(a.start, b.start), cmp.Compare(a.pid, b.pid))
	})
	known := make(map[int]proc, len(living))
	for _, p := range living {
		known[p.pid] = p
	}
	mark := strconv.AppendInt([]byte(commandName+"="), int64(c.number), 10)
	var started func(p proc, depth int) bool
	started = func(p proc, depth int) bool {
		environ := environOf(p.pid)
		if bytes.Contains(environ, []byte(commandName+"=")) {
			return hasVariable(environ, mark)
		}
		// A subshell has the environment of the shell, a program that another started may have any.
		if parent, ok := known[p.parent]; ok && p.parent != c.pid() && depth < len(living) {
			return started(parent, depth+1)
		}
		return p.start >= c.began
	}
	return slices.DeleteFunc(living, func(p proc) bool { return p.pid == c.pid() || !started(p, 0) })
}
