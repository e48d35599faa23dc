// Package nodetest starts nodes for tests: a node.Node on the backends of package
// sandboxtest.
package nodetest

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/doze-run/doze/node"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
)

// Token of the API of the nodes.
const Token = "doze_0123456789abcdefghijklmnopqrstuv"

// Open starts a node on backends, which sandboxtest.Prepare makes; the caller closes it.
// Another Open on the same backends restarts the node. The processes of its sandboxes
// are in the test's network, so they use backends.Uplink instead of the node's egress.
func Open(t testing.TB, cfg node.Config, backends *sandboxtest.Node, log *slog.Logger) *node.Node {
	t.Helper()
	if err := os.MkdirAll(filepath.Join(cfg.Home, "run"), 0o700); err != nil {
		t.Fatal(err)
	}
	deps := backends.Deps(t)
	deps.Log = log
	n, err := node.Assemble(t.Context(), cfg, node.Backends{Deps: deps, Documents: backends.Store, Uplink: backends.Uplink, Token: Token})
	if err != nil {
		t.Fatal(err)
	}
	backends.Manager = n.Sandboxes
	return n
}
