package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/doze-run/doze/cmd/internal/usage"
	"github.com/doze-run/doze/node"
	"github.com/doze-run/doze/node/backup"
	"github.com/doze-run/doze/runtime/store"
	"github.com/doze-run/doze/testkit"
)

// shortDir is a folder for sockets, whose paths must be short.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "doze")
	testkit.NoError(t, "make folder", err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// stoppedHome is the home of a node that does not run.
func stoppedHome(t *testing.T) string {
	t.Helper()
	home := shortDir(t)
	s, err := node.OpenStore(home, testkit.NewLog(t).Logger())
	testkit.NoError(t, "open", err)
	testkit.NoError(t, "put", s.PutDocument(t.Context(), "rules", "a", []byte("value")))
	testkit.NoError(t, "close", s.Close())
	testkit.NoError(t, "write", os.WriteFile(filepath.Join(home, "token"), []byte("token"), 0o600))
	return home
}

// runIn runs a command for a home.
func runIn(t *testing.T, home string, args ...string) (out, errs string, code int) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	a := &app{out: &stdout, err: &stderr, getenv: func(key string) string { return map[string]string{"DOZE_HOME": home}[key] }}
	code = a.run(t.Context(), args)
	return stdout.String(), stderr.String(), code
}

func mustRunIn(t *testing.T, home string, args ...string) string {
	t.Helper()
	out, errs, code := runIn(t, home, args...)
	if code != 0 {
		t.Fatalf("doze %q: exit code %d, error %s", args, code, errs)
	}
	return out
}

// serveAdmin serves an admin endpoint in the home.
func serveAdmin(t *testing.T, home string, handler http.HandlerFunc) {
	t.Helper()
	listener, err := net.Listen("unix", filepath.Join(home, "admin.sock"))
	testkit.NoError(t, "listen", err)
	server := httptest.NewUnstartedServer(handler)
	server.Listener.Close()
	server.Listener = listener
	server.Start()
	t.Cleanup(server.Close)
}

func TestAStoppedNodeIsBackedUpAndRestored(t *testing.T) {
	home := stoppedHome(t)
	file := filepath.Join(t.TempDir(), "backup")
	out := mustRunIn(t, home, "backup-node", file)
	id, err := node.ReadNodeID(home)
	if err != nil || !strings.HasPrefix(out, "Backed up node "+id+" to "+file+" (") {
		t.Errorf("it printed %q, %v", out, err)
	}
	if info, err := os.Stat(file); err != nil || info.Mode() != 0o600 {
		t.Errorf("the file has mode %v, %v", info.Mode(), err)
	}
	restored := filepath.Join(t.TempDir(), "restored")
	if out := mustRunIn(t, restored, "restore-node", file); !strings.HasPrefix(out, "Restored node "+id+" of ") || !strings.HasSuffix(out, " to "+restored+"\n") {
		t.Errorf("it printed %q", out)
	}
	s, err := node.OpenStore(restored, testkit.NewLog(t).Logger())
	testkit.NoError(t, "open", err)
	defer s.Close()
	if got, err := s.Document(t.Context(), "rules", "a"); err != nil || string(got) != "value" {
		t.Errorf("the document is %q, %v", got, err)
	}
	if _, errs, code := runIn(t, restored, "restore-node", file); code != exitFailed || !strings.Contains(errs, "another node uses this folder") {
		t.Errorf("where a node runs: exit code %d, %q", code, errs)
	}
}

func TestBackupsPassThroughStandardStreams(t *testing.T) {
	home := stoppedHome(t)
	b, err := program(t, home, "backup-node", "-").Output()
	testkit.NoError(t, "backup-node", err)
	restored := filepath.Join(t.TempDir(), "restored")
	cmd := program(t, restored, "restore-node", "-", "--json")
	cmd.Stdin = bytes.NewReader(b)
	out, err := cmd.Output()
	testkit.NoError(t, "restore-node", err)
	var contents backup.Contents
	if err := json.Unmarshal(out, &contents); err != nil || contents.Schema != backup.Schema || contents.Entries == 0 {
		t.Errorf("it printed %s: %v", out, err)
	}
	cmd = program(t, filepath.Join(t.TempDir(), "other"), "restore-node", "-")
	cmd.Stdin = bytes.NewReader(b[:len(b)-1])
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "the backup is truncated") {
		t.Errorf("a truncated backup: %v, %s", err, out)
	}
}

// A running node has its store open, so the backup comes from its admin endpoint.
func TestARunningNodeIsBackedUp(t *testing.T) {
	home := stoppedHome(t)
	s, err := node.OpenStore(home, testkit.NewLog(t).Logger())
	testkit.NoError(t, "open", err)
	defer s.Close()
	file := filepath.Join(t.TempDir(), "backup")
	if _, errs, code := runIn(t, home, "backup-node", file); code != exitFailed || !strings.Contains(errs, "name its admin endpoint by --address") {
		t.Errorf("without an admin endpoint: exit code %d, %q", code, errs)
	}
	serveAdmin(t, home, func(w http.ResponseWriter, r *http.Request) {
		if r.Method != "GET" || r.URL.Path != "/doze/backup" {
			t.Errorf("got the request %s %s", r.Method, r.URL)
		}
		err := backup.Write(r.Context(), w, backup.Source{Home: home, Store: s, Version: "v1", WithoutKey: r.URL.Query().Get("without_key") == "true"})
		if err != nil {
			t.Error(err)
		}
	})
	for flag, files := range map[string]int{"--without-key=false": 1, "--without-key": 0} {
		out := mustRunIn(t, home, "backup-node", file, flag, "--json")
		var contents backup.Contents
		if err := json.Unmarshal([]byte(out), &contents); err != nil || contents.Files != files || contents.Version != "v1" {
			t.Errorf("%s: it printed %s: %v", flag, out, err)
		}
	}
	mustRunIn(t, t.TempDir(), "backup-node", file, "--address", "unix/"+filepath.Join(home, "admin.sock"))
}

func mustContain(t *testing.T, file, want string) {
	t.Helper()
	if got, err := os.ReadFile(file); err != nil || string(got) != want {
		t.Errorf("%s contains %.100q, %v; want %q", file, got, err, want)
	}
}

func TestAFailedBackupLeavesTheOldFile(t *testing.T) {
	home := stoppedHome(t)
	file := filepath.Join(t.TempDir(), "backup")
	testkit.NoError(t, "write", os.WriteFile(file, []byte("old"), 0o600))
	var b bytes.Buffer
	testkit.NoError(t, "back up", backup.WriteStopped(t.Context(), &b, backup.Source{Home: home, Version: "v1"}))
	var respond atomic.Pointer[func(http.ResponseWriter)]
	serveAdmin(t, home, func(w http.ResponseWriter, _ *http.Request) { (*respond.Load())(w) })
	for want, response := range map[string]func(http.ResponseWriter){
		"the node is starting": func(w http.ResponseWriter) {
			w.WriteHeader(http.StatusServiceUnavailable)
			io.WriteString(w, `{"error":"the node is starting"}`)
		},
		"truncated": func(w http.ResponseWriter) { w.Write(b.Bytes()[:b.Len()-10]) },
		"checksum": func(w http.ResponseWriter) {
			w.Write(append(bytes.Clone(b.Bytes()[:b.Len()-1]), ^b.Bytes()[b.Len()-1]))
		},
		"unexpected EOF": func(w http.ResponseWriter) {
			w.Write(b.Bytes()[:b.Len()/2])
			http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		},
	} {
		respond.Store(&response)
		if out, errs, code := runIn(t, home, "backup-node", file); code != exitFailed || !strings.Contains(errs, want) || out != "" {
			t.Errorf("exit code %d, %q, want %q", code, errs, want)
		}
		mustContain(t, file, "old")
		if _, err := os.Lstat(file + ".partial"); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: a part is left: %v", want, err)
		}
	}
}

func TestAKilledBackupLeavesTheOldFile(t *testing.T) {
	home := stoppedHome(t)
	file := filepath.Join(t.TempDir(), "backup")
	testkit.NoError(t, "write", os.WriteFile(file, []byte("old"), 0o600))
	var b bytes.Buffer
	testkit.NoError(t, "back up", backup.WriteStopped(t.Context(), &b, backup.Source{Home: home, Version: "v1"}))
	stalled := make(chan struct{}, 1)
	var whole atomic.Bool
	serveAdmin(t, home, func(w http.ResponseWriter, r *http.Request) {
		if whole.Load() {
			w.Write(b.Bytes())
			return
		}
		w.Write(b.Bytes()[:b.Len()/2])
		http.NewResponseController(w).Flush()
		stalled <- struct{}{}
		<-r.Context().Done()
	})
	cmd := program(t, home, "backup-node", file)
	testkit.NoError(t, "start", cmd.Start())
	testkit.Receive(t, "half of the backup is sent", stalled)
	testkit.Eventually(t, "a part is written", func() bool { info, err := os.Stat(file + ".partial"); return err == nil && info.Size() > 0 })
	if _, errs, code := runIn(t, home, "backup-node", file); code != exitFailed || !strings.Contains(errs, "another run of backup-node writes to "+file) {
		t.Errorf("a second run at the same time: exit code %d, %q", code, errs)
	}
	testkit.NoError(t, "kill", cmd.Process.Kill())
	cmd.Wait()
	mustContain(t, file, "old")

	whole.Store(true)
	mustRunIn(t, home, "backup-node", file)
	mustContain(t, file, b.String())
	if _, err := os.Lstat(file + ".partial"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a part is left: %v", err)
	}
}

func TestABackupIsARegularFile(t *testing.T) {
	home := stoppedHome(t)
	dir := t.TempDir()
	link := filepath.Join(dir, "link")
	testkit.NoError(t, "link", os.Symlink("/dev/null", link))
	for _, path := range []string{dir, "/dev/null", link} {
		if _, errs, code := runIn(t, home, "backup-node", path); code != exitFailed || !strings.Contains(errs, "is not a regular file") {
			t.Errorf("%s: exit code %d, %q", path, code, errs)
		}
	}
	if _, errs, code := runIn(t, shortDir(t), "backup-node", filepath.Join(dir, "backup")); code != exitFailed || !strings.Contains(errs, "has no data of a node") {
		t.Errorf("an empty home: exit code %d, %q", code, errs)
	}
	if _, errs, code := runIn(t, home, "restore-node", filepath.Join(dir, "none")); code != exitFailed || !strings.Contains(errs, "no such file") {
		t.Errorf("a missing backup: exit code %d, %q", code, errs)
	}
	for _, args := range [][]string{{"backup-node"}, {"restore-node"}, {"backup-node", "a", "b"}} {
		if _, _, code := runIn(t, home, args...); code != usage.ExitCode {
			t.Errorf("%q: exit code %d", args, code)
		}
	}
	if err := store.Verify(node.StoreDir(home)); err != nil {
		t.Error(err)
	}
}
