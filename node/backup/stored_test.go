package backup_test

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/doze-run/doze/certstore"
	"github.com/doze-run/doze/egress"
	"github.com/doze-run/doze/egress/egresstest"
	"github.com/doze-run/doze/egress/policy/catalog"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/ruleset"
	"github.com/doze-run/doze/egress/secret/seal"
	"github.com/doze-run/doze/node"
	"github.com/doze-run/doze/node/backup"
	"github.com/doze-run/doze/node/nodetest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/runtime/store"
	"github.com/doze-run/doze/testkit"
)

// storedFile is a backup with records of every kind, which the first version that had
// backups wrote. Do not write it again: nodes must restore it as long as they restore
// its schema.
const storedFile = "testdata/schema1.backup"

// recordsFile is a backup with storedSandbox and storedSnapshot, which the first version that had both wrote. As for storedFile, do
// not write it again.
const recordsFile = "testdata/schema1-records.backup"

// storedTime is when everything in recordsFile happened.
var storedTime = time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)

// storedMounts are two buckets.
var storedMounts = []sandbox.Mount{
	{Bucket: "data", Prefix: "shop", Path: "/data", CreatedAt: storedTime},
	{Bucket: "models", Path: "/models", ReadOnly: true, CreatedAt: storedTime},
}

// storedSandbox is archived.
var storedSandbox = sandbox.Sandbox{
	ID: "b4n8r2t6w9xz", Name: "archived", Owner: node.Operator, Image: "base", ImageRef: "localhost/doze/base:latest", Size: "small",
	State: sandbox.StateArchived, StateReason: sandbox.ReasonRequested, StateSince: storedTime, CreatedAt: storedTime, LastActiveAt: storedTime,
	ArchiveAfter: sandbox.Duration(720 * time.Hour), Persist: sandbox.PersistDisk, Mounts: storedMounts, Rebase: true,
	Archived: &sandbox.Backup{
		ID: "c5p9s3v7y1ab", Owner: node.Operator, Sandbox: "b4n8r2t6w9xz", CreatedAt: storedTime, Usage: sandbox.DiskUsage{Bytes: 1000, Entries: 2},
		Stored: 500, Duration: sandbox.Duration(time.Second), Origin: sandbox.Sandbox{Image: "base", ImageRef: "localhost/doze/base:latest"}, Layers: []string{"sha256:1"},
	},
}

// storedSnapshot is partial.
var storedSnapshot = sandbox.Snapshot{
	ID: "d6q1t4w8z2bc", Name: "app", Owner: node.Operator, Sandbox: storedSandbox.ID, Depth: 1, CreatedAt: storedTime,
	Usage: sandbox.DiskUsage{Bytes: 4096, Entries: 1}, Duration: sandbox.Duration(time.Second), Frozen: sandbox.Duration(time.Millisecond), Paths: []string{"/srv/app", "/etc/motd"},
	Origin: sandbox.Sandbox{Name: "archived", Owner: node.Operator, Image: "base", ImageRef: "localhost/doze/base:latest", Size: "small", Persist: sandbox.PersistNone, CreatedAt: storedTime, Mounts: storedMounts},
}

const certificateKey = "certificates/local/a.example.com/a.example.com.key"

// stored is a node with fake backends on the store of a home.
type stored struct {
	*node.Node
	home         string
	records      *store.Badger
	certificates *certstore.Storage
}

func openStored(t *testing.T, home string) *stored {
	t.Helper()
	s := &stored{home: home}
	log := testkit.NewLog(t).Logger()
	var err error
	s.records, err = node.OpenStore(home, log)
	testkit.NoError(t, "open the store", err)
	t.Cleanup(func() { s.records.Close() })
	key, err := seal.Open(node.SealingKeyFile(home))
	testkit.NoError(t, "open the sealing key", err)
	s.certificates, err = certstore.Open(t.Context(), certstore.Config{Store: s.records, Key: key, Folder: filepath.Join(home, "caddy"), Log: log})
	testkit.NoError(t, "open the certificates", err)
	backends := sandboxtest.Prepare(t, nil)
	backends.Store = &sandboxtest.Store{Badger: s.records}
	cfg := node.Config{Home: home, Sandbox: sandbox.DefaultConfig(), Egress: egress.DefaultSettings()}
	cfg.Sandbox.Images.Names = map[string]string{"base": "localhost/doze/base:latest"}
	s.Node = nodetest.Open(t, cfg, backends, slog.New(slog.DiscardHandler))
	t.Cleanup(func() {
		if err := s.Close(testkit.Context(t)); err != nil {
			t.Error(err)
		}
	})
	return s
}

// A node starts with the data of the first version that had backups.
func TestStoredBackupIsRestored(t *testing.T) {
	if testkit.Update() {
		if _, err := os.Stat(storedFile); err != nil {
			writeStored(t)
		}
	}
	f, err := os.Open(storedFile)
	testkit.NoError(t, "open", err)
	defer f.Close()
	home := shortDir(t)
	contents, err := backup.Restore(f, home)
	testkit.NoError(t, "restore", err)
	if contents.Schema != 1 || !contents.SealingKey {
		t.Errorf("restored %+v", contents)
	}
	n := openStored(t, home)
	if n.records.NodeID() != contents.Node {
		t.Errorf("the node is %s, want %s", n.records.NodeID(), contents.Node)
	}
	all, _ := n.Sandboxes.List(node.Operator, sandbox.Filter{}, "", 10)
	if len(all) != 1 || all[0].Name != "stored" || all[0].Labels["kind"] != "fixture" || len(all[0].Ports) != 1 || all[0].Ports[0].Port != 3000 {
		t.Fatalf("the sandboxes are %+v", all)
	}
	events, err := n.records.Events(t.Context(), all[0].ID, 0, 100)
	if err != nil || len(events) == 0 || events[0].Type != sandbox.EventCreated {
		t.Errorf("the events are %+v, %v", events, err)
	}
	var snapshots []string
	testkit.NoError(t, "list snapshots", n.records.Snapshots(t.Context(), func(s sandbox.Snapshot) error {
		snapshots = append(snapshots, s.Name)
		return nil
	}))
	testkit.Diff(t, "the snapshots", snapshots, []string{"first"})
	if secrets := n.Egress.Secrets.List(node.Operator); len(secrets) != 1 || secrets[0].Name != "api" {
		t.Errorf("the secrets are %+v", secrets)
	}
	rules, _, err := n.Egress.Rules(t.Context(), node.Operator, all[0].ID)
	if err != nil || len(rules.Rules) != 1 || rules.Rules[0].Name != "kept" {
		t.Errorf("the rules are %+v, %v", rules, err)
	}
	policies, err := catalog.Open(t.Context(), n.records, filepath.Join(home, "egress", "policies"))
	testkit.NoError(t, "open the policies", err)
	if _, module, err := policies.Read(node.Operator, "pushed"); err != nil || !bytes.Equal(module, egresstest.Module(1)) {
		t.Errorf("the policy has %d bytes, %v", len(module), err)
	}
	if value, err := n.certificates.Load(t.Context(), certificateKey); err != nil || string(value) != "private key" {
		t.Errorf("the certificate's key is %q, %v", value, err)
	}
	token, err := os.ReadFile(filepath.Join(home, "token"))
	if err != nil || string(token) != nodetest.Token+"\n" {
		t.Errorf("the token is %q, %v", token, err)
	}
}

// A node starts with archived sandboxes, mounts and snapshots of paths of an earlier version.
func TestStoredRecordsAreRestored(t *testing.T) {
	if testkit.Update() {
		if _, err := os.Stat(recordsFile); err != nil {
			n := openStored(t, shortDir(t))
			testkit.NoError(t, "store", errors.Join(n.records.PutSandbox(t.Context(), storedSandbox), n.records.PutSnapshot(t.Context(), storedSnapshot)))
			n.write(t, recordsFile)
		}
	}
	f, err := os.Open(recordsFile)
	testkit.NoError(t, "open", err)
	defer f.Close()
	home := shortDir(t)
	_, err = backup.Restore(f, home)
	testkit.NoError(t, "restore", err)
	n := openStored(t, home)
	sandboxes, _ := n.Sandboxes.List(node.Operator, sandbox.Filter{}, "", 10)
	testkit.Diff(t, "the sandboxes", sandboxes, []sandbox.Sandbox{storedSandbox})
	var snapshots []sandbox.Snapshot
	testkit.NoError(t, "list snapshots", n.records.Snapshots(t.Context(), func(s sandbox.Snapshot) error {
		snapshots = append(snapshots, s)
		return nil
	}))
	testkit.Diff(t, "the snapshots", snapshots, []sandbox.Snapshot{storedSnapshot})
}

// write writes a stored backup of the node.
func (n *stored) write(t *testing.T, file string) {
	t.Helper()
	var b bytes.Buffer
	testkit.NoError(t, "back up", backup.Write(t.Context(), &b, backup.Source{Home: n.home, Store: n.records, Version: "v0.0.0"}))
	testkit.Golden(t, file, b.Bytes())
}

// shortDir is a folder for sockets, whose paths must be short.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "doze")
	testkit.NoError(t, "make folder", err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// writeStored writes storedFile.
func writeStored(t *testing.T) {
	home := shortDir(t)
	n := openStored(t, home)
	ctx := testkit.Context(t)
	testkit.NoError(t, "write the token", os.WriteFile(filepath.Join(home, "token"), []byte(nodetest.Token+"\n"), 0o600))
	sb, _, err := n.Sandboxes.Create(ctx, sandbox.CreateRequest{Owner: node.Operator, Name: "stored", Labels: map[string]string{"kind": "fixture"}})
	testkit.NoError(t, "create", err)
	_, err = n.Sandboxes.Expose(ctx, sb.ID, sandbox.Port{Port: 3000})
	testkit.NoError(t, "expose", err)
	testkit.NoError(t, "store a snapshot", n.records.PutSnapshot(ctx, sandbox.Snapshot{
		ID: "k3f9x2m7q1az", Owner: node.Operator, Name: "first", CreatedAt: time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC),
	}))
	_, err = n.Egress.Secrets.Put(ctx, node.Operator, "api", []byte("secret-value-0123456789"), []string{"a.example.com"})
	testkit.NoError(t, "store a secret", err)
	_, _, err = n.Egress.SetRules(ctx, node.Operator, sb.ID, ruleset.Update{Rules: []rule.Rule{{Name: "kept", Hosts: []string{"a.example.com"}, Action: rule.Allow}}})
	testkit.NoError(t, "set rules", err)
	policies, err := catalog.Open(ctx, n.records, filepath.Join(home, "egress", "policies"))
	testkit.NoError(t, "open the policies", err)
	_, err = policies.Put(ctx, node.Operator, "pushed", egresstest.Module(1))
	testkit.NoError(t, "store a policy", err)
	testkit.NoError(t, "store a certificate", n.certificates.Store(ctx, certificateKey, []byte("private key")))
	testkit.Eventually(t, "the events are stored", func() bool {
		events, err := n.records.Events(ctx, sb.ID, 0, 100)
		return err == nil && len(events) >= 2
	})
	n.write(t, storedFile)
}
