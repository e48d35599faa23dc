package rule

import (
	"strings"
	"testing"

	"github.com/doze-run/doze/egress/preset"
)

func TestPresetsAreHosts(t *testing.T) {
	t.Parallel()
	openai, _, err := preset.Parse("preset:openai")
	if err != nil {
		t.Fatal(err)
	}
	table := table(t, DenyAll, `[{"name":"packages","hosts":["preset:mistral","preset:openai","own.example"],"action":"allow"}]`, "", `[{"name":"gh","hosts":["preset:github","api.github.com"],"policies":[{"policy":"x"}]}]`)
	for _, host := range openai.Hosts {
		for what, d := range map[string]Decision{
			"name": table.Name(host), "connection": table.Connect(Request{Host: host, Port: 443}), "request": table.Decide(request(t, "GET https://"+host+"/x")),
		} {
			if d.Verdict != VerdictAllow || d.Rule != "node/packages" {
				t.Errorf("%s: the %s: %+v", host, what, d)
			}
		}
		if d := table.Name("not-" + host); d.Verdict != VerdictDeny {
			t.Errorf("not-%s: %+v", host, d)
		}
	}
	for _, c := range []struct{ rule, host, want string }{
		{"node/packages", openai.Hosts[0], "openai"}, {"node/packages", "own.example", ""}, {"node/packages", "other.example", ""},
		{"sandbox/gh", "raw.githubusercontent.com", "github"}, {"sandbox/gh", "api.github.com", ""}, {"default", openai.Hosts[0], ""}, {"owner/gh", "github.com", ""},
	} {
		if got := table.Preset(c.rule, c.host); got != c.want {
			t.Errorf("%s, %s: got %q, want %q", c.rule, c.host, got, c.want)
		}
	}
	if d := table.Decide(request(t, "GET https://raw.githubusercontent.com/x")); chain(d) != "sandbox/gh=x" {
		t.Errorf("got %+v", d)
	}
	if _, err := Compile(Owner, []Rule{{Name: "a", Hosts: []string{"a.example", "preset:nmp"}, Action: Allow}}); err == nil ||
		!strings.Contains(err.Error(), `rule 1 (a): hosts[1]: "nmp" is not a preset; use one of `) {
		t.Errorf("got %v", err)
	}
}

func TestWarningsOfPresets(t *testing.T) {
	t.Parallel()
	const packages = `{"name":"packages","hosts":["preset:openai"],"action":"allow"}`
	if got := Warnings(layerOf(t, Owner, `[`+packages+`,{"name":"rest","action":"deny"}]`), nil, nil); len(got) != 1 || !strings.Contains(got[0].Problem, `"packages"`) {
		t.Errorf("got %+v", got)
	}
	if got := Warnings(layerOf(t, Owner, `[`+packages+`,{"name":"no","hosts":["preset:openai"],"action":"deny"}]`), nil, nil); len(got) != 1 {
		t.Errorf("got %+v", got)
	}
	// One host of a preset is an exception, not a contradiction.
	if got := Warnings(layerOf(t, Owner, `[{"name":"gh","hosts":["preset:github"],"action":"allow"},{"name":"no","hosts":["gist.github.com"],"action":"deny"}]`), nil, nil); got != nil {
		t.Errorf("got %+v", got)
	}
	// A secret that is bound to one of its hosts can be sent.
	if got := Warnings(layerOf(t, Owner, `[{"name":"gh","hosts":["preset:github"],"policies":[{"policy":"x","secrets":{"token":"github"}}]}]`), nil,
		func(string) ([]string, bool) { return []string{"api.github.com"}, true }); got != nil {
		t.Errorf("got %+v", got)
	}
}
