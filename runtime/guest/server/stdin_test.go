package server_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/guest/server"
	"github.com/doze-run/doze/testkit"
)

// streamed is a command with streamed input, and what it printed.
type streamed struct {
	t      testing.TB
	stream *guest.ExecStream
	acked  int
}

func execStreamed(t testing.TB, c *guest.Client, argv ...string) *streamed {
	t.Helper()
	stream, err := c.Exec(t.Context(), guest.ExecRequest{Command: guest.Command{Argv: argv}, StreamStdin: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stream.Close() })
	s := &streamed{t: t, stream: stream}
	if ev := s.next(); ev.Kind != guest.FrameStart {
		t.Fatalf("first event %+v", ev)
	}
	return s
}

func (s *streamed) next() guest.ExecEvent {
	s.t.Helper()
	ev, err := s.stream.Next()
	if err != nil {
		s.t.Fatal(err)
	}
	s.acked += ev.Bytes
	return ev
}

func (s *streamed) write(text string) {
	s.t.Helper()
	if err := s.stream.WriteStdin([]byte(text)); err != nil {
		s.t.Fatal(err)
	}
}

func (s *streamed) closeStdin() {
	s.t.Helper()
	if err := s.stream.CloseStdin(); err != nil {
		s.t.Fatal(err)
	}
}

// expect reads output until the whole of it is text.
func (s *streamed) expect(text string) {
	s.t.Helper()
	for got := ""; got != text; {
		ev := s.next()
		got += string(ev.Data)
		if ev.Kind == guest.FrameComplete || !strings.HasPrefix(text, got) {
			s.t.Fatalf("got %q, then %+v, not %q", got, ev, text)
		}
	}
}

func (s *streamed) complete() guest.ExecResult {
	s.t.Helper()
	for {
		switch ev := s.next(); ev.Kind {
		case guest.FrameComplete:
			return *ev.Result
		case guest.FrameStdout, guest.FrameStderr:
			s.t.Fatalf("more output: %q", ev.Data)
		}
	}
}

func TestStdinIsReadWhileTheCommandRuns(t *testing.T) {
	s := execStreamed(t, start(t, nil), "cat")
	for i := range 3 {
		line := fmt.Sprintf("line %d\n", i)
		s.write(line)
		s.expect(line)
	}
	s.closeStdin()
	if r := s.complete(); r.ExitCode != 0 {
		t.Fatalf("result %+v", r)
	}
}

func TestStdinThatStaysOpenDoesNotKeepACommand(t *testing.T) {
	s := execStreamed(t, start(t, nil), "sh", "-c", "echo begun; exit 3")
	s.expect("begun\n")
	if r := s.complete(); r.ExitCode != 3 {
		t.Fatalf("result %+v", r)
	}
}

func TestStdinOfManyWindowsArrivesWhole(t *testing.T) {
	s := execStreamed(t, start(t, nil), "sha256sum")
	hash := sha256.New()
	chunk := make([]byte, 100_001)
	sent := 0
	for i := range 200 {
		for j := range chunk {
			chunk[j] = byte(i * j)
		}
		hash.Write(chunk)
		for sent+len(chunk)-s.acked > guest.StdinWindow {
			if ev := s.next(); ev.Kind != guest.FrameStdinAck {
				t.Fatalf("event %+v while sending", ev)
			}
		}
		if err := s.stream.WriteStdin(chunk); err != nil {
			t.Fatal(err)
		}
		sent += len(chunk)
	}
	s.closeStdin()
	var got bytes.Buffer
	for {
		ev := s.next()
		got.Write(ev.Data)
		if ev.Kind == guest.FrameComplete {
			break
		}
	}
	if want := fmt.Sprintf("%x  -\n", hash.Sum(nil)); got.String() != want {
		t.Errorf("got %q, not %q", got.String(), want)
	}
}

// A command that reads nothing takes a pipe's worth, and no more than the window is
// accepted for it.
func TestUnreadStdinIsBounded(t *testing.T) {
	s := execStreamed(t, start(t, nil), "sleep", "1000")
	chunk := make([]byte, 64<<10)
	sent := 0
	for {
		err := s.stream.WriteStdin(chunk)
		if errors.Is(err, guest.ErrStdinWindow) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if sent += len(chunk); sent > 2*guest.StdinWindow {
			t.Fatalf("%d bytes were accepted for a command that reads nothing", sent)
		}
	}
}

func TestStdinThatTheCommandClosesIsReported(t *testing.T) {
	s := execStreamed(t, start(t, nil), "sh", "-c", "exec <&-; echo closed; exec sleep 1000")
	s.expect("closed\n")
	s.write("unread\n")
	for s.next().Kind != guest.FrameStdinClosed {
	}
	s.write("discarded\n")
}

func TestDisconnectKillsACommandThatReadsNothing(t *testing.T) {
	c := start(t, nil)
	dir := fifoFolder(t)
	s := execStreamed(t, c, "sh", "-c", "exec 3<>"+filepath.Join(dir, "fifo")+"; echo $$; sleep 1000 & wait")
	ev := s.next()
	pid := strings.TrimSpace(string(ev.Data))
	s.write(strings.Repeat("x", guest.StdinWindow)) // more than a pipe holds
	s.stream.Close()
	testkit.Eventually(t, "the command is killed", func() bool {
		_, err := os.Stat("/proc/" + pid)
		return os.IsNotExist(err)
	})
}

func TestContextEndsAnExecWithStreamedInput(t *testing.T) {
	c := start(t, nil)
	ctx, cancel := context.WithCancel(t.Context())
	s, err := c.Exec(ctx, guest.ExecRequest{Command: guest.Command{Argv: []string{"sleep", "1000"}}, StreamStdin: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := s.Next(); err != nil {
		t.Fatal(err)
	}
	cancel()
	if ev, err := s.Next(); err == nil {
		t.Fatalf("event %+v after the context's end", ev)
	}
}

func TestEndOfTheServerEndsAnExecWithStreamedInput(t *testing.T) {
	c, end := serve(t, nil)
	s := execStreamed(t, c, "sleep", "1000")
	end()
	if ev, err := s.stream.Next(); !errors.Is(err, guest.ErrLost) && (err != nil || ev.Kind != guest.FrameComplete) {
		t.Fatalf("event %+v, error %v", ev, err)
	}
}

// A process that inherited the input and never reads it does not delay the end of an exec.
// The command ends only when all input was sent: a connection that ends earlier fails the
// client's write.
func TestUnreadStdinOfABackgroundProcessDoesNotKeepAnExec(t *testing.T) {
	pidFile, fifo := filepath.Join(t.TempDir(), "pid"), filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	release, err := os.OpenFile(fifo, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer release.Close()
	t.Cleanup(func() {
		text, err := os.ReadFile(pidFile)
		if err != nil {
			t.Fatal(err)
		}
		pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
		if err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Error(err)
		}
	})
	s := execStreamed(t, start(t, nil), "sh", "-c", `exec 3<&0; sleep 1000 <&3 & echo $! >"$0"; read line <"$1"; exit 5`, pidFile, fifo)
	s.write(strings.Repeat("x", guest.StdinWindow))
	if _, err := release.WriteString("go\n"); err != nil {
		t.Fatal(err)
	}
	if r := s.complete(); r.ExitCode != 5 {
		t.Fatalf("result %+v", r)
	}
}

func TestTimeoutEndsACommandWithStreamedInput(t *testing.T) {
	s, err := start(t, nil).Exec(t.Context(), guest.ExecRequest{Command: guest.Command{Argv: []string{"cat"}}, StreamStdin: true, Timeout: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for {
		ev, err := s.Next()
		if err != nil {
			t.Fatal(err)
		}
		if ev.Kind == guest.FrameComplete {
			if !ev.Result.TimedOut || ev.Result.Signal != "SIGKILL" {
				t.Errorf("result %+v", ev.Result)
			}
			return
		}
	}
}

// upgrade makes a request to a guest as another client than ours, and expects the upgrade to a
// protocol of frames.
func upgrade(t *testing.T, runDir, method, route, protocol, body string) (net.Conn, *bufio.Reader) {
	t.Helper()
	conn, err := net.Dial("unix", filepath.Join(runDir, guest.SocketName))
	testkit.NoError(t, "Dial", err)
	t.Cleanup(func() { conn.Close() })
	testkit.NoError(t, "SetDeadline", conn.SetDeadline(time.Now().Add(testkit.Patience)))
	fmt.Fprintf(conn, "%s %s HTTP/1.1\r\nHost: guest\r\nConnection: Upgrade\r\nUpgrade: %s\r\nContent-Length: %d\r\n\r\n%s", method, route, protocol, len(body), body)
	in := bufio.NewReader(conn)
	resp, err := http.ReadResponse(in, nil)
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("response %+v, error %v", resp, err)
	}
	return conn, in
}

// disconnected reports whether the guest has ended a connection.
func disconnected(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET)
}

// Another client than ours is bounded too.
func TestStdinBeyondTheWindowEndsTheExec(t *testing.T) {
	var runDir string
	start(t, func(cfg *server.Config) { runDir = cfg.RunDir })
	conn, in := upgrade(t, runDir, "POST", guest.RouteExec, guest.UpgradeExec, `{"argv":["sleep","1000"],"stream_stdin":true}`)
	frame := make([]byte, guest.FrameHeader+guest.MaxFrame)
	guest.PutFrameHeader(frame, guest.FrameStdin, guest.MaxFrame)
	for range 2*guest.StdinWindow/guest.MaxFrame + 1 {
		if _, err := conn.Write(frame); err != nil {
			break
		}
	}
	for {
		_, _, err := guest.ReadFrame(in, nil)
		if err == nil {
			continue
		}
		if !disconnected(err) {
			t.Errorf("the connection ended with %v", err)
		}
		return
	}
}

func TestStreamedInputNeedsTheUpgrade(t *testing.T) {
	c := start(t, nil)
	_, err := c.Exec(t.Context(), guest.ExecRequest{Command: guest.Command{Argv: []string{"cat"}}, StreamStdin: true, Stdin: []byte("x")})
	wantCode(t, err, guest.CodeInvalid, "no stdin")
}
