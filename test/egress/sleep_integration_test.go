//go:build integration

package egress

import (
	"strings"
	"testing"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/testkit"
)

func (b *box) show() types.Sandbox {
	b.t.Helper()
	sb, err := b.node.API.Get(testkit.Context(b.t), b.id)
	if err != nil {
		b.t.Fatal(err)
	}
	return sb
}

func (b *box) sleep() {
	b.t.Helper()
	if _, err := b.node.API.Sleep(testkit.Context(b.t), b.id); err != nil {
		b.t.Fatal(err)
	}
}

// A sandbox that waits for a response sleeps, and the response wakes it: through
// interception and passed through.
func TestResponseWakesTheSandboxThatWaitsForIt(t *testing.T) {
	for _, host := range []string{"slow-answer.look.test", "slow-answer.pass.test"} {
		t.Run(host, func(t *testing.T) {
			n := commonNode(t)
			b := n.newBox(t)
			p, err := n.API.StartProcess(testkit.Context(t), b.id, types.StartProcessRequest{Command: types.Command{Argv: []string{"curl", "-sSk", "https://" + host + "/hold"}}, Name: "waits"})
			if err != nil {
				t.Fatal(err)
			}
			release := n.servers.held(t, host)
			// The server's first bytes, such as TLS's tickets, may wake it again.
			testkit.Eventually(t, "it sleeps", func() bool { b.sleep(); return b.show().State == "asleep" })
			release("the response")
			testkit.Eventually(t, "the response woke it", func() bool { return b.show().State == "running" })
			var text strings.Builder
			err = n.API.Logs(testkit.Context(t), b.id, p.ID, true, func(l client.Log) error { text.Write(l.Data); return nil })
			if err != nil || !strings.Contains(text.String(), "the response") {
				t.Errorf("got %q, %v", text.String(), err)
			}
		})
	}
}

func TestNetworkWorksAfterARestart(t *testing.T) {
	n := ownNode(t)
	b := n.newBox(t)
	const get = "curl -sSk https://again.pass.test/"
	b.exec(get)
	for _, restart := range []struct {
		name string
		do   func()
	}{
		{"of the sandbox", func() {
			if _, err := n.API.Stop(testkit.Context(t), b.id); err != nil {
				t.Fatal(err)
			}
		}},
		{"of the node", func() {
			if err := n.Stop(); err != nil {
				t.Fatal(err)
			}
			if err := n.Start(); err != nil {
				t.Fatal(err)
			}
		}},
		{"of a killed node", func() {
			n.Kill()
			if err := n.Start(); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		restart.do()
		if r := b.try(get); r.ExitCode != 0 {
			t.Errorf("after a restart %s: %+v", restart.name, r)
		}
	}
}
