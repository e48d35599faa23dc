//go:build integration

package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/test/testnode"
	"github.com/doze-run/doze/testkit"
)

// That no sandbox uses up the quotas of another is tested in package podman. These tests are
// of when they hold, and of the sizes that define them.

func TestQuotasOfASizeHoldAfterEachStartAndRestart(t *testing.T) {
	configure := func(namespaces int) string {
		return caddyfile(t, fmt.Sprintf("size nested {\n cpus 1\n memory 512MiB\n pids 256\n user_namespaces %d\n inotify_instances 20\n}", namespaces))
	}
	n := &node{testnode.Start(t, testnode.Config{Caddyfile: configure(2)})}
	plain := n.newBox(t)
	nested := n.newBox(t, func(req *types.CreateSandboxRequest) { req.Size = "nested" })
	about, err := n.API.Node(testkit.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	if size := about.Sizes["nested"]; size.UserNamespaces != 2 || size.InotifyInstances != 20 || size.InotifyWatches != 65536 {
		t.Errorf("the node has the size %+v", size)
	}
	if size := about.Sizes["basic"]; size.UserNamespaces != 0 || size.InotifyInstances != 128 {
		t.Errorf("the node has the size basic: %+v", size)
	}
	holds := func(when string, namespaces int) {
		t.Helper()
		for _, c := range []struct {
			b          *box
			namespaces int
			instances  string
		}{{plain, 0, "128"}, {nested, namespaces, "20"}} {
			got := c.b.exec(`python3 -c '
import ctypes, os
libc, n = ctypes.CDLL(None), 0
while libc.inotify_init1(0) >= 0: n += 1
print(n)'`)
			if got != c.instances {
				t.Errorf("%s: it got %s inotify instances, want %s", when, got, c.instances)
			}
			// Each shell is in a user namespace within the one before.
			command := "true"
			for depth := 1; depth <= c.namespaces+1; depth++ {
				command = fmt.Sprintf("unshare --user --map-root-user sh -c %q", command)
				run := func() types.ExecResult {
					return c.b.try("setpriv --reuid 1000 --regid 1000 --clear-groups " + command)
				}
				if depth > c.namespaces {
					if result := run(); result.ExitCode == 0 || !strings.Contains(result.Stderr, "No space left on device") {
						t.Errorf("%s: %d user namespaces of %d: %+v", when, depth, c.namespaces, result)
					}
					continue
				}
				// The kernel frees namespaces some time after their last process.
				testkit.Eventually(t, fmt.Sprintf("%s: %d user namespaces of %d", when, depth, c.namespaces), func() bool { return run().ExitCode == 0 })
			}
		}
	}
	holds("when they are new", 2)
	for _, b := range []*box{plain, nested} {
		b.stop()
	}
	holds("after a cold wake", 2)
	before := nested.hostPID()
	nested.must(n.Kill())
	nested.must(n.Start())
	holds("after the node was killed", 2)
	if after := nested.hostPID(); after != before {
		t.Error("the sandbox was started again")
	}
	nested.must(n.Stop())
	nested.must(n.Configure(configure(1)))
	nested.must(n.Start())
	holds("when its size was changed", 2)
	nested.stop()
	holds("when its size was changed, after a cold wake", 1)
}
