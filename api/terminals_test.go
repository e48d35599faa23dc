package api

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// wsTerminal is a client of a terminal.
type wsTerminal struct {
	*wsExec
	seen      bytes.Buffer
	cursor    int64
	ready     *types.TerminalReady
	truncated int
	exit      *types.TerminalExit
	failed    *types.TerminalFailed
}

func (s *server) dialTerminal(query string) *wsTerminal {
	s.t.Helper()
	return &wsTerminal{wsExec: s.dialExec("/sandbox/box/terminal?" + query)}
}

// next reads one message.
func (w *wsTerminal) next() error {
	w.t.Helper()
	kind, b, err := w.read()
	if err != nil {
		return err
	}
	if kind == websocket.MessageBinary {
		w.seen.WriteString(b)
		w.cursor += int64(len(b))
		return nil
	}
	var m struct {
		Type types.TerminalMessageType `json:"type"`
	}
	decode := func(v any) {
		if err := json.Unmarshal([]byte(b), v); err != nil {
			w.t.Fatalf("%v in %s", err, b)
		}
	}
	switch decode(&m); m.Type {
	case types.TerminalMessageTypeReady:
		decode(&w.ready)
		w.cursor = w.ready.Cursor
	case types.TerminalMessageTypeTruncated:
		var truncated types.TerminalTruncated
		decode(&truncated)
		w.truncated++
		w.cursor = truncated.Cursor
	case types.TerminalMessageTypeExit:
		decode(&w.exit)
	case types.TerminalMessageTypeError:
		decode(&w.failed)
	default:
		w.t.Fatalf("got %s", b)
	}
	return nil
}

// sees reads until the output contains text.
func (w *wsTerminal) sees(text string) {
	w.t.Helper()
	for from := 0; !bytes.Contains(w.seen.Bytes()[from:], []byte(text)); {
		from = max(0, w.seen.Len()-len(text))
		if err := w.next(); err != nil {
			w.t.Fatalf("%v before %q; seen: %.2000q, %+v", err, text, w.seen.String(), w.failed)
		}
	}
}

// awaitReady reads until the message ready.
func (w *wsTerminal) awaitReady() *wsTerminal {
	w.t.Helper()
	for w.ready == nil {
		if err := w.next(); err != nil {
			w.t.Fatalf("%v before ready", err)
		}
	}
	return w
}

func (w *wsTerminal) types(keys string) {
	w.t.Helper()
	w.send(websocket.MessageBinary, keys)
}

// end reads to the end of the connection.
func (w *wsTerminal) end() {
	w.t.Helper()
	for {
		if err := w.next(); err != nil {
			if websocket.CloseStatus(err) == -1 {
				w.t.Fatalf("%v, not a close frame", err)
			}
			return
		}
	}
}

func (w *wsTerminal) expectExit(code int) {
	w.t.Helper()
	if w.end(); w.exit == nil || w.exit.Code != code || w.failed != nil {
		w.t.Fatalf("ended with %+v, %+v, want the exit code %d; seen: %.1000q", w.exit, w.failed, code, w.seen.String())
	}
}

func (w *wsTerminal) expectFailed(code problem.Code, words string) {
	w.t.Helper()
	w.end()
	switch f := w.failed; {
	case f == nil:
		w.t.Fatalf("the connection did not fail, %+v", w.exit)
	case f.Problem.Code != code || !strings.Contains(f.Message, words) || f.Message != f.Problem.Detail || f.Problem.RequestID != w.requestID:
		w.t.Errorf("failed with %q %+v, want %s with %q", f.Message, f.Problem, code, words)
	}
}

func terminalQuery(values ...string) string {
	q := url.Values{}
	for i := 0; i < len(values); i += 2 {
		q.Set(values[i], values[i+1])
	}
	return q.Encode()
}

func (s *server) terminals() []types.Terminal {
	s.t.Helper()
	return must[types.TerminalList](s, http.StatusOK, "GET", "/sandbox/box/terminals", nil).Terminals
}

func TestTerminalCarriesBytesBothWays(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	w := s.dialTerminal(terminalQuery("id", "main", "cols", "100", "rows", "30", "cwd", "/", "command", "pwd; stty size; stty raw -echo; echo begun; head -c 256 | od -An -tu1 -v | tr -d '\\n'; stty size; exit 7"))
	w.sees("begun")
	if !strings.HasPrefix(w.seen.String(), "/\r\n30 100\r\n") {
		t.Errorf("it began with %q", w.seen.String())
	}
	w.sendJSON(types.TerminalResize{Type: types.TerminalMessageTypeResize, Cols: 132, Rows: 50})
	var bytesToType, want []byte
	for b := range 256 {
		bytesToType = append(bytesToType, byte(b))
		want = fmt.Appendf(want, "%4d", b)
	}
	w.types(string(bytesToType))
	w.sees(string(want))
	w.sees("50 132")
	w.expectExit(7)
	if w.ready == nil || w.ready.ID != "main" {
		t.Errorf("ready %+v", w.ready)
	}
	var list []types.Terminal
	s.eventually("the end is known", func() bool {
		list = s.terminals()
		return list[0].State == types.ProcessStateExited
	})
	if len(list) != 1 || list[0].ID != "main" || *list[0].ExitCode != 7 || list[0].Cols != 132 || list[0].PID <= 0 || !strings.HasPrefix(list[0].Command, "pwd; stty") {
		t.Errorf("listed %+v", list)
	}
}

func TestTerminalIsAShellThatClientsShare(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	first := s.dialTerminal("id=main").awaitReady()
	first.types("PS1='rea''dy \\#> '\r") // with the number of the command
	first.sees("ready 2> ")
	second := s.dialTerminal("id=main")
	second.sees("ready 2> ")
	first.types("sh -c 'echo be''gun; exec sleep 1000'\r")
	second.sees("begun")
	second.types("\x03")
	for _, w := range []*wsTerminal{first, second} {
		w.sees("ready 3> ")
	}
	second.types("echo code=$?\r")
	first.sees("code=130")
	first.sees("ready 4> ")
	first.types("sh -c 'echo ag''ain; exec sleep 1000'\r")
	third := s.dialTerminal("id=main")
	third.sees("again")
	third.sendJSON(types.TerminalSignal{Type: types.TerminalMessageTypeSignal, Signal: "TERM"})
	first.sees("ready 5> ")
	first.types("echo code=$?\r")
	third.sees("code=143")
	if list := s.terminals(); len(list) != 1 || list[0].State != types.ProcessStateRunning {
		t.Errorf("listed %+v", list)
	}
	// A new one without an id.
	other := s.dialTerminal("").awaitReady()
	if other.ready.ID == "main" || len(s.terminals()) != 2 {
		t.Errorf("opened %+v", other.ready)
	}
	closed := must[types.Terminal](s, http.StatusOK, "DELETE", "/sandbox/box/terminal/main", nil)
	if closed.State != types.ProcessStateExited || closed.ExitCode == nil || closed.Signal == "SIGKILL" {
		t.Errorf("closed %+v", closed)
	}
	for _, w := range []*wsTerminal{first, second, third} {
		w.expectExit(*closed.ExitCode)
	}
	if list := s.terminals(); len(list) != 1 || list[0].ID != other.ready.ID {
		t.Errorf("listed %+v", list)
	}
	s.refused(problem.TerminalNotFound, "DELETE", "/sandbox/box/terminal/main", nil)
}

// The client disconnects after each number of bytes that it may have got, also inside of runes.
func TestTerminalResumesWithoutLossOrRepetition(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	const lines = 3000
	w := s.dialTerminal(terminalQuery("id", "main", "command", `read x; i=0; while [ $i -lt 3000 ]; do echo "é→🌙 $i"; i=$((i+1)); done; exit 5`)).awaitReady()
	w.types("\r")
	want := "\r\n"
	for i := range lines {
		want += fmt.Sprintf("é→🌙 %d\r\n", i)
	}
	random := rand.New(rand.NewPCG(1, 2))
	got := w.seen.String()
	cursor, connections := int64(len(got)), 1
	for w.exit == nil {
		for range 1 + random.IntN(3) {
			w.seen.Reset()
			if err := w.next(); err != nil {
				break
			}
			if b := w.seen.String(); b != "" {
				b = b[:1+random.IntN(len(b))] // bytes after it were lost with the connection
				got, cursor = got+b, cursor+int64(len(b))
				if len(b) < w.seen.Len() {
					break
				}
			}
		}
		if w.exit != nil {
			break
		}
		w.conn.CloseNow()
		w = s.dialTerminal("id=main&since=" + strconv.FormatInt(cursor, 10))
		connections++
	}
	if got != want || w.exit.Code != 5 || w.truncated > 0 || connections < 10 {
		t.Errorf("after %d connections got %d bytes instead of %d, the exit %+v, truncated %d times", connections, len(got), len(want), w.exit, w.truncated)
	}
}

// The guest retains the last 256 KiB of the output.
func TestTerminalResumesAfterOutputThatIsNotRetained(t *testing.T) {
	const total = int64(len("up\r\n") + 1_000_000)
	s := newServer(t, Limits{})
	s.create("box")
	w := s.dialTerminal(terminalQuery("id", "main", "command", "stty -echo; echo up; read x; head -c 1000000 /dev/zero | tr '\\0' x; read x; exit 4"))
	w.sees("up\r\n")
	w.types("\r")
	for w.cursor < total {
		testkit.NoError(t, "read", w.next())
	}
	w.conn.CloseNow()
	w = s.dialTerminal("id=main&since=10")
	testkit.NoError(t, "read", w.next())
	if w.truncated != 1 || w.cursor < total-256<<10 || w.cursor >= total {
		t.Fatalf("it began with the cursor %d, truncated %d times, %d bytes of output", w.cursor, w.truncated, w.seen.Len())
	}
	began := w.cursor
	for w.ready == nil {
		if w.cursor != began+int64(w.seen.Len()) {
			t.Fatalf("the cursor is %d after %d bytes from %d on", w.cursor, w.seen.Len(), began)
		}
		testkit.NoError(t, "read", w.next())
	}
	if w.ready.Cursor != total || began+int64(w.seen.Len()) != total {
		t.Errorf("ready with the cursor %d after %d bytes from %d on, want %d", w.ready.Cursor, w.seen.Len(), began, total)
	}
	w.types("\r")
	if w.expectExit(4); w.cursor != total || w.truncated != 1 {
		t.Errorf("it ended with the cursor %d of %d, truncated %d times", w.cursor, total, w.truncated)
	}
}

func TestTerminalClientThatNeverReadsStallsNoOther(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	idle := s.dialTerminal(terminalQuery("id", "main", "command", "read x; head -c 30000000 /dev/zero | tr '\\0' x; echo; echo end; read x; echo over"))
	active := s.dialTerminal("id=main").awaitReady()
	active.types("\r")
	active.sees("\nend")
	idle.types("\r") // it still types
	active.expectExit(0)
	idle.expectExit(0)
	if idle.truncated == 0 || idle.cursor != active.cursor || int64(idle.seen.Len()) >= idle.cursor || !strings.HasSuffix(idle.seen.String(), "over\r\n") {
		t.Errorf("the client that did not read got %d bytes of %d (%d), truncated %d times", idle.seen.Len(), idle.cursor, active.cursor, idle.truncated)
	}
}

func TestTerminalSleepsAndWakesWithItsClients(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	w := s.dialTerminal(terminalQuery("id", "main", "command", "echo up; while read x; do echo got $x; done"))
	w.sees("up")
	must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/box/sleep", nil)
	if list := s.terminals(); len(list) != 1 || list[0].State != types.ProcessStateRunning {
		t.Errorf("listed %+v", list)
	}
	s.refused(problem.TerminalNotFound, "DELETE", "/sandbox/box/terminal/other", nil)
	if sb, _ := s.node.Manager.ByID(sandbox.ID(id)); sb.State != sandbox.StateAsleep {
		t.Fatalf("the sandbox is %s after its terminals were listed", sb.State)
	}
	w.types("one\r")
	w.sees("got one")
	if sb, _ := s.node.Manager.ByID(sandbox.ID(id)); sb.State != sandbox.StateRunning {
		t.Errorf("the sandbox is %s after input", sb.State)
	}
	events := must[types.EventList](s, http.StatusOK, "GET", "/sandbox/box/events", nil).Events
	if last := events[len(events)-1]; last.Type != types.EventTypeWoke || last.Cause != types.CauseTerminal {
		t.Errorf("the last event is %+v", last)
	}
	w.conn.CloseNow()
	must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/box/sleep", nil)
	w = s.dialTerminal("id=main&since=" + strconv.FormatInt(w.cursor, 10)).awaitReady()
	w.types("two\r")
	w.sees("got two")
}

// Input that the program does not read waits, and does not hold the sandbox awake.
func TestTerminalWithUnreadInputSleeps(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	read := filepath.Join(t.TempDir(), "read")
	w := s.dialTerminal(terminalQuery("id", "main", "command", "stty raw -echo; echo up; while [ ! -e "+read+" ]; do sleep 0.01; done; head -c 1000000 | wc -c"))
	w.sees("up")
	typed := make(chan error, 1)
	go func() { // ended by the program
		var err error
		for range 10 {
			err = cmp.Or(err, w.conn.Write(t.Context(), websocket.MessageBinary, bytes.Repeat([]byte("x"), 100_000)))
		}
		typed <- err
	}()
	for range 20 { // at first, input that is accepted wakes it
		s.eventually("the sandbox sleeps", func() bool {
			return s.do("POST", "/sandbox/box/sleep", nil).status == http.StatusOK
		})
	}
	if err := os.WriteFile(read, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	w.sees("1000000")
	if err := <-typed; err != nil {
		t.Error(err)
	}
}

func TestTerminalEndsWithItsSandbox(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	stop := map[string]func(){
		"requested":        func() { s.do("POST", "/sandbox/box/stop?force=true", nil) },
		"container_exited": func() { s.node.Engine.Kill(t, sandbox.ID(id)) },
	}
	for reason, end := range stop {
		t.Run(reason, func(t *testing.T) {
			w := s.dialTerminal(terminalQuery("id", "main", "command", "echo up; exec cat"))
			w.sees("up")
			ended := s.dialTerminal(terminalQuery("id", "ended", "command", "true"))
			ended.expectExit(0)
			s.eventually("its end is known", func() bool { return s.terminals()[1].State == types.ProcessStateExited })
			end()
			s.eventually("the sandbox is stopped", func() bool {
				sb, _ := s.node.Manager.ByID(sandbox.ID(id))
				return sb.State == sandbox.StateStopped
			})
			w.end() // a guest that has the time for it ends its terminals
			if w.exit == nil && (w.failed == nil || w.failed.Problem.Code != problem.TerminalLost && w.failed.Problem.Code != problem.GuestLost) {
				t.Errorf("the connection ended with %+v", w.failed)
			}
			list := s.terminals()
			if len(list) != 2 || list[0].State == types.ProcessStateRunning || list[0].Reason == "" || list[1].ID != "ended" || *list[1].ExitCode != 0 {
				t.Fatalf("listed %+v", list)
			}
			path := "/sandbox/box/terminal?id=main&since=" + strconv.FormatInt(w.cursor, 10)
			if p := s.refused(problem.TerminalLost, "GET", path, nil, handshake...); !strings.Contains(p.Detail, string(list[0].Reason)) {
				t.Errorf("the reason %s is not in %q", list[0].Reason, p.Detail)
			}
			s.refused(problem.TerminalLost, "GET", "/sandbox/box/terminal?id=ended&since=0", nil, handshake...)
			s.refused(problem.TerminalNotFound, "GET", "/sandbox/box/terminal?id=other&since=0", nil, handshake...)
			if sb, _ := s.node.Manager.ByID(sandbox.ID(id)); sb.State != sandbox.StateStopped {
				t.Errorf("the sandbox is %s", sb.State)
			}
			// Without a cursor it is another terminal.
			w = s.dialTerminal(terminalQuery("id", "main", "command", "echo again; exec cat"))
			w.sees("again")
			if list := s.terminals(); len(list) != 2 || list[1].ID != "main" || list[1].State != types.ProcessStateRunning || list[1].Reason != "" {
				t.Errorf("listed %+v", list)
			}
			for _, id := range []string{"main", "ended"} {
				must[types.Terminal](s, http.StatusOK, "DELETE", "/sandbox/box/terminal/"+id, nil)
			}
		})
	}
}

func TestClosingATerminalOfAStoppedSandboxWakesNothing(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	s.dialTerminal("id=main&command=cat").awaitReady()
	must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/box/stop?force=true", nil)
	if got := must[types.Terminal](s, http.StatusOK, "DELETE", "/sandbox/box/terminal/main", nil); got.Reason == "" {
		t.Errorf("closed %+v", got)
	}
	if sb, _ := s.node.Manager.ByID(sandbox.ID(id)); sb.State != sandbox.StateStopped || len(s.terminals()) != 0 {
		t.Errorf("the sandbox is %s with %+v", sb.State, s.terminals())
	}
}

func TestTerminalMessagesAreChecked(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	for message, words := range map[string]string{
		`ls`:                                        "binary messages",
		`[]`:                                        "binary messages",
		`{"type":"stdin"}`:                          `"stdin"; use resize or signal`,
		`{"type":"resize","cols":0,"rows":1}`:       "cols",
		`{"type":"resize","cols":9999,"rows":1}`:    "cols",
		`{"type":"resize","rows":1}`:                "cols",
		`{"type":"resize","cols":1,"rows":1.5}`:     "rows",
		`{"type":"resize","cols":1,"rows":1,"x":1}`: "x",
		`{"type":"signal","signal":"SIGNAL"}`:       "use a name such as SIGINT",
		`{"type":"signal"}`:                         "signal",
	} {
		t.Run(message, func(t *testing.T) {
			w := s.dialTerminal("id=main&command=cat").awaitReady()
			w.send(websocket.MessageText, message)
			w.expectFailed(problem.RequestInvalid, words)
		})
	}
	// The terminal is as it was.
	w := s.dialTerminal("id=main").awaitReady()
	w.types("still\r")
	w.sees("still\r\nstill")
}

// handshake are the headers of the handshake of a WebSocket.
var handshake = []string{"Connection", "keep-alive, Upgrade", "Upgrade", "websocket", "Sec-WebSocket-Version", "13", "Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="}

func TestTerminalIsRefusedBeforeTheHandshake(t *testing.T) {
	s := newServer(t, Limits{MaxStreams: 1})
	s.create("box")
	s.refused(problem.UpgradeRequired, "GET", "/sandbox/box/terminal", nil)
	for query, code := range map[string]problem.Code{
		"cols=0":              problem.RequestInvalid,
		"rows=1001":           problem.RequestInvalid,
		"id=-x":               problem.RequestInvalid,
		"since=1":             problem.RequestInvalid,
		"since=-2&id=x":       problem.RequestInvalid,
		"cwd=relative":        problem.RequestInvalid,
		"shell=zsh":           problem.RequestInvalid,
		"cwd=/missing-folder": problem.PathNotFound,
		"id=missing&since=0":  problem.TerminalNotFound,
		"id=../main":          problem.RequestInvalid,
	} {
		s.refused(code, "GET", "/sandbox/box/terminal?"+query, nil, handshake...)
	}
	s.refused(problem.SandboxNotFound, "GET", "/sandbox/none/terminal", nil, handshake...)
	s.refused(problem.Unauthorized, "GET", "/sandbox/box/terminal", nil, append([]string{"Authorization", ""}, handshake...)...)
	if list := s.terminals(); len(list) != 0 {
		t.Errorf("listed %+v", list)
	}
	w := s.dialTerminal("id=main&command=cat").awaitReady()
	s.refused(problem.StreamLimitExceeded, "GET", "/sandbox/box/terminal", nil, handshake...)
	w.conn.CloseNow()
	s.eventually("the stream is closed", func() bool { return s.api.streams.pool.Used() == 0 })
	s.refused(problem.RequestInvalid, "GET", "/sandbox/box/terminal?id=main&since=1000", nil, handshake...)
}

func TestTerminalLimits(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	for range 32 {
		s.dialTerminal("id=main&command=cat").awaitReady()
	}
	s.refused(problem.TerminalLimitExceeded, "GET", "/sandbox/box/terminal?id=main", nil, handshake...)
}

// A client that disconnects leaves neither a stream nor a lease.
func TestTerminalDisconnectsLeaveNothing(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	for range 20 {
		w := s.dialTerminal(terminalQuery("id", "main", "command", "while :; do echo; done"))
		w.types("x")
		w.conn.CloseNow()
	}
	s.eventually("all streams are closed", func() bool { return s.api.streams.pool.Used() == 0 })
	s.eventually("no lease is held", func() bool { return s.do("POST", "/sandbox/box/sleep", nil).status == http.StatusOK })
}

// A client that disconnects while the program does not read what it typed is noticed.
func TestTerminalWithUnreadInputNoticesADisconnect(t *testing.T) {
	s := newServer(t, Limits{Heartbeat: 20 * time.Millisecond})
	s.create("box")
	w := s.dialTerminal(terminalQuery("id", "main", "command", "stty raw -echo; echo up; exec sleep 1000"))
	w.sees("up")
	typed := make(chan error, 1)
	go func() { // ended by CloseNow
		var err error
		for err == nil {
			err = w.conn.Write(t.Context(), websocket.MessageBinary, bytes.Repeat([]byte("x"), 100_000))
		}
		typed <- err
	}()
	s.eventually("the input waits", func() bool { return s.do("POST", "/sandbox/box/sleep", nil).status == http.StatusOK })
	w.conn.CloseNow()
	<-typed
	s.eventually("the stream is closed", func() bool { return s.api.streams.pool.Used() == 0 })
}

// A client that neither reads nor sends is disconnected, whether or not the program prints, and
// the program goes on.
func TestSilentClientOfATerminalIsDisconnected(t *testing.T) {
	s := newServer(t, Limits{Heartbeat: 20 * time.Millisecond, Stall: 200 * time.Millisecond})
	s.create("box")
	for _, program := range []string{"cat", "cat /dev/zero"} {
		t.Run(program, func(t *testing.T) {
			s.dialTerminal(terminalQuery("id", "main", "command", program))
			s.eventually("the connection is closed", func() bool { return s.api.streams.pool.Used() == 0 })
			s.eventually("no lease is held", func() bool { return s.do("POST", "/sandbox/box/sleep", nil).status == http.StatusOK })
			if list := s.terminals(); len(list) != 1 || list[0].State != types.ProcessStateRunning {
				t.Errorf("listed %+v", list)
			}
			must[types.Terminal](s, http.StatusOK, "DELETE", "/sandbox/box/terminal/main", nil)
		})
	}
}

// FuzzTerminalMessage parses text messages of clients.
func FuzzTerminalMessage(f *testing.F) {
	for _, seed := range []string{
		`{"type":"resize","cols":80,"rows":24}`, `{"type":"signal","signal":"SIGINT"}`, `{"type":"resize","cols":-1,"rows":1e9}`, `{"type":[]}`, `null`, `{`, "\xff", `{"type":"signal","signal":""}`,
		`{"type":"resize","cols":80,"rows":24,"type":"signal"}`, `{"type":"resize","cols":1001,"rows":0}`, `{"type":"resize","cols":1001,"rows":1}`, `{"type":"resize","cols":1,"rows":1000,"cols":65537}`, `{"type":"resize","cols":1,"rows":1000,"Cols":1001}`,
	} {
		f.Add([]byte(seed))
	}
	a := newAPI(f, Config{})
	f.Fuzz(func(t *testing.T, message []byte) {
		s := &terminalSocket{api: a}
		send, wakes, err := s.parse(message)
		if err == nil && send == nil {
			t.Fatalf("%q is neither valid nor refused", message)
		}
		if err == nil && !wakes { // a resize
			testkit.NoError(t, "resize", send())
			if s.size == nil || s.size.Cols < 1 || s.size.Cols > 1000 || s.size.Rows < 1 || s.size.Rows > 1000 {
				t.Fatalf("%q sets the size %+v", message, s.size)
			}
		}
		if p, ok := err.(*problem.Problem); err != nil && (!ok || p.Status >= 500) {
			t.Fatalf("%q is refused with %v", message, err)
		}
	})
}
