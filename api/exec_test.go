package api

import (
	"context"
	"encoding/base64"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

func TestExecReturnsOutputAndExitCode(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	dir := t.TempDir()
	for _, tc := range []struct {
		name string
		body map[string]any
		want types.ExecResult
	}{
		{"command", map[string]any{"command": "echo out; echo err >&2; exit 3"}, types.ExecResult{Stdout: "out\n", Stderr: "err\n", ExecExit: types.ExecExit{ExitCode: 3}}},
		{"argv", map[string]any{"argv": []string{"printf", "%s|", "a b", "$HOME"}}, types.ExecResult{Stdout: "a b|$HOME|"}},
		{"cwd", map[string]any{"command": "pwd", "cwd": dir}, types.ExecResult{Stdout: dir + "\n"}},
		{"env", map[string]any{"command": "echo $X", "env": map[string]string{"X": "y z"}}, types.ExecResult{Stdout: "y z\n"}},
		{"stdin", map[string]any{"command": "cat", "stdin": "héllo"}, types.ExecResult{Stdout: "héllo"}},
		{"binary stdin", map[string]any{"command": "od -An -tx1", "stdin": "/wA=", "stdin_encoding": "base64"}, types.ExecResult{Stdout: " ff 00\n"}},
		{"binary output", map[string]any{"command": `printf '\377\001'; printf text >&2`}, types.ExecResult{Stdout: "/wE=", StdoutEncoding: "base64", Stderr: "text"}},
		{"signal", map[string]any{"command": "kill -9 $$"}, types.ExecResult{ExecExit: types.ExecExit{ExitCode: 137, Signal: "SIGKILL"}}},
		{"unknown command in a shell", map[string]any{"command": "exit 127"}, types.ExecResult{ExecExit: types.ExecExit{ExitCode: 127}}},
		{"max_output_bytes", map[string]any{"command": "printf 12345; printf 123 >&2", "max_output_bytes": 4}, types.ExecResult{Stdout: "1234", Stderr: "123", Truncated: true}},
		{"max_output_bytes exactly", map[string]any{"command": "printf 1234", "max_output_bytes": 4}, types.ExecResult{Stdout: "1234"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := must[types.ExecResult](s, http.StatusOK, "POST", "/sandbox/box/exec", tc.body)
			if got.DurationMS <= 0 {
				t.Errorf("duration is %v", got.DurationMS)
			}
			got.DurationMS = 0
			if got != tc.want {
				t.Errorf("got %+v, not %+v", got, tc.want)
			}
		})
	}
}

func TestExecKeepsReadingWhatItDoesNotKeep(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	got := must[types.ExecResult](s, http.StatusOK, "POST", "/sandbox/box/exec", map[string]any{"command": "head -c 30000000 /dev/zero | tr '\\0' x; echo done >&2"})
	if len(got.Stdout) != defaultOutput || !got.Truncated || got.Stderr != "done\n" || got.ExitCode != 0 {
		t.Errorf("stdout has %d bytes, truncated %v, stderr %q, exit code %d", len(got.Stdout), got.Truncated, got.Stderr, got.ExitCode)
	}
}

func TestTimeoutKillsTheTreeAndIsReported(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	held, err := os.OpenFile(fifo, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	got := must[types.ExecResult](s, http.StatusOK, "POST", "/sandbox/box/exec",
		map[string]any{"command": "exec 3>" + fifo + "; echo before; sleep 1000 & echo up >&3; wait", "timeout": "300ms"})
	if !got.TimedOut || got.ExitCode == 0 {
		t.Errorf("got %+v", got)
	}
	// The whole tree has the fifo open. On a slow machine the shell may not have
	// come far.
	held.SetReadDeadline(time.Now().Add(testkit.Patience))
	up, err := io.ReadAll(held)
	if err != nil {
		t.Errorf("a process is left: %v", err)
	}
	if len(up) > 0 && got.Stdout != "before\n" {
		t.Errorf("stdout is %q", got.Stdout)
	}
}

// alive reports whether the process runs whose pid is in the file.
func alive(t *testing.T, pidFile string) bool {
	t.Helper()
	b, err := os.ReadFile(pidFile)
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		t.Fatalf("no pid in %s: %q", pidFile, b)
	}
	return testkit.Alive(pid)
}

func TestExecStreamsWhileTheCommandRuns(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	fifo := filepath.Join(t.TempDir(), "gate")
	stream := s.open("POST", "/sandbox/box/exec", map[string]any{
		"command": "mkfifo " + fifo + "; printf one; cat " + fifo + "; printf two >&2; exit 5", "stream": true})
	if start := parse[types.ExecStart](t, stream.expect("start")); start.PID <= 0 {
		t.Errorf("pid is %d", start.PID)
	}
	if out := parse[types.Output](t, stream.expect("stdout")); out.Data != "one" {
		t.Errorf("stdout is %+v", out)
	}
	// The command waits until it is read that it wrote.
	if err := os.WriteFile(fifo, nil, 0); err != nil {
		t.Fatal(err)
	}
	if out := parse[types.Output](t, stream.expect("stderr")); out.Data != "two" {
		t.Errorf("stderr is %+v", out)
	}
	if done := parse[types.ExecComplete](t, stream.expect("complete")); done.ExitCode != 5 || done.TimedOut || done.DurationMS <= 0 {
		t.Errorf("complete is %+v", done)
	}
	stream.expectEnd()
}

func TestStreamedTextIsNeverCutInARune(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	const text = "日本語 𝄞 é\n"
	// dd writes byte by byte, so the guest sends runes in pieces.
	stream := s.open("POST", "/sandbox/box/exec", map[string]any{"command": "dd bs=1 2>/dev/null; printf '\\377' >&2; printf '\\303'",
		"stdin": strings.Repeat(text, 40), "stream": true})
	stream.expect("start")
	var out, err []byte
	for {
		ev, ok := stream.next()
		if !ok {
			t.Fatal("the stream ended early")
		}
		if ev.name == "complete" {
			break
		}
		piece := parse[types.Output](t, ev)
		b := []byte(piece.Data)
		if piece.Encoding == types.EncodingBase64 {
			b, _ = base64.StdEncoding.DecodeString(piece.Data)
		}
		if ev.name == "stdout" {
			if piece.Encoding != "" && string(b) != "\xc3" {
				t.Errorf("text came as %+v", piece)
			}
			out = append(out, b...)
		} else {
			err = append(err, b...)
		}
	}
	if want := strings.Repeat(text, 40) + "\xc3"; string(out) != want || string(err) != "\xff" {
		t.Errorf("stdout %q, stderr %q", out, err)
	}
}

func TestStreamedTimeoutIsReported(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	stream := s.open("POST", "/sandbox/box/exec", map[string]any{"argv": []string{"sleep", "1000"}, "stream": true, "timeout": "50ms"})
	stream.expect("start")
	if done := parse[types.ExecComplete](t, stream.expect("complete")); !done.TimedOut {
		t.Errorf("complete is %+v", done)
	}
}

func TestClientThatLeavesEndsItsCommand(t *testing.T) {
	for _, tc := range []struct {
		name   string
		stream bool
		server func(*testing.T) *server
	}{
		{"stream", true, func(t *testing.T) *server { return newServer(t, Limits{}) }},
		{"buffered", false, func(t *testing.T) *server { return newServer(t, Limits{}) }},
		{"stream over HTTP2", true, func(t *testing.T) *server { return newServerHTTP2(t) }},
		{"buffered over HTTP2", false, func(t *testing.T) *server { return newServerHTTP2(t) }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := tc.server(t)
			id := s.create("box")
			pidFile := filepath.Join(t.TempDir(), "pid")
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			req := s.request(ctx, "POST", "/sandbox/box/exec", map[string]any{"command": "sleep 1000 & echo $! >" + pidFile + "; wait", "stream": tc.stream})
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				if resp, err := s.http.Client().Do(req); err == nil {
					<-ctx.Done()
					resp.Body.Close()
				}
			}()
			s.eventually("the command runs", func() bool {
				b, err := os.ReadFile(pidFile)
				return err == nil && strings.HasSuffix(string(b), "\n")
			})
			cancel()
			<-ended
			s.eventually("the command is gone", func() bool { return !alive(t, pidFile) })
			s.sleep(id) // no lease is held
		})
	}
}

func TestAbandonedCommandIsCountedAsSuch(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	stream := s.open("POST", "/sandbox/box/exec", map[string]any{"command": "sleep 1000", "stream": true})
	stream.expect("start")
	stream.close()
	s.eventually("it was counted", func() bool { return execs(t, s.api.cfg.Metrics)[outcomeClient] == 1 })
}

func TestStreamsAndTransfersWorkOverHTTP2(t *testing.T) {
	s := newServerHTTP2(t)
	s.create("box")
	path := filepath.Join(t.TempDir(), "f")
	got := s.do("PUT", "/sandbox/box/files/write?"+at(path), io.Reader(&pattern{left: 8 << 20}))
	if got.status != http.StatusOK {
		t.Fatalf("status %d: %s", got.status, got.body)
	}
	if got = s.do("GET", "/sandbox/box/files/read?"+at(path), nil); len(got.body) != 8<<20 {
		t.Errorf("read were %d bytes", len(got.body))
	}
	stream := s.open("POST", "/sandbox/box/exec", map[string]any{"command": "echo x; read y", "stream": true, "stdin": "y\n"})
	if stream.resp.ProtoMajor != 2 {
		t.Errorf("the protocol is %s", stream.resp.Proto)
	}
	stream.expect("start")
	stream.expect("stdout")
	stream.expect("complete")
	stream.expectEnd()
	s.refused(problem.RouteNotFound, "GET", "/nowhere", nil)
}

func TestLostCommandHasNoExitCode(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	stream := s.open("POST", "/sandbox/box/exec", map[string]any{"command": "sleep 1000", "stream": true})
	stream.expect("start")
	s.node.Engine.Kill(t, sandboxID(id))
	if p := parse[problem.Problem](t, stream.expect("problem")); p.Code != problem.GuestLost {
		t.Errorf("got %+v", p)
	}
	stream.expectEnd()
}

func TestDestroyEndsStreamsCleanly(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	exec := s.open("POST", "/sandbox/box/exec", map[string]any{"command": "sleep 1000", "stream": true})
	exec.expect("start")
	process := must[types.Process](s, http.StatusCreated, "POST", "/sandbox/box/process", map[string]any{"command": "echo x; sleep 1000"}).ID
	logs := s.open("GET", "/sandbox/box/process/"+process+"/logs", nil, "Accept", eventStreamType)
	logs.expect("stdout")
	events := s.open("GET", "/sandbox/box/events", nil, "Accept", eventStreamType)
	events.expect("created")
	must[struct{}](s, http.StatusNoContent, "DELETE", "/sandbox/box", nil)
	exec.expect("problem")
	exec.expectEnd()
	// The process was killed; the guest may have sent its end before.
	if ev, ok := logs.next(); !ok || ev.name != "problem" && ev.name != "exit" {
		t.Errorf("the logs ended with %+v", ev)
	}
	logs.expectEnd()
	for {
		ev, ok := events.next()
		if !ok {
			t.Fatal("the timeline ended without destroyed")
		}
		if ev.name == "destroyed" {
			break
		}
	}
	events.expectEnd()
}

func TestBadCommandsAreRefused(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	for body, code := range map[string]problem.Code{
		`{}`:                                            problem.RequestInvalid,
		`{"command":"a","argv":["b"]}`:                  problem.RequestInvalid,
		`{"command":""}`:                                problem.RequestInvalid,
		`{"argv":[]}`:                                   problem.RequestInvalid,
		`{"argv":[""]}`:                                 problem.RequestInvalid,
		`{"argv":"ls"}`:                                 problem.RequestInvalid,
		`{"argv":[1]}`:                                  problem.RequestInvalid,
		`{"argv":["true"],"timeout":"25h"}`:             problem.RequestInvalid,
		`{"argv":["true"],"timeout":"-1s"}`:             problem.RequestInvalid,
		`{"argv":["true"],"timeout":10}`:                problem.RequestInvalid,
		`{"argv":["true"],"timeout":"9999999999h"}`:     problem.RequestInvalid,
		`{"argv":["true"],"max_output_bytes":10485761}`: problem.RequestInvalid,
		`{"argv":["true"],"max_output_bytes":0}`:        problem.RequestInvalid,
		`{"argv":["true"],"stdin":"%%","stdin_encoding":"base64"}`:         problem.RequestInvalid,
		`{"argv":["true"],"cmd":"x"}`:                                      problem.RequestInvalid,
		`{"argv":["true"],"cwd":"relative"}`:                               problem.RequestInvalid,
		`{"argv":["true"],"env":{"A":1}}`:                                  problem.RequestInvalid,
		`{"argv":["true"],"env":["A=1"]}`:                                  problem.RequestInvalid,
		`{"argv":["no-such-command-anywhere"]}`:                            problem.CommandNotFound,
		`{"argv":["no-such-command-anywhere"],"stream":true}`:              problem.CommandNotFound,
		`{"argv":["true"],"stdin":"` + strings.Repeat("x", maxJSON) + `"}`: problem.BodyTooLarge,
	} {
		s.refused(code, "POST", "/sandbox/box/exec", body)
	}
	s.refused(problem.SandboxNotFound, "POST", "/sandbox/absent/exec", `{"argv":["true"]}`)
}

func TestTooManyCallsAndStreamsAreRefused(t *testing.T) {
	s := newServer(t, Limits{MaxStreams: 1, MaxCalls: 1})
	s.create("box")
	command := map[string]any{"command": "sleep 1000", "stream": true}
	stream := s.open("POST", "/sandbox/box/exec", command)
	stream.expect("start")
	got := s.do("POST", "/sandbox/box/exec", command)
	s.checkProblem(problem.StreamLimitExceeded, "second stream", got)
	if got.header.Get("Retry-After") == "" {
		t.Error("there is no Retry-After")
	}
	s.refused(problem.StreamLimitExceeded, "GET", "/sandbox/box/events", nil, "Accept", eventStreamType)

	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if resp, err := s.http.Client().Do(s.request(ctx, "POST", "/sandbox/box/exec", `{"command":"sleep 1000"}`)); err == nil {
			resp.Body.Close()
		}
	}()
	s.eventually("the call is under way", func() bool { return s.api.calls.pool.Used() == 1 })
	s.refused(problem.CallLimitExceeded, "POST", "/sandbox/box/exec", `{"command":"true"}`)
	s.refused(problem.CallLimitExceeded, "GET", "/sandbox/box/files?path=/", nil)
	cancel()
	<-ended
	stream.close()
	s.eventually("a slot is free again", func() bool {
		return s.do("POST", "/sandbox/box/exec", `{"command":"true"}`).status == http.StatusOK
	})
	s.eventually("the stream has ended", func() bool { return s.api.streams.pool.Used() == 0 })
	again := s.open("POST", "/sandbox/box/exec", `{"command":"true","stream":true}`)
	again.expect("start")
}

func TestCallsCountByTheMemoryThatTheyMayTake(t *testing.T) {
	s := newServer(t, Limits{MaxCalls: 3})
	s.create("box")
	for _, most := range []int{1, 1 << 20, 2 << 20, 3 << 20} {
		must[types.ExecResult](s, http.StatusOK, "POST", "/sandbox/box/exec", map[string]any{"command": "true", "max_output_bytes": most})
	}
	s.refused(problem.CallLimitExceeded, "POST", "/sandbox/box/exec", map[string]any{"command": "true", "max_output_bytes": 3<<20 + 1})
	must[types.Process](s, http.StatusCreated, "POST", "/sandbox/box/process", `{"command":"true","name":"web"}`)
	s.refused(problem.CallLimitExceeded, "GET", "/sandbox/box/process/web/logs", nil) // up to 4 MiB
	dir := t.TempDir()
	for i := range 3 * filesPerSlot {
		if err := os.WriteFile(filepath.Join(dir, itoa(i)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if i == 3*filesPerSlot-2 {
			must[types.FileList](s, http.StatusOK, "GET", "/sandbox/box/files?path="+dir, nil)
		}
	}
	s.refused(problem.CallLimitExceeded, "GET", "/sandbox/box/files?path="+dir, nil)
	if n := s.api.calls.pool.Used(); n != 0 {
		t.Errorf("%d slots are held", n)
	}
}

func TestSilentStreamGetsAHeartbeat(t *testing.T) {
	s := newServer(t, Limits{Heartbeat: 5 * time.Millisecond})
	s.create("box")
	stream := s.open("POST", "/sandbox/box/exec", map[string]any{"command": "cat >/dev/null; sleep 1000", "stream": true})
	stream.expect("start")
	for range 3 {
		if ev, ok := stream.next(); !ok || ev.name != ":" {
			t.Fatalf("got %+v", ev)
		}
	}
}

func TestExecIsMeasured(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	must[types.ExecResult](s, http.StatusOK, "POST", "/sandbox/box/exec", `{"command":"true"}`)
	must[types.ExecResult](s, http.StatusOK, "POST", "/sandbox/box/exec", `{"command":"sleep 1000","timeout":"10ms"}`)
	if got := execs(t, s.api.cfg.Metrics); got[outcomeExited] != 1 || got[outcomeTimedOut] != 1 || len(got) != 2 {
		t.Errorf("counted were %v", got)
	}
}

// execs returns how many commands were counted, by outcome.
func execs(t *testing.T, m *Metrics) map[string]uint64 {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(m)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	counts := map[string]uint64{}
	for _, family := range families {
		if strings.HasPrefix(family.GetName(), "doze_api_request") {
			continue
		}
		if family.GetName() != "doze_exec_duration_seconds" {
			t.Errorf("there is a metric %s", family.GetName())
		}
		for _, metric := range family.GetMetric() {
			counts[metric.GetLabel()[0].GetValue()] = metric.GetHistogram().GetSampleCount()
		}
	}
	return counts
}

func BenchmarkExecTrue(b *testing.B) {
	s := newServer(b, Limits{})
	s.create("box")
	for b.Loop() {
		if got := s.do("POST", "/sandbox/box/exec", `{"argv":["true"]}`); got.status != http.StatusOK {
			b.Fatalf("status %d: %s", got.status, got.body)
		}
	}
}
