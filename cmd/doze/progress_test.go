package main

import (
	"bytes"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/doze-run/doze/testkit/testterm"
)

func TestCreateShowsThePullOnATerminal(t *testing.T) {
	r := newRig(t)
	r.node.Engine.Pulls("layer 1 of 2")
	release := r.node.Engine.Block("create") // after the pull
	term := testterm.New(t, 80, 24)
	r.start(term, "create", "shop", "--image", "base")
	term.AwaitText("it shows the pull", "pulling base: layer 1 of 2")
	release()
	term.ExpectExit(0)
	sb := r.ok("show", "shop", "--json")
	id := strings.Split(strings.Split(sb, `"id": "`)[1], `"`)[0]
	term.AwaitText("the line made way", "shop  "+id+"  created, running")
	term.ExpectRestored()
}

func TestProgressOfAnEndedCommandIsWiped(t *testing.T) {
	r := newRig(t)
	r.node.Engine.Pulls("layer 1 of 2")
	r.node.Engine.Block("create")
	term := testterm.New(t, 80, 24)
	r.start(term, "create", "shop")
	term.AwaitText("it shows the pull with the image", "pulling base: layer 1 of 2")
	term.Press("\x03") // the terminal makes a signal of it
	term.ExpectExit(exitInterrupted)
	term.AwaitText("nothing is left", "")
	term.ExpectRestored()
}

func TestLongProgressStaysOnOneLine(t *testing.T) {
	r := newRig(t)
	r.node.Engine.Pulls("layer " + strings.Repeat("1", 100))
	defer r.node.Engine.Block("create")()
	term := testterm.New(t, 30, 5)
	r.start(term, "create", "shop", "--image", "base")
	term.AwaitText("it is cut", "pulling base: layer 111111111")
}

func TestCopyShowsHowMuchItHasCopied(t *testing.T) {
	arrived, goOn := make(chan struct{}), make(chan struct{})
	r := fakeNode(t, func(w http.ResponseWriter, req *http.Request) {
		if req.Method == http.MethodGet { // the path does not exist
			w.Header().Set("Content-Type", "application/problem+json")
			w.WriteHeader(http.StatusNotFound)
			io.WriteString(w, `{"code":"path_not_found"}`)
			return
		}
		io.CopyN(io.Discard, req.Body, 1<<20)
		close(arrived)
		<-goOn
		io.Copy(io.Discard, req.Body)
		io.WriteString(w, `{}`)
	})
	file := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(file, bytes.Repeat([]byte("x"), 32<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	term := testterm.New(t, 80, 24)
	r.start(term, "cp", file, "a:/f")
	<-arrived
	term.Await("it shows how much", func(s testterm.Screen) bool { return s.Matches(`\Acopied [0-9.]+ [KM]iB\n\z`) })
	close(goOn)
	term.ExpectExit(0)
	term.AwaitText("one line summarizes the copy", "copied 32.0 MiB")
	term.ExpectRestored()
}

func TestWithoutATerminalThereIsNoProgressAndNoEscapeSequence(t *testing.T) {
	r := newRig(t)
	r.node.Engine.Pulls("layer 1 of 2")
	dir := t.TempDir()
	tree{"f": "x"}.write(t, dir)
	for _, args := range [][]string{
		{"create", "shop"}, {"top"}, {"cp", dir, "shop:" + dir + "/made"}, {"events", "shop"}, {"sleep", "shop"}, {"wake", "shop"},
		{"ls"}, {"show", "shop"}, {"ps", "shop"}, {"exec", "shop", "true"}, {"rm", "shop"}, {"show", "gone"}, {"--help"},
	} {
		out, _ := r.program(args...).CombinedOutput()
		if bytes.ContainsAny(out, "\x1b\r") || bytes.Contains(out, []byte("pulling")) || bytes.Contains(out, []byte("copied")) {
			t.Errorf("doze %s wrote %q", strings.Join(args, " "), out)
		}
	}
}

func TestSlowCommandsShowWhatTheyWaitFor(t *testing.T) {
	r := newRig(t)
	r.ok("create", "shop")
	for _, tt := range []struct {
		command, blocks, waits, ends string
	}{
		{"stop", "stop", `\Ashop: stop… \d+s\n\z`, "shop  stopped"},
		{"wake", "start", `\Ashop: wake… \d+s\n\z`, "shop  running"},
		{"rm", "remove", `\Ashop: rm… \d+s\n\z`, "shop  destroyed"},
		{"create", "create", `\Acreating shop… \d+s\n\z`, `shop  \w+  created, running`},
	} {
		t.Run(tt.command, func(t *testing.T) {
			release := r.node.Engine.Block(tt.blocks)
			term := testterm.New(t, 80, 24)
			r.start(term, tt.command, "shop")
			term.Await("it is shown", func(s testterm.Screen) bool { return s.Matches(tt.waits) })
			release()
			term.ExpectExit(0)
			term.Await("the line made way", func(s testterm.Screen) bool { return s.Matches(`\A` + tt.ends + `\n\z`) })
			term.ExpectRestored()
		})
	}
}

func TestTarAndTerminalsAreKeptApart(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	for args, want := range map[string]string{"cp - a:/tmp": "standard input is a terminal", "cp a:/tmp -": "standard output is a terminal"} {
		term := testterm.New(t, 200, 24)
		r.start(term, strings.Fields(args)...)
		term.ExpectExit(exitFailed)
		term.Await("it shows the reason", func(s testterm.Screen) bool { return s.Matches(`\Adoze: .*` + want) })
	}
}
