package server

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

const (
	// sessionStart bounds how long a shell takes to be ready.
	sessionStart = 10 * time.Second
	// reportMark encloses the reports of a shell among its prompts and messages.
	reportMark = 0x1e
	// maxReport is more than the bytes of one report.
	maxReport = 64
	// maxReportRequests bounds how often a shell is asked to report the end of one command.
	maxReportRequests = 100
)

// setUpBash makes a failed exec, and a failure under set -e, end the command and not the shell:
// an interactive bash drops what it executes when it receives SIGINT. It ignores a SIGINT that
// comes while it waits for a program, unless that ends the program; abortSignal is pending
// until then.
//
// TMOUT would end a shell that waits for its next command.
const setUpBash = `unset HISTFILE MAILCHECK TMOUT; set +H +o history -E; shopt -s execfail; ` +
	`trap 'case "$-$BASHPID" in *e*"s$$") DOZE_STATUS=$?; kill -INT $$;; esac' ERR; trap 'kill -INT $$' RTMAX` + "\n"

// shBuiltin executes the builtin that follows, whatever functions and aliases there are: unset
// precedes functions in sh, as a special builtin. An error in the builtin drops nothing of the line.
const shBuiltin = `\unset -f command;\command`

const abortSignal = syscall.Signal(64) // SIGRTMAX

// session is a shell that executes one command after the other. It is interactive, because
// SIGINT returns such a shell to its prompt; it has no terminal, and so no job control.
// It reads one line per command from a pipe: the line executes a file with the standard
// streams of the command. The output of the shell itself goes to another pipe.
type session struct {
	tree    *tree
	bash    bool
	folder  string        // of the files and FIFOs of commands
	input   *os.File      // of the shell
	control *outputPipe   // of the shell: prompts, messages and reports
	slot    chan struct{} // has an element while a command has the shell
	over    chan struct{} // closed when the shell has ended

	mu      sync.Mutex
	view    guest.Session
	waiting int             // commands
	number  int             // of the last command
	current *sessionCommand // nil while none runs
	partial []byte          // the end of what was read from control
	ended   bool
}

// sessionsFolder is in the folder of the sockets, which is writable in every sandbox.
func (s *Server) sessionsFolder() string { return filepath.Join(s.cfg.RunDir, "sessions") }

// startSession starts a shell.
func (s *Server) startSession(spec guest.SessionSpec) (*session, error) {
	cmd, bash, err := s.shellCommand(nil, spec.Command(), []string{"bash", "--norc", "--noprofile", "--noediting", "-i"}, []string{shell, "-i"})
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(s.sessionsFolder(), 0o700); err != nil {
		return nil, err
	}
	folder, err := os.MkdirTemp(s.sessionsFolder(), "")
	if err != nil {
		return nil, err
	}
	ss := &session{
		bash: bash, folder: folder, slot: make(chan struct{}, 1), over: make(chan struct{}),
		view: guest.Session{ID: spec.ID, Shell: filepath.Base(cmd.path), Cwd: guest.Shorten(cmd.dir, maxShown), State: guest.ProcessRunning, StartedAt: time.Now()},
	}
	if err := s.startShell(ss, cmd); err != nil {
		os.RemoveAll(folder)
		return nil, err
	}
	ss.view.PID = ss.tree.root.pid
	return ss, nil
}

func (s *Server) startShell(ss *session, cmd *command) error {
	input, in, err := newPipe(writeEnd)
	if err != nil {
		return err
	}
	defer syscall.Close(in)
	control, out, err := newPipe(readEnd)
	if err != nil {
		input.Close()
		return err
	}
	defer syscall.Close(out)
	ss.input, ss.control = input, &outputPipe{file: control, drain: s.cfg.drain}
	ss.tree, err = s.startTree(cmd, []uintptr{uintptr(in), uintptr(out), uintptr(out)}, &syscall.SysProcAttr{Setsid: true})
	if err != nil {
		input.Close()
		control.Close()
	}
	return err
}

// ready configures the shell, and returns when it can execute commands.
func (ss *session) ready() error {
	ready := &sessionCommand{session: ss, ended: make(chan struct{})}
	ss.mu.Lock()
	ss.current = ready
	ss.mu.Unlock()
	line := "export " + commandName + "\n" + ss.reportLine(0)
	if ss.bash {
		line = setUpBash + line
	}
	ss.input.WriteString(line) // fails if the shell has ended
	select {
	case <-ready.ended:
	case <-time.After(sessionStart):
		return refuse(guest.CodeInternal, "the shell of the session was not ready after %s", sessionStart)
	}
	ss.mu.Lock()
	defer ss.mu.Unlock()
	ss.current = nil
	if ss.ended {
		return refuse(guest.CodeNoShell, "%s of this image cannot be used: it ended with code %d", ss.view.Shell, ready.code)
	}
	return nil
}

// run reads what the shell prints until it has ended.
func (ss *session) run() {
	var holding sync.WaitGroup
	holding.Go(func() { // a process in the background may hold the pipe
		<-ss.tree.root.done
		ss.control.commandEnded()
	})
	var buf [512]byte
	ss.control.copy(buf[:], ss.read)
	holding.Wait()
	ss.control.file.Close()
	ss.input.Close()
	os.RemoveAll(ss.folder)
	ss.mu.Lock()
	defer ss.mu.Unlock()
	code, signal := exitOf(ss.tree.root.status)
	now := time.Now()
	ss.view.State, ss.view.ExitCode, ss.view.Signal, ss.view.ExitedAt = guest.ProcessExited, &code, signal, &now
	ss.ended = true
	if c := ss.current; c != nil {
		ss.view.Command = c.shown
		c.recordEnd(code, signal)
	}
	close(ss.over)
}

// read reads a part of what the shell prints.
func (ss *session) read(data []byte) error {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	ss.partial = append(ss.partial, data...)
	for {
		text, rest, found := bytes.Cut(ss.partial, []byte{reportMark})
		if !found {
			break
		}
		ss.noteReport(string(text))
		ss.partial = rest
	}
	ss.partial = bytes.Clone(ss.partial[max(0, len(ss.partial)-maxReport-1):]) // a longer text stays too long
	// A sh that was interrupted has dropped the rest of the line, and with it the report.
	// It has printed its prompt.
	if !ss.bash {
		ss.requestReport()
	}
	return nil
}

// noteReport ends the present command if the text is its report. ss.mu is held.
func (ss *session) noteReport(text string) {
	number, code, _ := strings.Cut(text, " ")
	if c := ss.current; c != nil && len(text) <= maxReport && number == strconv.Itoa(c.number) {
		if code, err := strconv.ParseUint(code, 10, 8); err == nil {
			c.recordEnd(int(code), "")
		}
	}
}

// requestReport has the shell report the end of the present command, unless it has or has not
// read the line before: requests would beget requests. ss.mu is held.
func (ss *session) requestReport() {
	c := ss.current
	if c == nil || !c.running() || c.requests >= maxReportRequests {
		return
	}
	if unread, err := pendingIn(ss.input); err == nil && unread == 0 {
		c.requests++
		ss.input.WriteString(ss.reportLine(c.number))
	}
}

// reportLine reports the status of the line before it. bash reports in the message for a file
// that cannot exist, which no function or alias of the session changes. sh would write such a
// message in parts.
func (ss *session) reportLine(number int) string {
	if ss.bash {
		return fmt.Sprintf(`! >"/dev/null/%c%d ${%s:-$?}%[1]c"`+"\n", reportMark, number, statusName)
	}
	return fmt.Sprintf(`%s=$?;%s printf '%c%d %%s%[3]c' "$%[1]s" >&2`+"\n", statusName, shBuiltin, reportMark, number)
}

// acquire waits for the shell, at most for the timeout. The caller calls release.
func (ss *session) acquire(ctx context.Context, timeout time.Duration) error {
	ss.mu.Lock()
	switch {
	case ss.ended:
		ss.mu.Unlock()
		return ss.goneError()
	case ss.waiting >= maxWaitingCommands:
		ss.mu.Unlock()
		return refuse(guest.CodeSessionBusy, "%d commands wait for the session %s already; use another session to run commands at the same time", maxWaitingCommands, ss.view.ID)
	}
	ss.waiting++
	ss.mu.Unlock()
	defer func() {
		ss.mu.Lock()
		ss.waiting--
		ss.mu.Unlock()
	}()
	var expired <-chan time.Time
	if timeout > 0 {
		expired = time.After(timeout)
	}
	select {
	case ss.slot <- struct{}{}: // in order of arrival
	case <-ss.over:
		return ss.goneError()
	case <-ctx.Done():
		return ctx.Err()
	case <-expired:
		return refuse(guest.CodeSessionBusy, "the session %s has executed other commands for %s, the timeout of this one, which did not run", ss.view.ID, timeout)
	}
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if ss.ended {
		<-ss.slot
		return ss.goneErrorLocked()
	}
	return nil
}

func (ss *session) release() { <-ss.slot }

func (ss *session) goneError() error {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	return ss.goneErrorLocked()
}

func (ss *session) goneErrorLocked() error {
	return refuse(guest.CodeSessionLost, "the session %s %s", ss.view.ID, ss.view.Ending())
}

// interrupt sends SIGINT to the present command.
func (ss *session) interrupt() {
	ss.mu.Lock()
	c := ss.current
	if c != nil {
		c.interrupts.Add(1)
	}
	ss.mu.Unlock()
	if c != nil {
		defer c.interrupts.Done()
		c.interrupt()
	}
}

// abort makes the shell drop what it executes once the program for which it waits has ended.
func (ss *session) abort() {
	if ss.bash {
		ss.tree.root.signal(abortSignal, false)
	}
	ss.tree.root.signal(syscall.SIGINT, false)
}

// stop ends the shell with all that it started.
func (ss *session) stop(grace time.Duration) {
	ss.tree.stopShell(grace)
	<-ss.over
}

// shown is the session as clients see it.
func (ss *session) shown(closed bool) guest.Session {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	view := ss.view
	view.Closed = closed
	return view
}

func (ss *session) hangUp() { ss.tree.hangUp() }

func (ss *session) outputBytes() int { return 0 } // clients get it as it is written
