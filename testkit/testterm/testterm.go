// Package testterm emulates terminals of people for tests.
package testterm

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/charmbracelet/x/vt"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/testkit"
	"github.com/doze-run/doze/testkit/testpty"
)

// Keys without a character, for Terminal.Key.
const (
	KeyUp   = vt.KeyUp
	KeyLeft = vt.KeyLeft
	KeyF5   = vt.KeyF5
)

// Terminal is a terminal with a person before it and programs on it, one after the other.
// Its methods end the test when they fail.
type Terminal struct {
	t       testing.TB
	person  *os.File
	program *os.File
	modes   unix.Termios  // before any program
	changed chan struct{} // has an element when the screen has changed
	cmd     *exec.Cmd
	ended   chan error // the result of cmd

	working sync.WaitGroup

	mu       sync.Mutex
	emulator *vt.Emulator
	screen   Screen // without its text
}

// Screen is what a terminal shows.
type Screen struct {
	Rows int
	// Alternate: it is the screen of a program that draws, and the other one is preserved.
	Alternate    bool
	CursorHidden bool
	text         string
}

// String returns the rows, without blanks at their ends, each with a newline, up to the last
// one that is not blank.
func (s Screen) String() string { return s.text }

// Row returns a row, or "" if it is blank. Row -1 is the last one that is not, and so on.
func (s Screen) Row(i int) string {
	rows := strings.Split(strings.TrimSuffix(s.text, "\n"), "\n")
	if i < 0 {
		i += len(rows)
	}
	if i < 0 || i >= len(rows) {
		return ""
	}
	return rows[i]
}

// Matches reports whether the screen matches a regular expression, whose ^ and $ match at the
// beginning and the end of rows.
func (s Screen) Matches(pattern string) bool {
	return regexp.MustCompile(`(?m)` + pattern).MatchString(s.text)
}

// New returns a Terminal. Programs on it are killed at the end of the test.
func New(t testing.TB, columns, rows int) *Terminal {
	t.Helper()
	person, program, err := testpty.Open(columns, rows)
	if err != nil {
		t.Fatal(err)
	}
	term := &Terminal{t: t, person: person, program: program, changed: make(chan struct{}, 1), emulator: vt.NewEmulator(columns, rows), screen: Screen{Rows: rows}}
	term.modes = term.currentModes()
	term.emulator.SetCallbacks(vt.Callbacks{ // called within Write
		AltScreen:        func(on bool) { term.screen.Alternate = on },
		CursorVisibility: func(visible bool) { term.screen.CursorHidden = !visible },
	})
	term.working.Go(term.emulate)                              // ended by the end of the file
	term.working.Go(func() { io.Copy(person, term.emulator) }) // keys, and responses to queries of programs; ended by emulate
	t.Cleanup(func() {
		if term.cmd != nil {
			term.cmd.Process.Kill() // if it has not ended
		}
		program.Close()
		person.Close()
		term.working.Wait()
	})
	return term
}

func (term *Terminal) emulate() {
	defer term.emulator.InputPipe().(io.Closer).Close()
	buf := make([]byte, 4096)
	for {
		n, err := term.person.Read(buf)
		if err != nil {
			return
		}
		term.mu.Lock()
		term.emulator.Write(buf[:n])
		term.mu.Unlock()
		select {
		case term.changed <- struct{}{}:
		default:
		}
	}
}

// Start starts a program. The one before has to have ended.
func (term *Terminal) Start(cmd *exec.Cmd) {
	term.t.Helper()
	if err := testpty.Start(cmd, term.program); err != nil {
		term.t.Fatal(err)
	}
	ended := make(chan error, 1)
	term.working.Go(func() { ended <- cmd.Wait() }) // ended by the end of the program
	term.cmd, term.ended = cmd, ended
}

// Signal sends a signal to the program.
func (term *Terminal) Signal(signal os.Signal) {
	term.t.Helper()
	if err := term.cmd.Process.Signal(signal); err != nil {
		term.t.Fatal(err)
	}
}

// ExitCode waits for the end of the program.
func (term *Terminal) ExitCode() int {
	term.t.Helper()
	err := testkit.Receive(term.t, "the end of the program", term.ended)
	exit, ok := errors.AsType[*exec.ExitError](err)
	switch {
	case ok:
		return exit.ExitCode()
	case err != nil:
		term.t.Fatal(err)
	}
	return 0
}

// ExpectExit waits for the end of the program, and fails the test if it has another exit code.
func (term *Terminal) ExpectExit(want int) {
	term.t.Helper()
	if got := term.ExitCode(); got != want {
		term.t.Errorf("the program ended with %d, want %d; the screen has\n%s", got, want, term.Screen())
	}
}

// ExpectRestored fails the test unless programs have restored the terminal.
func (term *Terminal) ExpectRestored() {
	term.t.Helper()
	term.ExpectModes()
	term.Await("the cursor and the screen are back", func(s Screen) bool { return !s.Alternate && !s.CursorHidden })
}

// ExpectModes fails the test unless programs have restored the modes of the line discipline.
func (term *Terminal) ExpectModes() {
	term.t.Helper()
	if modes := term.currentModes(); modes != term.modes {
		term.t.Errorf("the terminal's modes are %+v, and were %+v", modes, term.modes)
	}
}

func (term *Terminal) currentModes() unix.Termios {
	term.t.Helper()
	modes, err := unix.IoctlGetTermios(int(term.program.Fd()), unix.TCGETS)
	if err != nil {
		term.t.Fatal(err)
	}
	return *modes
}

// Press types keys.
func (term *Terminal) Press(keys string) {
	term.t.Helper()
	if _, err := io.WriteString(term.emulator.InputPipe(), keys); err != nil {
		term.t.Fatal(err)
	}
}

// Key presses a key that has no character.
func (term *Terminal) Key(code rune) {
	term.mu.Lock()
	defer term.mu.Unlock()
	term.emulator.SendKey(vt.KeyPressEvent{Code: code})
}

// Resize changes the size of the terminal's window. A program that draws has to draw all of
// its screen again.
func (term *Terminal) Resize(columns, rows int) {
	term.t.Helper()
	term.mu.Lock()
	term.emulator.Resize(columns, rows)
	term.screen.Rows = rows
	if term.screen.Alternate {
		for y := range rows {
			for x := range columns {
				term.emulator.SetCell(x, y, nil)
			}
		}
	}
	term.mu.Unlock()
	if err := testpty.Resize(term.program, columns, rows); err != nil {
		term.t.Fatal(err)
	}
}

// Screen returns what the terminal shows now.
func (term *Terminal) Screen() Screen {
	term.mu.Lock()
	defer term.mu.Unlock()
	screen := term.screen
	var text strings.Builder
	for row := range strings.Lines(term.emulator.String()) {
		text.WriteString(strings.TrimRight(row, " \n") + "\n")
	}
	if screen.text = strings.TrimRight(text.String(), "\n"); screen.text != "" {
		screen.text += "\n"
	}
	return screen
}

// Await waits until the screen is as check wants it.
func (term *Terminal) Await(what string, check func(Screen) bool) {
	term.t.Helper()
	deadline := time.After(testkit.Patience)
	for {
		screen := term.Screen()
		if check(screen) {
			return
		}
		select {
		case <-term.changed:
		case <-deadline:
			term.t.Fatalf("%s: not within %s; the screen has\n%s", what, testkit.Patience, screen)
		}
	}
}

// AwaitText waits until the screen has exactly these rows.
func (term *Terminal) AwaitText(what, want string) {
	term.t.Helper()
	term.Await(what, func(s Screen) bool { return strings.TrimSuffix(s.text, "\n") == want })
}

// Shows waits until the screen contains texts. They should not be what was typed.
func (term *Terminal) Shows(texts ...string) {
	term.t.Helper()
	term.Await(strings.Join(texts, ", "), func(s Screen) bool {
		for _, text := range texts {
			if !strings.Contains(s.text, text) {
				return false
			}
		}
		return true
	})
}

// Lacks waits until the screen does not contain a text.
func (term *Terminal) Lacks(text string) {
	term.t.Helper()
	term.Await("without "+text, func(s Screen) bool { return !strings.Contains(s.text, text) })
}
