package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/cmd/internal/usage"
	"github.com/doze-run/doze/egress/egresstest"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/jupyter/jupytertest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

func TestLifeOfASandbox(t *testing.T) {
	r := newRig(t)
	if out := r.ok("create", "shop", "--env", "A=b", "--label", "team=web", "--sleep-after", "5m"); !regexp.MustCompile(`^shop  [a-z0-9]{12}  created, running\n$`).MatchString(out) {
		t.Errorf("create printed %q", out)
	}
	if out := r.ok("create", "shop"); !strings.Contains(out, "exists") {
		t.Errorf("the second create printed %q", out)
	}
	sb := decodeJSON[types.Sandbox](t, r.ok("show", "shop", "--json"))
	if sb.Env["A"] != "b" || sb.Labels["team"] != "web" || time.Duration(sb.SleepAfter) != 5*time.Minute {
		t.Errorf("got %+v", sb)
	}
	for _, step := range []struct{ command, state string }{{"sleep", "asleep"}, {"wake", "running"}, {"stop", "stopped"}, {"wake", "running"}} {
		if out, want := r.ok(step.command, "shop"), "shop  "+step.state+"\n"; out != want {
			t.Errorf("%s printed %q, want %q", step.command, out, want)
		}
	}
	if sb := decodeJSON[types.Sandbox](t, r.ok("hold", "shop", "30m", "--json")); sb.HoldUntil.IsZero() {
		t.Error("hold did not hold")
	}
	if out := r.ok("rm", "shop"); out != "shop  destroyed\n" {
		t.Errorf("rm printed %q", out)
	}
	r.refused("sandbox_not_found: ", "show", "shop")
	r.refused("sandbox_not_found: ", "rm", "shop")
	r.ok("rm", "--force", "shop")
}

func TestForceIsOfferedWhenASandboxIsBusy(t *testing.T) {
	r := newRig(t)
	r.ok("create", "shop")
	id := decodeJSON[types.Sandbox](t, r.ok("show", "shop", "--json")).ID
	lease, err := r.node.Manager.AcquireRunning(sandbox.ID(id))
	if err != nil {
		t.Fatal(err)
	}
	defer lease.Release()
	for _, step := range []struct{ command, state string }{{"sleep", "asleep"}, {"stop", "stopped"}} {
		r.refused("or with force=true\n  use --force: ", step.command, "shop")
		if out, want := r.ok(step.command, "--force", "shop"), "shop  "+step.state+"\n"; out != want {
			t.Errorf("%s --force printed %q, want %q", step.command, out, want)
		}
	}
}

func TestCreateWithoutWaiting(t *testing.T) {
	r := newRig(t)
	release := r.node.Engine.Block("start")
	out := r.ok("create", "slow", "--wait=false")
	if !strings.Contains(out, "created, starting") {
		t.Errorf("create printed %q", out)
	}
	r.refused("sandbox_conflict: ", "create", "slow", "--wait=false", "--image", "other")
	release()
	testkit.Eventually(t, "slow runs", func() bool { return strings.Contains(r.ok("show", "slow"), "running") })
	r.refused("sandbox_conflict: ", "create", "slow", "--wait=false", "--image", "other")
	if out := r.ok("create", "slow", "--wait=false"); !strings.Contains(out, "exists, running") {
		t.Errorf("create printed %q", out)
	}
	r.misused("requires a name", "create", "--wait=false")
}

func TestListFilters(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a", "-l", "team=web")
	r.ok("create", "b", "-l", "team=web")
	r.ok("create", "c")
	r.ok("sleep", "b")
	for _, tt := range []struct {
		args []string
		want string
	}{
		{nil, "a b c"},
		{[]string{"--state", "asleep"}, "b"},
		{[]string{"--label", "team=web"}, "a b"},
		{[]string{"--label", "team=web", "--state", "running"}, "a"},
		{[]string{"--state", "stopped"}, ""},
	} {
		out := r.ok(append([]string{"ls", "-q"}, tt.args...)...)
		if got := strings.Join(strings.Fields(out), " "); got != tt.want {
			t.Errorf("ls -q %v: got %q, want %q", tt.args, got, tt.want)
		}
	}
	list := decodeJSON[struct{ Sandboxes []types.Sandbox }](t, r.ok("ls", "--json"))
	if len(list.Sandboxes) != 3 {
		t.Errorf("got %d sandboxes as JSON", len(list.Sandboxes))
	}
	if out := r.ok("ls"); !strings.HasPrefix(out, "NAME") || strings.Count(out, "\n") != 4 {
		t.Errorf("ls printed %q", out)
	}
	r.refused("state", "ls", "--state", "sleeping")
}

func TestSeveralNamesAreAllTried(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	r.ok("create", "b")
	got := r.doze("sleep", "a", "missing", "b", "gone")
	if got.code != exitFailed || got.out != "a  asleep\nb  asleep\n" || strings.Count(got.err, "sandbox_not_found") != 2 {
		t.Errorf("got %+v", got)
	}
}

func TestBackgroundProcesses(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	r.refused("has had no background processes", "logs", "a", "web")
	out := r.ok("exec", "-d", "--name", "web", "--restart", "on_wake", "a", "-c", "echo up; echo oops >&2; sleep 1000")
	if !regexp.MustCompile(`^p-[a-z0-9]{8}  web\n$`).MatchString(out) {
		t.Errorf("exec -d printed %q", out)
	}
	if out := r.ok("ps", "a"); !regexp.MustCompile(`(?m)^p-[a-z0-9]{8} +web +\d+ +running +on_wake +\d+s +echo up`).MatchString(out) {
		t.Errorf("ps printed %q", out)
	}
	testkit.Eventually(t, "the output is stored", func() bool {
		got := r.doze("logs", "a", "web")
		return got == result{out: "up\n", err: "oops\n"}
	})
	r.refused("web (p-", "logs", "a", "wep")
	if out := r.ok("logs", "--json", "a", "web"); !strings.Contains(out, `{"stream":"stdout","data":"up\n"}`) {
		t.Errorf("logs --json printed %q", out)
	}
	follower := r.program("logs", "-f", "a", "web")
	var followed, end bytes.Buffer
	follower.Stdout, follower.Stderr = &followed, &end
	if err := follower.Start(); err != nil {
		t.Fatal(err)
	}
	if out := r.ok("kill", "a", "web"); !regexp.MustCompile(`^p-[a-z0-9]{8}  web  exited \(SIG\w+\)\n$`).MatchString(out) {
		t.Errorf("kill printed %q", out)
	}
	if err := follower.Wait(); err != nil || followed.String() != "up\n" {
		t.Errorf("logs -f: %v, %q, %q", err, followed.String(), end.String())
	}
	r.refused("process_not_found: ", "kill", "a", "99999999")
}

func TestPreviews(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	r.refused("doze expose a PORT", "open", "a")
	out := r.ok("expose", "a", "3000", "--access", "public", "--wake", "never", "--host-header", "preserve", "--protocol", "h2c", "--websocket", "keep_awake")
	if !regexp.MustCompile(`^https://\S+\n$`).MatchString(out) {
		t.Errorf("expose printed %q", out)
	}
	port := decodeJSON[types.Port](t, r.ok("open", "a", "--json"))
	if port.Access != "public" || port.Wake != "never" || port.HostHeader != "preserve" || port.Protocol != "h2c" || port.WebSocket != "keep_awake" {
		t.Errorf("got %+v", port)
	}
	if got := r.ok("open", "a"); got != out {
		t.Errorf("open printed %q, want %q", got, out)
	}
	r.ok("expose", "a", "3001")
	r.refused("name the port: 3000,3001", "open", "a")
	r.refused("port 9 of a", "open", "a", "9")
	r.misused("use 1 to 65535", "expose", "a", "70000")
	r.refused("access", "expose", "a", "80", "--access", "secret")
	r.misused("--remove and --access exclude", "expose", "a", "3000", "--remove", "--access", "public")
	r.misused("--remove and --wait-timeout exclude", "expose", "a", "3000", "--remove", "--wait-timeout", "1s")
	if out := r.ok("expose", "a", "3000", "--remove"); out != "3000  closed\n" {
		t.Errorf("expose --remove printed %q", out)
	}
	if closed := decodeJSON[types.Port](t, r.ok("expose", "a", "3001", "--remove", "--json")); closed.Port != 3001 {
		t.Errorf("got %+v", closed)
	}
	r.refused("port_not_exposed: ", "expose", "a", "3000", "--remove")
}

func TestEventsFollowUntilDestroyed(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	r.ok("sleep", "a")
	if out := r.ok("events", "a"); !regexp.MustCompile(`(?m) created .*\n.* slept `).MatchString(out) {
		t.Errorf("events printed %q", out)
	}
	follower := r.program("events", "-f", "--json", "a")
	out := r.output(follower)
	r.ok("wake", "a")
	var seen []string
	lines := json.NewDecoder(out)
	for {
		var e types.Event
		if err := lines.Decode(&e); err != nil {
			break
		}
		seen = append(seen, string(e.Type))
		if e.Type == "woke" {
			r.ok("rm", "a")
		}
	}
	if err := follower.Wait(); err != nil {
		t.Error(err)
	}
	if got := strings.Join(seen, " "); !strings.HasSuffix(got, "slept woke destroyed") {
		t.Errorf("got events %s", got)
	}
}

func TestEventsOfAllSandboxes(t *testing.T) {
	r := newRig(t)
	if out := r.ok("events", "--json"); !strings.Contains(out, `"events": []`) {
		t.Errorf("without events it printed %s", out)
	}
	r.ok("create", "a")
	r.ok("create", "b")
	r.ok("sleep", "a")
	if out := r.ok("events"); !regexp.MustCompile(`(?m) a +created .*\n.* b +created .*\n.* a +slept `).MatchString(out) {
		t.Errorf("events printed %q", out)
	}
	follower := r.program("events", "-f", "--json")
	out := r.output(follower)
	r.ok("wake", "a")
	r.ok("rm", "b")
	var seen []string
	for lines := json.NewDecoder(out); len(seen) < 5; {
		var e types.FeedEvent
		if err := lines.Decode(&e); err != nil {
			t.Fatalf("after %q: %v", seen, err)
		}
		seen = append(seen, string(e.Type)+" "+e.SandboxName)
	}
	if err := follower.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	_ = follower.Wait() // ended by a signal
	if got := strings.Join(seen, ", "); got != "created a, created b, slept a, woke a, destroyed b" {
		t.Errorf("got %s", got)
	}
}

func TestTopOnce(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	r.ok("sleep", "a")
	r.ok("wake", "a")
	out := r.ok("top", "--once")
	if !regexp.MustCompile(`(?m)^a +running +\d+s +- +1\.0 MiB +1 `).MatchString(out) || !strings.Contains(out, "1 running") {
		t.Errorf("top printed %q", out)
	}
	decodeJSON[reading](t, r.ok("top", "--json"))
	r.misused("too short", "top", "--interval", "1ms")
}

// The commands whose help promises it wake no sandbox.
func TestReadingWakesNothing(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	r.ok("expose", "a", "3000")
	r.ok("exec", "-d", "--name", "p", "a", "--", "sleep", "1000")
	r.ok("session", "create", "a", "dev")
	dir := t.TempDir()
	r.ok("mount", "add", "a", "data", dir+"/mounted")
	r.ok("sleep", "a")
	lines := commandLines(t, dir, "", "")
	lines["top"] = "top --once"
	reading := []string{"open a", "shell --list a", "files url a:/f", "egress rules a", "egress explain a GET https://a.example/"}
	for name, cmd := range commands((&app{getenv: os.Getenv}).rootCommand()) {
		if !strings.Contains(cmd.Long, "never wakes") {
			continue
		}
		if lines[name] == "" {
			t.Errorf("doze %s is not tested", name)
			continue
		}
		reading = append(reading, lines[name])
	}
	for _, line := range reading {
		r.ok(strings.Fields(line)...)
		if sb := decodeJSON[types.Sandbox](t, r.ok("show", "a", "--json")); sb.State != types.StateAsleep {
			t.Fatalf("doze %s woke it: %s", line, sb.State)
		}
	}
	if len(reading) < 15 {
		t.Errorf("only %d commands are tested: %q", len(reading), reading)
	}
}

func TestRefusalsNameTheRemedy(t *testing.T) {
	r := newRig(t)
	r.misused(`unknown command "slep"; did you mean sleep`, "slep")
	r.misused("doze ls --help", "ls", "--stat", "x")
	r.misused(`unexpected argument "b"; usage: doze create [NAME]`, "create", "a", "b")
	r.misused("PORT is missing; usage: doze expose SANDBOX PORT", "expose", "a")
	r.refused("name_invalid: ", "create", "No_Such")
	r.misused("write --label KEY=VALUE", "create", "a", "--label", "x")
	r.misused("invalid duration", "hold", "a", "soon")
	r.env["DOZE_TOKEN"] = "two words"
	r.refused("copy it again", "ls")
	r.env["DOZE_TOKEN"] = "wrong"
	r.refused("unauthorized: ", "ls")
	r.env["DOZE_TOKEN"] = ""
	r.env["DOZE_API"] = "https://node.example.com/api/v1"
	r.refused("set DOZE_TOKEN", "ls")
	r.env["DOZE_TOKEN"], r.env["DOZE_API"] = "x", "http://127.0.0.1:1/api/v1"
	r.refused("does not respond", "ls")
}

func TestHelpAndVersion(t *testing.T) {
	r := newRig(t)
	for _, args := range []string{"help nosuch", "help egress nosuch"} {
		got := r.doze(strings.Fields(args)...)
		if got.code != usage.ExitCode || got.out != "" || !strings.Contains(got.err, `unknown command "`+strings.TrimPrefix(args, "help ")+`"`) {
			t.Errorf("doze %s: %+v", args, got)
		}
	}
	for _, args := range []string{"exec", "egress rules"} {
		if help, flag := r.ok(append([]string{"help"}, strings.Fields(args)...)...), r.ok(append(strings.Fields(args), "--help")...); help != flag {
			t.Errorf("doze help %s and doze %s --help differ:\n%s\n%s", args, args, help, flag)
		}
	}
	if long, short := r.ok("version"), r.ok("--version"); long != short || !strings.HasPrefix(long, "doze ") {
		t.Errorf("%q and %q", long, short)
	}
}

func TestPoliciesOfDozeCannotBeRemoved(t *testing.T) {
	r := newRig(t)
	r.refused("policy_built_in: policy "+egresstest.BuiltIn+": the policy is part of doze; only pushed policies can be deleted", "policy", "rm", egresstest.BuiltIn)
	r.refused("policy_not_found: ", "policy", "rm", "nope")
}

func TestErrorsNameTheSandboxAsTheCallerDid(t *testing.T) {
	r := newRig(t)
	r.ok("create", "shop")
	sb := decodeJSON[types.Sandbox](t, r.ok("show", "shop", "--json"))
	lease, err := r.node.Manager.Acquire(t.Context(), sandbox.ID(sb.ID), sandbox.CauseExec)
	if err != nil {
		t.Fatal(err)
	}
	defer lease.Release()
	for _, name := range []string{"shop", sb.ID} {
		if got := r.doze("sleep", name); got.code != exitFailed || !strings.Contains(got.err, name) || !strings.Contains(got.err, "has 1 request in flight") {
			t.Errorf("doze sleep %s: %+v", name, got)
		}
	}
}

func TestCompletionsAreNamesOfSandboxes(t *testing.T) {
	r := newRig(t)
	r.ok("create", "shop")
	r.ok("create", "show")
	r.ok("exec", "-d", "--name", "web", "shop", "--", "sleep", "1000")
	r.ok("expose", "shop", "3000")
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"sleep", "sh"}, "shop show :4"},
		{[]string{"sleep", "shop", "sh"}, "show :4"},
		{[]string{"logs", "shop", "w"}, "web :4"},
		{[]string{"cp", "sho"}, "shop: show: :2"},
		{[]string{"expose", "a", "--access", ""}, "token public :4"},
		{[]string{"open", "shop", ""}, "3000 :4"},
		{[]string{"open", "shop", "3000", ""}, ":4"},
		{[]string{"create", "x", "--image", "b"}, "base :4"},
		{[]string{"create", "x", "--size", "b"}, "basic :4"},
		{[]string{"kill", "shop", "--signal", ""}, "HUP INT QUIT KILL USR1 USR2 TERM CONT STOP :4"},
		{[]string{"cp", "shop:/x", "y", ""}, ":4"},
		{[]string{"cp", "./", ""}, "shop: show: :2"},
		{[]string{"files", "url", "sho"}, "shop: show: :2"},
		{[]string{"ls", ""}, ":4"},
		{[]string{"exec", "shop", ""}, ":4"},
		{[]string{"run", ""}, ":0"},
	} {
		out := r.ok(append([]string{"__completeNoDesc"}, tt.args...)...)
		if got := strings.Join(strings.Fields(out), " "); got != tt.want {
			t.Errorf("completing %v: got %q, want %q", tt.args, got, tt.want)
		}
	}
	r.env["DOZE_API"] = "http://127.0.0.1:1"
	r.ok("__completeNoDesc", "sleep", "")
}

func TestWhatASandboxSaysDoesNotDriveTheTerminal(t *testing.T) {
	const evil = "\x1b]0;owned\x07\x1b[2J\u202e\u009b2J\x7f\U000e0001\nname"
	process := types.Process{ID: evil, PID: 1, Name: evil, Command: evil, Cwd: evil, Restart: evil, State: evil, Signal: evil, LogFile: evil}
	event := types.Event{Seq: 1, Type: evil, Kind: evil, Cause: evil, Reason: evil, Progress: evil, Process: &process}
	sb := types.Sandbox{ID: "k3f9x2m7q1az", Name: "a", State: evil, StateReason: evil, Processes: []types.Process{process},
		Labels: map[string]string{"a": evil}, Env: map[string]string{"A": evil}, Image: evil}
	r := fakeNode(t, func(w http.ResponseWriter, req *http.Request) {
		route := path.Base(req.URL.Path)
		switch {
		case req.Header.Get("Accept") == "text/event-stream":
			w.Header().Set("Content-Type", "text/event-stream")
			if route == "events" {
				event.Type = "destroyed"
			}
			text, _ := json.Marshal(map[string]any{"events": event, "logs": process}[route])
			fmt.Fprintf(w, "event: %s\ndata: %s\n\n", map[string]string{"events": "destroyed", "logs": "exit"}[route], text)
		case route == "absent":
			w.Header().Set("Content-Type", "application/problem+json")
			w.WriteHeader(http.StatusNotFound)
			json.NewEncoder(w).Encode(map[string]any{"code": evil, "detail": evil, "errors": []problem.FieldError{{Location: evil}, {Message: evil}}})
		case route == "a", route == "sleep":
			json.NewEncoder(w).Encode(sb)
		case route == "exec":
			complete, _ := json.Marshal(map[string]any{"type": "complete", "signal": evil})
			respondExec(w, req, evil, string(complete))
		case route == "process", route == "1":
			json.NewEncoder(w).Encode(process)
		case route == "expose":
			json.NewEncoder(w).Encode(types.Port{URL: evil})
		default:
			json.NewEncoder(w).Encode(map[string]any{"processes": []types.Process{process}, "events": []types.Event{event},
				"sandboxes": []types.Sandbox{sb}, "engine": types.EngineStatus{Error: evil}, "id": evil})
		}
	})
	for _, args := range []string{
		"ps a", "ls", "ls -q", "show a", "show absent", "events a", "events -f a", "logs -f a 1", "kill a absent", "kill a 1", "exec -d a true",
		"sleep a", "create a", "expose a 80", "open a 80", "top --once", "__complete kill a x", "__complete logs a \x1b",
		"ps a --json", "ls --json", "show a --json", "events a --json", "events -f a --json", "logs -f a 1 --json", "kill a 1 --json",
		"exec -d a true --json", "exec --json a true", "top --json", "expose a 80 --json",
	} {
		got := r.doze(strings.Split(args, " ")...)
		if got.out+got.err == "" || strings.ContainsAny(got.out+got.err, "\x1b\x07\u202e\u009b\x7f\U000e0001") {
			t.Errorf("doze %s printed %q and %q", args, got.out, got.err)
		}
		if strings.HasPrefix(args, "show a --json") && decodeJSON[types.Sandbox](t, got.out).Env["A"] != evil {
			t.Errorf("JSON has lost something: %q", got.out)
		}
	}
	if out := r.ok("ps", "a"); strings.Count(out, "\n") != 2 {
		t.Errorf("ps printed %q", out)
	}
}

func TestLogsReportGaps(t *testing.T) {
	r := fakeNode(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "event: stdout\ndata: {\"data\":\"x\"}\n\nevent: dropped\ndata: {\"bytes\":2048}\n\n")
	})
	got := r.doze("logs", "-f", "a", "1")
	if got.code != exitFailed || got.out != "x" || !strings.Contains(got.err, "2.0 KiB of output were overwritten") || !strings.Contains(got.err, "ended before the process") {
		t.Errorf("got %+v", got)
	}
	if got := r.doze("logs", "-f", "--json", "a", "1"); !strings.Contains(got.out, `{"dropped":{"bytes":2048}}`) {
		t.Errorf("got %+v", got)
	}
}

// TestUnwrittenOutputIsAnError writes to a disk that is full.
func TestUnwrittenOutputIsAnError(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	if err := os.WriteFile(filepath.Join(r.env["DOZE_HOME"], "token"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	for _, args := range []string{"ls", "ls -q", "ls --json", "show a", "ps a", "events a", "events -f a", "env", "top --once", "version", "sleep a", "exec a -- echo x"} {
		var errs bytes.Buffer
		a := &app{in: strings.NewReader(""), out: full, err: &errs, getenv: func(key string) string { return r.env[key] }}
		ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
		code := a.run(ctx, strings.Fields(args))
		cancel()
		want := exitFailed
		if strings.HasPrefix(args, execName) {
			want = exitExecFailed
		}
		if code != want || !strings.Contains(errs.String(), "no space left") {
			t.Errorf("doze %s: got exit code %d and %q", args, code, errs.String())
		}
	}
}

func TestUntrustedNodeIsSaidToBeOne(t *testing.T) {
	node := httptest.NewTLSServer(http.NotFoundHandler())
	defer node.Close()
	node.Config.ErrorLog = log.New(io.Discard, "", 0) // of the handshake
	r := &rig{t: t, env: map[string]string{"DOZE_API": node.URL, "DOZE_TOKEN": "x", "DOZE_HOME": t.TempDir()}}
	r.refused("DOZE_CA or --ca names the file", "ls")
}

func TestContainerInQuarantineIsAdoptedOrRemoved(t *testing.T) {
	r := newRig(t)
	for _, name := range []string{"a", "b"} {
		r.loseRecord(decodeJSON[types.Sandbox](t, r.ok("create", name, "--json")).ID)
		r.ok("create", name) // another of that name
		id := string(r.node.Manager.Info(t.Context()).Quarantined[0].ID)
		r.refused("quarantine_not_found: ", "rm", "--quarantined", name)
		r.refused("sandbox_conflict: ", "adopt", id)
		if name == "a" {
			if out := r.ok("adopt", id, "--name", "again"); out != "again  stopped\n" {
				t.Errorf("adopt: %q", out)
			}
			r.ok("exec", "again", "--", "true")
		} else if out := r.ok("rm", "--quarantined", id); out != id+"  destroyed\n" {
			t.Errorf("rm: %q", out)
		}
		r.refused("quarantine_not_found: ", "adopt", id)
		r.ok("rm", "-f", "--quarantined", id)
		r.ok("show", name)
	}
}

// commandLines are how each command that speaks to the node is called, with files in
// dir, with a container in quarantine, and with a backup.
func commandLines(t *testing.T, dir, lost, backup string) map[string]string {
	t.Helper()
	rules, module := dir+"/rules.json", dir+"/p.wasm"
	tree{"rules.json": "[]", "p.wasm": string(egresstest.Module(1)), "value": canary}.write(t, dir)
	origin, clone := dir+"/origin.git", dir+"/clone"
	if out, err := exec.CommandContext(t.Context(), "git", "init", "-q", "--bare", "-b", "main", origin).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return map[string]string{
		"git clone": "git clone a file://" + origin + " " + clone, "git commit": "git commit a " + clone + " -m x --allow-empty --name a --email a@example.com",
		"git push": "git push a " + clone, "git pull": "git pull a " + clone, "git status": "git status a " + clone, "git diff": "git diff a " + clone,
		"git log": "git log a " + clone, "git branches": "git branches a " + clone, "git checkout": "git checkout a " + clone + " main",
		"create": "create a", "ls": "ls", "show": "show a", "sleep": "sleep a", "wake": "wake a", "hold": "hold a 0s", "update": "update a --sleep-after 5m", "adopt": "adopt " + lost, "fork": "fork a b", "restore": "restore a s",
		"snapshot create": "snapshot create a s", "snapshot ls": "snapshot ls", "snapshot push": "snapshot push s oci:" + dir + "/image", "snapshot rm": "snapshot rm s", "backup create": "backup create a", "backup ls": "backup ls a", "backup restore": "backup restore a " + backup, "backup rm": "backup rm " + backup,
		"mount add": "mount add a data " + dir + "/mounted", "mount ls": "mount ls a", "mount rm": "mount rm a " + dir + "/mounted", "events": "events a", "history": "history a", "top": "top",
		"exec": "exec a true", "shell": "shell --list a", "cp": "cp " + dir + "/f a:" + dir + "/g", "files url": "files url a:/f", "ps": "ps a", "wait": "wait a web log=x", "ports": "ports a", "logs": "logs a web", "kill": "kill a web",
		"files stat": "files stat a:/", "files find": "files find a:" + dir, "files grep": "files grep a:" + dir + " x",
		"session create": "session create a dev", "session ls": "session ls a", "session interrupt": "session interrupt a dev", "session rm": "session rm a dev",
		"code": "code a print", "context create": "context create a python calc", "context ls": "context ls a", "context interrupt": "context interrupt a calc",
		"context restart": "context restart a calc", "context rm": "context rm a calc",
		"expose": "expose a 80", "open": "open a", "stop": "stop a", "archive": "archive a", "rm": "rm a", "df": "df", "env": "env", "version": "version",
		"egress rules": "egress rules a --set " + rules, "egress flows": "egress flows a", "egress explain": "egress explain a GET https://a.example/", "egress ca": "egress ca",
		"egress presets": "egress presets", "policy push": "policy push p " + module, "policy ls": "policy ls", "policy logs": "policy logs p", "policy rm": "policy rm p",
		"secret set": "secret set s --host a.example --from-file " + dir + "/value", "secret ls": "secret ls", "secret rm": "secret rm s",
	}
}

// commands are all commands by the words that call them, without the commands of the
// node's program.
func commands(of *cobra.Command) map[string]*cobra.Command {
	all := map[string]*cobra.Command{}
	for _, sub := range of.Commands() {
		if sub.DisableFlagParsing {
			continue
		}
		all[sub.Name()] = sub
		for name, cmd := range commands(sub) {
			all[sub.Name()+" "+name] = cmd
		}
	}
	return all
}

// failure is the exit code of a command that fails, of exec and shell the one that is not the
// program's.
func failure(name string, code int) int {
	if name == execName || name == shellName {
		return exitExecFailed
	}
	return code
}

func TestWrongCommandLinesHaveOneExitCode(t *testing.T) {
	r := &rig{t: t, env: map[string]string{"DOZE_HOME": t.TempDir()}}
	all := commands((&app{getenv: os.Getenv}).rootCommand())
	if len(all) < 40 {
		t.Fatalf("there are %d commands", len(all))
	}
	wrong := func(name string, args ...string) {
		t.Helper()
		got := r.doze(append(strings.Fields(name), args...)...)
		if want := failure(name, usage.ExitCode); got.code != want || got.out != "" || !strings.HasPrefix(got.err, "doze: ") {
			t.Errorf("doze %s %s: exit code %d, want %d; output %q, error %q", name, strings.Join(args, " "), got.code, want, got.out, got.err)
		}
	}
	many := slices.Repeat([]string{"x"}, 30)
	wrong("no-such-command")
	wrong("--no-such-flag")
	for name, cmd := range all {
		wrong(name, "--no-such-flag")
		if cmd.HasSubCommands() {
			wrong(name, "no-such-command")
		}
		if cmd.Args != nil && cmd.Args(cmd, many) != nil {
			wrong(name, many...)
		}
		if cmd.Args != nil && cmd.Args(cmd, nil) != nil {
			wrong(name)
		}
	}
}

func TestFailuresHaveOneExitCode(t *testing.T) {
	r := &rig{t: t, env: map[string]string{"DOZE_HOME": t.TempDir(), "DOZE_API": "http://127.0.0.1:1/api/v1", "DOZE_TOKEN": "x"}}
	dir := t.TempDir()
	tree{"f": "x"}.write(t, dir)
	for name, line := range commandLines(t, dir, "aaaaaaaaaaaa", "bbbbbbbbbbbb") {
		if name == "env" || name == "version" { // need no node
			continue
		}
		got := r.doze(strings.Fields(line)...)
		if want := failure(name, exitFailed); got.code != want || !strings.HasPrefix(got.err, "doze: ") {
			t.Errorf("doze %s: exit code %d, want %d; output %q, error %q", line, got.code, want, got.out, got.err)
		}
	}
}

func TestEveryCommandHasJSON(t *testing.T) {
	t.Setenv("PATH", jupytertest.Install(t)+":"+os.Getenv("PATH"))
	r := newRig(t)
	if err := os.WriteFile(filepath.Join(r.env["DOZE_HOME"], "token"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	tree{"f": "x"}.write(t, dir)
	r.ok("create", "a")
	lost := decodeJSON[types.Sandbox](t, r.ok("create", "lost", "--json")).ID
	r.loseRecord(lost)
	r.ok("exec", "-d", "--name", "web", "a", "--", "sh", "-c", "echo x; sleep 1000")
	testkit.Eventually(t, "the process has said something", func() bool { return r.ok("logs", "a", "web") != "" })
	backup := strings.TrimSpace(r.ok("backup", "create", "a"))
	lines := commandLines(t, dir, lost, backup)
	order := strings.Split("create,adopt,ls,show,sleep,wake,hold,update,events,history,top,exec,shell,session create,session ls,session interrupt,session rm,code,context create,context ls,context interrupt,context restart,context rm,cp,files url,files stat,files find,files grep,ps,wait,ports,logs,kill,expose,open,egress rules,egress flows,egress explain,egress ca,"+
		"egress presets,policy push,policy ls,policy logs,policy rm,secret set,secret ls,secret rm,snapshot create,snapshot ls,snapshot push,fork,restore,snapshot rm,backup create,backup ls,backup restore,backup rm,mount add,mount ls,mount rm,df,stop,archive,rm,env,version", ",") // in which all succeed
	inGit := strings.Split("git clone,git commit,git push,git pull,git status,git diff,git log,git branches,git checkout", ",")
	order = slices.Insert(order, slices.Index(order, "stop"), inGit...)
	var check func(path string, cmd *cobra.Command)
	check = func(path string, cmd *cobra.Command) {
		for _, sub := range cmd.Commands() {
			name := strings.TrimSpace(path + " " + sub.Name())
			switch {
			case name == "completion" || name == "help":
			case name == "policy new" || name == "policy dev" || name == "policy build" || name == "policy test" || name == "watch": // have tests of their own
			case sub.HasSubCommands():
				check(name, sub)
			case !slices.Contains(order, name) && !sub.DisableFlagParsing:
				t.Errorf("this test does not call the command %s", name)
			}
		}
	}
	check("", (&app{getenv: os.Getenv}).rootCommand())
	for _, name := range order {
		got := r.doze(append(strings.Fields(lines[name]), "--json")...)
		if !json.Valid([]byte(got.out)) || got.code != 0 {
			t.Errorf("doze %s --json: exit code %d, output %q, error %q", lines[name], got.code, got.out, got.err)
		}
	}
}
