package main

import (
	"go/parser"
	"go/token"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/store"
)

// TestCommandsForSandboxesUseTheAPIOnly: of this project, they know its client.
// The node's own commands run and look after what is on this machine, and so do
// those for writing policies.
func TestCommandsForSandboxesUseTheAPIOnly(t *testing.T) {
	ofThisMachine := []string{"node.go", "modules.go", "doctor.go", "policynew.go", "policyrun.go"}
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
			if ours && path != "github.com/doze-run/doze/api/client" {
				t.Errorf("%s imports %s", name, path)
			}
		}
	}
}

func TestCaddysCommandsAreUnderOneOfOurs(t *testing.T) {
	r := newRig(t)
	file := filepath.Join(t.TempDir(), "Caddyfile")
	for _, c := range []struct {
		name, caddyfile string
		args            []string
		code            int
		words           string
	}{
		{"any command of Caddy", "", []string{"caddy", "list-modules"}, 0, "http.handlers.doze_preview"},
		{"one whose name is ours too", "", []string{"caddy", "stop", "--address", "unix/" + file + ".sock"}, 1, file + ".sock"},
		{"validate", "{\n\tdoze {\n\t\tdata /nowhere\n\t}\n}\n", []string{"validate", "--config", file}, 0, "Valid configuration"},
		{"validate refuses", "{\n\tdoze {\n\t\tdota /nowhere\n\t}\n}\n", []string{"validate", "--config", file}, 1, file + ":3"},
		{"reload without a node", "{\n\tadmin unix/" + file + ".sock\n}\n", []string{"reload", "--config", file}, 1, file + ".sock"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := os.WriteFile(file, []byte(c.caddyfile), 0o644); err != nil {
				t.Fatal(err)
			}
			cmd := r.program(c.args...)
			out, _ := cmd.CombinedOutput()
			if code := cmd.ProcessState.ExitCode(); code != c.code || !strings.Contains(string(out), c.words) {
				t.Errorf("exit code %d, want %d, and output with %q:\n%s", code, c.code, c.words, out)
			}
		})
	}
}

func TestSecondNodeIsFoundWhereverTheCaddyfilePutsTheData(t *testing.T) {
	r := newRig(t)
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
	cmd := r.program("run", "--config", file)
	out, _ := cmd.CombinedOutput()
	if code := cmd.ProcessState.ExitCode(); code != exitFailed || !strings.Contains(string(out), "another node uses this folder") {
		t.Errorf("exit code %d, output:\n%s", code, out)
	}
	if after, err := os.Stat(socket); err != nil || !os.SameFile(before, after) {
		t.Errorf("the first node's admin socket is another now (%v)", err)
	}
}
