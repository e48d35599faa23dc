package node_test

import (
	"context"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/egress"
	"github.com/doze-run/doze/node"
	"github.com/doze-run/doze/node/nodetest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
)

func TestChangesOfARunningNode(t *testing.T) {
	home, err := os.MkdirTemp("", "doze") // the path of a Unix socket must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(home) })
	cfg := node.Config{Home: home, Sandbox: sandbox.DefaultConfig(), Egress: egress.DefaultSettings()}
	cfg.Sandbox.Images.Names = map[string]string{"base": "localhost/doze/base:latest"}
	backends := sandboxtest.Prepare(t, nil)
	n := nodetest.Open(t, cfg, backends, slog.New(slog.NewTextHandler(t.Output(), nil)))
	sleepAfter := func(name string) time.Duration {
		t.Helper()
		sb, _, err := n.Sandboxes.Create(t.Context(), sandbox.CreateRequest{Owner: node.Operator, Name: name})
		if err != nil {
			t.Fatal(err)
		}
		return time.Duration(sb.SleepAfter)
	}

	other := cfg
	other.Sandbox.SleepAfter, other.TokenFile = time.Hour, "/elsewhere/token"
	if _, err := n.Prepare(t.Context(), other); err == nil || !strings.Contains(err.Error(), "token_file cannot change") {
		t.Errorf("another token file: %v", err)
	}
	other.TokenFile, other.Egress.Default = "", "nonsense"
	if _, err := n.Prepare(t.Context(), other); err == nil || !strings.Contains(err.Error(), "default is") {
		t.Errorf("invalid egress: %v", err)
	}
	other.Egress = cfg.Egress
	change, err := n.Prepare(t.Context(), other)
	if err != nil {
		t.Fatal(err)
	}
	change.Discard()
	if got := sleepAfter("discarded"); got != cfg.Sandbox.SleepAfter {
		t.Errorf("after changes that were not applied sandboxes sleep after %v", got)
	}
	if change, err = n.Prepare(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	if err := change.Apply(); err != nil {
		t.Fatal(err)
	}
	if got := sleepAfter("applied"); got != time.Hour {
		t.Errorf("after the change sandboxes sleep after %v", got)
	}

	if err := n.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	if n.Requests().Err() == nil {
		t.Error("requests to the API go on after the end of the node")
	}
	n = nodetest.Open(t, cfg, backends, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if sb, err := n.Sandboxes.Get(node.Operator, "applied"); err != nil || sb.State != sandbox.StateRunning {
		t.Errorf("after a restart the sandbox is %s, %v", sb.State, err)
	}
	if err := n.Close(context.Background()); err != nil {
		t.Error(err)
	}
}
