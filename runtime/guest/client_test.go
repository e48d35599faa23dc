package guest

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// hostileGuest sends these bytes on every connection and closes it.
func hostileGuest(t testing.TB, response []byte) *Client {
	t.Helper()
	socket := filepath.Join(t.TempDir(), SocketName)
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			conn.SetDeadline(time.Now().Add(5 * time.Second))
			in := bufio.NewReader(conn)
			if req, err := http.ReadRequest(in); err == nil {
				io.CopyN(io.Discard, req.Body, 1<<20)
			}
			conn.Write(response)
			conn.Close()
		}
	}()
	c := NewClient(socket)
	t.Cleanup(func() { c.Close(); l.Close(); <-done })
	return c
}

func body(content string) []byte {
	return fmt.Appendf(nil, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(content), content)
}

func chunked(content string, end bool) []byte {
	b := fmt.Appendf(nil, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n", len(content), content)
	if end {
		b = append(b, "0\r\n\r\n"...)
	}
	return b
}

func frame(t FrameType, payload string) string {
	b := make([]byte, FrameHeader)
	PutFrameHeader(b, t, len(payload))
	return string(b) + payload
}

// everyCall makes every call of a client and reads each stream to its end. items counts
// what the streams of logs and events had before.
func everyCall(ctx context.Context, c *Client) (errs map[string]error, items map[string]int) {
	errs, items = map[string]error{}, map[string]int{"Logs": -1, "Events": -1, "Watch": -1} // Next is called again
	_, errs["Hello"] = c.Hello(ctx)
	errs["Exec"] = runCommand(ctx, c)
	_, errs["StartProcess"] = c.StartProcess(ctx, ProcessSpec{Command: Command{Command: "x"}})
	_, errs["Processes"] = c.Processes(ctx)
	_, errs["StopProcess"] = c.StopProcess(ctx, "p-aaaaaaaa", 0)
	_, errs["SignalProcess"] = c.SignalProcess(ctx, "p-aaaaaaaa", "HUP")
	_, errs["WriteFile"] = c.WriteFile(ctx, "/x", 0, strings.NewReader("x"))
	_, errs["Stat"] = c.Stat(ctx, "/x", StatOptions{})
	_, _, errs["List"] = c.List(ctx, "/x", ListOptions{})
	errs["Remove"] = c.Remove(ctx, "/x", false, "")
	_, errs["Mkdir"] = c.Mkdir(ctx, "/x", 0)
	_, errs["Move"] = c.Move(ctx, "/x", "/y", "")
	_, errs["PutArchive"] = c.PutArchive(ctx, "/x", strings.NewReader("x"))
	errs["PortReady"] = c.PortReady(ctx, 1, 0)
	_, errs["OpenTerminal"] = c.OpenTerminal(ctx, TerminalSpec{})
	_, errs["CloseTerminal"] = c.CloseTerminal(ctx, "t", 0)
	errs["AttachTerminal"] = watchTerminal(ctx, c)
	_, errs["OpenSession"] = c.OpenSession(ctx, SessionSpec{})
	_, errs["InterruptSession"] = c.InterruptSession(ctx, "s")
	_, errs["CloseSession"] = c.CloseSession(ctx, "s", 0)
	_, errs["WaitProcess"] = c.WaitProcess(ctx, "p-aaaaaaaa", Wait{Exit: true})
	_, errs["Search"] = c.Search(ctx, "/x", SearchOptions{Name: "x", Limit: 1})
	_, errs["SearchContent"] = c.Search(ctx, "/x", SearchOptions{Content: "x", Limit: 1})
	_, errs["Trust"] = c.Trust(ctx, Trust{})
	errs["Trim"] = c.Trim(ctx)
	drain := func(r io.ReadCloser, err error) error {
		if err != nil {
			return err
		}
		defer r.Close()
		_, err = io.Copy(io.Discard, r)
		return err
	}
	errs["GetArchive"] = drain(c.GetArchive(ctx, "/x"))
	if f, err := c.ReadFile(ctx, "/x", http.Header{"Range": {"bytes=0-1"}}); err != nil {
		errs["ReadFile"] = err
	} else {
		errs["ReadFile"] = drain(f.Body, nil)
	}
	if s, err := c.Logs(ctx, "p-aaaaaaaa", true); err != nil {
		errs["Logs"] = err
	} else {
		for ; err == nil; items["Logs"]++ {
			_, err = s.Next()
		}
		errs["Logs"] = err
	}
	if s, err := c.Events(ctx); err != nil {
		errs["Events"] = err
	} else {
		for ; err == nil; items["Events"]++ {
			_, err = s.Next()
		}
		s.Close()
		errs["Events"] = err
	}
	if s, err := c.Watch(ctx, WatchSpec{Path: "/x"}); err != nil {
		errs["Watch"] = err
	} else {
		for ; err == nil; items["Watch"]++ {
			_, err = s.Next()
		}
		s.Close()
		errs["Watch"] = err
	}
	return errs, items
}

// watchTerminal reads the output of a terminal to its end.
func watchTerminal(ctx context.Context, c *Client) error {
	s, err := c.AttachTerminal(ctx, "t", 0)
	if err != nil {
		return err
	}
	defer s.Close()
	for {
		if ev, err := s.Next(); err != nil || ev.Kind == FrameComplete {
			return err
		}
	}
}

// runCommand reads a command to its end.
func runCommand(ctx context.Context, c *Client) error {
	s, err := c.Exec(ctx, ExecRequest{Command: Command{Command: "x"}})
	if err != nil {
		return err
	}
	defer s.Close()
	for {
		if ev, err := s.Next(); err != nil || ev.Kind == FrameComplete {
			return err
		}
	}
}

// watchBody is the beginning of a watch and a line.
func watchBody(line string) []byte {
	return body(`{"started":{"watch":"k3f9x2m7"}}` + "\n" + line + "\n")
}

func TestHostileResponsesAreErrors(t *testing.T) {
	huge := binary.BigEndian.AppendUint32([]byte{byte(FrameStdout)}, MaxFrame+1)
	for _, tt := range []struct {
		name     string
		response []byte
		only     string // the call that must fail; default: all
		good     int    // items of a stream that precede what is wrong
	}{
		{name: "nothing"},
		{name: "no HTTP", response: []byte("SSH-2.0-OpenSSH_9.2\r\n")},
		{name: "endless header", response: []byte("HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 1<<20))},
		{name: "header of 1 MB", response: []byte("HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 1<<20) + "\r\nContent-Length: 25\r\n\r\n" + `{"type":"hold","hold":1}` + "\n")},
		{name: "many informational responses", response: []byte(strings.Repeat("HTTP/1.1 103 Early\r\nX: y\r\n\r\n", 10_000))},
		{name: "switched protocols", response: []byte("HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n")},
		{name: "redirect", response: []byte("HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\nContent-Length: 0\r\n\r\n")},
		{name: "no content", response: []byte("HTTP/1.1 204 No Content\r\n\r\n")},
		{name: "error without words", response: []byte("HTTP/1.1 500 X\r\nContent-Length: 0\r\n\r\n")},
		{name: "error of 1 MB", response: []byte("HTTP/1.1 500 X\r\nContent-Length: 1048576\r\n\r\n" + strings.Repeat("x", 1<<20))},
		{name: "status 999", response: []byte("HTTP/1.1 999 X\r\nContent-Length: 0\r\n\r\n")},
		{name: "body cut", response: []byte("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")},
		{name: "chunks cut", response: chunked("{", false)},
		{name: "JSON over the limit", response: body(`{"version":"` + strings.Repeat("x", MaxJSON) + `"}`), only: "Hello"},
		{name: "another protocol", response: body(`{"protocol":99}`), only: "Hello"},
		{name: "process without a pid", response: body(`{"id":"p-aaaaaaaa","pid":0,"state":"running","restart":"never"}`), only: "SignalProcess"},
		{name: "process without an id", response: body(`{"pid":1,"state":"running","restart":"never"}`), only: "SignalProcess"},
		{name: "process with an unusable id", response: body(`{"id":"p-../../..","pid":1,"state":"running","restart":"never"}`), only: "SignalProcess"},
		{name: "process in an unknown state", response: body(`{"id":"p-aaaaaaaa","pid":1,"state":"flying","restart":"never"}`), only: "StartProcess"},
		{name: "process with an unknown restart", response: body(`[{"id":"p-aaaaaaaa","pid":1,"state":"running","restart":"x"}]`), only: "Processes"},
		{name: "more processes than a guest has", response: body(`[` + strings.Repeat(`{"id":"p-aaaaaaaa","pid":1,"state":"running","restart":"never"},`, maxProcesses) +
			`{"id":"p-aaaaaaaa","pid":1,"state":"running","restart":"never"}]`), only: "Processes"},
		{name: "processes that are none", response: body(`{"id":"p-aaaaaaaa"}`), only: "Processes"},
		{name: "session without an id", response: body(`{"pid":1,"state":"running"}`), only: "OpenSession"},
		{name: "wait with an unknown outcome", response: body(`{"outcome":"x","process":{"id":"p-aaaaaaaa","pid":1,"state":"running","restart":"never"}}`), only: "WaitProcess"},
		{name: "wait with a group of another line", response: body(`{"outcome":"met","line":"a","match":["b"],"process":{"id":"p-aaaaaaaa","pid":1,"state":"running","restart":"never"}}`), only: "WaitProcess"},
		{name: "search without end", response: body(`{"file":{"name":"x"}}` + "\n"), only: "Search"},
		{name: "more results than requested", response: body(strings.Repeat(`{"file":{"name":"x"}}`+"\n", 2) + `{"end":{}}` + "\n"), only: "Search"},
		{name: "lines for a search of names", response: body(`{"match":{"path":"/x"}}` + "\n" + `{"end":{}}` + "\n"), only: "Search"},
		{name: "unknown frame", response: chunked(frame(99, ""), true), only: "Exec"},
		{name: "frame over the limit", response: chunked(string(huge), true), only: "Exec"},
		{name: "output before the start", response: chunked(frame(FrameStdout, "x"), true), only: "Exec"},
		{name: "two starts", response: chunked(frame(FrameStart, `{"pid":1}`)+frame(FrameStart, `{"pid":1}`), true), only: "Exec"},
		{name: "start without a pid", response: chunked(frame(FrameStart, `{}`), true), only: "Exec"},
		{name: "no result", response: chunked(frame(FrameStart, `{"pid":1}`)+frame(FrameStdout, "x"), true), only: "Exec"},
		{name: "unusable result", response: chunked(frame(FrameStart, `{"pid":1}`)+frame(FrameComplete, "x"), true), only: "Exec"},
		{name: "exit code out of range", response: chunked(frame(FrameStart, `{"pid":1}`)+frame(FrameComplete, `{"exit_code":256}`), true), only: "Exec"},
		{name: "exit code below zero", response: chunked(frame(FrameStart, `{"pid":1}`)+frame(FrameComplete, `{"exit_code":-1}`), true), only: "Exec"},
		{name: "command that took less than nothing", response: chunked(frame(FrameStart, `{"pid":1}`)+frame(FrameComplete, `{"duration":-1}`), true), only: "Exec"},
		{name: "signal that is none", response: chunked(frame(FrameStart, `{"pid":1}`)+frame(FrameComplete, `{"exit_code":137,"signal":"\u001b[2J"}`), true), only: "Exec"},
		{name: "long signal", response: chunked(frame(FrameStart, `{"pid":1}`)+frame(FrameComplete, `{"exit_code":137,"signal":"SIGKILLSIGKILLSIGKILL"}`), true), only: "Exec"},
		{name: "running process with an exit code", response: body(`{"id":"p-aaaaaaaa","pid":1,"state":"running","restart":"never","exit_code":0}`), only: "SignalProcess"},
		{name: "lost process with an exit code", response: body(`{"id":"p-aaaaaaaa","pid":1,"state":"lost","restart":"never","exit_code":0}`), only: "SignalProcess"},
		{name: "ended process without an exit code", response: body(`{"id":"p-aaaaaaaa","pid":1,"state":"exited","restart":"never"}`), only: "SignalProcess"},
		{name: "process with an exit code out of range", response: body(`{"id":"p-aaaaaaaa","pid":1,"state":"exited","restart":"never","exit_code":-1}`), only: "StopProcess"},
		{name: "event of a process with an unusable signal", response: body(`{"type":"process","process":{"id":"p-aaaaaaaa","pid":1,"state":"exited","restart":"never","exit_code":1,"signal":"x"}}` + "\n"), only: "Events"},
		{name: "log's frame in an exec", response: chunked(frame(FrameStart, `{"pid":1}`)+frame(FrameExit, `{}`), true), only: "Exec"},
		{name: "exec's frame in a log", response: chunked(frame(FrameComplete, `{}`), true), only: "Logs"},
		{name: "log that follows without end", response: chunked(frame(FrameStdout, `x`), true), only: "Logs", good: 1},
		{name: "log that skips backwards", response: chunked(frame(FrameSkipped, `{"bytes":-1}`), true), only: "Logs"},
		{name: "listing without end", response: body(`{"entry":{"name":"x"}}` + "\n"), only: "List"},
		{name: "line of a listing over the limit", response: body(`{"entry":{"name":"` + strings.Repeat("x", MaxFrame) + `"}}`), only: "List"},
		{name: "more entries than allowed", response: body(strings.Repeat(`{"entry":{}}`+"\n", MaxEntries+1) + `{"end":{}}`), only: "List"},
		{name: "event of an unknown type", response: body(`{"type":"x"}` + "\n"), only: "Events"},
		{name: "event of no process", response: body(`{"type":"process"}` + "\n"), only: "Events"},
		{name: "endless hold", response: body(`{"type":"hold","hold":9000000000000000000}` + "\n"), only: "Events"},
		{name: "hold backwards", response: body(`{"type":"hold","hold":-1}` + "\n"), only: "Events"},
		{name: "watch without a beginning", response: body(`{"events":[{"seq":1,"type":"modify","path":"L2E="}]}` + "\n"), only: "Watch"},
		{name: "watch with an unusable id", response: body(`{"started":{"watch":"a\nid: b"}}` + "\n"), only: "Watch"},
		{name: "watch of less than no directories", response: watchBody(`{"started":{"watch":"k3f9x2m7","directories":-1}}`), only: "Watch"},
		{name: "watch that ends without a reason", response: watchBody(`{"events":[{"seq":1,"type":"modify","path":"L2E="}]}`), only: "Watch", good: 1},
		{name: "watch without events", response: watchBody(`{"events":[]}`), only: "Watch"},
		{name: "watch with an unknown event", response: watchBody(`{"events":[{"seq":1,"type":"x","path":"L2E="}]}`), only: "Watch"},
		{name: "watch with a relative path", response: watchBody(`{"events":[{"seq":1,"type":"modify","path":"YQ=="}]}`), only: "Watch"},
		{name: "watch with a move from nowhere", response: watchBody(`{"events":[{"seq":1,"type":"move","path":"L2E="}]}`), only: "Watch"},
		{name: "watch with an unknown reason", response: watchBody(`{"events":[{"seq":1,"type":"overflow","reason":"x"}]}`), only: "Watch"},
		{name: "watch with the end's reason for a loss", response: watchBody(`{"events":[{"seq":1,"type":"overflow","reason":"root_deleted"}]}`), only: "Watch"},
		{name: "watch that goes on after its end", response: watchBody(`{"events":[{"seq":1,"type":"stopped","reason":"root_deleted"},{"seq":2,"type":"modify","path":"L2E="}]}`), only: "Watch"},
		{name: "watch with a line over the limit", response: watchBody(`{"events":[{"path":"` + strings.Repeat("A", MaxFrame) + `"}]}`), only: "Watch"},
		{name: "event over the limit", response: body(`{"type":"` + strings.Repeat("x", MaxFrame) + `"}`), only: "Events"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := hostileGuest(t, tt.response)
			errs, items := everyCall(t.Context(), c)
			for call, err := range errs {
				if (tt.only == "" || tt.only == call) && (err == nil || err == io.EOF || items[call] > tt.good) {
					t.Errorf("%s took it: %v after %d items", call, err, items[call])
				}
			}
		})
	}
}

func TestRefusalIsAnError(t *testing.T) {
	long := strings.Repeat("x", 10_000)
	refused := strings.Replace(string(body(`{"code":"already_exists","message":"`+long+`"}`)), "200 OK", "409 Conflict", 1)
	c := hostileGuest(t, []byte(refused))
	_, err := c.Stat(t.Context(), "/x", StatOptions{})
	var refusal *Error
	if !errors.As(err, &refusal) || refusal.Code != CodeExists || refusal.Status != 409 || len(refusal.Message) > maxMessage+10 {
		t.Errorf("got %.100v", err)
	}
}

func TestSocketThatIsALinkIsRefused(t *testing.T) {
	dir := t.TempDir()
	l, err := net.Listen("unix", filepath.Join(dir, "other.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := os.Symlink("other.sock", filepath.Join(dir, "link.sock")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "file.sock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"link.sock", "file.sock", "none.sock", "."} {
		c := NewClient(filepath.Join(dir, name))
		if _, err := c.Hello(t.Context()); err == nil || !strings.Contains(err.Error(), "socket") && !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v", name, err)
		}
		c.Close()
	}
}

func TestGuestThatDoesNotRespond(t *testing.T) {
	socket := filepath.Join(t.TempDir(), SocketName)
	l, err := net.Listen("unix", socket) // connects are queued and never accepted
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c := NewClient(socket)
	defer c.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	errs, _ := everyCall(ctx, c)
	for call, err := range errs {
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v", call, err)
		}
	}
	w, watched := newWatchdog(t.Context(), time.Hour)
	watched.set(time.Nanosecond)
	<-w.Done()
	if err := watched.explain(io.EOF); !errors.Is(err, ErrNoResponse) {
		t.Errorf("the watchdog says %v", err)
	}
	watched.stop()
}

func TestFullBacklogIsTriedAgain(t *testing.T) {
	socket := filepath.Join(t.TempDir(), SocketName)
	l := listenWithBacklog(t, socket, 1)
	fillBacklog(t, socket)
	type dialed struct {
		conn net.Conn
		err  error
	}
	done := make(chan dialed, 1)
	paused, again := make(chan time.Duration), make(chan time.Time)
	go func() { // ended by the second attempt
		conn, err := dialSocket(t.Context(), socket, func(d time.Duration) <-chan time.Time { paused <- d; return again })
		done <- dialed{conn, err}
	}()
	select {
	case d := <-paused:
		if d != dialRetry {
			t.Errorf("the pause is %s", d)
		}
	case d := <-done:
		t.Fatalf("a full backlog is %v, %v", d.conn, d.err)
	}
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	again <- time.Time{}
	d := <-done
	if d.err != nil {
		t.Fatalf("after a connection was accepted: %v", d.err)
	}
	d.conn.Close()
}

// listenWithBacklog is net.Listen with a backlog, which is otherwise 4096.
func listenWithBacklog(t *testing.T, socket string, backlog int) net.Listener {
	t.Helper()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), socket)
	defer f.Close()
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrUnix{Name: socket}), unix.Listen(fd, backlog)); err != nil {
		t.Fatal(err)
	}
	l, err := net.FileListener(f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// fillBacklog connects until there is no more room.
func fillBacklog(t *testing.T, socket string) {
	t.Helper()
	for {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		switch err := unix.Connect(fd, &unix.SockaddrUnix{Name: socket}); err {
		case nil:
		case unix.EAGAIN:
			return
		default:
			t.Fatal(err)
		}
	}
}

func FuzzReadFrame(f *testing.F) {
	f.Add([]byte(frame(FrameStdout, "hello") + frame(FrameComplete, "{}")))
	f.Add([]byte{1, 0, 0, 0})
	f.Add([]byte{2, 255, 255, 255, 255, 0})
	f.Add([]byte(frame(7, "")))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := strings.NewReader(string(b))
		var out []byte
		for {
			kind, payload, err := ReadFrame(r, nil)
			if err != nil {
				if err == io.EOF && len(out) != len(b) {
					t.Fatalf("lost %d bytes", len(b)-len(out))
				}
				return
			}
			if len(payload) > MaxFrame {
				t.Fatalf("payload of %d bytes", len(payload))
			}
			out = append(out, frame(kind, string(payload))...)
			if string(out) != string(b[:len(out)]) {
				t.Fatalf("frames changed")
			}
		}
	})
}

func FuzzClient(f *testing.F) {
	f.Add([]byte{})
	f.Add(body(`{"protocol":1,"version":"x","pid":1}`))
	f.Add(body(`{"id":"p-aaaaaaaa","pid":1,"name":"x","state":"running","restart":"never","started_at":"2026-01-01T00:00:00Z"}`))
	f.Add(body(`{"entry":{"name":"x","path":"/x"}}` + "\n" + `{"end":{"truncated":false}}` + "\n"))
	f.Add(body(`{"type":"hold","hold":1000}` + "\n"))
	f.Add(chunked(`{"started":{"watch":"k3f9x2m7"}}`+"\n"+`{"events":[{"seq":1,"type":"move","path":"L2I=","from":"L2E="},{"seq":2,"type":"stopped","reason":"root_deleted"}]}`+"\n", true))
	f.Add(chunked(frame(FrameStart, `{"pid":1}`)+frame(FrameStdout, "x")+frame(FrameComplete, `{"exit_code":1}`), true))
	f.Add(chunked(frame(FrameSkipped, `{"bytes":1}`)+frame(FrameExit, `{"pid":1,"state":"exited","restart":"never","exit_code":0}`), true))
	f.Add([]byte("HTTP/1.1 409 X\r\nContent-Length: 38\r\n\r\n{\"code\":\"already_exists\",\"message\":\"\"}"))
	f.Add([]byte("HTTP/1.1 206 X\r\nContent-Range: bytes 0-1/2\r\nContent-Length: 2\r\n\r\nxx"))
	f.Add([]byte("HTTP/1.1 101 X\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"))
	f.Add(body(`{"id":"t-aaaaaaaa","pid":1,"command":"x","cols":1,"rows":1,"state":"running","started_at":"2026-01-01T00:00:00Z"}`))
	f.Add([]byte("HTTP/1.1 101 X\r\nUpgrade: " + UpgradeTerminal + "\r\nConnection: upgrade\r\n\r\n" + frame(FrameSkipped, `{"bytes":1}`) + frame(FrameStdout, "x") +
		frame(FrameReady, `{"cursor":2}`) + frame(FrameStdinAck, `{"bytes":1}`) + frame(FrameComplete, `{"exit_code":1}`)))
	f.Fuzz(func(t *testing.T, response []byte) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		everyCall(ctx, hostileGuest(t, response))
		if ctx.Err() != nil {
			t.Fatal("a call did not end")
		}
	})
}
