package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/cmd/internal/usage"
	"github.com/doze-run/doze/runtime/store"
	"github.com/doze-run/doze/testkit"
)

func TestCaddysCommandsAreUnderOneOfOurs(t *testing.T) {
	file := filepath.Join(t.TempDir(), "Caddyfile")
	for _, c := range []struct {
		name string
		args []string
		code int
		says string
	}{
		{"any command of Caddy", []string{"caddy", "list-modules"}, 0, "http.handlers.doze_preview"},
		{"one whose name is ours too", []string{"caddy", "stop", "--address", "unix/" + file + ".sock"}, 1, file + ".sock"},
		{"help of Caddy's", []string{"run", "--help"}, 0, "--pidfile"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cmd := program(t, t.TempDir(), c.args...)
			out, _ := cmd.CombinedOutput()
			if code := cmd.ProcessState.ExitCode(); code != c.code || !strings.Contains(string(out), c.says) {
				t.Errorf("exit code %d, want %d, and output with %q:\n%s", code, c.code, c.says, out)
			}
		})
	}
}

func TestDoctorListsContainersInQuarantine(t *testing.T) {
	node := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/api/v1/node" || r.Header.Get("Authorization") != "Bearer secret" {
			t.Errorf("request for %s", r.URL.Path)
		}
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"quarantined":[{"id":"k3f9x2m7q1az","name":"shop","image":"base","has_container":true,"error":"podman hangs"},{"id":"aaaaaaaaaaaa","has_container":false}]}`)
	}))
	defer node.Close()
	folder := t.TempDir()
	if err := os.WriteFile(filepath.Join(folder, "token"), []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"DOZE_API": node.URL + "/api/v1", "DOZE_HOME": folder}
	a := &app{getenv: func(key string) string { return env[key] }}
	if got := a.quarantineFindings(t.Context()); len(got) != 0 {
		t.Errorf("the token of this machine's node was sent without TLS: %+v", got)
	}
	env["DOZE_TOKEN"] = "secret"
	got := a.quarantineFindings(t.Context())
	if len(got) != 2 {
		t.Fatalf("findings: %+v", got)
	}
	for i, words := range [][]string{
		{"k3f9x2m7q1az", "shop", "podman hangs", "doze adopt k3f9x2m7q1az", "doze rm --quarantined k3f9x2m7q1az"},
		{"aaaaaaaaaaaa", "run folder", "doze rm --quarantined aaaaaaaaaaaa"},
	} {
		for _, word := range words {
			if f := got[i]; f.OK || f.Name != "quarantine" || !strings.Contains(f.Detail+f.Remedy, word) {
				t.Errorf("finding %+v lacks %q", f, word)
			}
		}
	}
	node.Close()
	if got := a.quarantineFindings(t.Context()); len(got) != 0 {
		t.Errorf("without a node: %+v", got)
	}
}

func TestSecondNodeIsFoundWhereverTheCaddyfilePutsTheData(t *testing.T) {
	dir := t.TempDir()
	first, err := store.Open(filepath.Join(dir, "data", "store"), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	socket := filepath.Join(dir, "admin.sock") // as if the first node's
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	file := filepath.Join(dir, "Caddyfile")
	text := "{\n\tadmin unix/" + socket + "\n\tdoze {\n\t\tdata " + filepath.Join(dir, "data") + "\n\t}\n}\n"
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	before, err := os.Stat(socket)
	if err != nil {
		t.Fatal(err)
	}
	cmd := program(t, t.TempDir(), "run", "--config", file)
	out, _ := cmd.CombinedOutput()
	if code := cmd.ProcessState.ExitCode(); code != exitFailed || !strings.Contains(string(out), "another node uses this folder") {
		t.Errorf("exit code %d, output:\n%s", code, out)
	}
	if after, err := os.Stat(socket); err != nil || !os.SameFile(before, after) {
		t.Errorf("the first node's admin socket is another now (%v)", err)
	}
}

func TestDoctorChecksAStoreOfflineAndReplacesIt(t *testing.T) {
	home := t.TempDir()
	dir := filepath.Join(home, "store")
	doctor := func(args ...string) (code int, out string) {
		t.Helper()
		var text strings.Builder
		a := &app{out: &text, err: &text, getenv: func(key string) string { return map[string]string{"DOZE_HOME": home}[key] }}
		code = a.run(t.Context(), append([]string{"doctor"}, args...))
		return code, text.String()
	}
	if code, out := doctor("--store"); code != exitFailed || !strings.Contains(out, dir) {
		t.Errorf("without a store: exit code %d, %s", code, out)
	}
	records, err := store.Open(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	id := records.NodeID()
	if err := records.PutDocument(t.Context(), "rules", "a", []byte("b")); err != nil {
		t.Fatal(err)
	}
	if code, out := doctor("--store"); code != exitFailed || !strings.Contains(out, "another node uses") {
		t.Errorf("while a node runs: exit code %d, %s", code, out)
	}
	if err := records.Close(); err != nil {
		t.Fatal(err)
	}
	if code, out := doctor("--store", dir); code != 0 || !strings.HasPrefix(out, "ok ") {
		t.Errorf("a good one: exit code %d, %s", code, out)
	}
	tables, err := filepath.Glob(filepath.Join(dir, "*.sst"))
	if err != nil || len(tables) != 1 {
		t.Fatalf("tables %v, %v", tables, err)
	}
	if err := os.Truncate(tables[0], 100); err != nil {
		t.Fatal(err)
	}
	if code, out := doctor("--store"); code != exitFailed || !strings.Contains(out, tables[0]) || !strings.Contains(out, "--reset") {
		t.Errorf("a damaged one: exit code %d, %s", code, out)
	}
	if code, out := doctor("--store", "--reset"); code != exitFailed || !strings.Contains(out, "node_id") {
		t.Errorf("reset of a node without a name: exit code %d, %s", code, out)
	}
	if err := os.WriteFile(filepath.Join(home, "node_id"), []byte(id+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, out := doctor("--store", "--reset"); code != 0 || !strings.Contains(out, ".damaged-") {
		t.Errorf("reset: exit code %d, %s", code, out)
	}
	if records, err = store.OpenOf(id, dir, nil); err != nil {
		t.Fatal(err)
	}
	if err := records.Close(); err != nil {
		t.Error(err)
	}
	if code, _ := doctor("--reset"); code != usage.ExitCode {
		t.Error("--reset without --store is accepted")
	}
}

// testNode is a Caddy with doze's modules, but without sandboxes, in a folder of its own.
type testNode struct {
	t    *testing.T
	home string
	port int
	cmd  *exec.Cmd
}

const siteCaddyfile = `{
	admin unix/{$DOZE_HOME}/admin.sock|0600
	persist_config off
	auto_https off
	storage file_system {$DOZE_HOME}/caddy
	%s
}
http://127.0.0.1:{$TEST_PORT} {
	bind 127.0.0.1
	respond "{$TEST_GREETING}%s"
}
`

// startNode starts a node whose environment has a port and a greeting.
func startNode(t *testing.T) *testNode {
	t.Helper()
	n := &testNode{t: t, home: t.TempDir(), port: testkit.FreePort(t)}
	n.configure("", "")
	n.cmd = program(t, n.home, "run", "--config", n.caddyfile())
	n.cmd.Env = append(n.cmd.Env, "TEST_PORT="+strconv.Itoa(n.port), "TEST_GREETING=hello")
	lines, err := n.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := n.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		n.cmd.Process.Signal(os.Interrupt)
		n.cmd.Wait()
	})
	var log strings.Builder
	for scan := bufio.NewScanner(lines); scan.Scan(); {
		fmt.Fprintln(&log, scan.Text())
		if strings.Contains(scan.Text(), "serving initial configuration") {
			go io.Copy(io.Discard, lines) // ends with the node
			return n
		}
	}
	t.Fatalf("the node did not start:\n%s", log.String())
	return nil
}

func (n *testNode) caddyfile() string { return filepath.Join(n.home, "Caddyfile") }

func (n *testNode) configure(global, greeting string) {
	n.t.Helper()
	if err := os.WriteFile(n.caddyfile(), fmt.Appendf(nil, siteCaddyfile, global, greeting), 0o644); err != nil {
		n.t.Fatal(err)
	}
}

// doze runs a command in an environment that has the node's folder alone.
func (n *testNode) doze(args ...string) (output string, code int) {
	n.t.Helper()
	cmd := program(n.t, n.home, args...)
	out, _ := cmd.CombinedOutput()
	return string(out), cmd.ProcessState.ExitCode()
}

func (n *testNode) greeting() string {
	n.t.Helper()
	res, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/", n.port))
	if err != nil {
		n.t.Fatal(err)
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		n.t.Fatal(err)
	}
	return string(text)
}

func TestReloadUsesTheNodesEnvironment(t *testing.T) {
	n := startNode(t)
	n.configure("", " again")
	if out, code := n.doze("reload", "--config", n.caddyfile()); code != 0 {
		t.Fatalf("exit code %d: %s", code, out)
	}
	if got := n.greeting(); got != "hello again" {
		t.Errorf("got %q", got)
	}
	// Imports are relative to the file, whatever the directories of the two processes.
	if err := os.WriteFile(filepath.Join(n.home, "snippet"), []byte("log {\n\toutput discard\n}\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	n.configure("import snippet", " imported")
	if out, code := n.doze("reload", "--config", n.caddyfile()); code != 0 || n.greeting() != "hello imported" {
		t.Errorf("exit code %d: %s", code, out)
	}
	n.configure("nonsense", " refused")
	if out, code := n.doze("reload", "--config", n.caddyfile()); code != exitFailed || !strings.HasPrefix(out, "doze: ") || !strings.Contains(out, n.caddyfile()+":6") {
		t.Errorf("exit code %d: %s", code, out)
	}
	if got := n.greeting(); got != "hello imported" {
		t.Errorf("after a reload that was refused: %q", got)
	}
	other := t.TempDir()
	cmd := program(t, other, "reload", "--config", n.caddyfile())
	out, _ := cmd.CombinedOutput()
	if !strings.Contains(string(out), "no node responds at unix/"+other+"/admin.sock") || cmd.ProcessState.ExitCode() != exitFailed {
		t.Errorf("without a node: %s", out)
	}
}

func TestASecondNodeDoesNotShareTheFirstsAddresses(t *testing.T) {
	n := startNode(t)
	for name, tt := range map[string]struct{ config, says string }{
		"the port": {fmt.Sprintf("{\n\tadmin off\n}\nhttp://127.0.0.1:%d {\n\tbind 127.0.0.1\n}\n", n.port),
			fmt.Sprintf("process %d (doze-node.test) already listens on tcp/127.0.0.1:%d;", n.cmd.Process.Pid, n.port)},
		"all addresses":      {fmt.Sprintf("{\n\tadmin off\n}\nhttp://:%d {\n}\n", n.port), fmt.Sprintf("process %d ", n.cmd.Process.Pid)},
		"the port for admin": {fmt.Sprintf("{\n\tadmin 127.0.0.1:%d\n}\n", n.port), fmt.Sprintf("process %d ", n.cmd.Process.Pid)},
		"the admin socket":   {fmt.Sprintf("{\n\tadmin unix/%s/admin.sock|0600\n}\n", n.home), "another process already listens on " + n.home + "/admin.sock;"},
	} {
		t.Run(name, func(t *testing.T) {
			home := t.TempDir()
			file := filepath.Join(home, "Caddyfile")
			if err := os.WriteFile(file, []byte(tt.config), 0o644); err != nil {
				t.Fatal(err)
			}
			cmd := program(t, home, "run", "--config", file)
			out, _ := cmd.CombinedOutput()
			if code := cmd.ProcessState.ExitCode(); code != exitFailed || !strings.Contains(string(out), tt.says) {
				t.Errorf("exit code %d, output %s; want %q", code, out, tt.says)
			}
		})
	}
	if got := n.greeting(); got != "hello" {
		t.Errorf("the first node says %q", got)
	}
	if out, code := n.doze("reload", "--config", n.caddyfile(), "--force"); code != 0 {
		t.Errorf("the first node has lost its admin socket: %s", out)
	}
}

// entries lists a folder with all that is in it.
func entries(t *testing.T, dir string) string {
	t.Helper()
	var list []string
	if err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		list = append(list, path)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return strings.Join(list, "\n")
}

func TestValidateRefusesWhatReloadRefusesAndWritesNothing(t *testing.T) {
	const frame = `{
	admin unix/{$DOZE_HOME}/admin.sock|0600
	persist_config off
	storage file_system {$DOZE_HOME}/caddy
	log {
		output file {$DOZE_HOME}/log/node.log
	}
	doze {
		data {$DOZE_HOME}
		%s
	}
}
api.doze.localhost {
	tls internal
	doze_api
	acme_server
}
`
	rule := func(policy string) string {
		return "egress {\n\trule r {\n\thosts a.example\n\tpolicy " + policy + "\n}\n}"
	}
	backups := func(password string) string {
		return "backups {\n\tendpoint http://127.0.0.1:9000\n\tbucket disks\n\taccess_key id\n\tsecret_key key\n\tpassword \"" + password + "\"\n}"
	}
	for _, tt := range []struct{ name, options, says string }{
		{"a good one", "", "Valid configuration\n"},
		{"an unknown option", "dota /nowhere", `unrecognized subdirective 'dota' of doze`},
		{"too little memory", "size s {\n\tmemory 1\n}", "size s: memory: 1 is too little for a sandbox; at least 32MiB"},
		{"an impossible domain", "preview_domain foo_bar!", `preview_domain: "foo_bar!" is not a domain name`},
		{"an object store", backups("long enough password"), "Valid configuration\n"},
		{"a password that is missing", backups("{env.NO_SUCH_VARIABLE}"), "backups: password is {env.NO_SUCH_VARIABLE}, which is missing or empty"},
		{"a policy's wrong configuration", rule("header"), `"name" is missing`},
		{"a policy that may have been pushed", rule("own"), "doze: not checked, because no node runs: doze does not ship the policies own"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			home, user := t.TempDir(), t.TempDir()
			file := filepath.Join(home, "Caddyfile")
			if err := os.WriteFile(file, fmt.Appendf(nil, frame, tt.options), 0o644); err != nil {
				t.Fatal(err)
			}
			before := entries(t, home)
			cmd := program(t, home, "validate", "--config", file)
			cmd.Env = append(cmd.Env, "HOME="+user, "XDG_CONFIG_HOME=", "XDG_DATA_HOME=")
			cmd.Dir = home
			out, _ := cmd.CombinedOutput()
			if !strings.Contains(string(out), tt.says) || (cmd.ProcessState.ExitCode() == 0) != strings.Contains(string(out), "Valid configuration\n") {
				t.Errorf("exit code %d, output %s; want %q", cmd.ProcessState.ExitCode(), out, tt.says)
			}
			if after := entries(t, home); after != before {
				t.Errorf("validate wrote files:\n%s", after)
			}
			if after := entries(t, user); after != user {
				t.Errorf("validate wrote files:\n%s", after)
			}
		})
	}
}

func TestValidateUsesTheNodesEnvironment(t *testing.T) {
	n := startNode(t)
	// Without TEST_PORT the address is http://127.0.0.1: and the option has no value.
	n.configure("grace_period {$TEST_PORT}ms", "")
	if out, code := n.doze("validate", "--config", n.caddyfile()); code != 0 || !strings.HasSuffix(out, "Valid configuration\n") {
		t.Errorf("exit code %d: %s", code, out)
	}
	n.configure("grace_period {$TEST_NOTHING}ms", "")
	if out, code := n.doze("validate", "--config", n.caddyfile()); code != exitFailed || !strings.Contains(out, `invalid duration "ms"`) {
		t.Errorf("exit code %d: %s", code, out)
	}
	before := entries(t, n.home)
	n.configure("", " changed")
	if out, code := n.doze("validate", "--config", n.caddyfile()); code != 0 || n.greeting() != "hello" {
		t.Errorf("exit code %d: %s", code, out)
	}
	if after := entries(t, n.home); after != before {
		t.Errorf("validate wrote files:\n%s", after)
	}
}

func TestValidateEndsWhenItIsInterrupted(t *testing.T) {
	folder := t.TempDir()
	t.Setenv("DOZE_HOME", folder)
	listener, err := net.Listen("unix", filepath.Join(folder, "hangs.sock"))
	if err != nil {
		t.Fatal(err)
	}
	asked := make(chan struct{}, 1)
	node := &http.Server{Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		asked <- struct{}{}
		<-r.Context().Done()
	})}
	go node.Serve(listener)
	defer node.Close()
	ctx, interrupt := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		a := &app{out: io.Discard, err: io.Discard, getenv: os.Getenv}
		ended <- a.validate(ctx, "unix/"+listener.Addr().String(), &configFlags{file: "Caddyfile"}, nil)
	}()
	<-asked
	interrupt()
	select {
	case err := <-ended:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("it ended with %v", err)
		}
	case <-time.After(time.Minute):
		t.Error("it goes on although it was interrupted")
		node.Close()
		<-ended
	}
}
