package main

import (
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestCommandsForSandboxesUseTheAPIOnly: of this project, they import its client and
// types, and the packages archive for cp, and archive/ociimage and its registry for snapshot push. Commands for
// writing policies run on this machine.
func TestCommandsForSandboxesUseTheAPIOnly(t *testing.T) {
	ofAClient := []string{"api/client", "api/types", "problem", "archive", "archive/ociimage", "archive/ociimage/registry"}
	ofThisMachine := []string{"policy_new.go", "policy_run.go", "policy_trial.go"}
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") || slices.Contains(ofThisMachine, name) {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		for _, spec := range file.Imports {
			path, _ := strconv.Unquote(spec.Path.Value)
			ours := strings.HasPrefix(path, "github.com/doze-run/doze/")
			if ours && !slices.Contains(ofAClient, strings.TrimPrefix(path, "github.com/doze-run/doze/")) && !strings.HasPrefix(path, "github.com/doze-run/doze/cmd/internal/") {
				t.Errorf("%s imports %s", name, path)
			}
		}
	}
}

// TestClientImportsNoServer: what these modules do when a program starts took the
// client 90 ms and 60 MB, and they build for Linux only.
func TestClientImportsNoServer(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	packages := strings.Fields(string(out))
	if !slices.Contains(packages, "github.com/doze-run/doze/api/client") {
		t.Fatalf("go list printed %.200q", out)
	}
	for _, name := range packages {
		for _, server := range []string{
			"github.com/caddyserver/", "github.com/containers/", "go.podman.io/", "gvisor.dev/", "github.com/dgraph-io/", "github.com/quic-go/",
			"github.com/danielgtaylor/huma/", "github.com/prometheus/",
			"github.com/doze-run/doze/node/", "github.com/doze-run/doze/runtime/", "github.com/doze-run/doze/caddymodule", "github.com/doze-run/doze/wakeproxy",
		} {
			// store/document is an interface that imports nothing else; package policy uses it.
			if strings.HasPrefix(name+"/", server) && name != "github.com/doze-run/doze/runtime/store/document" {
				t.Errorf("cmd/doze depends on %s", name)
			}
		}
		if name == "github.com/doze-run/doze/egress" || name == "github.com/doze-run/doze/api" {
			t.Errorf("cmd/doze depends on %s", name)
		}
	}
}

// copyProgram copies this program to a folder and returns its path.
func copyProgram(t *testing.T, dir string) string {
	t.Helper()
	text, err := os.ReadFile(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "doze")
	if err := os.WriteFile(file, text, 0o755); err != nil {
		t.Fatal(err)
	}
	return file
}

func writeNodeProgram(t *testing.T, dir, name string) {
	t.Helper()
	script := "#!/bin/sh\necho \"" + name + ": $*\"\nexit 7\n"
	if err := os.WriteFile(filepath.Join(dir, nodeProgram), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
}

func TestCommandsOfTheNodeAreHandedOver(t *testing.T) {
	r := &rig{t: t, env: map[string]string{}}
	install, path, links := t.TempDir(), t.TempDir(), t.TempDir()
	program := copyProgram(t, install)
	link := filepath.Join(links, "doze")
	if err := os.Symlink(program, link); err != nil {
		t.Fatal(err)
	}
	run := func(program string, args ...string) (string, int) {
		cmd := r.program(args...)
		cmd.Path = program
		cmd.Env = append(cmd.Env, "PATH="+path+":"+os.Getenv("PATH"))
		out, _ := cmd.CombinedOutput()
		return string(out), cmd.ProcessState.ExitCode()
	}
	out, code := run(program, "run")
	if code != exitFailed || !strings.HasPrefix(out, "doze: doze-node, which runs nodes, is not installed on this machine; ") {
		t.Errorf("without it: exit code %d, output %q", code, out)
	}
	writeNodeProgram(t, path, "in PATH")
	for _, args := range []string{"run --config x", "reload", "validate --help", "caddy list-modules -x", "doctor --json"} {
		if out, code := run(program, strings.Fields(args)...); code != 7 || out != "in PATH: "+args+"\n" {
			t.Errorf("doze %s: exit code %d, output %q", args, code, out)
		}
	}
	if out, code := run(program, "--json", "doctor"); code != 7 || out != "in PATH: doctor --json\n" {
		t.Errorf("doze --json doctor: exit code %d, output %q", code, out)
	}
	writeNodeProgram(t, install, "adjacent")
	for _, program := range []string{program, link} {
		if out, code := run(program, "doctor"); code != 7 || out != "adjacent: doctor\n" {
			t.Errorf("%s doctor: exit code %d, output %q", program, code, out)
		}
	}
}
