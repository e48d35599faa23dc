package main

import (
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/doze-run/doze/testkit/testterm"
)

func TestTopRedrawsAndRestoresTheTerminal(t *testing.T) {
	r := newRig(t)
	r.ok("create", "shop")
	for _, tt := range []struct {
		name string
		end  func(*testterm.Terminal)
	}{
		{"q", func(term *testterm.Terminal) { term.Press("xq") }}, // x is not a key of top
		{"Ctrl-C", func(term *testterm.Terminal) { term.Press("x\x03") }},
		{"SIGTERM", func(term *testterm.Terminal) { term.Signal(syscall.SIGTERM) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r.ok("wake", "shop")
			term := testterm.New(t, 80, 24)
			r.start(term, "top", "--interval", "100ms")
			term.Await("the sandbox runs on another screen", func(s testterm.Screen) bool {
				return s.Alternate && s.CursorHidden && s.Matches(`^node .* 1 running$`) && s.Matches(`^shop +running `)
			})
			r.ok("sleep", "shop")
			term.Await("the table follows", func(s testterm.Screen) bool {
				return s.Matches(`^node .* 1 asleep$`) && s.Matches(`^shop +asleep `) && !s.Matches("running")
			})
			tt.end(term)
			term.ExpectExit(0)
			term.ExpectRestored()
			term.AwaitText("nothing is left on the screen", "")
		})
	}
}

func TestTopFollowsTheSizeOfTheTerminal(t *testing.T) {
	r := newRig(t)
	for i := range 12 {
		r.ok("create", fmt.Sprintf("box-%02d-%s", i, strings.Repeat("x", 40)))
	}
	term := testterm.New(t, 150, 20)
	r.start(term, "top", "--interval", "1h") // so that nothing but the size makes it draw
	fits := func(sandboxes int) func(testterm.Screen) bool {
		return func(s testterm.Screen) bool {
			last := fmt.Sprintf("… and %d more", 12-sandboxes)
			if sandboxes == 12 {
				last = s.Row(2 + 12)
			}
			return strings.HasPrefix(s.Row(0), "node ") && strings.HasPrefix(s.Row(2), "NAME") && s.Row(-1) == last &&
				strings.Count(s.String(), "\nbox-") == sandboxes && strings.Count(s.String(), "\n") <= s.Rows-1
		}
	}
	term.Await("all are shown", fits(12))
	term.Resize(150, 10)
	term.Await("a lower screen has fewer", fits(5))
	term.Resize(40, 10)
	term.Await("a narrow screen has lines that are cut, not folded", fits(5))
	term.Resize(150, 24)
	term.Await("a higher screen has all again", fits(12))
	term.Resize(20, 3)
	term.Await("a tiny screen has the top of it", func(s testterm.Screen) bool {
		return strings.HasPrefix(s.Row(0), "node ") && s.Row(1) == "" && strings.HasPrefix(s.Row(2), "NAME")
	})
	term.Press("q")
	term.ExpectExit(0)
	term.ExpectRestored()
}

func TestTopOutlivesTheNode(t *testing.T) {
	r := newRig(t)
	r.ok("create", "shop")
	term := testterm.New(t, 80, 24)
	r.start(term, "top", "--interval", "100ms")
	term.Await("the sandbox is shown", func(s testterm.Screen) bool { return s.Matches(`^shop +running `) })
	r.server.CloseClientConnections()
	r.server.Close()
	term.Await("it shows that the node does not respond", func(s testterm.Screen) bool { return s.Alternate && s.Matches(`^the node at .* does not respond`) })
	term.Press("q")
	term.ExpectExit(0)
	term.ExpectRestored()
	term.AwaitText("nothing is left on the screen", "")
}

func TestTopRefusesWithoutTouchingTheScreen(t *testing.T) {
	r := newRig(t)
	r.env["DOZE_TOKEN"] = "wrong"
	term := testterm.New(t, 200, 24)
	r.start(term, "top")
	term.ExpectExit(exitFailed)
	term.Await("it shows the reason", func(s testterm.Screen) bool {
		return !s.Alternate && strings.HasPrefix(s.Row(0), "doze: unauthorized: ")
	})
	term.ExpectRestored()
}
