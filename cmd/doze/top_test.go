package main

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"syscall"
	"testing"
)

// shows reports whether a line of the screen matches.
func (s *screen) shows(pattern string) bool {
	return regexp.MustCompile(`(?m)` + pattern).MatchString(s.String())
}

func TestTopRedrawsAndRestoresTheTerminal(t *testing.T) {
	r := newRig(t)
	r.ok("create", "shop")
	for _, tt := range []struct {
		name string
		end  func(*terminal, *os.Process)
	}{
		{"q", func(term *terminal, _ *os.Process) { term.press("xq") }}, // x is not a key of top
		{"Ctrl-C", func(term *terminal, _ *os.Process) { term.press("x\x03") }},
		{"SIGTERM", func(_ *terminal, p *os.Process) { p.Signal(syscall.SIGTERM) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r.ok("wake", "shop")
			term := newTerminal(t, 80, 24)
			cmd := term.start(r, "top", "--interval", "100ms")
			term.await("the sandbox runs on another screen", func(s *screen) bool {
				return s.other && s.hidden && s.shows(`^node .* 1 running$`) && s.shows(`^shop +running `)
			})
			r.ok("sleep", "shop")
			term.await("the table follows", func(s *screen) bool {
				return s.shows(`^node .* 1 asleep$`) && s.shows(`^shop +asleep `) && !s.shows("running")
			})
			tt.end(term, cmd.Process)
			if err := cmd.Wait(); err != nil {
				t.Error(err)
			}
			term.expectRestored()
			term.awaitText("nothing is left on the screen", "")
		})
	}
}

func TestTopFollowsTheSizeOfTheTerminal(t *testing.T) {
	r := newRig(t)
	for i := range 12 {
		r.ok("create", fmt.Sprintf("box-%02d-%s", i, strings.Repeat("x", 40)))
	}
	term := newTerminal(t, 150, 20)
	cmd := term.start(r, "top", "--interval", "1h") // so that nothing but the size makes it draw
	fits := func(sandboxes int) func(*screen) bool {
		return func(s *screen) bool {
			last := fmt.Sprintf("… and %d more", 12-sandboxes)
			if sandboxes == 12 {
				last = s.line(2 + 12)
			}
			return strings.HasPrefix(s.line(0), "node ") && strings.HasPrefix(s.line(2), "NAME") && s.line(-1) == last &&
				strings.Count(s.String(), "\nbox-") == sandboxes && strings.Count(s.String(), "\n") <= s.rows-2
		}
	}
	term.await("all are shown", fits(12))
	term.resize(150, 10)
	term.await("a lower screen has fewer", fits(5))
	term.resize(40, 10)
	term.await("a narrow screen has lines that are cut, not folded", fits(5))
	term.resize(150, 24)
	term.await("a higher screen has all again", fits(12))
	term.resize(20, 3)
	term.await("a tiny screen has the top of it", func(s *screen) bool {
		return strings.HasPrefix(s.line(0), "node ") && len(s.line(0)) <= 20 && strings.Count(s.String(), "\n") < 3
	})
	term.press("q")
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	term.expectRestored()
}

func TestTopOutlivesTheNode(t *testing.T) {
	r := newRig(t)
	r.ok("create", "shop")
	term := newTerminal(t, 80, 24)
	cmd := term.start(r, "top", "--interval", "100ms")
	term.await("the sandbox is shown", func(s *screen) bool { return s.shows(`^shop +running `) })
	r.server.CloseClientConnections()
	r.server.Close()
	term.await("it shows that the node does not respond", func(s *screen) bool { return s.other && s.shows(`^the node at .* does not respond`) })
	term.press("q")
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	term.expectRestored()
	term.awaitText("nothing is left on the screen", "")
}

func TestTopRefusesWithoutTouchingTheScreen(t *testing.T) {
	r := newRig(t)
	r.env["DOZE_TOKEN"] = "wrong"
	term := newTerminal(t, 200, 24)
	cmd := term.start(r, "top")
	if err := cmd.Wait(); err == nil {
		t.Error("it ended well")
	}
	term.await("it shows the reason", func(s *screen) bool {
		return !s.other && strings.HasPrefix(s.line(0), "doze: unauthorized: ")
	})
	term.expectRestored()
}
