package main

import (
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/store"
)

func TestCaddysCommandsAreUnderOneOfOurs(t *testing.T) {
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
			cmd := program(t, t.TempDir(), c.args...)
			out, _ := cmd.CombinedOutput()
			if code := cmd.ProcessState.ExitCode(); code != c.code || !strings.Contains(string(out), c.words) {
				t.Errorf("exit code %d, want %d, and output with %q:\n%s", code, c.code, c.words, out)
			}
		})
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
