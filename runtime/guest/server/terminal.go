package server

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

const (
	maxViewers = 32
	// terminalRead is the size of one read: more than the kernel returns in one call.
	terminalRead = 16 << 10
)

// terminal is a pseudoterminal and the program that runs on it.
type terminal struct {
	tree  *tree
	pty   pty           // closed when the output has ended
	slave *os.File      // the program's end, until it has ended
	done  chan struct{} // closed when the program has ended and its output is read

	mu      sync.Mutex
	changed sync.Cond // output, the end, or a viewer that has read or left
	view    guest.Terminal
	screen  screen
	viewers map[*viewer]bool
	held    bool          // the program waits for a viewer
	waited  time.Time     // when it last did
	waiting *atomic.Int64 // how many terminals of the guest are held
	ended   bool
}

// startTerminal starts the program, in the surroundings unless they are nil. The caller calls
// run.
func (s *Server) startTerminal(in *surroundings, spec guest.TerminalSpec) (*terminal, error) {
	cmd, err := s.terminalCommand(in, spec.Command)
	if err != nil {
		return nil, err
	}
	master, slave, err := openPTY()
	if err != nil {
		return nil, refuse(guest.CodeInternal, "this sandbox has no pseudoterminals: %v", err)
	}
	t := &terminal{
		pty: master, slave: slave, done: make(chan struct{}), viewers: map[*viewer]bool{}, waiting: &s.heldTerminals,
		view: guest.Terminal{ID: spec.ID, Command: cmd.shown(guest.MaxTerminalCommand), State: guest.ProcessRunning, StartedAt: time.Now()},
	}
	t.changed.L = &t.mu
	if err = t.resize(spec.TerminalSize); err == nil {
		fd := slave.Fd()
		t.tree, err = s.startTree(cmd, []uintptr{fd, fd, fd}, &syscall.SysProcAttr{Setsid: true, Setctty: true})
	}
	if err != nil {
		master.Close()
		slave.Close()
		return nil, err
	}
	t.view.PID = t.tree.root.pid
	return t, nil
}

// terminalDefaults are variables for programs on a terminal.
var terminalDefaults = map[string]string{"TERM": "xterm-256color", "COLORTERM": "truecolor"}

// terminalCommand is commandIn with the shell as its default.
func (s *Server) terminalCommand(in *surroundings, c guest.Command) (*command, error) {
	if in != nil {
		for name, value := range terminalDefaults {
			if _, ok := lookup(in.env, name); !ok {
				in.env = append(in.env, name+"="+value)
			}
		}
	}
	c.Defaults = maps.Clone(c.Defaults)
	if c.Defaults == nil {
		c.Defaults = map[string]string{}
	}
	maps.Copy(c.Defaults, terminalDefaults)
	if c.Command != "" || len(c.Argv) > 0 {
		return s.commandIn(in, c)
	}
	cmd, _, err := s.shellCommand(in, c, []string{"bash"}, []string{shell})
	return cmd, err
}

// run reads the output of the program until its end. The slave's end stays open as long
// as the program runs, which may close it and open it again.
func (t *terminal) run() {
	defer close(t.done)
	var holding sync.WaitGroup
	holding.Go(func() {
		<-t.tree.root.done // its end hangs the terminal up for everything that it started
		t.slave.Close()
	})
	buf := make([]byte, terminalRead)
	for {
		n, err := t.pty.Read(buf)
		t.print(buf[:n])
		if err != nil {
			break // EIO: it was hung up; or stop closed it
		}
	}
	holding.Wait()
	t.mu.Lock()
	defer t.mu.Unlock()
	code, signal := exitOf(t.tree.root.status)
	now := time.Now()
	t.view.State, t.view.ExitCode, t.view.Signal, t.view.ExitedAt = guest.ProcessExited, &code, signal, &now
	t.ended = true
	t.pty.Close()
	t.changed.Broadcast()
}

// print adds output once the viewers that keep up have read what it displaces.
func (t *terminal) print(data []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for t.awaitViewers(len(data)) {
	}
	t.screen.print(data)
	t.changed.Broadcast()
}

// resize sets the size; 0 stands for the default.
func (t *terminal) resize(size guest.TerminalSize) error {
	size.Cols, size.Rows = cmp.Or(size.Cols, 80), cmp.Or(size.Rows, 24)
	if err := t.pty.resize(size); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.view.TerminalSize = size
	return nil
}

// signal signals the process group in the foreground.
func (t *terminal) signal(sig syscall.Signal) error {
	group, err := t.pty.foreground()
	if err != nil {
		return err
	}
	if group <= 1 {
		return syscall.ESRCH
	}
	return syscall.Kill(-group, sig)
}

// shown is the terminal as clients see it.
func (t *terminal) shown(closed bool) guest.Terminal {
	t.mu.Lock()
	defer t.mu.Unlock()
	view := t.view
	view.Closed = closed
	return view
}

func (t *terminal) ready() error { return nil }

func (t *terminal) outputBytes() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.screen.buf)
}

func (t *terminal) hangUp() { t.tree.hangUp() }

// stop ends the program with all that it started.
func (t *terminal) stop(grace time.Duration) {
	t.tree.stopShell(grace)
	select {
	case <-t.done:
	case <-time.After(killLimit): // a process that left the tree holds the terminal
		t.pty.Close()
		<-t.done
	}
}

// receive reads the frames of a client until the connection fails or the client violates
// the protocol.
func (t *terminal) receive(r io.Reader, keys *stdinPipe) error {
	return receiveFrames(r, func(f guest.FrameType, data []byte) error {
		switch f {
		case guest.FrameStdin:
			return keys.add(data)
		case guest.FrameResize:
			var size guest.TerminalSize
			if err := guest.DecodePayload(data, &size); err != nil {
				return err
			}
			t.resize(size) // fails once the program has ended
			return nil
		case guest.FrameSignal:
			var s guest.TerminalSignal
			if err := guest.DecodePayload(data, &s); err != nil {
				return err
			}
			sig, err := parseSignal(s.Signal)
			if err != nil {
				return err
			}
			t.signal(sig) // fails once the program has ended
			return nil
		}
		return fmt.Errorf("%w: type %d from a viewer of a terminal", guest.ErrFrame, f)
	})
}
