package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/doze-run/doze/cmd/internal/usage"
	"github.com/doze-run/doze/egress/policy/policytest"
	"github.com/doze-run/doze/runtime/doctor"
	"github.com/doze-run/doze/testkit"
)

// mainEnv makes the test binary the program itself.
const mainEnv = "DOZE_TEST_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(mainEnv) != "" {
		a := &app{out: os.Stdout, err: os.Stderr, getenv: os.Getenv, policyCompiler: os.Getenv(compilerEnv)}
		os.Exit(a.run(context.Background(), os.Args[1:]))
	}
	os.Exit(runTests(m))
}

// compilerEnv names the compiler of policies to the program.
const compilerEnv = "DOZE_TEST_COMPILER"

func runTests(m *testing.M) int {
	dir, err := os.MkdirTemp("", "doze-compiler-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	compiler, err := policytest.BuildCompiler(dir)
	if err != nil {
		panic(err)
	}
	if err := os.Setenv(compilerEnv, compiler); err != nil {
		panic(err)
	}
	return m.Run()
}

// program returns the program as a process of its own, for a node in the folder
// home. The end of the test kills it.
func program(t *testing.T, home string, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, os.Args[0], args...)
	cmd.Env = append(os.Environ(), mainEnv+"=1", "DOZE_HOME="+home, "GORACE=atexit_sleep_ms=0") // or -race has each wait for a second
	return cmd
}

func run(t *testing.T, args ...string) (out, errs string, code int) {
	t.Helper()
	env := map[string]string{"DOZE_HOME": t.TempDir()}
	var stdout, stderr bytes.Buffer
	a := &app{out: &stdout, err: &stderr, getenv: func(key string) string { return env[key] }}
	code = a.run(t.Context(), args)
	return stdout.String(), stderr.String(), code
}

// On every machine: Podman cannot use a file as its folder for sockets.
func TestDoctorExitsWith1WhereNoSandboxCouldRun(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("XDG_RUNTIME_DIR", file)
	for _, test := range []struct{ args, finding string }{
		{"doctor", "error    runtime folder     " + file + " cannot be used: it is not a folder\n"},
		{"doctor --json", `"detail": "` + file + ` cannot be used: it is not a folder"`},
	} {
		out, errs, code := run(t, strings.Fields(test.args)...)
		if code != exitFailed || !strings.Contains(out, test.finding) || errs != "" {
			t.Errorf("doze %s: exit code %d, output %q, error %q", test.args, code, out, errs)
		}
		if strings.Contains(test.args, "json") && !json.Valid([]byte(out)) {
			t.Errorf("doze %s printed %q", test.args, out)
		}
	}
}

func TestDoctorPrintsDetailsAndRemedies(t *testing.T) {
	var out bytes.Buffer
	a := &app{out: &out}
	if err := a.printFindings([]doctor.Finding{
		{Name: "user", OK: true, Detail: "runs as doze"},
		{Name: "tun", Level: doctor.LevelError, Detail: "/dev/net/tun is not writable", Remedy: "chmod 0666 /dev/net/tun"},
	}); err != nil {
		t.Fatal(err)
	}
	want := `ok       user               runs as doze
error    tun                /dev/net/tun is not writable
                            → chmod 0666 /dev/net/tun
`
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
}

func TestWrongArgumentsAreRefused(t *testing.T) {
	for args, words := range map[string]string{
		"doctor x": `unknown command "x"`, "doctor --nope": "unknown flag: --nope", "nope": `doze has no command "nope"`,
		"doctor --store x y": "accepts at most 1 arg", "doctor --reset": "--reset requires --store", "reload x": `unknown command "x"`, "reload --nope": "unknown flag: --nope",
		"validate x": `unknown command "x"`, "validate --nope": "unknown flag: --nope", "version x": `unknown command "x"`, "backup-node --nope": "unknown flag: --nope", "restore-node --nope": "unknown flag: --nope", "version --nope": "unknown flag: --nope",
	} {
		if out, errs, code := run(t, strings.Fields(args)...); code != usage.ExitCode || !strings.HasPrefix(errs, "doze: ") || !strings.Contains(errs, words) || out != "" {
			t.Errorf("doze %s: exit code %d, output %q, error %q", args, code, out, errs)
		}
	}
	if out, _, code := run(t, "doctor", "--help"); code != 0 || !strings.Contains(out, "doze doctor [flags]") {
		t.Errorf("exit code %d, help %q", code, out)
	}
}
