package main

import (
	"bytes"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestCreateShowsThePullOnATerminal(t *testing.T) {
	r := newRig(t)
	r.node.Engine.Pulls("layer 1 of 2")
	release := r.node.Engine.Block("create") // after the pull
	term := newTerminal(t, 80, 24)
	cmd := term.start(r, "create", "shop", "--image", "base")
	term.awaitText("it shows the pull", "pulling base: layer 1 of 2")
	release()
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	sb := r.ok("show", "shop", "--json")
	id := strings.Split(strings.Split(sb, `"id": "`)[1], `"`)[0]
	term.awaitText("the line made way", "shop  "+id+"  created, running")
	term.expectRestored()
}

func TestProgressOfAnEndedCommandIsWiped(t *testing.T) {
	r := newRig(t)
	r.node.Engine.Pulls("layer 1 of 2")
	r.node.Engine.Block("create")
	term := newTerminal(t, 80, 24)
	cmd := term.start(r, "create", "shop")
	term.awaitText("it shows the pull with the image", "pulling base: layer 1 of 2")
	term.press("\x03") // the terminal makes a signal of it
	cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != exitInterrupted {
		t.Errorf("got exit code %d", code)
	}
	term.awaitText("nothing is left", "")
	term.expectRestored()
}

func TestLongProgressStaysOnOneLine(t *testing.T) {
	r := newRig(t)
	r.node.Engine.Pulls("layer " + strings.Repeat("1", 100))
	defer r.node.Engine.Block("create")()
	term := newTerminal(t, 30, 5)
	term.start(r, "create", "shop", "--image", "base")
	term.awaitText("it is cut", "pulling base: layer 111111111")
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
	term := newTerminal(t, 80, 24)
	cmd := term.start(r, "cp", file, "a:/f")
	<-arrived
	term.await("it shows how much", func(s *screen) bool { return s.shows(`\Acopied [0-9.]+ [KM]iB\z`) })
	close(goOn)
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	term.awaitText("one line summarizes the copy", "copied 32.0 MiB")
	term.expectRestored()
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
		{"stop", "stop", `\Ashop: stop… \d+s\z`, "shop  stopped"},
		{"wake", "start", `\Ashop: wake… \d+s\z`, "shop  running"},
		{"rm", "remove", `\Ashop: rm… \d+s\z`, "shop  destroyed"},
		{"create", "create", `\Acreating shop… \d+s\z`, ""},
	} {
		t.Run(tt.command, func(t *testing.T) {
			release := r.node.Engine.Block(tt.blocks)
			term := newTerminal(t, 80, 24)
			cmd := term.start(r, tt.command, "shop")
			term.await("it is shown", func(s *screen) bool { return s.shows(tt.waits) })
			release()
			if err := cmd.Wait(); err != nil {
				t.Error(err)
			}
			term.await("the line made way", func(s *screen) bool {
				return tt.ends != "" && s.String() == tt.ends || s.shows(`\Ashop  \w+  created, running\z`)
			})
			term.expectRestored()
		})
	}
}

func TestTarAndTerminalsAreKeptApart(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	for args, want := range map[string]string{"cp - a:/tmp": "standard input is a terminal", "cp a:/tmp -": "standard output is a terminal"} {
		term := newTerminal(t, 200, 24)
		cmd := term.start(r, strings.Fields(args)...)
		cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != exitFailed {
			t.Errorf("doze %s: got exit code %d", args, code)
		}
		term.await("it shows the reason", func(s *screen) bool { return s.shows(`\Adoze: .*` + want) })
	}
}
