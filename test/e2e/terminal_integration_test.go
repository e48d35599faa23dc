//go:build integration

package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/test/testnode"
	"github.com/doze-run/doze/testkit"
	"github.com/doze-run/doze/testkit/testterm"
)

// shell runs doze shell with these arguments on a terminal of 80 columns and 24 rows.
func (n *node) shell(t *testing.T, args ...string) *testterm.Terminal {
	t.Helper()
	cmd := n.Command(append([]string{"shell"}, args...)...)
	cmd.Env = append(cmd.Env, "TERM=xterm-256color")
	term := testterm.New(t, 80, 24)
	term.Start(cmd)
	return term
}

func TestShellRunsProgramsOfTerminals(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	// open opens a shell with a short prompt.
	open := func(t *testing.T) *testterm.Terminal {
		s := n.shell(t, b.id, "--", "PS1='$ ' LC_ALL=C.UTF-8 bash --norc")
		s.Shows("$")
		return s
	}

	t.Run("NoCommand", func(t *testing.T) { // the shell of the image, with its prompt
		s := n.shell(t, b.id)
		s.Await("the prompt", func(screen testterm.Screen) bool { return strings.HasSuffix(screen.Row(-1), "#") })
		s.Press("echo $((6 * 7)) $0\r")
		s.Shows("\n42 ")
		s.Press("exit 3\r")
		s.ExpectExit(3)
	})

	t.Run("vi", func(t *testing.T) {
		s := open(t)
		s.Press("vi /tmp/poem\r")
		s.Shows("~\n~\n~")
		s.Press("ione\rtwo\rgrüße 世界 😀\x1b")
		s.Press("ggyyGp") // copies the first line after the last one
		s.Shows("one\ntwo\ngrüße 世界 😀\none\n~")
		s.Resize(100, 30)
		s.Await("25 lines after the text", func(screen testterm.Screen) bool { return strings.Count(screen.String(), "\n~") == 25 })
		s.Press(":set lines? columns?\r") // prints both, and waits for a key
		s.Shows("lines=30", "columns=100")
		s.Press("\r:%s/two/2/\r:wq\r")
		s.Shows("$ vi /tmp/poem\n$") // its other screen is gone
		if got := b.exec("cat /tmp/poem"); got != "one\n2\ngrüße 世界 😀\none" {
			t.Errorf("vi wrote %q", got)
		}
		s.Press("exit\r")
		s.ExpectExit(0)
	})

	t.Run("less", func(t *testing.T) {
		s := open(t)
		s.Press("seq 1000 | less\r")
		s.Shows("1\n2\n3\n", "\n23\n")
		s.Press(" ")
		s.Shows("24\n25\n", "\n46\n")
		s.Press("/77[7]\r")
		s.Await("the line that was found is first", func(screen testterm.Screen) bool { return strings.HasPrefix(screen.String(), "777\n778\n") })
		s.Resize(40, 10)
		s.Await("nine lines", func(screen testterm.Screen) bool {
			return strings.HasPrefix(screen.String(), "777\n") && strings.Contains(screen.String(), "\n785\n") && !strings.Contains(screen.String(), "786")
		})
		s.Press("G")
		s.Shows("\n1000\n")
		s.Press("q")
		s.Shows("$ seq 1000 | less\n$")
		s.Press("exit 3\r")
		s.ExpectExit(3)
	})

	t.Run("htop", func(t *testing.T) {
		s := open(t)
		s.Press("sleep 12345 &\r")
		s.Shows("[1]")
		s.Press("htop\r")
		s.Shows("Tasks:", "F10Quit", "sleep 12345")
		s.Resize(120, 40)
		s.Await("the keys are in the last row", func(screen testterm.Screen) bool {
			return strings.Contains(screen.Row(39), "F10Quit")
		})
		s.Key(testterm.KeyF5)
		s.Shows("└─")
		s.Press("q")
		s.Lacks("F10Quit")
		s.Press("kill %1; exit\r")
		s.ExpectExit(0)
	})

	t.Run("Python", func(t *testing.T) {
		s := open(t)
		s.Press("python3 -q\r")
		s.Shows(">>>")
		s.Press("for i in range(3): print('line', i)\r\r")
		s.Shows("\nline 0\nline 1\nline 2\n>>>")
		s.Press("import time; print('be' + 'gun'); time.sleep(1000)\r")
		s.Shows("\nbegun\n")
		s.Press("\x03")
		s.Shows("KeyboardInterrupt\n>>>")
		s.Press("print(6 7)")
		for range 2 {
			s.Key(testterm.KeyLeft)
		}
		s.Press("* \x05\r") // Ctrl-E moves to the end
		s.Shows("\n42\n>>>")
		s.Key(testterm.KeyUp) // the last line from the history
		s.Press("\x7f + 1)\r")
		s.Shows("\n43\n>>>")
		s.Press("input('na' + 'me? ')\r")
		s.Shows("\nname?")
		s.Press("grüße\r")
		s.Shows("\nname? grüße\n'grüße'\n>>>")
		s.Press("exit(7)\r")
		s.Shows(">>> exit(7)\n$")
		s.Press("exit $?\r")
		s.ExpectExit(7)
	})

	t.Run("Jobs", func(t *testing.T) {
		s := open(t)
		s.Press("sh -c 'echo be\"\"gun; exec sleep 1000'\r")
		s.Shows("\nbegun\n")
		s.Press("\x1a")
		s.Shows("[1]+  Stopped")
		s.Press("bg; jobs\r")
		s.Shows("[1]+  Running")
		s.Press("fg\r")
		b.exec("until ps -C sleep -o stat= | grep -q '+'; do sleep 0.02; done") // it is in the foreground
		s.Press("\x03")
		s.Press("echo code=$?\r")
		s.Shows("\ncode=130\n")
		s.Press("jobs; echo job''less\r")
		s.Shows("$ jobs; echo job''less\njobless\n")
		s.Press("sh -c 'echo be\"\"gun; exec cat'\r")
		s.Await("the second program", func(screen testterm.Screen) bool { return strings.Count(screen.String(), "\nbegun\n") == 2 })
		s.Press("typ\x7fed\r\x04") // the line discipline edits, and ends the input
		s.Shows("\ntyed\n$")
		s.Press("kill -KILL $$\r")
		s.ExpectExit(137)
	})
}

// TestShellOutlivesTheNode: the node is killed while a program prints, and while one draws.
func TestShellOutlivesTheNode(t *testing.T) {
	n := ownNode(t)
	b := n.newBox(t)
	counter := n.shell(t, "--id", "counter", b.id, "--", `stty -echo; i=0; while read -r line && [ "$line" != end ]; do i=$((i+1)); echo "$i $line"; done; exit $i`)
	editor := n.shell(t, b.id, "--", "vi /tmp/text")
	counter.Press("before\r")
	counter.Shows("1 before\n")
	editor.Press("ibefore\x1b:set ruler\r")
	editor.Shows("before\n~", "1,6")
	for round := range 2 {
		b.must(n.Kill())
		counter.Press(fmt.Sprintf("meanwhile%d\r", round)) // before and after it is known that the connection is lost
		counter.Await("the loss", func(screen testterm.Screen) bool { return strings.Count(screen.String(), "trying again") == round+1 })
		counter.Press(fmt.Sprintf("offline%d\r", round))
		editor.Shows("trying again")
		b.must(n.Start())
		counter.Shows(fmt.Sprintf("offline%d\n", round))
		editor.Lacks("trying again") // vi has drawn its screen again
		editor.Press("oafter\x1b")
		editor.Shows(strings.Repeat("after\n", round+1) + "~")
		counter.Press(fmt.Sprintf("after%d\r", round))
		counter.Shows(fmt.Sprintf("after%d\n", round))
	}
	editor.Press(":wq\r")
	editor.ExpectExit(0)
	if got := b.exec("cat /tmp/text"); got != "before\nafter\nafter" {
		t.Errorf("vi wrote %q", got)
	}
	counter.Press("end\r")
	counter.Await("the last line", func(screen testterm.Screen) bool { return strings.Contains(screen.String(), "after1\n") })
	lines := strings.Split(strings.TrimSpace(counter.Screen().String()), "\n")
	// Keys may be lost that were typed before the loss of the connection was noticed.
	counted := 0
	for _, line := range lines {
		if number, word, ok := strings.Cut(line, " "); ok && !strings.HasPrefix(line, "doze:") {
			if counted++; number != fmt.Sprint(counted) || word == "" {
				t.Errorf("line %d is %q", counted, line)
			}
		}
	}
	if counted < 5 {
		t.Errorf("the screen has only %d lines:\n%s", counted, counter.Screen())
	}
	counter.ExpectExit(counted)
}

// TestShellThroughSleepAndStop: a session of vi sleeps, and a cold stop ends it.
func TestShellThroughSleepAndStop(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	s := n.shell(t, "--id", "main", b.id, "--", "vi /tmp/text")
	s.Press("ibefore\x1b")
	s.Shows("before\n~")
	b.sleep()
	woke := len(b.events("woke"))
	s.Resize(100, 30) // does not wake it
	if list, err := n.API.Terminals(testkit.Context(t), b.id); err != nil || len(list) != 1 || list[0].ID != "main" || list[0].State != types.ProcessStateRunning {
		t.Errorf("terminals %+v, %v", list, err)
	}
	if state := b.state(); state != types.StateAsleep || len(b.events("woke")) != woke {
		t.Errorf("a resized window made the sandbox %s", state)
	}
	s.Press("oafter\x1b")
	s.Await("the text, in 30 rows", func(screen testterm.Screen) bool {
		return strings.HasPrefix(screen.String(), "before\nafter\n~\n") && strings.Count(screen.String(), "\n~") == 27
	})
	if events := b.events("woke"); len(events) != woke+1 || events[woke].Cause != types.CauseTerminal {
		t.Errorf("typing woke the sandbox by %+v", events[woke:])
	}

	b.stop()
	if code := s.ExitCode(); code == 0 { // the program's, which is hung up, or that the terminal is lost
		t.Errorf("doze shell ended with 0 when the sandbox stopped; the screen has\n%s", s.Screen())
	}
	list, err := n.API.Terminals(testkit.Context(t), b.id)
	if err != nil || len(list) != 1 || list[0].State == types.ProcessStateRunning || list[0].Reason != "requested" {
		t.Errorf("terminals %+v, %v", list, err)
	}
	out, err := n.Command("shell", "--list", b.id).Output()
	if err != nil || !strings.Contains(string(out), "(requested)") {
		t.Errorf("listed %q, %v", out, err)
	}
	_, err = n.API.OpenTerminal(testkit.Context(t), b.id, client.TerminalOptions{ID: "main", Since: new(int64)})
	if p, ok := errors.AsType[*problem.Problem](err); !ok || p.Code != problem.TerminalLost || p.Status != 410 {
		t.Errorf("resumed after the stop: %v", err)
	}
	if b.state() != types.StateStopped {
		t.Error("the refused connection has started the sandbox")
	}
	again := n.shell(t, "--id", "main", b.id, "--", "echo n''ew; exit 4") // another terminal, by a cold wake
	again.Shows("new\n")
	again.ExpectExit(4)
}

// TestViewerThatNeverReads: it holds neither the program nor another viewer up, and uses little
// memory of the node.
func TestViewerThatNeverReads(t *testing.T) {
	n := ownNode(t)
	b := n.newBox(t)
	const lines = 1_000_000
	open := func() *client.Terminal {
		t.Helper()
		term, err := n.API.OpenTerminal(testkit.Context(t), b.id, client.TerminalOptions{ID: "main", Command: fmt.Sprintf(
			"stty -opost -echo; echo begun; read x; seq -f '%%019.0f' %d; exit 5", lines)})
		b.must(err)
		t.Cleanup(func() { term.Close() })
		return term
	}
	idle, reader := open(), open()
	ev, err := reader.Next()
	for err == nil && len(ev.Output) == 0 {
		ev, err = reader.Next()
	}
	if err != nil || string(ev.Output) != "begun\n" {
		t.Fatalf("it began with %q, %v", ev.Output, err)
	}
	n.StaysSmall(t, func() {
		_, err := reader.Write([]byte("\r"))
		b.must(err)
		read := 0
		for {
			ev, err := reader.Next()
			b.must(err)
			read += len(ev.Output)
			if ev.Truncated != nil {
				t.Fatalf("a viewer that reads missed output after %d bytes", read)
			}
			if ev.Exit != nil {
				if ev.Exit.Code != 5 {
					t.Errorf("exit %+v", ev.Exit)
				}
				break
			}
		}
		if want := lines * 20; read != want {
			t.Errorf("read %d bytes, want %d", read, want)
		}
	})
	// It is notified of what it has missed, and sees the end.
	var last []byte
	truncated := false
	for {
		ev, err := idle.Next()
		b.must(err)
		truncated = truncated || ev.Truncated != nil
		last = append(last, ev.Output...)
		last = last[max(0, len(last)-100):]
		if ev.Exit != nil {
			break
		}
	}
	if !truncated || !bytes.HasSuffix(last, fmt.Appendf(nil, "%019d\n", lines)) {
		t.Errorf("truncated %t, at last %q", truncated, last)
	}
}

// TestOnlyViewerThatNeverReads: it does not hold the program up for long, and uses little memory
// of the node and of the guest.
func TestOnlyViewerThatNeverReads(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	guest := b.hostPID()
	const lines = 300_000
	n.StaysSmall(t, func() {
		term, err := n.API.OpenTerminal(testkit.Context(t), b.id, client.TerminalOptions{ID: "main", Command: fmt.Sprintf(
			"stty -opost; seq -f '%%019.0f' %d; touch /tmp/done; exec sleep 1000", lines)})
		b.must(err)
		t.Cleanup(func() { term.Close() })
		b.exec("until [ -e /tmp/done ]; do sleep 0.02; done")
		// It is notified of what it has missed, and sees the end.
		var last []byte
		for truncated := false; !truncated || !bytes.HasSuffix(last, fmt.Appendf(nil, "%019d\n", lines)); {
			ev, err := term.Next()
			b.must(err)
			truncated = truncated || ev.Truncated != nil
			last = append(last, ev.Output...)
			last = last[max(0, len(last)-100):]
		}
	})
	if most := testnode.Memory(t, guest, "VmHWM"); most > 16*mib {
		t.Errorf("the guest had %d bytes", most)
	}
}

// mostTerminal bounds what an open terminal adds to the memory of an idle guest: the output that it
// retains, and its program's.
const mostTerminal = 300 << 10

func TestGuestWithTerminalsIsSmall(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	guest := b.hostPID()
	const terminals = 16
	_, err := n.API.OpenSession(testkit.Context(t), b.id, types.OpenSessionRequest{ID: "dev"})
	b.must(err)
	b.watchFiles("/srv", client.WatchOptions{}).begin()
	for i := range terminals {
		term, err := n.API.OpenTerminal(testkit.Context(t), b.id, client.TerminalOptions{ID: fmt.Sprint("t", i), Command: fmt.Sprintf(
			"seq 200000; touch /tmp/done-%d; exec sleep 1000", i)})
		b.must(err)
		term.Close()
	}
	b.exec("until [ $(ls /tmp/done-* 2>/dev/null | wc -l) = 16 ]; do sleep 0.02; done")
	testkit.Eventually(t, "its guest is small", func() bool { return testnode.Memory(t, guest, "VmRSS") <= mostGuest+terminals*mostTerminal }, func() string {
		return fmt.Sprintf("it has %d bytes", testnode.Memory(t, guest, "VmRSS"))
	})
	b.sleep()
	size := testnode.Memory(t, guest, "VmRSS")
	if size > mostGuest+terminals*mostTerminal {
		t.Errorf("asleep its guest has %d bytes", size)
	}
	t.Logf("asleep its guest has %d bytes", size)
}

// TestDisconnectInsideARune: viewers resume inside a rune, or begin outside of one.
func TestDisconnectInsideARune(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	const rune = "世"
	open := func(since *int64) *client.Terminal {
		t.Helper()
		term, err := n.API.OpenTerminal(testkit.Context(t), b.id, client.TerminalOptions{ID: "main", Since: since,
			Command: `stty -opost -echo; mkfifo /tmp/go /tmp/end; printf '|\344\270'; read x </tmp/go; printf '\226|'; read x </tmp/end`})
		b.must(err)
		t.Cleanup(func() { term.Close() })
		return term
	}
	// read reads until the terminal is ready and the end of what it has read is text.
	read := func(term *client.Terminal, text string) string {
		t.Helper()
		var seen []byte
		for ready := false; !ready || !bytes.HasSuffix(seen, []byte(text)); {
			ev, err := term.Next()
			b.must(err)
			ready = ready || ev.Ready != nil
			if ev.Exit != nil || ev.Truncated != nil {
				t.Fatalf("%+v after %q", ev, seen)
			}
			seen = append(seen, ev.Output...)
		}
		return string(seen)
	}
	first := open(nil)
	read(first, "|"+rune[:2])
	cursor, ok := first.Cursor()
	if !ok || cursor != 3 {
		t.Errorf("cursor %d, %t", cursor, ok)
	}
	first.Close()
	b.exec("echo >/tmp/go")
	if got := read(open(&cursor), "|"); got != rune[2:]+"|" {
		t.Errorf("resumed with %q", got)
	}
	if got := read(open(nil), rune+"|"); got != "|"+rune+"|" || !utf8.ValidString(got) {
		t.Errorf("began with %q", got)
	}
	b.exec("echo >/tmp/end")
}
