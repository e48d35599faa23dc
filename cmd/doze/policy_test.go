package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/doze-run/doze/policies"
)

// policyRig is a command line in an empty folder, without a node.
func policyRig(t *testing.T) *rig {
	t.Helper()
	if err := compileForPolicies(); err != nil {
		t.Fatal(err)
	}
	t.Chdir(t.TempDir())
	// Neither the tags of this program nor its workspace concern a policy.
	t.Setenv("GOFLAGS", "")
	return &rig{t: t, env: map[string]string{}}
}

// compileForPolicies fills Go's build cache with the SDK's dependencies, as policies need
// them. Without it the first test that builds a policy compiles the standard library
// within the time of one command, which is too short on a busy machine.
var compileForPolicies = sync.OnceValue(func() error {
	build := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "github.com/doze-run/doze/policies/sdk")
	build.Env = append(os.Environ(), "GOOS=wasip1", "GOARCH=wasm", "CGO_ENABLED=0", "GOFLAGS=")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("compile for policies: %w: %s", err, out)
	}
	return nil
})

// inFolder runs a program in a folder and returns what it prints.
func inFolder(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
	cmd.Dir = dir
	// Without network: all that a policy needs is in its folder.
	cmd.Env = append(os.Environ(), "GOPROXY=off", "GOFLAGS=")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

func TestANewPolicyBuildsByItself(t *testing.T) {
	r := policyRig(t)
	if out := r.ok("policy", "new", "mine-1", "--template", "readonly"); !strings.HasPrefix(out, "mine-1/  a policy like readonly") {
		t.Errorf("new printed %q", out)
	}
	inFolder(t, "mine-1", "go", "vet", "./...")
	if out := inFolder(t, "mine-1", "go", "test", "./..."); !strings.Contains(out, "ok  \tpolicy/mine-1") {
		t.Errorf("its tests print %s", out)
	}
	for file, want := range map[string]string{
		"go.mod":                 "module policy/mine-1\n\ngo 1.24\n",
		"README.md":              "# mine-1\n",
		"request.json":           `"method"`,
		".gitignore":             "*.wasm",
		"internal/sdk/README.md": "guest SDK",
	} {
		text, err := os.ReadFile(filepath.Join("mine-1", file))
		if err != nil || !strings.Contains(string(text), want) {
			t.Errorf("%s: %v, %q", file, err, text)
		}
	}
	if deps := inFolder(t, "mine-1", "go", "list", "-deps", "-test", "./..."); strings.Contains(deps, "doze") {
		t.Errorf("it depends on doze's own module: %s", deps)
	}
	out := r.ok("policy", "build", "mine-1")
	wasm, err := os.ReadFile("mine-1/mine-1.wasm")
	if err != nil || !bytes.HasPrefix(wasm, []byte("\x00asm\x01")) || !strings.Contains(out, "mine-1.wasm") {
		t.Errorf("build printed %q, %v", out, err)
	}
	if out := r.ok("policy", "test", "mine-1/tests.json"); !strings.HasSuffix(out, "2 of 2 tests passed\n") {
		t.Errorf("the tests of the module print %s", out)
	}
	built := decodeJSON[builtPolicy](t, r.ok("policy", "build", "mine-1", "-o", "other.wasm", "--json"))
	if built.File != "other.wasm" || built.Bytes != int64(len(wasm)) || len(built.Digest) != 64 {
		t.Errorf("got %+v", built)
	}
}

func TestEveryTemplateIsWhole(t *testing.T) {
	r := policyRig(t)
	for _, name := range policies.Names() {
		got := decodeJSON[struct{ Folder, Template string }](t, r.ok("policy", "new", name, "--template", name, "--json"))
		if got.Folder != name || got.Template != name {
			t.Errorf("new printed %+v", got)
		}
		inFolder(t, name, "go", "vet", "./...")
	}
}

func TestInvalidNamesOfNewPoliciesAreRefused(t *testing.T) {
	r := policyRig(t)
	r.misused("of a policy; use", "policy", "new", "../up")
	r.misused("of a policy; use", "policy", "new", "Upper")
	r.misused("templates are aws-sigv4, basic", "policy", "new", "a", "--template", "none")
	r.misused("NAME is missing", "policy", "new")
	r.ok("policy", "new", "a")
	r.refused("exists; choose", "policy", "new", "a")
}

func TestFailedBuildsAreReported(t *testing.T) {
	r := policyRig(t)
	r.refused("no such file", "policy", "build", "none")
	r.ok("policy", "new", "a")
	r.refused("is not a folder", "policy", "build", "a/main.go")
	if err := os.WriteFile("a/main.go", []byte("package main\n\nfunc main() { undefined() }\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	r.refused("undefined: undefined", "policy", "build", "a")
	t.Setenv("PATH", t.TempDir())
	r.refused("go is not in PATH", "policy", "build", "a")
}

func TestAnInterruptedBuildIsReported(t *testing.T) {
	dir, started := t.TempDir(), filepath.Join(t.TempDir(), "started")
	if err := syscall.Mkfifo(started, 0o600); err != nil {
		t.Fatal(err)
	}
	compiler := filepath.Join(dir, "go")
	if err := os.WriteFile(compiler, []byte("#!/bin/sh\necho >"+started+"\nexec /bin/sleep 1000\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir)
	ctx, interrupt := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := buildPolicy(ctx, dir, "")
		ended <- err
	}()
	if _, err := os.ReadFile(started); err != nil { // waits for the compiler
		t.Error(err)
	}
	interrupt()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("it ended with %v", err)
	}
}
