//go:build integration

package egress

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/testkit"
)

// token is a value that nothing in a sandbox may ever hold.
const token = "tok-V9x2QmZ7LwR4sK8pB3nD"

func (n *node) secret(t *testing.T, name, value string, hosts ...string) {
	t.Helper()
	n.canary.watch(value)
	if _, err := n.API.PutSecret(testkit.Context(t), name, []byte(value), hosts); err != nil {
		t.Fatal(err)
	}
}

// rules sets the rules of the sandbox.
func (b *box) rules(rules string) {
	b.t.Helper()
	if _, err := b.node.API.SetRules(testkit.Context(b.t), b.id, client.RulesUpdate{Rules: json.RawMessage(rules)}); err != nil {
		b.t.Fatal(err)
	}
}

// flows are what the sandbox sent.
func (b *box) flows(filter client.FlowFilter) []types.Flow {
	b.t.Helper()
	flows, err := b.node.API.Flows(testkit.Context(b.t), b.id, filter, 0)
	if err != nil {
		b.t.Fatal(err)
	}
	return flows
}

func TestRequestIsAuthenticatedWithoutTheSecretInTheSandbox(t *testing.T) {
	n := commonNode(t)
	n.secret(t, "bearer-test", token, "bearer.look.test")
	b := n.newBox(t)
	b.rules(`[{"name":"api","hosts":["bearer.look.test"],"policies":[{"name":"bearer","secrets":{"token":"bearer-test"}}]}]`)

	text := b.exec("curl -sS -H 'Authorization: Bearer mine' https://bearer.look.test/user?q=1")
	got := n.servers.requests("bearer.look.test")
	if len(got) != 1 || len(got[0].Header["Authorization"]) != 1 || got[0].Header.Get("Authorization") != "Bearer "+token {
		t.Fatalf("the server got %+v", got)
	}
	if strings.Contains(text, token) {
		t.Errorf("the server's echo reached the sandbox: %s", text)
	}
	if echoed := parseSeen(t, text); echoed.Header.Get("Authorization") != "Bearer "+strings.Repeat("*", len(token)) {
		t.Errorf("the echo was not replaced in place: %q", echoed.Header.Get("Authorization"))
	}

	flows := b.flows(client.FlowFilter{Host: "bearer.look.test"})
	if len(flows) != 1 {
		t.Fatalf("got %+v", flows)
	}
	f := flows[0]
	if f.Method != "GET" || f.Path != "/user" || f.Verdict != "allow" || f.Rule != "sandbox/api" || len(f.Secrets) != 1 || f.Secrets[0] != "bearer-test" ||
		len(f.Policies) != 1 || f.Policies[0].Name != "bearer" || f.Status != 200 || f.BytesIn == 0 {
		t.Errorf("the audit log has %+v", f)
	}
}

func TestSecretIsSentToItsHostOnly(t *testing.T) {
	n := commonNode(t)
	n.secret(t, "bound", token, "bound.look.test")
	b := n.newBox(t)
	b.rules(`[{"name":"all","hosts":["*.look.test","*.plain.test"],"policies":[{"name":"bearer","secrets":{"token":"bound"}}]}]`)
	for _, url := range []string{"https://other.look.test/", "http://bound.plain.test/"} {
		r := b.try("curl -sS -w ' %{http_code}' " + url)
		if !strings.HasSuffix(r.Stdout, " 403") || !strings.Contains(r.Stdout, `"code":"secret_not_allowed"`) {
			t.Errorf("%s: %+v", url, r)
		}
	}
	if got := append(n.servers.requests("other.look.test"), n.servers.requests("bound.plain.test")...); len(got) != 0 {
		t.Errorf("requests arrived: %+v", got)
	}
}

func TestPlaceholderIsReplacedForItsHostOnly(t *testing.T) {
	n := commonNode(t)
	n.secret(t, "placed", token, "placed.look.test")
	b := n.newBox(t)
	b.rules(`[{"name":"api","hosts":["placed.look.test"],"action":"allow","placeholders":{"API_TOKEN":"placed"}}]`)
	value := b.exec("echo $API_TOKEN")
	if !strings.HasPrefix(value, "doze-placeholder-") {
		t.Fatalf("got %q", value)
	}
	b.exec(`curl -sS -H "X-Api-Key: $API_TOKEN" https://placed.look.test/header`)
	b.exec(`curl -sS -u "git:$API_TOKEN" https://placed.look.test/basic`)
	b.exec(`curl -sS "https://placed.look.test/query?key=$API_TOKEN"`)
	b.exec(`curl -sS -d "key=$API_TOKEN" https://placed.look.test/body`)
	got := n.servers.requests("placed.look.test")
	if len(got) != 4 {
		t.Fatalf("got %+v", got)
	}
	if got[0].Header.Get("X-Api-Key") != token || !strings.Contains(got[2].URI, token) || got[3].Body != "key="+token {
		t.Errorf("got %+v", got)
	}
	if r := b.try(`curl -sS -w ' %{http_code}' -H "X-Api-Key: $API_TOKEN" https://elsewhere.look.test/`); !strings.HasSuffix(r.Stdout, " 403") {
		t.Errorf("elsewhere: %+v", r)
	}
	if got := n.servers.requests("elsewhere.look.test"); len(got) != 0 {
		t.Errorf("a placeholder arrived elsewhere: %+v", got)
	}
}
