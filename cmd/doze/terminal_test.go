package main

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/testkit"
	"github.com/doze-run/doze/testkit/testpty"
)

// terminal is a pseudo-terminal with what a person would see on it.
type terminal struct {
	t           *testing.T
	keyboard    *os.File // our side
	tty         *os.File // the program's side
	was         unix.Termios
	mu          sync.Mutex
	screen      *screen
	changed     chan struct{} // has something when the screen changed
	interpreted chan struct{} // closed when nothing more comes
}

func newTerminal(t *testing.T, columns, rows int) *terminal {
	t.Helper()
	keyboard, tty, err := testpty.Open(columns, rows)
	if err != nil {
		t.Fatal(err)
	}
	term := &terminal{t: t, keyboard: keyboard, tty: tty, screen: newScreen(columns, rows), changed: make(chan struct{}, 1), interpreted: make(chan struct{})}
	term.was = term.modes()
	go term.interpret() // ends when keyboard is closed
	t.Cleanup(func() {
		tty.Close()
		keyboard.Close()
		<-term.interpreted
	})
	return term
}

// resize changes the size of the terminal, as the edge of its window does. The program
// redraws it.
func (term *terminal) resize(columns, rows int) {
	term.t.Helper()
	term.mu.Lock()
	term.screen.resize(columns, rows)
	clear(term.screen.lines)
	term.mu.Unlock()
	if err := testpty.Resize(term.tty, columns, rows); err != nil {
		term.t.Fatal(err)
	}
}

func (term *terminal) modes() unix.Termios {
	term.t.Helper()
	modes, err := unix.IoctlGetTermios(int(term.tty.Fd()), unix.TCGETS)
	if err != nil {
		term.t.Fatal(err)
	}
	return *modes
}

func (term *terminal) interpret() {
	defer close(term.interpreted)
	buf := make([]byte, 4096)
	for {
		n, err := term.keyboard.Read(buf)
		if err != nil {
			return
		}
		term.mu.Lock()
		term.screen.write(buf[:n])
		term.mu.Unlock()
		select {
		case term.changed <- struct{}{}:
		default:
		}
	}
}

// start runs a command line on the terminal.
func (term *terminal) start(r *rig, args ...string) *exec.Cmd {
	term.t.Helper()
	cmd := r.program(args...)
	if err := testpty.Start(cmd, term.tty); err != nil {
		term.t.Fatal(err)
	}
	return cmd
}

func (term *terminal) press(keys string) {
	term.t.Helper()
	if _, err := io.WriteString(term.keyboard, keys); err != nil {
		term.t.Fatal(err)
	}
}

// await waits until the screen is as check wants it.
func (term *terminal) await(what string, check func(*screen) bool) {
	term.t.Helper()
	deadline := time.After(testkit.Patience)
	for {
		term.mu.Lock()
		ok, shown := check(term.screen), term.screen.String()
		term.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-term.changed:
		case <-deadline:
			term.t.Fatalf("%s: not within %s; the screen has\n%s", what, testkit.Patience, shown)
		}
	}
}

// awaitText waits until the screen is exactly this.
func (term *terminal) awaitText(what, want string) {
	term.t.Helper()
	term.await(what, func(s *screen) bool { return s.String() == want })
}

// expectRestored fails unless a program has restored the terminal.
func (term *terminal) expectRestored() {
	term.t.Helper()
	if modes := term.modes(); modes != term.was {
		term.t.Errorf("the terminal's modes are %+v, and were %+v", modes, term.was)
	}
	term.await("the cursor and the screen are back", func(s *screen) bool { return !s.other && !s.hidden })
	term.mu.Lock()
	defer term.mu.Unlock()
	for _, sequence := range term.screen.unknown {
		term.t.Errorf("the program wrote %q, which the model of a screen does not know", sequence)
	}
}

// screen is what a terminal shows, for the few escape sequences that doze writes.
type screen struct {
	columns, rows int
	lines         [][]rune
	x, y          int
	hidden        bool // the cursor
	other         bool // the alternate screen is shown
	main          [][]rune
	mainX, mainY  int
	partial       []byte   // the start of a sequence
	unknown       []string // sequences that are none of the few
}

func newScreen(columns, rows int) *screen {
	return &screen{columns: columns, rows: rows, lines: make([][]rune, rows)}
}

// resize cuts lines off or adds some, below and at the right.
func (s *screen) resize(columns, rows int) {
	s.columns, s.rows = columns, rows
	lines := make([][]rune, rows)
	copy(lines, s.lines)
	for i := range lines {
		lines[i] = lines[i][:min(len(lines[i]), columns)]
	}
	s.lines, s.x, s.y = lines, min(s.x, columns-1), min(s.y, rows-1)
}

// String is the text without blanks at the end of lines and blank lines at the end.
func (s *screen) String() string {
	var text []string
	for _, line := range s.lines {
		text = append(text, strings.TrimRight(string(line), " "))
	}
	return strings.TrimRight(strings.Join(text, "\n"), "\n")
}

func (s *screen) line(i int) string {
	lines := strings.Split(s.String(), "\n")
	if i < 0 {
		i += len(lines)
	}
	if i < 0 || i >= len(lines) {
		return ""
	}
	return lines[i]
}

func (s *screen) write(b []byte) {
	b = append(s.partial, b...)
	for len(b) > 0 {
		n := s.one(b)
		if n == 0 {
			break
		}
		b = b[n:]
	}
	s.partial = bytes.Clone(b)
}

// one interprets one character or sequence and returns its length, or 0 when it
// is not all there.
func (s *screen) one(b []byte) int {
	switch b[0] {
	case '\r':
		s.x = 0
		return 1
	case '\n':
		s.newline()
		return 1
	case 0x1b:
		return s.escape(b)
	}
	if !utf8.FullRune(b) {
		return 0
	}
	r, n := utf8.DecodeRune(b)
	if r < ' ' || r >= 0x7f && r < 0xa0 || r == utf8.RuneError {
		s.unknown = append(s.unknown, string(b[:n]))
		return n
	}
	if s.x == s.columns {
		s.x = 0
		s.newline()
	}
	line := s.lines[s.y]
	for len(line) <= s.x {
		line = append(line, ' ')
	}
	line[s.x] = r
	s.lines[s.y] = line
	s.x++
	return n
}

func (s *screen) newline() {
	if s.y++; s.y == s.rows {
		s.y--
		s.lines = append(s.lines[1:], nil)
	}
}

// eraseLine erases the cursor's cell and all to its right. Behind a full line the
// cursor stands in the last cell.
func (s *screen) eraseLine() {
	s.lines[s.y] = s.lines[s.y][:min(s.x, s.columns-1, len(s.lines[s.y]))]
}

func (s *screen) escape(b []byte) int {
	for _, known := range []struct {
		sequence string
		do       func()
	}{
		{"\x1b[H", func() { s.x, s.y = 0, 0 }},
		{"\x1b[K", s.eraseLine},
		{"\x1b[0m", func() {}},
		{"\x1b[J", func() {
			s.eraseLine()
			clear(s.lines[s.y+1:])
		}},
		{"\x1b[?25h", func() { s.hidden = false }},
		{"\x1b[?25l", func() { s.hidden = true }},
		{"\x1b[?1049h", func() {
			s.other, s.main, s.mainX, s.mainY = true, s.lines, s.x, s.y
			s.lines, s.x, s.y = make([][]rune, s.rows), 0, 0
		}},
		{"\x1b[?1049l", func() {
			s.other, s.lines, s.x, s.y = false, s.main, s.mainX, s.mainY
			s.resize(s.columns, s.rows)
		}},
	} {
		if bytes.HasPrefix(b, []byte(known.sequence)) {
			known.do()
			return len(known.sequence)
		}
		if strings.HasPrefix(known.sequence, string(b)) {
			return 0
		}
	}
	s.unknown = append(s.unknown, string(b[:min(len(b), 8)]))
	return 1
}
