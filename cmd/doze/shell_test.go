package main

import (
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
	"github.com/doze-run/doze/testkit/testterm"
)

// shellRig is a rig with a sandbox, and a proxy before the node whose connections can be cut.
type shellRig struct {
	*rig
	front net.Listener

	mu    sync.Mutex
	conns map[net.Conn]bool
	down  bool // new connections are refused
}

func newShellRig(t *testing.T) *shellRig {
	t.Helper()
	r := &shellRig{rig: newRig(t), conns: map[net.Conn]bool{}}
	r.ok("create", "shop")
	var err error
	if r.front, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	serving.Go(func() { // ended by Close
		for {
			conn, err := r.front.Accept()
			if err != nil {
				return
			}
			serving.Go(func() { r.forward(conn) })
		}
	})
	t.Cleanup(func() {
		r.front.Close()
		r.cut(true)
		serving.Wait()
	})
	back := r.server.Listener.Addr().String()
	r.env["DOZE_API"] = strings.Replace(r.env["DOZE_API"], back, r.front.Addr().String(), 1)
	return r
}

func (r *shellRig) forward(conn net.Conn) {
	defer conn.Close()
	back, err := net.Dial("tcp", r.server.Listener.Addr().String())
	if err != nil {
		return
	}
	defer back.Close()
	r.mu.Lock()
	down := r.down
	r.conns[conn] = true
	r.mu.Unlock()
	if down {
		return
	}
	go func() {
		io.Copy(back, conn)
		back.Close()
	}()
	io.Copy(conn, back)
}

// cut cuts all connections. If it is down, it makes no others.
func (r *shellRig) cut(down bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.down = down
	for conn := range r.conns {
		conn.Close()
	}
	clear(r.conns)
}

func (r *shellRig) terminals() []types.Terminal {
	r.t.Helper()
	return decodeJSON[struct{ Terminals []types.Terminal }](r.t, r.ok("shell", "--list", "shop", "--json")).Terminals
}

func TestShellFeelsLocal(t *testing.T) {
	r := newShellRig(t)
	term := testterm.New(t, 80, 24)
	r.start(term, "shell", "shop", "--", "sh")
	term.Press("PS1='rea''dy> '; stty size\r")
	term.Shows("24 80")
	term.Shows("\nready>")
	term.Resize(100, 30)
	term.Press("while [ \"$(stty size)\" != '30 100' ]; do sleep 0.01; done; echo re''sized\r")
	term.Shows("resized")
	term.Press("sh -c 'echo be''gun; exec sleep 1000'\r")
	term.Shows("begun")
	term.Press("\x03")
	term.Press("echo co''de=$?\r")
	term.Shows("code=130")
	term.Press("read -r x; echo got=$x\ré→🌙 ~. \x16\x01 ~\r") // ~ means something at the beginning of a line only
	term.Shows("got=é→🌙 ~. ")
	term.Press("exit 7\r")
	term.ExpectExit(7)
	term.ExpectModes()
}

func TestShellDisconnectsAndJoinsAgain(t *testing.T) {
	r := newShellRig(t)
	term := testterm.New(t, 120, 24)
	r.start(term, "shell", "--id", "main", "shop", "--", `echo up; read x; echo "got $x"; read x`)
	term.Shows("up")
	term.Press("~?")
	term.Shows("~?  list these")
	term.Press("~~half\r")
	term.Shows("got ~half")
	term.Press("~.")
	term.ExpectExit(0)
	term.Shows("doze shell --id main shop joins it again")
	term.ExpectRestored()
	if list := r.terminals(); len(list) != 1 || list[0].ID != "main" || list[0].State != types.ProcessStateRunning || list[0].Cols != 120 {
		t.Errorf("listed %+v", list)
	}
	if out := r.ok("shell", "--list", "shop"); !strings.Contains(out, "main") || !strings.Contains(out, "120x24") || !strings.Contains(out, "running") {
		t.Errorf("listed %s", out)
	}
	again := testterm.New(t, 80, 24)
	r.start(again, "shell", "--id", "main", "shop")
	again.Shows("got ~half")
	if out := r.ok("shell", "--close", "main", "shop"); !strings.HasPrefix(out, "main  exited") {
		t.Errorf("close printed %q", out)
	}
	again.ExpectExit(129)
	again.ExpectRestored()
	r.refusedWith(exitExecFailed, "terminal_not_found: ", "shell", "--close", "main", "shop")
}

func TestShellOutlivesItsConnection(t *testing.T) {
	r := newShellRig(t)
	term := testterm.New(t, 80, 24)
	r.start(term, "shell", "shop", "--", "i=0; while read x; do echo line $((i=i+1)) $x; done")
	for i, word := range []string{"one", "two", "three"} {
		term.Press(word + "\r")
		term.Shows(fmt.Sprintf("line %d %s", i+1, word))
		r.cut(false)
		testkit.Eventually(t, "it has connected again", func() bool { // before, keys may be lost
			r.mu.Lock()
			defer r.mu.Unlock()
			return len(r.conns) > 0
		})
	}
	r.cut(true)
	term.Shows("the connection was lost; trying again")
	term.Press("four\r")
	r.cut(false)
	term.Shows("line 4 four")
	term.Await("each line is there once", func(s testterm.Screen) bool {
		return strings.Count(s.String(), "line 1 one") == 1 && strings.Count(s.String(), "line 3 three") == 1
	})
	term.Press("\x04")
	term.ExpectExit(0)
	term.ExpectRestored()
}

func TestShellRestoresTheTerminal(t *testing.T) {
	r := newShellRig(t)
	const fullScreen = `read x; printf '\033[?1049h\033[?25lfull screen'; read x`
	for _, tt := range []struct {
		name string
		end  func(*testterm.Terminal)
		code int
	}{
		{"SIGTERM", func(term *testterm.Terminal) { term.Signal(syscall.SIGTERM) }, exitInterrupted},
		{"SIGHUP", func(term *testterm.Terminal) { term.Signal(syscall.SIGHUP) }, 129},
		{"escape", func(term *testterm.Terminal) { term.Press("\r~.") }, 0},
		{"Ctrl-C without a connection", func(term *testterm.Terminal) {
			r.cut(true)
			term.Shows("the connection was lost")
			term.Press("\x03")
		}, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			defer r.cut(false)
			term := testterm.New(t, 120, 24)
			r.start(term, "shell", "shop", "--", fullScreen+"; read y")
			term.Press("\r") // output after it comes when the client has the terminal's id
			term.Await("the program has the screen", func(s testterm.Screen) bool {
				return s.Alternate && s.CursorHidden && strings.Contains(s.String(), "full screen")
			})
			tt.end(term)
			term.ExpectExit(tt.code)
			term.ExpectRestored()
		})
	}
}

func TestShellReportsALostTerminal(t *testing.T) {
	r := newShellRig(t)
	term := testterm.New(t, 150, 24)
	r.start(term, "shell", "shop", "--", "read x; echo up; read x")
	term.Press("\r") // output after it comes when the client has the terminal's id
	term.Shows("up")
	r.cut(true)
	term.Shows("the connection was lost")
	r.mu.Lock()
	r.down = false
	r.mu.Unlock()
	if _, err := r.node.Manager.Stop(t.Context(), sandbox.ID(decodeJSON[types.Sandbox](t, r.ok("show", "shop", "--json")).ID)); err != nil {
		t.Fatal(err)
	}
	term.ExpectExit(exitExecFailed)
	term.Shows("terminal_lost: ")
	term.ExpectRestored()
}

func TestShellRefusesToStart(t *testing.T) {
	r := newShellRig(t)
	r.refusedWith(exitExecFailed, "standard input is not a terminal; run commands without one with doze exec shop -- COMMAND", "shell", "shop")
	r.refusedWith(exitExecFailed, "exclude each other", "shell", "--list", "--close", "x", "shop")
	r.refusedWith(exitExecFailed, "exclude each other", "shell", "--web", "shop", "--", "ls")
	r.refusedWith(exitExecFailed, "exclude each other", "shell", "--list", "shop", "sh")
	r.refusedWith(exitExecFailed, "put -- before a command", "shell", "shop", "htop", "-d", "5")
	term := testterm.New(t, 120, 24)
	r.start(term, "shell", "none")
	term.ExpectExit(exitExecFailed)
	term.Shows("doze: sandbox_not_found: ")
	r.start(term, "shell", "shop", "--cwd", "/missing-folder")
	term.ExpectExit(exitExecFailed)
	term.Shows("doze: path_not_found: ")
	term.ExpectRestored()
}

func TestKeyFilter(t *testing.T) {
	for _, tt := range []struct {
		name         string
		keys         []string
		typed, found string
	}{
		{"plain", []string{"ls ~/x\r"}, "ls ~/x\r", ""},
		{"disconnect", []string{"~."}, "", "."},
		{"after a line", []string{"ls\r~.x"}, "ls\r", "."},
		{"in pieces", []string{"ls\r", "~", "."}, "ls\r", "."},
		{"within a line", []string{"a~.\n"}, "a~.\n", ""},
		{"tilde", []string{"~~.\r"}, "~.\r", ""},
		{"home", []string{"~/x\r"}, "~/x\r", ""},
		{"empty line after a tilde", []string{"~\r~."}, "~\r", "."},
		{"help", []string{"~?ls"}, "ls", "?"},
		{"help, then disconnect", []string{"~?~."}, "", "."},
	} {
		t.Run(tt.name, func(t *testing.T) {
			k := keyFilter{lineStart: true}
			typed, found := "", ""
			for _, keys := range tt.keys {
				b, e := k.filter([]byte(keys))
				typed += string(b)
				if e != 0 {
					found = string(e)
				}
			}
			if typed != tt.typed || found != tt.found {
				t.Errorf("got %q, %q, want %q, %q", typed, found, tt.typed, tt.found)
			}
		})
	}
}

func TestScreenModesAreUndone(t *testing.T) {
	for _, tt := range []struct{ output, undo string }{
		{"plain \x1b[31mred\x1b[0m \x1b[2J\x1b]0;title\x07", ""},
		{"\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"},
		{"\x1b[?1049h\x1b[?25l\x1b[?25h\x1b[?1049l", ""},
		{"\x1b[?1000;1006;2004h", "\x1b[?1000l\x1b[?1006l\x1b[?2004l"},
		{"\x1b[?1000h\x1bc", ""},
		{"\x1b[?7l\x1b[?7l", "\x1b[?7h"},
		{"\x1b[?\x1b[?2004h", "\x1b[?2004l"},
		{"\x1b[?999999999999999999999h\x1b[?h", ""},
	} {
		for size := 1; size <= len(tt.output); size++ { // however the output is cut
			var m screenModes
			for i := 0; i < len(tt.output); i += size {
				m.note([]byte(tt.output[i:min(i+size, len(tt.output))]))
			}
			if got := m.undo(); got != tt.undo+"\x1b[0m" {
				t.Fatalf("%q in pieces of %d is undone by %q, want %q", tt.output, size, got, tt.undo)
			}
		}
	}
	var hostile screenModes
	hostile.note([]byte(strings.Repeat("\x1b[?1;2;3;4;5;6;8;9;10;11;12;13;14;15;16;17;18;19;20;21;22;23;24h", 10)))
	for mode := range 10000 {
		hostile.set(mode, true)
	}
	if len(hostile.changed) > maxModes {
		t.Errorf("%d modes are stored", len(hostile.changed))
	}
}

func TestCommandLineOfWords(t *testing.T) {
	for _, tt := range []struct {
		words []string
		want  string
	}{
		{nil, ""},
		{[]string{"ls | wc -l"}, "ls | wc -l"},
		{[]string{"htop", "-d", "5"}, "htop -d 5"},
		{[]string{"echo", "a b", "", "it's"}, "echo 'a b' '' " + shellQuote("it's")},
	} {
		if got := commandLineOf(tt.words); got != tt.want {
			t.Errorf("%q is %q, want %q", tt.words, got, tt.want)
		}
	}
}

// TestKeyQueueIsBounded: what is pasted waits, in order, and is not lost.
func TestKeyQueueIsBounded(t *testing.T) {
	q := keyQueue{changed: make(chan struct{}, 1)}
	const parts = 40
	go func() { // ended by the test
		for i := range parts {
			q.add([]byte(strings.Repeat(string(rune('a'+i%26)), maxQueuedKeys/8)))
		}
	}()
	var got int
	for got < parts*maxQueuedKeys/8 {
		<-q.changed
		keys := q.drain()
		if len(keys) > maxQueuedKeys+maxQueuedKeys/8 {
			t.Fatalf("%d keys waited", len(keys))
		}
		for _, key := range keys {
			if want := byte('a' + got/(maxQueuedKeys/8)%26); key != want {
				t.Fatalf("key %d is %q, want %q", got, key, want)
			}
			got++
		}
	}
	testkit.Eventually(t, "the queue is empty", func() bool { return len(q.drain()) == 0 })
}

func TestShellPrintsThePageOfTheTerminal(t *testing.T) {
	r := newRig(t)
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"shop"}, "/terminal/shop\n"},
		{[]string{"shop", "--id", "build 1"}, "/terminal/shop?id=build+1\n"},
	} {
		out := r.ok(append([]string{"shell", "--web"}, tc.args...)...)
		if !strings.HasPrefix(out, "http") || !strings.HasSuffix(out, tc.want) || strings.Contains(out, "/api/") {
			t.Errorf("%q prints %s", tc.args, out)
		}
	}
	if address := decodeJSON[struct{ URL string }](t, r.ok("shell", "--web", "shop", "--json")).URL; !strings.HasSuffix(address, "/terminal/shop") {
		t.Errorf("printed %s", address)
	}
}
