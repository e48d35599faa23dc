package main

import (
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
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

func TestDoctorListsContainersInQuarantine(t *testing.T) {
	node := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/api/v1/node" || r.Header.Get("Authorization") != "Bearer secret" {
			t.Errorf("request for %s", r.URL.Path)
		}
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"quarantined":[{"id":"k3f9x2m7q1az","name":"shop","image":"base","container":true,"problem":"podman hangs"},{"id":"aaaaaaaaaaaa","container":false}]}`)
	}))
	defer node.Close()
	folder := t.TempDir()
	if err := os.WriteFile(filepath.Join(folder, "token"), []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"DOZE_API": node.URL + "/api/v1"}
	a := &app{getenv: func(key string) string { return env[key] }}
	got := a.quarantineFindings(t.Context(), folder, 8443)
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
	if got := a.quarantineFindings(t.Context(), folder, 8443); len(got) != 0 {
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
	if code, _ := doctor("--reset"); code != exitFailed {
		t.Error("--reset without --store is accepted")
	}
}
