package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/prometheus/procfs"
)

// benchToken is the secret of the figures.
const benchToken = "bench-7Qk2vXw9Lr4sT8pB3nDzH6mC"

// Hosts of the figures: what goes to *.look.test is intercepted, the rest passes.
const (
	interceptedURL = "https://api.look.test/"
	passURL        = "https://api.pass.test/"
	rawHost        = "stream.raw.test:7000"
)

// Where a sandbox has this program, and the origin's authority.
const (
	sandboxProgram = "/srv/bench"
	clientCA       = "/srv/origin-ca.pem"
)

// startEgressNode starts a node whose sandboxes reach an origin by names under .test.
func startEgressNode(bin string) (_ *node, err error) {
	o, err := startOrigin(filepath.Join(bin, "bench"))
	if err != nil {
		return nil, err
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return nil, err
	}
	n := &node{origin: o}
	if n.folder, err = os.MkdirTemp(home, "bench"); err != nil {
		return n, err
	}
	if err := os.WriteFile(n.originCA(), []byte(o.CA), 0o600); err != nil {
		return n, err
	}
	if err := n.start(bin,
		"egress {",
		"upstream_ca "+n.originCA(),
		"resolve *.look.test "+o.HTTPS,
		"resolve *.pass.test "+o.HTTPS,
		"resolve *.raw.test "+o.Raw,
		"rule look {", "hosts *.look.test", "policy bearer {", "secret token bench", "}", "}",
		"}",
	); err != nil {
		return n, err
	}
	_, err = n.API.PutSecret(context.Background(), "bench", []byte(benchToken), []string{"*.look.test"})
	return n, err
}

// originCA is the file of the origin's authority.
func (n *node) originCA() string { return filepath.Join(n.folder, "origin-ca.pem") }

// remove ends all that startNode, startEgressNode or startBackupNode started.
func (n *node) remove() error {
	var errs []error
	if n.Node != nil {
		errs = append(errs, n.Remove())
	}
	if n.origin != nil {
		n.origin.kill()
	}
	if n.store != nil {
		n.store.kill()
	}
	if n.folder != "" {
		errs = append(errs, os.RemoveAll(n.folder))
	}
	return errors.Join(errs...)
}

// withProgram makes a sandbox that has this program, and the origin's authority if the
// node has one.
func (n *node) withProgram(ctx context.Context, name string) (id string, err error) {
	if id, err = n.create(ctx, name, 0); err != nil {
		return id, err
	}
	program, err := os.Open(n.Program("bench"))
	if err != nil {
		return id, err
	}
	defer program.Close()
	if _, err := n.API.WriteFile(ctx, id, sandboxProgram, 0o755, program); err != nil || n.origin == nil {
		return id, err
	}
	_, err = n.API.WriteFile(ctx, id, clientCA, 0o644, strings.NewReader(n.origin.CA))
	return id, err
}

// client runs a client in a sandbox.
func (n *node) client(ctx context.Context, id string, t task) (r clientResult, err error) {
	t.CA = clientCA
	result, err := n.API.Exec(ctx, id, client.ExecRequest{
		Command: types.Command{Argv: []string{sandboxProgram, "client", t.argument()}}, Timeout: client.NoTimeout,
	})
	if err != nil {
		return r, err
	}
	if result.ExitCode != 0 {
		return r, fmt.Errorf("%+v: %s", t, result.Stderr)
	}
	return parseClient([]byte(result.Stdout))
}

// rss is the node's resident memory in bytes.
func (n *node) rss() (int64, error) {
	p, err := procfs.NewProc(n.PID())
	if err != nil {
		return 0, err
	}
	memory, err := p.ProcSMapsRollup()
	return int64(memory.Rss), err
}
