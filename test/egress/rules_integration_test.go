//go:build integration

package egress

import (
	"strings"
	"testing"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/testkit"
)

func TestRefusalsAreFastReadableAndAudited(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	b.rules(`[
		{"name":"never","hosts":["never.look.test"],"action":"deny","reason":"not this one"},
		{"name":"writes","hosts":["reads.look.test"],"methods":["POST"],"action":"deny","reason":"only reading"},
		{"name":"port","hosts":["port.pass.test"],"ports":["443"],"action":"deny","reason":"not by TLS"},
		{"name":"still","hosts":["still.look.test"],"respond":{"status":418,"headers":{"X-Tea":"green"},"body":"short and stout"}}
	]`)
	// Its name is not resolved.
	if r := b.try("curl -sS https://never.look.test/"); r.ExitCode != 6 {
		t.Errorf("a denied name: %+v", r)
	}
	if r := b.try("curl -sS -w ' %{http_code}' -d x https://reads.look.test/"); !strings.HasSuffix(r.Stdout, " 403") ||
		!strings.Contains(r.Stdout, `"detail":"only reading"`) || !strings.Contains(r.Stdout, `"rule":"sandbox/writes"`) {
		t.Errorf("a denied request: %+v", r)
	}
	if got := b.exec("curl -sS https://reads.look.test/"); parseSeen(t, got).Method != "GET" {
		t.Errorf("another request: %s", got)
	}
	// The refusal is sent although no other connection is intercepted.
	if r := b.try("curl -sS -w ' %{http_code}' https://port.pass.test/"); !strings.HasSuffix(r.Stdout, " 403") || !strings.Contains(r.Stdout, "not by TLS") {
		t.Errorf("a denied connection: %+v", r)
	}
	if r := b.try("curl -sSi https://still.look.test/"); !strings.Contains(r.Stdout, "418") || !strings.Contains(r.Stdout, "x-tea: green") || !strings.Contains(r.Stdout, "short and stout") {
		t.Errorf("a response: %+v", r)
	}
	reasons := map[string]string{}
	for _, f := range b.flows(client.FlowFilter{Verdict: "deny"}) {
		reasons[f.Host] = string(f.Kind) + " " + f.Rule + " " + f.Reason
	}
	for host, want := range map[string]string{
		"never.look.test": "dns sandbox/never not this one", "reads.look.test": "request sandbox/writes only reading", "port.pass.test": "connection sandbox/port not by TLS",
	} {
		if reasons[host] != want {
			t.Errorf("%s: the audit log has %q, want %q", host, reasons[host], want)
		}
	}
	for _, host := range []string{"never.look.test", "port.pass.test", "still.look.test"} {
		if got := n.servers.requests(host); len(got) != 0 {
			t.Errorf("%s got %+v", host, got)
		}
	}
}

func TestRulesApplyToTheNextRequest(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	const url = "https://live.look.test/"
	b.exec("curl -sSf " + url)
	b.rules(`[{"name":"stop","hosts":["live.look.test"],"paths":["/**"],"action":"deny","reason":"stopped"}]`)
	if r := b.try("curl -sSf " + url); r.ExitCode != 22 {
		t.Errorf("after the rule: %+v", r)
	}
	b.rules(`[]`)
	b.exec("curl -sSf " + url)
}

func TestDefaultDenyRefusesRequestsWithoutARule(t *testing.T) {
	n := ownNode(t, "default deny", "rule ok {\nhosts ok.pass.test\nallow\n}")
	b := n.newBox(t)
	b.exec("curl -sSk https://ok.pass.test/")
	for _, host := range []string{"other.pass.test", "a.echo.test"} {
		if r := b.try("getent hosts " + host); r.ExitCode == 0 {
			t.Errorf("%s has an address: %s", host, r.Stdout)
		}
	}
	if r := b.try("curl -sS --connect-timeout 5 http://192.0.2.7/"); r.ExitCode != 7 {
		t.Errorf("an address that no name led to: %+v", r)
	}
	e, err := n.API.Explain(testkit.Context(t), b.id, types.ExplainRequest{Method: "GET", URL: "https://other.pass.test/"})
	if err != nil || e.Verdict != "deny" || e.Rule != "default" {
		t.Errorf("explained as %+v, %v", e, err)
	}
}
