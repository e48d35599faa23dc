package api

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coder/websocket"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/testkit"
)

// wsExec is the client's end of the WebSocket of one command.
type wsExec struct {
	t         testing.TB
	conn      *websocket.Conn
	requestID string // X-Request-Id of the handshake's response
}

func (s *server) dialExec(path string) *wsExec {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), testkit.Patience)
	s.t.Cleanup(cancel)
	conn, resp, err := websocket.Dial(ctx, s.http.URL+Prefix+path, &websocket.DialOptions{
		HTTPClient: s.http.Client(), HTTPHeader: http.Header{"Authorization": {"Bearer " + testToken}},
	})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { conn.CloseNow() })
	conn.SetReadLimit(1 << 20)
	return &wsExec{t: s.t, conn: conn, requestID: resp.Header.Get("X-Request-Id")}
}

// execWS starts a command and reads its start.
func (s *server) execWS(command map[string]any) (*wsExec, types.ExecStarted) {
	s.t.Helper()
	e := s.dialExec("/sandbox/box/exec")
	command["type"] = "exec"
	e.sendJSON(command)
	return e, expectMessage[types.ExecStarted](e, "start")
}

func (e *wsExec) send(kind websocket.MessageType, message string) {
	e.t.Helper()
	if err := e.conn.Write(e.t.Context(), kind, []byte(message)); err != nil {
		e.t.Fatal(err)
	}
}

func (e *wsExec) sendJSON(v any) {
	e.t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		e.t.Fatal(err)
	}
	e.send(websocket.MessageText, string(b))
}

func (e *wsExec) stdin(data string) {
	e.t.Helper()
	e.send(websocket.MessageBinary, "\x00"+data)
}

func (e *wsExec) read() (websocket.MessageType, string, error) {
	ctx, cancel := context.WithTimeout(e.t.Context(), testkit.Patience)
	defer cancel()
	kind, b, err := e.conn.Read(ctx)
	return kind, string(b), err
}

// expectMessage skips acknowledgements, unless it expects one.
func expectMessage[T any](e *wsExec, want string) T {
	e.t.Helper()
	for {
		kind, b, err := e.read()
		if err != nil {
			e.t.Fatalf("%v instead of the message %s", err, want)
		}
		var m struct {
			Type string `json:"type"`
		}
		var v T
		if kind != websocket.MessageText || json.Unmarshal([]byte(b), &m) != nil || json.Unmarshal([]byte(b), &v) != nil {
			e.t.Fatalf("got %.200q, not the message %s", b, want)
		}
		if m.Type == "stdin_ack" && want != m.Type {
			continue
		}
		if m.Type != want {
			e.t.Fatalf("got %.500s, not the message %s", b, want)
		}
		return v
	}
}

// expectOutput reads output of one stream until it is text.
func (e *wsExec) expectOutput(stream byte, text string) {
	e.t.Helper()
	for got := ""; got != text; {
		kind, b, err := e.read()
		if err != nil {
			e.t.Fatal(err)
		}
		if kind == websocket.MessageText && strings.Contains(b, `"stdin_ack"`) {
			continue
		}
		if kind != websocket.MessageBinary || b[0] != stream || !strings.HasPrefix(text, got+b[1:]) {
			e.t.Fatalf("got %q after %q, want %q", b, got, text)
		}
		got += b[1:]
	}
}

func (e *wsExec) expectComplete() types.ExecCompleted {
	e.t.Helper()
	c := expectMessage[types.ExecCompleted](e, "complete")
	if _, b, err := e.read(); websocket.CloseStatus(err) != websocket.StatusNormalClosure {
		e.t.Fatalf("got %q, %v after the end", b, err)
	}
	return c
}

func (e *wsExec) expectProblem(code problem.Code, words string) {
	e.t.Helper()
	p := expectMessage[types.ExecFailed](e, "error").Problem
	if p.Code != code || p.Status != code.Definition().Status || !strings.Contains(p.Detail, words) {
		e.t.Errorf("got %+v, want %s with %q", p, code, words)
	}
	if p.RequestID == "" || p.RequestID != e.requestID {
		e.t.Errorf("the problem %s has request_id %q, the response's X-Request-Id is %q", code, p.RequestID, e.requestID)
	}
	if _, b, err := e.read(); websocket.CloseStatus(err) == -1 {
		e.t.Fatalf("got %q, %v after the error, not a close frame", b, err)
	}
}

func TestExecWebSocketCarriesBytesBothWays(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	e, started := s.execWS(map[string]any{"command": "cat; echo err >&2; exit 3", "stream_stdin": true})
	if started.PID <= 0 || started.StdinWindowBytes != guest.StdinWindow {
		t.Errorf("start is %+v", started)
	}
	for _, data := range []string{"hello\n", "\x00\xff\x01", "more"} {
		e.stdin(data)
		e.expectEcho(data)
	}
	e.sendJSON(types.ExecStdinEOF{Type: "stdin_eof"})
	e.expectOutput(types.StreamStderr, "err\n")
	if c := e.expectComplete(); c.ExitCode != 3 || c.TimedOut || c.DurationMS <= 0 {
		t.Errorf("complete is %+v", c)
	}
}

// expectEcho reads until input has come back as output and is acknowledged, which
// happen in any order.
func (e *wsExec) expectEcho(data string) {
	e.t.Helper()
	out, acked := "", 0
	for out != data || acked != len(data) {
		kind, b, err := e.read()
		if err != nil {
			e.t.Fatal(err)
		}
		var ack types.ExecStdinAck
		switch {
		case kind == websocket.MessageBinary && b[0] == types.StreamStdout:
			out += b[1:]
		case kind == websocket.MessageText && json.Unmarshal([]byte(b), &ack) == nil && ack.Type == "stdin_ack":
			acked += ack.Bytes
		default:
			e.t.Fatalf("got %q, not the echo of %q", b, data)
		}
		if !strings.HasPrefix(data, out) || acked > len(data) {
			e.t.Fatalf("output %q and %d bytes acknowledged of %q", out, acked, data)
		}
	}
}

func TestExecWebSocketWithoutInput(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	e, started := s.execWS(map[string]any{"argv": []string{"cat"}})
	if started.StdinWindowBytes != 0 {
		t.Errorf("start is %+v", started)
	}
	if c := e.expectComplete(); c.ExitCode != 0 {
		t.Errorf("complete is %+v", c)
	}
}

func TestExecWebSocketReportsClosedStdin(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	e, _ := s.execWS(map[string]any{"command": "exec <&-; echo closed; exec sleep 1000", "stream_stdin": true})
	e.expectOutput(types.StreamStdout, "closed\n")
	e.stdin("discarded")
	expectMessage[types.ExecStdinClosed](e, "stdin_closed")
}

func TestExecWebSocketRefusals(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	plain := filepath.Join(t.TempDir(), "plain")
	if err := os.WriteFile(plain, []byte("#!/bin/sh\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	const text, binary = websocket.MessageText, websocket.MessageBinary
	for _, tc := range []struct {
		name  string
		kind  websocket.MessageType
		first string
		code  problem.Code
		words string
	}{
		{"binary", binary, "\x00x", problem.RequestInvalid, "the first message is binary"},
		{"not JSON", text, "ls", problem.JSONInvalid, "send a JSON object"},
		{"no type", text, `{"argv":["ls"]}`, problem.RequestInvalid, "type"},
		{"no command", text, `{"type":"exec"}`, problem.RequestInvalid, "no command"},
		{"both", text, `{"type":"exec","argv":["ls"],"command":"ls"}`, problem.RequestInvalid, "both"},
		{"unknown field", text, `{"type":"exec","argv":["ls"],"stdin":"x"}`, problem.RequestInvalid, "stream_stdin"},
		{"field twice", text, `{"type":"exec","argv":["ls"],"argv":["rm"]}`, problem.RequestInvalid, "duplicate field"},
		{"timeout", text, `{"type":"exec","argv":["ls"],"timeout":"25h"}`, problem.RequestInvalid, "24h"},
		{"missing program", text, `{"type":"exec","argv":["no-such-program"]}`, problem.CommandNotFound, "PATH"},
		{"not executable", text, `{"type":"exec","argv":["` + plain + `"]}`, problem.CommandNotExecutable, "executed"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			e := s.dialExec("/sandbox/box/exec")
			e.t = t
			e.send(tc.kind, tc.first)
			e.expectProblem(tc.code, tc.words)
		})
	}
}

func TestExecWebSocketViolationsEndTheCommand(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	for _, tc := range []struct {
		name  string
		stdin bool
		send  func(*wsExec)
		words string
	}{
		{"input of a command without", false, func(e *wsExec) { e.stdin("x") }, "stream_stdin"},
		{"end of no input", false, func(e *wsExec) { e.sendJSON(types.ExecStdinEOF{Type: "stdin_eof"}) }, "without streamed input"},
		{"another stream", true, func(e *wsExec) { e.send(websocket.MessageBinary, "\x01x") }, "byte 0"},
		{"no stream", true, func(e *wsExec) { e.send(websocket.MessageBinary, "") }, "byte 0"},
		{"not JSON", true, func(e *wsExec) { e.send(websocket.MessageText, "x") }, "not a JSON object"},
		{"unknown type", true, func(e *wsExec) { e.send(websocket.MessageText, `{"type":"dance"}`) }, `"dance"`},
		{"more than the window", true, func(e *wsExec) {
			e.stdin(strings.Repeat("x", guest.StdinWindow))
			e.stdin(strings.Repeat("x", guest.StdinWindow/2))
		}, "stdin_ack"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			pid := filepath.Join(t.TempDir(), "pid")
			e, _ := s.execWS(map[string]any{"command": "echo $$ >" + pid + "; echo up; exec sleep 1000", "stream_stdin": tc.stdin})
			e.t = t
			e.expectOutput(types.StreamStdout, "up\n")
			tc.send(e)
			e.expectProblem(problem.RequestInvalid, tc.words)
			s.eventually("the command is killed", func() bool { return !alive(t, pid) })
		})
	}
}

func TestExecWebSocketIsRefusedBeforeTheHandshake(t *testing.T) {
	s := newServer(t, Limits{MaxStreams: 1})
	s.create("box")
	handshake := []string{"Connection", "keep-alive, Upgrade", "Upgrade", "websocket", "Sec-WebSocket-Version", "13", "Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="}
	with := func(name, value string) []string { return append(append([]string(nil), handshake...), name, value) }
	s.refused(problem.UpgradeRequired, "GET", "/sandbox/box/exec", nil)
	s.refused(problem.UpgradeRequired, "GET", "/sandbox/box/exec", nil, with("Sec-WebSocket-Version", "8")...)
	s.refused(problem.UpgradeRequired, "GET", "/sandbox/box/exec", nil, with("Sec-WebSocket-Key", "short")...)
	for name, change := range map[string]func(*http.Request){
		"HEAD":     func(r *http.Request) { r.Method = http.MethodHead },
		"HTTP/1.0": func(r *http.Request) { r.ProtoMinor = 0 },
	} {
		r := s.request(t.Context(), "GET", "/sandbox/box/exec", nil, handshake...)
		change(r)
		w := httptest.NewRecorder()
		s.api.ServeHTTP(w, r)
		if code := w.Header().Get(problem.HeaderError); code != problem.UpgradeRequired.String() {
			t.Errorf("%s: status %d, code %q: %s", name, w.Code, code, w.Body)
		}
	}
	s.refused(problem.SandboxNotFound, "GET", "/sandbox/none/exec", nil, handshake...)
	s.refused(problem.Unauthorized, "GET", "/sandbox/box/exec", nil, with("Authorization", "")...)
	e, _ := s.execWS(map[string]any{"argv": []string{"cat"}, "stream_stdin": true})
	s.refused(problem.StreamLimitExceeded, "GET", "/sandbox/box/exec", nil, handshake...)
	e.sendJSON(types.ExecStdinEOF{Type: "stdin_eof"})
	e.expectComplete()
}

func TestExecWebSocketNeedsHTTP1(t *testing.T) {
	s := newServerHTTP2(t)
	s.create("box")
	response := s.do("GET", "/sandbox/box/exec", nil)
	if header := response.header.Get("Upgrade"); header != "" {
		t.Errorf("Upgrade: %s over HTTP/2, whose clients refuse such a response", header)
	}
	s.checkProblem(problem.UpgradeRequired, "WebSocket", response)
}

// A client that disconnects is noticed although the command reads nothing of what it
// has sent and prints nothing.
func TestExecWebSocketDisconnectKillsTheCommand(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	for name, disconnect := range map[string]func(*wsExec){
		"cut":    func(e *wsExec) { e.conn.CloseNow() },
		"closed": func(e *wsExec) { e.conn.Close(websocket.StatusGoingAway, "") },
	} {
		t.Run(name, func(t *testing.T) {
			pid := filepath.Join(t.TempDir(), "pid")
			e, _ := s.execWS(map[string]any{"command": "sleep 1000 & echo $! >" + pid + "; echo up; wait", "stream_stdin": true})
			e.expectOutput(types.StreamStdout, "up\n")
			e.stdin(strings.Repeat("x", guest.StdinWindow))
			disconnect(e)
			s.eventually("the command's child is killed", func() bool { return !alive(t, pid) })
			s.eventually("the lease is released", func() bool {
				return s.do("POST", "/sandbox/"+id+"/sleep", nil).status == http.StatusOK
			})
		})
	}
}

func TestExecWebSocketDisconnectDuringAWake(t *testing.T) {
	s := newServer(t, Limits{MaxStreams: 1})
	s.create("box")
	e := s.dialExec("/sandbox/box/exec")
	e.conn.CloseNow()
	s.eventually("the stream is closed", func() bool { return s.api.streams.pool.Used() == 0 })
}

// A client that does not read but sends keepalives slows the command down, and loses
// nothing.
func TestExecWebSocketSlowClientLosesNothing(t *testing.T) {
	const stall, tick = 3 * time.Second, 100 * time.Millisecond
	s := newServer(t, Limits{Heartbeat: tick, Stall: stall})
	s.create("box")
	const size = 20 << 20 // more than sockets and pipes buffer
	e, _ := s.execWS(map[string]any{"command": "head -c 20971520 /dev/zero; echo end >&2"})
	sent := 0
	for range time.NewTicker(tick).C {
		e.sendJSON(types.Keepalive{Type: "keepalive"})
		if sent++; sent > int((stall+time.Second)/tick) {
			break
		}
	}
	out, errs := 0, ""
	for out < size || errs != "end\n" {
		kind, b, err := e.read()
		if err != nil || kind != websocket.MessageBinary {
			t.Fatalf("got %.100q, %v after %d bytes and %q", b, err, out, errs)
		}
		if b[0] == types.StreamStderr {
			errs += b[1:]
			continue
		}
		out += len(b) - 1
	}
	if out != size {
		t.Errorf("got %d bytes", out)
	}
	e.expectComplete()
}

// A client that neither reads nor sends is disconnected.
func TestExecWebSocketSilentClientIsDisconnected(t *testing.T) {
	s := newServer(t, Limits{Heartbeat: 20 * time.Millisecond, Stall: 200 * time.Millisecond})
	s.create("box")
	pid := filepath.Join(t.TempDir(), "pid")
	e := s.dialExec("/sandbox/box/exec")
	defer e.conn.CloseNow()
	e.sendJSON(map[string]any{"type": "exec", "command": "echo $$ >" + pid + "; exec cat /dev/zero"})
	s.eventually("the connection is closed", func() bool { return s.api.streams.pool.Used() == 0 })
	if b, err := os.ReadFile(pid); err == nil && len(b) > 0 { // otherwise a loaded machine had not started the command
		s.eventually("the command is killed", func() bool { return !alive(t, pid) })
	}
}

// A client that only reads responds to pings, and stays connected.
func TestExecWebSocketSilentClientThatReadsStaysConnected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI(t, Config{})
		sockets := make(chan *socket, 1)
		server := serveInMemory(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			s := &socket{}
			if err := s.accept(a, Exchange{r, w}); err != nil {
				t.Error(err)
				return
			}
			sockets <- s
			var receiving sync.WaitGroup
			receiving.Go(func() { s.cancel(s.receiveAll(func(websocket.MessageType, []byte) error { return nil })) })
			s.watch(a.cfg.Limits.Heartbeat, a.cfg.Limits.Stall)
			s.conn.CloseNow()
			receiving.Wait()
			s.cut()
		}))
		transport := &http.Transport{DialContext: server.dial}
		defer transport.CloseIdleConnections()
		pings := 0
		conn, _, err := websocket.Dial(t.Context(), "http://node.test/", &websocket.DialOptions{
			HTTPClient:     &http.Client{Transport: transport},
			OnPingReceived: func(context.Context, []byte) bool { pings++; return true },
		})
		if err != nil {
			t.Fatal(err)
		}
		ended := conn.CloseRead(t.Context())
		s := <-sockets
		time.Sleep(10 * a.cfg.Limits.Stall)
		synctest.Wait()
		if s.ctx.Err() != nil || ended.Err() != nil || pings == 0 {
			t.Errorf("after %d pings: %v, the client's %v", pings, context.Cause(s.ctx), context.Cause(ended))
		}
		conn.CloseNow()
		<-s.ctx.Done()
	})
}

func TestExecWebSocketPingsTheClientOfASilentCommand(t *testing.T) {
	s := newServer(t, Limits{Heartbeat: 20 * time.Millisecond})
	s.create("box")
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	pings := make(chan struct{}, 1000)
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	conn, _, err := websocket.Dial(ctx, s.http.URL+Prefix+"/sandbox/box/exec", &websocket.DialOptions{
		HTTPClient: s.http.Client(), HTTPHeader: http.Header{"Authorization": {"Bearer " + testToken}},
		OnPingReceived: func(context.Context, []byte) bool { pings <- struct{}{}; return true },
	})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.CloseNow()
	e := &wsExec{t: t, conn: conn}
	e.sendJSON(map[string]any{"type": "exec", "argv": []string{"cat", fifo}})
	expectMessage[types.ExecStarted](e, "start")
	completed := make(chan types.ExecCompleted, 1)
	go func() { completed <- expectMessage[types.ExecCompleted](e, "complete") }()
	for range 3 {
		testkit.Receive(t, "a ping", pings)
	}
	gate, err := os.OpenFile(fifo, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	gate.Close()
	if c := testkit.Receive(t, "the command ends", completed); c.ExitCode != 0 {
		t.Errorf("complete is %+v", c)
	}
}

func TestExecWebSocketTimeout(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	e, _ := s.execWS(map[string]any{"argv": []string{"cat"}, "stream_stdin": true, "timeout": "50ms"})
	if c := e.expectComplete(); !c.TimedOut || c.Signal != "SIGKILL" {
		t.Errorf("complete is %+v", c)
	}
}

// slowMessage is a message that comes in pieces.
type slowMessage struct {
	s      *execSocket
	pieces int
	silent int // pieces after which the client counted as silent
}

func (m *slowMessage) Read(b []byte) (int, error) {
	if m.s.active.Swap(0) == 0 {
		m.silent++
	}
	if m.pieces--; m.pieces < 0 {
		return 0, io.EOF
	}
	return copy(b, "x"), nil
}

// A large message may take longer than a client may be silent, and no pong comes
// within a frame.
func TestExecWebSocketClientThatSendsSlowlyIsNotSilent(t *testing.T) {
	s := &execSocket{}
	s.noteActivity()
	m := &slowMessage{s: s, pieces: 10}
	message, err := s.readMessage(nil, m)
	if err != nil || string(message) != "xxxxxxxxxx" || m.silent > 0 {
		t.Errorf("got %q, %v; %d of the pieces did not count", message, err, m.silent)
	}
}
