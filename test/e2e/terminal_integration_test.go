//go:build integration

package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/charmbracelet/x/vt"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

func TestShellRunsProgramsOfTerminals(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	// open opens a shell with a short prompt.
	open := func(t *testing.T) *screen {
		s := n.shell(t, b.id, "--", "PS1='$ ' LC_ALL=C.UTF-8 bash --norc")
		s.shows("$")
		return s
	}

	t.Run("vi", func(t *testing.T) {
		s := open(t)
		s.press("vi /tmp/poem\r")
		s.shows("~\n~\n~")
		s.press("ione\rtwo\rgrüße 世界 😀\x1b")
		s.press("ggyyGp") // copies the first line after the last one
		s.shows("one\ntwo\ngrüße 世界 😀\none\n~")
		s.resize(100, 30)
		s.await("25 lines after the text", func(text string) bool { return strings.Count(text, "\n~") == 25 })
		s.press(":set lines? columns?\r") // prints both, and waits for a key
		s.shows("lines=30", "columns=100")
		s.press("\r:%s/two/2/\r:wq\r")
		s.shows("$ vi /tmp/poem\n$") // its other screen is gone
		if got := b.exec("cat /tmp/poem"); got != "one\n2\ngrüße 世界 😀\none" {
			t.Errorf("vi wrote %q", got)
		}
		s.press("exit\r")
		s.expectExit(0)
	})

	t.Run("less", func(t *testing.T) {
		s := open(t)
		s.press("seq 1000 | less\r")
		s.shows("1\n2\n3\n", "\n23\n")
		s.press(" ")
		s.shows("24\n25\n", "\n46\n")
		s.press("/77[7]\r")
		s.await("the line that was found is first", func(text string) bool { return strings.HasPrefix(text, "777\n778\n") })
		s.resize(40, 10)
		s.await("nine lines", func(text string) bool {
			return strings.HasPrefix(text, "777\n") && strings.Contains(text, "\n785\n") && !strings.Contains(text, "786")
		})
		s.press("G")
		s.shows("\n1000\n")
		s.press("q")
		s.shows("$ seq 1000 | less\n$")
		s.press("exit 3\r")
		s.expectExit(3)
	})

	t.Run("htop", func(t *testing.T) {
		s := open(t)
		s.press("sleep 12345 &\r")
		s.shows("[1]")
		s.press("htop\r")
		s.shows("Tasks:", "F10Quit", "sleep 12345")
		s.resize(120, 40)
		s.await("the keys are in the last row", func(text string) bool {
			lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
			return len(lines) == 40 && strings.Contains(lines[39], "F10Quit")
		})
		s.key(vt.KeyF5)
		s.shows("└─")
		s.press("q")
		s.lacks("F10Quit")
		s.press("kill %1; exit\r")
		s.expectExit(0)
	})

	t.Run("Python", func(t *testing.T) {
		s := open(t)
		s.press("python3 -q\r")
		s.shows(">>>")
		s.press("for i in range(3): print('line', i)\r\r")
		s.shows("\nline 0\nline 1\nline 2\n>>>")
		s.press("import time; print('be' + 'gun'); time.sleep(1000)\r")
		s.shows("\nbegun\n")
		s.press("\x03")
		s.shows("KeyboardInterrupt\n>>>")
		s.press("print(6 7)")
		for range 2 {
			s.key(vt.KeyLeft)
		}
		s.press("* \x05\r") // Ctrl-E moves to the end
		s.shows("\n42\n>>>")
		s.key(vt.KeyUp) // the last line from the history
		s.press("\x7f + 1)\r")
		s.shows("\n43\n>>>")
		s.press("input('na' + 'me? ')\r")
		s.shows("\nname?")
		s.press("grüße\r")
		s.shows("\nname? grüße\n'grüße'\n>>>")
		s.press("exit(7)\r")
		s.shows(">>> exit(7)\n$")
		s.press("exit $?\r")
		s.expectExit(7)
	})

	t.Run("Jobs", func(t *testing.T) {
		s := open(t)
		s.press("sh -c 'echo be\"\"gun; exec sleep 1000'\r")
		s.shows("\nbegun\n")
		s.press("\x1a")
		s.shows("[1]+  Stopped")
		s.press("bg; jobs\r")
		s.shows("[1]+  Running")
		s.press("fg\r")
		b.exec("until ps -C sleep -o stat= | grep -q '+'; do sleep 0.02; done") // it is in the foreground
		s.press("\x03")
		s.press("echo code=$?\r")
		s.shows("\ncode=130\n")
		s.press("jobs; echo job''less\r")
		s.shows("$ jobs; echo job''less\njobless\n")
		s.press("sh -c 'echo be\"\"gun; exec cat'\r")
		s.await("the second program", func(text string) bool { return strings.Count(text, "\nbegun\n") == 2 })
		s.press("typ\x7fed\r\x04") // the line discipline edits, and ends the input
		s.shows("\ntyed\n$")
		s.press("kill -KILL $$\r")
		s.expectExit(137)
	})
}

// TestShellOutlivesTheNode: the node is killed while a program prints, and while one draws.
func TestShellOutlivesTheNode(t *testing.T) {
	n := ownNode(t)
	b := n.newBox(t)
	counter := n.shell(t, "--id", "counter", b.id, "--", `stty -echo; i=0; while read -r line && [ "$line" != end ]; do i=$((i+1)); echo "$i $line"; done; exit $i`)
	editor := n.shell(t, b.id, "--", "vi /tmp/text")
	counter.press("before\r")
	counter.shows("1 before\n")
	editor.press("ibefore\x1b:set ruler\r")
	editor.shows("before\n~", "1,6")
	for round := range 2 {
		b.must(n.Kill())
		counter.press(fmt.Sprintf("meanwhile%d\r", round)) // before and after it is known that the connection is lost
		counter.await("the loss", func(text string) bool { return strings.Count(text, "trying again") == round+1 })
		counter.press(fmt.Sprintf("offline%d\r", round))
		editor.shows("trying again")
		b.must(n.Start())
		counter.shows(fmt.Sprintf("offline%d\n", round))
		editor.lacks("trying again") // vi has drawn its screen again
		editor.press("oafter\x1b")
		editor.shows(strings.Repeat("after\n", round+1) + "~")
		counter.press(fmt.Sprintf("after%d\r", round))
		counter.shows(fmt.Sprintf("after%d\n", round))
	}
	editor.press(":wq\r")
	editor.expectExit(0)
	if got := b.exec("cat /tmp/text"); got != "before\nafter\nafter" {
		t.Errorf("vi wrote %q", got)
	}
	counter.press("end\r")
	counter.await("the last line", func(text string) bool { return strings.Contains(text, "after1\n") })
	lines := strings.Split(strings.TrimSpace(counter.content()), "\n")
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
		t.Errorf("the screen has only %d lines:\n%s", counted, counter.content())
	}
	counter.expectExit(counted)
}

// TestShellThroughSleepAndStop: a session of vi sleeps, and a cold stop ends it.
func TestShellThroughSleepAndStop(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	s := n.shell(t, "--id", "main", b.id, "--", "vi /tmp/text")
	s.press("ibefore\x1b")
	s.shows("before\n~")
	b.sleep()
	woke := len(b.events("woke"))
	s.resize(100, 30) // does not wake it
	if list, err := n.API.Terminals(testkit.Context(t), b.id); err != nil || len(list) != 1 || list[0].ID != "main" || list[0].State != types.ProcessStateRunning {
		t.Errorf("terminals %+v, %v", list, err)
	}
	if state := b.state(); state != types.StateAsleep || len(b.events("woke")) != woke {
		t.Errorf("a resized window made the sandbox %s", state)
	}
	s.press("oafter\x1b")
	s.await("the text, in 30 rows", func(text string) bool {
		return strings.HasPrefix(text, "before\nafter\n~\n") && strings.Count(text, "\n~") == 27
	})
	if events := b.events("woke"); len(events) != woke+1 || events[woke].Cause != types.CauseTerminal {
		t.Errorf("typing woke the sandbox by %+v", events[woke:])
	}

	b.stop()
	if code := s.exitCode(); code == 0 { // the program's, which is hung up, or that the terminal is lost
		t.Errorf("doze shell ended with 0 when the sandbox stopped; the screen has\n%s", s.content())
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
	again.shows("new\n")
	again.expectExit(4)
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

// TestDisconnectInsideARune: viewers resume inside a rune, or begin outside of one.
func TestDisconnectInsideARune(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	const rune = "世"
	open := func(since *int64) *client.Terminal {
		t.Helper()
		term, err := n.API.OpenTerminal(testkit.Context(t), b.id, client.TerminalOptions{ID: "main", Since: since,
			Command: `stty -opost -echo; mkfifo /tmp/go; printf '|\344\270'; read x </tmp/go; printf '\226|'; read x </tmp/go`})
		b.must(err)
		t.Cleanup(func() { term.Close() })
		return term
	}
	// read reads until the end of what it has read is text.
	read := func(term *client.Terminal, text string) string {
		t.Helper()
		var seen []byte
		for !bytes.HasSuffix(seen, []byte(text)) {
			ev, err := term.Next()
			b.must(err)
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
	b.exec("echo >/tmp/go")
}
