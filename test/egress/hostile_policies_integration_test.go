//go:build integration

package egress

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

// hostile is the module of the program hostile.
func hostile(t *testing.T) []byte {
	t.Helper()
	wasm, err := os.ReadFile(filepath.Join(os.Getenv("DOZE_BIN"), "hostile.wasm"))
	if err != nil {
		t.Fatal(err)
	}
	return wasm
}

// padded is a module with a custom section more, which changes its digest and
// nothing else.
func padded(wasm []byte, size int) []byte {
	content := append([]byte{3, 'p', 'a', 'd'}, make([]byte, size)...)
	section := append([]byte{0}, binary.AppendUvarint(nil, uint64(len(content)))...)
	return append(bytes.Clone(wasm), append(section, content...)...)
}

func (n *node) push(t *testing.T, name string, wasm []byte) {
	t.Helper()
	if _, err := n.API.PushPolicy(testkit.Context(t), name, bytes.NewReader(wasm)); err != nil {
		t.Fatal(err)
	}
}

// well checks that the node and the sandbox's egress work.
func (b *box) well() {
	b.t.Helper()
	if _, err := b.node.API.Node(testkit.Context(b.t)); err != nil {
		b.t.Errorf("the node: %v", err)
	}
	b.exec("curl -sSf --max-time 60 https://well.look.test/")
}

func TestHarmfulPolicyDeniesOnlyItsRequests(t *testing.T) {
	n := commonNode(t)
	n.push(t, "harm", hostile(t))
	b := n.newBox(t)
	for _, c := range []struct{ do, at, reason string }{
		{"loop", "request", "longer than 50ms"},
		{"loop", "response", "longer than 50ms"},
		{"output", "request", "longer than 50ms"},
		{"output", "response", "longer than 50ms"},
		{"memory", "request", "memory"},
		{"memory", "response", "memory"},
		{"trap", "request", "on purpose"},
		{"trap", "response", "on purpose"},
	} {
		host := c.do + "-" + c.at + ".look.test"
		b.rules(fmt.Sprintf(`[{"name":"harm","hosts":[%q],"policies":[{"name":"harm","config":{"do":%q,"at":%q}}]}]`, host, c.do, c.at))
		for range 3 { // the instance is gone each time
			r := b.try("curl -sS -w ' %{http_code}' --max-time 60 https://" + host + "/")
			if !strings.HasSuffix(r.Stdout, " 403") && !strings.HasSuffix(r.Stdout, " 502") || !strings.Contains(r.Stdout, `"code":"policy_failed"`) {
				t.Errorf("%s at %s: %+v", c.do, c.at, r)
			}
		}
		b.audited(client.FlowFilter{Host: host, Kind: "request"}, "denied by policy harm: ")
		b.audited(client.FlowFilter{Host: host, Kind: "request"}, c.reason)
		if c.at == "request" && len(n.servers.requests(host)) != 0 {
			t.Errorf("%s got a request", host)
		}
		b.well()
	}
}

// A policy that cannot start is refused with its rule, and the rules stay.
func TestRuleWhosePolicyDoesNotStartIsRefused(t *testing.T) {
	n := commonNode(t)
	n.push(t, "starts", hostile(t))
	b := n.newBox(t)
	b.rules(`[{"name":"kept","hosts":["kept.look.test"],"action":"deny","reason":"kept"}]`)
	for _, do := range []string{"loop", "output", "memory", "trap", "error"} {
		rules := fmt.Sprintf(`[{"name":"harm","hosts":["starts.look.test"],"policies":[{"name":"starts","config":{"do":%q,"at":"start"}}]}]`, do)
		_, err := n.API.SetRules(testkit.Context(t), b.id, client.RulesUpdate{Rules: json.RawMessage(rules)})
		var refused *problem.Problem
		if !errors.As(err, &refused) || refused.Status >= 500 || !strings.Contains(err.Error(), "starts") {
			t.Errorf("%s: %v", do, err)
		}
		t.Logf("%s: %v", do, err)
		b.well()
	}
	if set, err := n.API.Rules(testkit.Context(t), b.id); err != nil || !strings.Contains(string(set.Rules), "kept") {
		t.Errorf("the rules are %s, %v", set.Rules, err)
	}
}

func TestInvalidPolicyIsRefusedWithAReason(t *testing.T) {
	n := commonNode(t)
	wasm := hostile(t)
	empty := []byte{0, 'a', 's', 'm', 1, 0, 0, 0}
	for _, c := range []struct {
		name, want string
		module     []byte
	}{
		{"nothing", "", nil},
		{"text", "WebAssembly", []byte("(module)")},
		{"an ELF", "WebAssembly", append([]byte("\x7fELF"), make([]byte, 1000)...)},
		{"a component", "", []byte{0, 'a', 's', 'm', 0x0d, 0, 1, 0}},
		{"no exports", "handle_request", empty},
		{"a part of one", "", wasm[:len(wasm)/2]},
		{"17 MiB", "16777216 bytes", padded(wasm, 17<<20)},
		{"200 MB", "16777216 bytes", padded(wasm, 200e6)},
	} {
		_, err := n.API.PushPolicy(testkit.Context(t), "wrong", bytes.NewReader(c.module))
		var refused *problem.Problem
		if !errors.As(err, &refused) || refused.Status < 400 || refused.Status >= 500 || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
		t.Logf("%s: %v", c.name, err)
	}
	policies, err := n.API.Policies(testkit.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range policies {
		if p.Name == "wrong" {
			t.Errorf("there is %+v", p)
		}
	}
}

// replacements of a policy while requests pass through it.
const replacements = 10

func TestPolicyIsReplacedUnderLoad(t *testing.T) {
	n := commonNode(t)
	wasm := hostile(t)
	n.push(t, "turns", wasm)
	b := n.newBox(t)
	b.rules(`[{"name":"turns","hosts":["turns.look.test"],"policies":[{"name":"turns"}]}]`)
	b.exec("rm -f /tmp/stop; curl -sSf -o /tmp/first https://turns.look.test/")
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	type outcome struct {
		result types.ExecResult
		err    error
	}
	load := make(chan outcome, 1)
	go func() { // ends when /tmp/stop exists
		r, err := n.API.Exec(ctx, b.id, client.ExecRequest{Command: types.Command{Command: `
			for i in 1 2 3 4; do
				while [ ! -e /tmp/stop ]; do
					curl -sS -o /dev/null -w '%{http_code}\n' 'https://turns.look.test/[1-50]'
				done >/tmp/codes.$i 2>&1 &
			done
			wait`}})
		load <- outcome{r, err}
	}()
	for i := range replacements {
		before := len(n.servers.requests("turns.look.test"))
		n.push(t, "turns", padded(wasm, 1+i%2))
		testkit.Eventually(t, "requests pass through it", func() bool { return len(n.servers.requests("turns.look.test")) > before+20 })
	}
	b.exec("touch /tmp/stop")
	if o := <-load; o.err != nil || o.result.ExitCode != 0 {
		t.Fatalf("%+v", o)
	}
	if others := b.exec("cat /tmp/codes.* | sort | uniq -c"); strings.Contains(others, "\n") || !strings.HasSuffix(others, " 200") {
		t.Errorf("got %s", others)
	}
	digests := map[string]bool{}
	for _, f := range b.flows(client.FlowFilter{Host: "turns.look.test", Kind: "request"}) {
		for _, p := range f.Policies {
			digests[p.Digest] = true
		}
	}
	if len(digests) < 2 {
		t.Errorf("the requests passed through %d modules", len(digests))
	}
}
