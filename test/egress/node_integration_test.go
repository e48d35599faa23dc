//go:build integration

package egress

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/test/testnode"
	"github.com/doze-run/doze/testkit"
)

// node is a node whose sandboxes reach the test's servers by names under .test.
type node struct {
	*testnode.Node
	servers *servers
	canary  canary
}

// common is the node of all tests that change nothing that others see.
var common struct {
	once sync.Once
	node *node
	err  error
}

func TestMain(m *testing.M) {
	code := m.Run()
	if n := common.node; n != nil {
		if code != 0 {
			fmt.Fprintf(os.Stderr, "the log of the common node:\n%s", n.Log())
		}
		if err := n.remove(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// commonNode returns the node that tests share. Connections to hosts of *.pass.test
// pass through; the node intercepts the others.
func commonNode(t *testing.T) *node {
	t.Helper()
	common.once.Do(func() {
		common.node, common.err = newNode(`
			rule look {
				hosts *.look.test
				methods GET HEAD POST PUT DELETE PATCH OPTIONS
				allow
			}`)
	})
	if common.err != nil {
		t.Fatal(common.err)
	}
	return common.node
}

// newNode starts a node with more lines of the block egress.
func newNode(egress ...string) (_ *node, err error) {
	s, err := startServers()
	if err != nil {
		return nil, err
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return nil, err
	}
	folder, err := os.MkdirTemp(home, "egress")
	if err != nil {
		return nil, err
	}
	ca := filepath.Join(folder, "upstream-ca.pem")
	if err := os.WriteFile(ca, s.ca, 0o600); err != nil {
		return nil, err
	}
	lines := append([]string{"allow_images localhost/doze/*", "egress {", "upstream_ca " + ca}, s.resolve()...)
	text, err := testnode.ProjectCaddyfile(append(append(lines, egress...), "}")...)
	if err != nil {
		return nil, err
	}
	n, err := testnode.New(testnode.Config{Caddyfile: text, Home: filepath.Join(folder, "home")})
	if err != nil {
		return nil, err
	}
	return &node{Node: n, servers: s}, n.Start()
}

// ownNode is newNode for one test.
func ownNode(t *testing.T, egress ...string) *node {
	t.Helper()
	n, err := newNode(egress...)
	if n != nil {
		t.Cleanup(func() {
			if t.Failed() {
				t.Logf("the node's log:\n%s", n.Log())
			}
			if err := n.remove(); err != nil {
				t.Error(err)
			}
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// reload changes the node's Caddyfile and reloads it.
func (n *node) reload(t *testing.T, caddyfile string) {
	t.Helper()
	if err := n.Configure(caddyfile); err != nil {
		t.Fatal(err)
	}
	if out, err := n.Command("reload", "--config", n.Caddyfile()).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

func (n *node) remove() error {
	err := errors.Join(n.search(), n.Remove())
	n.servers.close()
	if e := os.RemoveAll(filepath.Dir(n.Home)); err == nil {
		err = e
	}
	return err
}

// box is a sandbox of a test.
type box struct {
	t    *testing.T
	node *node
	id   string
}

var names atomic.Int64

// newBox creates a sandbox, with the request as edit changes it, and removes it when the test
// has ended. It sleeps only when that is requested.
func (n *node) newBox(t *testing.T, edit ...func(*types.CreateSandboxRequest)) *box {
	t.Helper()
	never := types.Duration(0)
	req := types.CreateSandboxRequest{Name: fmt.Sprint("egress-", names.Add(1)), SleepAfter: &never}
	for _, f := range edit {
		f(&req)
	}
	sb, _, err := n.API.Create(testkit.Context(t), req)
	if err != nil {
		t.Fatal(err)
	}
	b := &box{t: t, node: n, id: sb.ID}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
		defer cancel()
		if err := n.searchBox(ctx, b.id); err != nil {
			t.Error(err)
		}
		if err := n.API.Delete(ctx, b.id); err != nil && !problem.Has(err, problem.SandboxNotFound) {
			t.Error(err)
		}
	})
	return b
}

// try runs a shell command and returns what came of it.
func (b *box) try(command string) types.ExecResult {
	b.t.Helper()
	result, err := b.node.API.Exec(testkit.Context(b.t), b.id, client.ExecRequest{Command: types.Command{Command: command}})
	if err != nil {
		b.t.Fatalf("%s: %v", command, err)
	}
	b.checked(command, result)
	return result
}

// exec runs a shell command that has to succeed, and returns its output.
func (b *box) exec(command string) string {
	b.t.Helper()
	r := b.try(command)
	if r.ExitCode != 0 {
		b.t.Fatalf("%s: exit code %d\n%s%s", command, r.ExitCode, r.Stdout, r.Stderr)
	}
	return strings.TrimSpace(r.Stdout)
}

func after(d time.Duration) func(*types.CreateSandboxRequest) {
	return func(req *types.CreateSandboxRequest) {
		v := types.Duration(d)
		req.SleepAfter = &v
	}
}
