//go:build integration

package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/test/testnode"
	"github.com/doze-run/doze/testkit"
)

func TestNodeIsBackedUpWhileItRuns(t *testing.T) {
	n := ownNode(t)
	b := n.newBox(t, func(req *types.CreateSandboxRequest) { req.Name = "backed-up" })
	snapshot := b.snapshot(types.CreateSnapshotRequest{Name: "first"})
	_, err := n.API.PutSecret(testkit.Context(t), "api", []byte("secret-value-0123456789"), []string{"api.example.com"})
	b.must(err)
	_, err = n.API.SetRules(testkit.Context(t), b.id, client.RulesUpdate{Rules: json.RawMessage(`[{"name":"kept","hosts":["api.example.com"],"action":"allow"}]`)})
	b.must(err)
	file := filepath.Join(t.TempDir(), "backup")
	if out, err := n.Command("backup-node", file).CombinedOutput(); err != nil {
		t.Fatalf("doze backup-node: %v: %s", err, out)
	}
	if info, err := os.Stat(file); err != nil || info.Mode() != 0o600 {
		t.Errorf("the backup has mode %v, %v", info.Mode(), err)
	}
	later := n.newBox(t, func(req *types.CreateSandboxRequest) { req.Name = "later" })
	_, err = n.API.Stop(testkit.Context(t), b.id)
	b.must(err)
	b.must(n.Stop())

	restored, err := testnode.New(testnode.Config{})
	b.must(err)
	t.Cleanup(func() {
		var stopped error
		if restored.Runs() {
			stopped = restored.Stop()
		}
		if err := errors.Join(stopped, os.RemoveAll(restored.Home)); err != nil { // n removes its sandboxes
			t.Error(err)
		}
	})
	if out, err := restored.Command("restore-node", file).CombinedOutput(); err != nil {
		t.Fatalf("doze restore-node: %v: %s", err, out)
	}
	b.must(restored.Start())
	sandboxes, err := restored.API.List(testkit.Context(t), client.Filter{})
	b.must(err)
	if len(sandboxes) != 1 || sandboxes[0].ID != b.id || sandboxes[0].Name != "backed-up" {
		t.Errorf("the sandboxes are %+v", sandboxes)
	}
	snapshots, err := restored.API.Snapshots(testkit.Context(t), "")
	b.must(err)
	if len(snapshots) != 1 || snapshots[0].ID != snapshot.ID {
		t.Errorf("the snapshots are %+v", snapshots)
	}
	secrets, err := restored.API.Secrets(testkit.Context(t))
	b.must(err)
	if len(secrets) != 1 || secrets[0].Name != "api" {
		t.Errorf("the secrets are %+v", secrets)
	}
	rules, err := restored.API.Rules(testkit.Context(t), b.id)
	b.must(err)
	var kept []types.Rule
	b.must(json.Unmarshal(rules.Rules, &kept))
	if len(kept) != 1 || kept[0].Name != "kept" {
		t.Errorf("the rules are %+v", kept)
	}
	info, err := restored.API.Node(testkit.Context(t))
	b.must(err)
	if !info.DataRestored || len(info.Quarantined) != 1 || info.Quarantined[0].ID != later.id {
		t.Errorf("the node restored older data: %t, in quarantine: %+v", info.DataRestored, info.Quarantined)
	}
	if restored.Token != n.Token {
		t.Error("the token is another")
	}
	before, err := os.ReadFile(n.CA)
	b.must(err)
	after, err := os.ReadFile(restored.CA)
	b.must(err)
	if !bytes.Equal(before, after) {
		t.Error("the certificate authority is another")
	}
	restored.API.Close()
	b.must(restored.Stop())
	b.must(n.Start()) // on its newer data
}
