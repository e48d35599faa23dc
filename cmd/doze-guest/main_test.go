package main

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/guest/server"
)

func TestMain(m *testing.M) {
	asInit() // does not return in the child that a test starts as PID 1
	goleak.VerifyTestMain(m)
}

func TestHold(t *testing.T) {
	runDir := t.TempDir()
	srv, err := server.New(server.Config{RunDir: runDir, LogDir: t.TempDir(), AnyPeer: true})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ctx) }()
	defer func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}()
	if err := hold(runDir, "10m"); err == nil || !strings.Contains(err.Error(), "node is not listening") {
		t.Errorf("without a node: %v", err)
	}
	c := guest.NewClient(srv.Socket())
	defer c.Close()
	events, err := c.Events(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer events.Close()
	for text, want := range map[string]time.Duration{"10m": 10 * time.Minute, "0": 0, "24h": guest.MaxHold} {
		if err := hold(runDir, text); err != nil {
			t.Errorf("hold %s: %v", text, err)
		}
		if ev, err := events.Next(); err != nil || ev.Hold != want {
			t.Errorf("hold %s arrived as %+v, %v", text, ev, err)
		}
	}
	for _, bad := range []string{"", "x", "-1m", "25h"} {
		if err := hold(runDir, bad); err == nil || !strings.Contains(err.Error(), "10m") {
			t.Errorf("hold %q: %v", bad, err)
		}
	}
	if err := hold(t.TempDir(), "10m"); err == nil || !strings.Contains(err.Error(), "reach") {
		t.Errorf("outside of a sandbox: %v", err)
	}
}

func TestArguments(t *testing.T) {
	for _, args := range [][]string{{"x"}, {"hold"}, {"hold", "1m", "2m"}, {"version", "x"}} {
		if err := run(args, os.TempDir(), os.TempDir()); err == nil || !strings.Contains(err.Error(), "usage") {
			t.Errorf("%q: %v", args, err)
		}
	}
	if err := run([]string{"version"}, "", ""); err != nil {
		t.Error(err)
	}
}
