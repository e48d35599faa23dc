package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/api"
	"github.com/doze-run/doze/cmd/internal/usage"
	"github.com/doze-run/doze/egress/egresstest"
	"github.com/doze-run/doze/egress/policy"
	"github.com/doze-run/doze/runtime/jupyter/jupytertest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
	"github.com/doze-run/doze/testkit/testterm"
)

// mainEnv makes the test binary the program itself, for tests of exit codes,
// signals and pipes.
const mainEnv = "DOZE_TEST_MAIN"

func TestMain(m *testing.M) {
	jupytertest.Main()
	if os.Getenv(mainEnv) != "" {
		main()
	}
	os.Exit(runTests(m))
}

// compiling is how tests compile policies: each module once.
var compiling policy.Config

func runTests(m *testing.M) int {
	dir, err := os.MkdirTemp("", "doze-policies")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	if compiling, err = egresstest.Compiling(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

const testToken = "a-token-for-tests"

// rig is a node with its real API, whose sandboxes are folders of this machine.
type rig struct {
	t      *testing.T
	node   *sandboxtest.Node
	egress *egresstest.Egress
	server *httptest.Server
	env    map[string]string
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{t: t, node: sandboxtest.Open(t, nil), env: map[string]string{"DOZE_TOKEN": testToken, "DOZE_HOME": t.TempDir()}}
	r.egress = egresstest.Open(t, r.node.Manager, compiling)
	r.serve()
	return r
}

// serve serves the API of the node's present Manager.
func (r *rig) serve() {
	r.t.Helper()
	handler, err := api.New(api.Config{
		Sandboxes: r.node.Manager,
		Egress:    r.egress.Egress,
		Auth:      api.SingleToken(testToken, "tester"),
		PreviewURL: func(sb sandbox.Sandbox, p sandbox.Port) string {
			return "https://3000-" + string(sb.ID) + ".preview.test/"
		},
		Version: "test",
	})
	if err != nil {
		r.t.Fatal(err)
	}
	r.server = httptest.NewServer(handler)
	r.t.Cleanup(r.server.Close)
	r.env["DOZE_API"] = r.server.URL + api.Prefix
}

// loseRecord restarts the node without the record of a sandbox.
func (r *rig) loseRecord(id string) {
	r.t.Helper()
	r.node.Crash(r.t, func() {
		if err := r.node.Store.DeleteSandbox(r.t.Context(), sandbox.ID(id)); err != nil {
			r.t.Fatal(err)
		}
	})
	r.egress.Reopen(r.t, r.node.Manager)
	r.serve()
}

// result of a command line.
type result struct {
	out, err string
	code     int
}

// doze runs a command line in this process, without input.
func (r *rig) doze(args ...string) result { return r.dozeWith("", args...) }

func (r *rig) dozeWith(stdin string, args ...string) result {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	defer cancel()
	var out, errs bytes.Buffer
	a := &app{in: strings.NewReader(stdin), out: &out, err: &errs, getenv: func(key string) string { return r.env[key] }, policies: compiling}
	code := a.run(ctx, args)
	return result{out.String(), errs.String(), code}
}

// ok runs a command line that must succeed and returns its output.
func (r *rig) ok(args ...string) string {
	r.t.Helper()
	got := r.doze(args...)
	if got.code != 0 {
		r.t.Fatalf("doze %s: exit code %d: %s%s", strings.Join(args, " "), got.code, got.out, got.err)
	}
	return got.out
}

// refused runs a command line that must fail with these words.
func (r *rig) refused(words string, args ...string) {
	r.t.Helper()
	r.refusedWith(exitFailed, words, args...)
}

// misused runs a command line that is wrong.
func (r *rig) misused(words string, args ...string) {
	r.t.Helper()
	r.refusedWith(usage.ExitCode, words, args...)
}

func (r *rig) refusedWith(code int, words string, args ...string) {
	r.t.Helper()
	got := r.doze(args...)
	if got.code != code || !strings.Contains(got.err, words) || !strings.HasPrefix(got.err, "doze: ") || got.out != "" {
		r.t.Errorf("doze %s: exit code %d, output %q, error %q; want %d and an error with %q", strings.Join(args, " "), got.code, got.out, got.err, code, words)
	}
}

// program is the command line as a process of its own, which the test's end or
// too long a time kills.
func (r *rig) program(args ...string) *exec.Cmd { return r.programWithin(testkit.Patience, args...) }

// start runs doze on a terminal.
func (r *rig) start(term *testterm.Terminal, args ...string) {
	r.t.Helper()
	term.Start(r.program(args...))
}

func (r *rig) programWithin(limit time.Duration, args ...string) *exec.Cmd {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	r.t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, os.Args[0], args...)
	cmd.Env = append(os.Environ(), mainEnv+"=1", "GORACE=atexit_sleep_ms=0") // or -race has each wait for a second
	for key, value := range r.env {
		cmd.Env = append(cmd.Env, key+"="+value)
	}
	return cmd
}

// output starts a program and returns what it prints.
func (r *rig) output(program *exec.Cmd) io.Reader {
	r.t.Helper()
	out, err := program.StdoutPipe()
	if err != nil {
		r.t.Fatal(err)
	}
	if err := program.Start(); err != nil {
		r.t.Fatal(err)
	}
	return out
}

func decodeJSON[T any](t *testing.T, text string) T {
	t.Helper()
	var v T
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	return v
}

// golden compares output with testdata/<name>.golden. Moments are masked.
func golden(t *testing.T, name, got string) {
	t.Helper()
	got = regexp.MustCompile(`\d{4}-\d\d-\d\d \d\d:\d\d:\d\d`).ReplaceAllString(got, "YYYY-MM-DD hh:mm:ss")
	testkit.Golden(t, filepath.Join("testdata", name+".golden"), []byte(got))
}

// fakeNode is a rig with another node than the real one.
func fakeNode(t *testing.T, answer http.HandlerFunc) *rig {
	t.Helper()
	node := httptest.NewServer(answer)
	t.Cleanup(node.Close)
	return &rig{t: t, server: node, env: map[string]string{"DOZE_API": node.URL, "DOZE_TOKEN": "x", "DOZE_HOME": t.TempDir()}}
}
