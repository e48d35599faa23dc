package server_test

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/guest/server"
	"github.com/doze-run/doze/testkit"
)

// typist is a client of a terminal that remembers what it has seen.
type typist struct {
	t      *testing.T
	id     string
	stream *guest.TerminalStream
	output bytes.Buffer
	ready  int64 // cursor at the end of the replay; -1 before
	replay int   // bytes of output before ready
	result *guest.ExecResult
	skip   int64
}

func openTerminal(t *testing.T, c *guest.Client, command ...string) guest.Terminal {
	t.Helper()
	term, err := c.OpenTerminal(t.Context(), guest.TerminalSpec{Command: guest.Command{Argv: command}, TerminalSize: guest.TerminalSize{Cols: 100, Rows: 30}})
	if err != nil {
		t.Fatal(err)
	}
	return term
}

func attach(t *testing.T, c *guest.Client, id string, since int64) *typist {
	t.Helper()
	stream, err := c.AttachTerminal(t.Context(), id, since)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stream.Close() })
	return &typist{t: t, id: id, stream: stream, ready: -1}
}

// next reads one event.
func (y *typist) next() error {
	ev, err := y.stream.Next()
	if err != nil {
		return err
	}
	switch ev.Kind {
	case guest.FrameStdout:
		y.output.Write(ev.Data)
	case guest.FrameReady:
		y.ready, y.replay = ev.Cursor, y.output.Len()
	case guest.FrameSkipped:
		y.skip += ev.Bytes
	case guest.FrameComplete:
		y.result = ev.Result
	}
	return nil
}

// sees reads until the output contains text.
func (y *typist) sees(text string) {
	y.t.Helper()
	for from := 0; !bytes.Contains(y.output.Bytes()[from:], []byte(text)); {
		from = max(0, y.output.Len()-len(text))
		stop := time.AfterFunc(5*time.Second, func() { y.stream.Close() })
		err := y.next()
		stop.Stop()
		if err != nil {
			y.t.Fatalf("%v before %q; seen: %.2000q", err, text, y.output.String())
		}
	}
}

// types sends keys.
func (y *typist) types(keys string) {
	y.t.Helper()
	if _, err := io.WriteString(y.stream, keys); err != nil {
		y.t.Fatal(err)
	}
}

// end reads to the end and returns how the program ended.
func (y *typist) end() guest.ExecResult {
	y.t.Helper()
	for {
		err := y.next()
		if err == io.EOF {
			return *y.result
		}
		if err != nil {
			y.t.Fatal(err)
		}
	}
}

func TestTerminalIsATTY(t *testing.T) {
	c := start(t, nil)
	term := openTerminal(t, c, "sh", "-c", `tty; test -t 0 && test -t 1 && test -t 2 && echo is a tty; stty size; echo "TERM=$TERM"; exit 3`)
	y := attach(t, c, term.ID, -1)
	if got := y.end(); got.ExitCode != 3 {
		t.Errorf("ended with %+v", got)
	}
	for _, want := range []string{"/dev/pts/", "is a tty", "30 100", "TERM="} {
		if !strings.Contains(y.output.String(), want) {
			t.Errorf("%q is missing in %q", want, y.output.String())
		}
	}
}

func TestTerminalWithoutACommandIsAShell(t *testing.T) {
	t.Setenv("HOME", t.TempDir()) // the shell reads its settings there
	c := start(t, nil)
	term, err := c.OpenTerminal(t.Context(), guest.TerminalSpec{ID: "main"})
	if err != nil {
		t.Fatal(err)
	}
	if term.ID != "main" || term.Cols != 80 || term.Rows != 24 || term.State != guest.ProcessRunning {
		t.Errorf("terminal %+v", term)
	}
	y := attach(t, c, "main", -1)
	y.types("echo $((6*7))=answer; stty size\r")
	y.sees("42=answer")
	y.sees("24 80")
	if err := y.stream.Resize(guest.TerminalSize{Cols: 132, Rows: 50}); err != nil {
		t.Fatal(err)
	}
	y.types("stty size\r")
	y.sees("50 132")
	y.types("exit 7\r")
	if got := y.end(); got.ExitCode != 7 {
		t.Errorf("ended with %+v", got)
	}
}

func TestControlKeysAndSignalsReachTheForeground(t *testing.T) {
	c := start(t, nil)
	y := attach(t, c, openTerminal(t, c, "bash", "--norc").ID, -1)
	y.types("PS1='rea''dy> '\r")
	y.sees("ready> ")
	y.types("sh -c 'echo be\"\"gun; exec sleep 1000'\r")
	y.sees("begun")
	y.types("\x03")
	y.types("echo interrupted=$?\r")
	y.sees("interrupted=130")
	y.types("sh -c 'trap \"echo cau; exit 5\" USR1; echo wait''ing; while :; do sleep 0.01; done'\r")
	y.sees("waiting")
	if err := y.stream.Signal("SIGUSR1"); err != nil {
		t.Fatal(err)
	}
	y.sees("\ncau")
	y.types("echo code=$?\r")
	y.sees("code=5")
}

func TestTerminalSurvivesDisconnects(t *testing.T) {
	c := start(t, nil)
	term := openTerminal(t, c, "sh", "-c", "echo first; read x; echo got $x; read y; echo bye")
	y := attach(t, c, term.ID, -1)
	y.sees("first")
	y.stream.Close()
	y = attach(t, c, term.ID, -1)
	y.sees("first")
	y.types("hello\r")
	y.sees("got hello")
	y.stream.Close()
	seen := int64(y.output.Len())
	z := attach(t, c, term.ID, seen)
	z.types("\r")
	z.end()
	if got := y.output.String() + z.output.String(); strings.Count(got, "first") != 1 || strings.Count(got, "got hello") != 1 || !strings.Contains(got, "bye") || z.skip != 0 {
		t.Errorf("the two connections saw %q, skipped %d", got, z.skip)
	}
	// After its end the output is replayed once.
	after := attach(t, c, term.ID, -1)
	after.end()
	if after.output.String() != y.output.String()+z.output.String() || after.ready != int64(after.output.Len()) {
		t.Errorf("the replay %q ends at %d", after.output.String(), after.ready)
	}
}

func TestAllViewersSeeEverything(t *testing.T) {
	c := start(t, nil)
	term := openTerminal(t, c, "sh", "-c", "read x; seq 1 200000; echo end")
	viewers := make([]*typist, 5)
	for i := range viewers {
		viewers[i] = attach(t, c, term.ID, 0)
	}
	for _, v := range viewers[1:] {
		go func() { // ends with the terminal
			v.end()
			v.stream.Close()
		}()
	}
	viewers[0].types("\r")
	viewers[0].end()
	want := strings.Builder{}
	want.WriteString("\r\n")
	for i := range 200000 {
		fmt.Fprintf(&want, "%d\r\n", i+1)
	}
	if got := viewers[0].output.String(); got != want.String()+"end\r\n" || viewers[0].skip != 0 {
		t.Errorf("saw %d bytes instead of %d, %d skipped", len(got), want.Len()+5, viewers[0].skip)
	}
}

func TestViewerThatDoesNotReadHoldsNothingUp(t *testing.T) {
	c := start(t, nil)
	term := openTerminal(t, c, "sh", "-c", "read x; head -c 20000000 /dev/zero | tr '\\0' x; echo; echo end; read y")
	idle, active := attach(t, c, term.ID, 0), attach(t, c, term.ID, 0)
	active.types("\r")
	active.sees("\nend")
	idle.sees("\nend")
	if idle.skip == 0 || int64(idle.output.Len())+idle.skip != int64(active.output.Len())+active.skip {
		t.Errorf("the viewer that did not read got %d bytes and missed %d; the other got %d and missed %d", idle.output.Len(), idle.skip, active.output.Len(), active.skip)
	}
}

// sequence is an escape sequence of the test below.
var sequence = regexp.MustCompile(`\x1b\][^\x07\x1a\x1b]*(\x07|\x1a|\x1b\\)|\x1b[PX^_][^\x1b]*\x1b\\|\x1b\[[0-?]*[@-~\x18]|\x1b[ -/]+[0-~]`)

// The output is longer than what is kept, by each number of bytes of one unit in turn.
func TestReplayIsCutBetweenRunesAndSequences(t *testing.T) {
	for _, unit := range []string{"é→🌙", "\x1b[38;2;255;100;0mx", "\x1b]0;title\x07y", "\x1b]8;;http://a.test\x1b\\link", "\x1bP+q544e\x1b\\z", "\x1b(B-",
		"\x1b_Gi=1;AAAA\x1b\\a", "\x1b^private\x1b\\p", "\x1bXstart\x1b\\s", "\x1b[38;2\x18c", "\x1b]0;title\x1ad", "\x1b$(C="} {
		t.Run(fmt.Sprintf("%q", unit), func(t *testing.T) {
			dir, c := t.TempDir(), start(t, nil)
			text := strings.Repeat(unit, (300<<10)/len(unit))
			for extra := range len(unit) {
				whole := text + strings.Repeat(".", extra)
				if err := os.WriteFile(filepath.Join(dir, "text"), []byte(whole), 0o644); err != nil {
					t.Fatal(err)
				}
				y := attach(t, c, openTerminal(t, c, "sh", "-c", `stty -opost; exec cat "$0"`, dir+"/text").ID, 0)
				y.end()
				y = attach(t, c, y.id, -1)
				y.end()
				got := y.output.String()
				cut := len(whole) - len(got)
				if !strings.HasSuffix(whole, got) || len(got) < 255<<10 || len(got) > 256<<10 || !utf8.RuneStart(got[0]) {
					t.Fatalf("the replay of %d bytes has %d and begins with %.40q", len(whole), len(got), got)
				}
				if y.replay != len(got) || y.ready != int64(len(whole)) {
					t.Fatalf("ready came after %d of the %d bytes of the replay, with the cursor %d of %d", y.replay, len(got), y.ready, len(whole))
				}
				for _, span := range sequence.FindAllStringIndex(whole[cut-100:cut+100], -1) {
					if span[0] < 100 && 100 < span[1] {
						t.Fatalf("the replay begins with %.40q, within %q", got, whole[cut-100:][span[0]:span[1]])
					}
				}
			}
		})
	}
}

// The replay is longer than what the connection buffers, and the program prints on meanwhile.
func TestReadyIsSentAfterExactlyTheReplay(t *testing.T) {
	const printed = 200_001
	c := start(t, nil)
	term := openTerminal(t, c, "sh", "-c", fmt.Sprintf("stty raw -echo; head -c %d /dev/zero | tr '\\0' x; read go; head -c 20000 /dev/zero | tr '\\0' y; echo end", printed))
	active := attach(t, c, term.ID, 0)
	for active.output.Len() < printed {
		testkit.NoError(t, "Next", active.next())
	}
	late := map[int64]*typist{}
	for _, since := range []int64{-1, 0, 1000} {
		late[since] = attach(t, c, term.ID, since)
	}
	active.types("\n")
	active.sees("end")
	for since, y := range late {
		y.sees("end")
		if got := max(0, since) + int64(y.replay); y.ready != printed || got != printed || y.skip != 0 {
			t.Errorf("since %d: ready came at %d with the cursor %d, want %d; skipped %d", since, got, y.ready, printed, y.skip)
		}
	}
}

func TestTerminalRefusals(t *testing.T) {
	c := start(t, nil)
	term := openTerminal(t, c, "sleep", "1000")
	if _, err := c.OpenTerminal(t.Context(), guest.TerminalSpec{ID: term.ID}); true {
		wantCode(t, err, guest.CodeExists, term.ID)
	}
	_, err := c.OpenTerminal(t.Context(), guest.TerminalSpec{ID: "../x"})
	wantCode(t, err, guest.CodeInvalid, "id")
	_, err = c.AttachTerminal(t.Context(), "t-missing", -1)
	wantCode(t, err, guest.CodeNoTerminal, "t-missing")
	_, err = c.AttachTerminal(t.Context(), term.ID, 1<<40)
	wantCode(t, err, guest.CodeInvalid, "since")
	_, err = c.OpenTerminal(t.Context(), guest.TerminalSpec{Command: guest.Command{Argv: []string{"no-such-program"}}})
	wantCode(t, err, guest.CodeNoCommand, "no-such-program")
	if list, _ := known(t, c); len(list) != 1 {
		t.Errorf("terminals %v", list)
	}
	if got, err := c.CloseTerminal(t.Context(), term.ID, 0); err != nil || got.State != guest.ProcessExited || got.Signal != "SIGKILL" {
		t.Errorf("closed %+v, %v", got, err)
	}
	_, err = c.AttachTerminal(t.Context(), term.ID, -1)
	wantCode(t, err, guest.CodeNoTerminal, term.ID)
}

// The guest handles the resize, which the program reports, after the input before it.
func TestUnreadInputIsBounded(t *testing.T) {
	var runDir string
	c := start(t, func(cfg *server.Config) { runDir = cfg.RunDir })
	term := openTerminal(t, c, "bash", "-c", "stty raw -echo; trap 'echo resized' WINCH; sleep 1000 & echo asleep; while :; do wait; done")
	attach(t, c, term.ID, -1).sees("asleep")
	conn, in := upgrade(t, runDir, "GET", guest.RouteTerminal+"/"+term.ID+guest.SuffixAttach, guest.UpgradeTerminal, "")
	var output bytes.Buffer
	acked := 0
	next := func() error {
		kind, data, err := guest.ReadFrame(in, nil)
		switch {
		case err != nil:
			return err
		case kind == guest.FrameStdout:
			output.Write(data)
		case kind == guest.FrameStdinAck:
			var ack guest.StdinAck
			testkit.NoError(t, "DecodePayload", guest.DecodePayload(data, &ack))
			acked += ack.Bytes
		}
		return nil
	}
	write := func(kind guest.FrameType, data []byte) error {
		frame := make([]byte, guest.FrameHeader, guest.FrameHeader+len(data))
		guest.PutFrameHeader(frame, kind, len(data))
		_, err := conn.Write(append(frame, data...))
		return err
	}
	keys := make([]byte, guest.MaxFrame)
	for range guest.StdinWindow / len(keys) {
		testkit.NoError(t, "Write", write(guest.FrameStdin, keys))
	}
	testkit.NoError(t, "Write", write(guest.FrameResize, []byte(`{"cols":101,"rows":31}`)))
	for !bytes.Contains(output.Bytes(), []byte("resized")) {
		testkit.NoError(t, "ReadFrame", next())
	}
	if acked > len(keys) { // a terminal takes less
		t.Fatalf("%d bytes are acknowledged, and the program has read nothing", acked)
	}
	for range 2 {
		_ = write(guest.FrameStdin, keys) // fails once the guest has disconnected
	}
	err := next()
	for err == nil {
		err = next()
	}
	if !disconnected(err) {
		t.Errorf("input beyond the window ended the connection with %v", err)
	}
}

func TestCloseEndsAWriteOfUnreadInput(t *testing.T) {
	c := start(t, nil)
	y := attach(t, c, openTerminal(t, c, "sh", "-c", "stty raw -echo; echo asleep; exec sleep 1000").ID, -1)
	y.sees("asleep")
	y.types(strings.Repeat("x", guest.StdinWindow)) // acknowledgements wait for Next
	written := make(chan error, 1)
	go func() {
		_, err := y.stream.Write([]byte("x"))
		written <- err
	}()
	testkit.Eventually(t, "the write is in progress", func() bool { return strings.Contains(testkit.Stacks(), "guest.(*TerminalStream).Write(") })
	y.stream.Close()
	if testkit.Receive(t, "the end of the write", written) == nil {
		t.Error("input was accepted beyond the window")
	}
}

func TestEndedTerminalsAreForgotten(t *testing.T) {
	c := start(t, nil)
	for range 100 {
		attach(t, c, openTerminal(t, c, "true").ID, -1).end()
	}
	testkit.Eventually(t, "few ended terminals are left", func() bool {
		list, _ := known(t, c)
		return len(list) <= 16
	})
}

func TestTerminalStartsInTheSurroundingsOfASession(t *testing.T) {
	inEachShell(t, func(t *testing.T, s *shellSession) {
		s.wants(`mkdir sub; cd sub; export A='x  y' B="1
2"; C=private; unset HOME TERM; cat() { echo a function; }; false`, "", 1)
		open := func(spec guest.TerminalSpec) string {
			t.Helper()
			spec.Session = s.id
			term, err := s.c.OpenTerminal(t.Context(), spec)
			if err != nil {
				t.Fatal(err)
			}
			y := attach(t, s.c, term.ID, -1)
			if end := y.end(); end.ExitCode != 0 {
				t.Errorf("ended with %+v", end)
			}
			return strings.ReplaceAll(y.output.String(), "\r\n", "\n")
		}
		script := `pwd; env | while read -r x; do case $x in DOZE_TREE=*) echo marked;; esac; done; echo "$A|$B|${C-no}|${HOME-no}|${DOZE_COMMAND-no}|$TERM|$COLORTERM"`
		if got, want := open(guest.TerminalSpec{Command: guest.Command{Command: script}}), s.dir+"/sub\nmarked\nx  y|1\n2|no|no|no|xterm-256color|truecolor\n"; got != want {
			t.Errorf("the terminal printed %q, want %q", got, want)
		}
		// The session is as it was, and its end does not end the terminal.
		s.wants("cat; echo $C; export TERM=dumb PATH=/nowhere", "a function\nprivate\n", 0)
		if got, want := open(guest.TerminalSpec{Command: guest.Command{Argv: []string{"/bin/sh", "-c", "pwd; echo $TERM $PATH"}, Cwd: "/"}}), "/\ndumb /nowhere\n"; got != want {
			t.Errorf("the terminal printed %q, want %q", got, want)
		}
		term, err := s.c.OpenTerminal(t.Context(), guest.TerminalSpec{Session: s.id, Command: guest.Command{Argv: []string{"/bin/sh", "-c", "read x; exit 3"}}})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.c.CloseSession(t.Context(), s.id, time.Second); err != nil {
			t.Fatal(err)
		}
		y := attach(t, s.c, term.ID, -1)
		y.types("\r")
		if end := y.end(); end.ExitCode != 3 {
			t.Errorf("ended with %+v", end)
		}
	})
}

func TestTerminalWaitsForItsSession(t *testing.T) {
	c := start(t, nil)
	dir := t.TempDir()
	s, err := c.OpenSession(t.Context(), guest.SessionSpec{Cwd: dir})
	if err != nil {
		t.Fatal(err)
	}
	run(t, c, guest.ExecRequest{Session: s.ID, Command: guest.Command{Command: "mkfifo begun go"}})
	var working sync.WaitGroup
	working.Go(func() {
		run(t, c, guest.ExecRequest{Session: s.ID, Command: guest.Command{Command: "echo >begun; cat go; export A=after"}})
	})
	if _, err := os.ReadFile(filepath.Join(dir, "begun")); err != nil {
		t.Fatal(err)
	}
	opened := make(chan guest.Terminal, 1)
	go func() {
		term, err := c.OpenTerminal(t.Context(), guest.TerminalSpec{Session: s.ID, Command: guest.Command{Command: "echo a=$A"}})
		if err != nil {
			t.Error(err)
		}
		opened <- term
	}()
	if err := os.WriteFile(filepath.Join(dir, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	working.Wait()
	attach(t, c, testkit.Receive(t, "the terminal", opened).ID, -1).sees("a=after")
}

func TestTerminalRefusesSessionsThatItCannotUse(t *testing.T) {
	c := start(t, (*server.Config).AwaitSessionsBriefly)
	dir := t.TempDir()
	for _, id := range []string{"busy", "ended", "full"} {
		if _, err := c.OpenSession(t.Context(), guest.SessionSpec{ID: id, Cwd: dir}); err != nil {
			t.Fatal(err)
		}
	}
	run(t, c, guest.ExecRequest{Session: "ended", Command: guest.Command{Command: "exit 3"}})
	// An environment that no program can be started with.
	run(t, c, guest.ExecRequest{Session: "full", Command: guest.Command{Command: `mkfifo begun; export A="$(head -c 200000 /dev/zero | tr '\0' x)"`}})
	stream, err := c.Exec(t.Context(), guest.ExecRequest{Session: "busy", Command: guest.Command{Command: "echo >begun; sleep 1000"}})
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	if _, err := os.ReadFile(filepath.Join(dir, "begun")); err != nil {
		t.Fatal(err)
	}
	openTerminal := func(spec guest.TerminalSpec) error {
		_, err := c.OpenTerminal(t.Context(), spec)
		return err
	}
	for session, want := range map[string]string{"none": guest.CodeNoSession, "ended": guest.CodeSessionLost, "busy": guest.CodeSessionBusy, "full": guest.CodeInternal} {
		wantCode(t, openTerminal(guest.TerminalSpec{Session: session}), want, session)
	}
	if list, _ := known(t, c); len(list) > 0 {
		t.Errorf("terminals %+v", list)
	}
	// A terminal that runs is joined, whatever its session does.
	if err := openTerminal(guest.TerminalSpec{ID: "main"}); err != nil {
		t.Fatal(err)
	}
	wantCode(t, openTerminal(guest.TerminalSpec{ID: "main", Session: "ended"}), guest.CodeExists, "main")
}
