//go:build integration

package e2e

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/charmbracelet/x/vt"

	"github.com/doze-run/doze/testkit"
	"github.com/doze-run/doze/testkit/testpty"
)

// screen is a terminal emulator of a person, with a command of doze on it.
type screen struct {
	t       *testing.T
	person  *os.File
	program *os.File
	cmd     *exec.Cmd
	changed chan struct{} // has an element when the screen has changed
	ended   chan error    // the result of the command

	mu       sync.Mutex
	emulator *vt.Emulator
}

// shell runs doze shell with these arguments on a terminal of 80 columns and 24 rows.
func (n *node) shell(t *testing.T, args ...string) *screen {
	t.Helper()
	person, program, err := testpty.Open(80, 24)
	if err != nil {
		t.Fatal(err)
	}
	s := &screen{t: t, person: person, program: program, cmd: n.Command(append([]string{"shell"}, args...)...), changed: make(chan struct{}, 1), ended: make(chan error, 1), emulator: vt.NewEmulator(80, 24)}
	s.cmd.Env = append(s.cmd.Env, "TERM=xterm-256color")
	if err := testpty.Start(s.cmd, program); err != nil {
		t.Fatal(err)
	}
	var emulating sync.WaitGroup
	emulating.Go(s.emulate)                              // ended by the end of the file
	emulating.Go(func() { io.Copy(person, s.emulator) }) // keys, and responses to queries of programs; ended by emulate
	emulating.Go(func() { s.ended <- s.cmd.Wait() })     // ended by the end of the command
	t.Cleanup(func() {
		s.cmd.Process.Kill() // if it has not ended
		program.Close()
		person.Close()
		emulating.Wait()
	})
	return s
}

func (s *screen) emulate() {
	defer s.emulator.InputPipe().(io.Closer).Close()
	buf := make([]byte, 4096)
	for {
		n, err := s.person.Read(buf)
		if err != nil {
			return
		}
		s.mu.Lock()
		s.emulator.Write(buf[:n])
		s.mu.Unlock()
		select {
		case s.changed <- struct{}{}:
		default:
		}
	}
}

// content is the text on the screen, without blanks at the ends of lines.
func (s *screen) content() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var text strings.Builder
	for line := range strings.Lines(s.emulator.String()) {
		text.WriteString(strings.TrimRight(line, " \n") + "\n")
	}
	return text.String()
}

// press types keys.
func (s *screen) press(keys string) {
	s.t.Helper()
	if _, err := io.WriteString(s.emulator.InputPipe(), keys); err != nil {
		s.t.Fatal(err)
	}
}

// key presses a key that has no character, such as vt.KeyUp.
func (s *screen) key(code rune) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.emulator.SendKey(vt.KeyPressEvent{Code: code})
}

// resize changes the size of the window.
func (s *screen) resize(columns, rows int) {
	s.t.Helper()
	s.mu.Lock()
	s.emulator.Resize(columns, rows)
	s.mu.Unlock()
	if err := testpty.Resize(s.program, columns, rows); err != nil {
		s.t.Fatal(err)
	}
}

// await waits until the screen is as check wants it.
func (s *screen) await(what string, check func(text string) bool) {
	s.t.Helper()
	deadline := time.After(testkit.Patience)
	for {
		text := s.content()
		if check(text) {
			return
		}
		select {
		case <-s.changed:
		case <-deadline:
			s.t.Fatalf("%s: not within %s; the screen has\n%s", what, testkit.Patience, text)
		}
	}
}

// shows waits until the screen contains the texts, which are not what was typed.
func (s *screen) shows(texts ...string) {
	s.t.Helper()
	s.await(strings.Join(texts, ", "), func(screen string) bool {
		for _, text := range texts {
			if !strings.Contains(screen, text) {
				return false
			}
		}
		return true
	})
}

// lacks waits until the screen does not contain the text.
func (s *screen) lacks(text string) {
	s.t.Helper()
	s.await("without "+text, func(screen string) bool { return !strings.Contains(screen, text) })
}

// exitCode waits for the end of doze.
func (s *screen) exitCode() int {
	s.t.Helper()
	err := testkit.Receive(s.t, "the end of doze shell", s.ended)
	exit, ok := errors.AsType[*exec.ExitError](err)
	switch {
	case ok:
		return exit.ExitCode()
	case err != nil:
		s.t.Fatal(err)
	}
	return 0
}

func (s *screen) expectExit(want int) {
	s.t.Helper()
	if got := s.exitCode(); got != want {
		s.t.Errorf("doze shell ended with %d, want %d; the screen has\n%s", got, want, s.content())
	}
}
