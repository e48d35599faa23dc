package server_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/guest/server"
	"github.com/doze-run/doze/testkit"
)

func TestMain(m *testing.M) {
	if helperMain() {
		return
	}
	// A process that was started with SIGHUP ignored, by nohup for instance, passes that
	// on, and a shell cannot trap it. Children do not ignore signals that this process
	// catches; the guest's own program does the same.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	testkit.Main(m)
}

// start serves a guest in this process until the test ends and returns a client
// for it. The configuration fits a test; change may replace parts of it.
func start(t testing.TB, change func(*server.Config)) *guest.Client {
	t.Helper()
	client, _ := serve(t, change)
	return client
}

// serve is start for tests that end the guest themselves.
func serve(t testing.TB, change func(*server.Config)) (client *guest.Client, end func()) {
	t.Helper()
	cfg := server.Config{
		RunDir: t.TempDir(), LogDir: filepath.Join(t.TempDir(), "log"), Workdir: t.TempDir(),
		Env: os.Environ(), AnyPeer: true, Grace: 100 * time.Millisecond, Version: "test",
	}
	if change != nil {
		change(&cfg)
	}
	srv, err := server.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ctx) }()
	client = guest.NewClient(srv.Socket())
	end = sync.OnceFunc(func() {
		client.Close()
		cancel()
		if err := <-served; err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	t.Cleanup(end)
	return client, end
}

// codeOf is the code of a guest's refusal, or empty.
func codeOf(err error) string {
	var e *guest.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}

// wantCode fails the test unless err is a refusal with the code, and words that
// hold the hint.
func wantCode(t testing.TB, err error, code, hint string) {
	t.Helper()
	if codeOf(err) != code || !strings.Contains(err.Error(), hint) {
		t.Fatalf("got error %v (code %q), want code %q and a message with %q", err, codeOf(err), code, hint)
	}
}

// aliveWith counts the living processes that have text in their environment.
func aliveWith(t testing.TB, text string) int {
	t.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, path := range stats {
		environ, err := os.ReadFile(path)
		if err == nil && bytes.Contains(environ, []byte(text)) {
			n++
		}
	}
	return n
}

func TestHelloSaysVersion(t *testing.T) {
	c := start(t, nil)
	h, err := c.Hello(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if want := (guest.Hello{Protocol: guest.ProtocolVersion, Version: "test", PID: os.Getpid()}); h != want {
		t.Fatalf("got %+v, want %+v", h, want)
	}
}

func TestAUsedGuestIsTrimmedOnce(t *testing.T) {
	var trims atomic.Int32
	c := start(t, func(cfg *server.Config) { cfg.Trim = func() { trims.Add(1) } })
	for used := range int32(3) {
		run(t, c, guest.ExecRequest{Command: guest.Command{Command: "true"}})
		for range 2 { // the second has nothing to do
			if err := c.Trim(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if n := trims.Load(); n != used+1 {
			t.Errorf("used %d times, trimmed %d times", used+1, n)
		}
	}
}

func TestSocketPathMayBeLong(t *testing.T) {
	long := filepath.Join(t.TempDir(), strings.Repeat("long/", 60))
	if err := os.MkdirAll(long, 0o755); err != nil {
		t.Fatal(err)
	}
	c := start(t, func(cfg *server.Config) { cfg.RunDir = long })
	if _, err := c.Hello(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestStaleSocketIsReplaced(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o777|os.ModeSticky); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second finds the sockets of the first
		if err := os.WriteFile(filepath.Join(dir, guest.SandboxSocketName), []byte("stale"), 0o600); err != nil && !errors.Is(err, os.ErrExist) && !strings.Contains(err.Error(), "no such device") {
			t.Fatal(err)
		}
		srv, err := server.New(server.Config{RunDir: dir, LogDir: t.TempDir(), AnyPeer: true})
		if err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(srv.Socket())
		if err != nil || info.Mode().Type() != os.ModeSocket || info.Mode().Perm() != 0o666 {
			t.Fatalf("socket is %v, %v", info, err)
		}
		srv.Close()
	}
}

func TestPeersInsideAreRefused(t *testing.T) {
	c := start(t, func(cfg *server.Config) { cfg.AnyPeer = false })
	if _, err := c.Hello(t.Context()); !errors.Is(err, guest.ErrLost) {
		t.Fatalf("a process of the same PID namespace got %v", err)
	}
}
