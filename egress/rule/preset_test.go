package rule

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/doze-run/doze/egress/rule/preset"
)

func TestPresetsAreHosts(t *testing.T) {
	t.Parallel()
	i, _ := builtInPresets.find("openai")
	openai := builtInPresets.list[i]
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
	if _, err := Compile(Owner, []Rule{{Name: "a", Hosts: []string{"a.example", "preset:nmp"}, Action: Allow}}, nil); err == nil ||
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

// operators are presets of a node.
func operators(t *testing.T, presets ...preset.Preset) *Presets {
	t.Helper()
	p, err := NewPresets(presets)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestOperatorsPresetsAreListedWithTheBuiltInOnes(t *testing.T) {
	t.Parallel()
	p := operators(t,
		preset.Preset{Name: "npm", Description: "our mirror", Hosts: []string{"npm.example.com"}},
		preset.Preset{Name: "github", Hosts: []string{"git.example.com", "*.git.example.com"}})
	want := append(preset.All(), preset.Preset{Name: "npm", Description: "our mirror", Hosts: []string{"npm.example.com"}, Source: preset.Node})
	for i := range want {
		if want[i].Name == "github" { // the operator's takes its place
			want[i] = preset.Preset{Name: "github", Hosts: []string{"git.example.com", "*.git.example.com"}, Source: preset.Node}
		}
	}
	slices.SortFunc(want, func(a, b preset.Preset) int { return strings.Compare(a.Name, b.Name) })
	if diff := cmp.Diff(want, p.All()); diff != "" {
		t.Error(diff)
	}
	l, err := Compile(Owner, []Rule{{Name: "a", Hosts: []string{"preset:npm", "preset:github"}, Action: Allow}}, p)
	if err != nil {
		t.Fatal(err)
	}
	table := Table{Default: DenyAll, Layers: [3]*Layer{nil, l, nil}}
	for host, want := range map[string]string{"npm.example.com": "npm", "a.git.example.com": "github", "git.example.com": "github", "api.github.com": "", "a.npm.example.com": ""} {
		if got := table.Name(host).Verdict == VerdictAllow; got != (want != "") {
			t.Errorf("%s is allowed: %v", host, got)
		}
		if got := table.Preset("owner/a", host); got != want {
			t.Errorf("%s: matched by %q, want %q", host, got, want)
		}
	}
	if got := (*Presets)(nil).All(); !cmp.Equal(got, preset.All()) {
		t.Errorf("nil has %v", got)
	}
}

func TestPresetsThatCannotBeDefined(t *testing.T) {
	t.Parallel()
	one := func(name string, hosts ...string) []preset.Preset { return []preset.Preset{{Name: name, Hosts: hosts}} }
	many := func(n int, format string) (list []string) {
		for i := range n {
			list = append(list, fmt.Sprintf(format, i))
		}
		return list
	}
	var hundred []preset.Preset
	for _, name := range many(MaxPresets, "p%d") {
		hundred = append(hundred, one(name, "a.example")...)
	}
	if _, err := NewPresets(hundred); err != nil {
		t.Error(err)
	}
	for want, list := range map[string][]preset.Preset{
		`101 presets; at most 100`:                                    append(hundred, one("more", "a.example")...),
		`preset "N P M": a name is`:                                   one("N P M", "a.example"),
		`preset "": a name is`:                                        one("", "a.example"),
		`preset npm is already set`:                                   append(one("npm", "a.example"), one("npm", "b.example")...),
		`preset npm has no hosts`:                                     one("npm"),
		`has 201 hosts; at most 200`:                                  one("npm", many(MaxPresetHosts+1, "h%d.example")...),
		`description has 1001 bytes`:                                  {{Name: "npm", Description: strings.Repeat("x", MaxText+1), Hosts: []string{"a.example"}}},
		`preset npm: hosts[1]: invalid host name "https://a.example"`: one("npm", "b.example", "https://a.example"),
		`preset npm: hosts[0]: "10.1.2.3" is an address`:              one("npm", "10.1.2.3"),
		`preset npm: hosts[0]: "**"`:                                  one("npm", "**"),
		`preset npm: hosts[0]: "preset:github"`:                       one("npm", "preset:github"),
		`preset npm: hosts[0]: "a.*.example"`:                         one("npm", "a.*.example"),
		`hosts[1]: "a.example" is already in the list`:                one("npm", "a.example", "a.example"),
	} {
		if _, err := NewPresets(list); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}

func TestRulesNameAThousandPresetsAtMost(t *testing.T) {
	t.Parallel()
	names := slices.Repeat([]string{"preset:github"}, MaxPresetNames/2)
	rules := []Rule{{Name: "a", Hosts: names, Action: Allow}, {Name: "b", Hosts: names, Action: Allow}}
	if _, err := Compile(Owner, rules, nil); err != nil {
		t.Error(err)
	}
	rules = append(rules, Rule{Name: "c", Hosts: []string{"preset:github"}, Action: Allow})
	if _, err := Compile(Owner, rules, nil); err == nil || !strings.Contains(err.Error(), "1001 presets in hosts of all rules") {
		t.Errorf("got %v", err)
	}
}

// A preset that is not defined any more opens nothing, whatever its rules do.
func TestUndefinedPresetsFailClosed(t *testing.T) {
	t.Parallel()
	defined := operators(t, preset.Preset{Name: "npm", Hosts: []string{"npm.example"}})
	const reason = "names preset:npm, which is not defined on this node"
	for _, c := range []struct {
		name, rules string
		def         Default
		url         string
		verdict     Verdict // before, and then
		then        Verdict
		rule        string
		reason      string
	}{
		{"allow", `[{"name":"a","hosts":["preset:npm","b.example"],"action":"allow"}]`, DenyAll, "https://npm.example/", VerdictAllow, VerdictDeny, "default", "no rule allows it; owner/a " + reason},
		{"allow, another host of the rule", `[{"name":"a","hosts":["preset:npm","b.example"],"action":"allow"}]`, DenyAll, "https://b.example/", VerdictAllow, VerdictAllow, "owner/a", ""},
		{"allow some requests", `[{"name":"a","hosts":["preset:npm"],"methods":["GET"],"action":"allow"}]`, DenyAll, "https://npm.example/", VerdictAllow, VerdictDeny, "default", "no rule allows it; owner/a " + reason},
		{"deny", `[{"name":"a","hosts":["preset:npm"],"action":"deny","reason":"no packages"}]`, AllowPublic, "https://npm.example/", VerdictDeny, VerdictDeny, "owner/a", "the rule " + reason + ", so that it denies every host"},
		{"deny, another host", `[{"name":"a","hosts":["preset:npm"],"action":"deny"}]`, AllowPublic, "https://c.example/", VerdictAllow, VerdictDeny, "owner/a", "the rule " + reason + ", so that it denies every host"},
		{"deny, a host that the rule names", `[{"name":"a","hosts":["preset:npm","b.example"],"action":"deny","reason":"not b"}]`, AllowPublic, "https://b.example/", VerdictDeny, VerdictDeny, "owner/a", "not b"},
		{"deny some requests", `[{"name":"a","hosts":["preset:npm"],"methods":["PUT"],"action":"deny"}]`, AllowPublic, "PUT https://npm.example/", VerdictDeny, VerdictDeny, "owner/a", "the rule " + reason + ", so that it denies every host"},
		{"deny some requests, others", `[{"name":"a","hosts":["preset:npm"],"methods":["PUT"],"action":"deny"}]`, AllowPublic, "https://npm.example/", VerdictAllow, VerdictAllow, "default", ""},
		{"policies", `[{"name":"a","hosts":["preset:npm"],"policies":[{"policy":"readonly"}]}]`, AllowPublic, "https://npm.example/", VerdictAllow, VerdictDeny, "owner/a", "the rule " + reason + ", so that it may be about every host"},
		{"policies after a rule that allows", `[{"name":"b","hosts":["b.example"],"action":"allow"},{"name":"a","hosts":["preset:npm"],"policies":[{"policy":"readonly"}]}]`, AllowPublic, "https://b.example/", VerdictAllow, VerdictAllow, "owner/b", ""},
		{"policies, another port", `[{"name":"a","hosts":["preset:npm"],"policies":[{"policy":"readonly"}]}]`, AllowPublic, "https://npm.example:8443/", VerdictAllow, VerdictAllow, "default", ""},
		{"answer", `[{"name":"a","hosts":["preset:npm"],"answer":{"status":200}}]`, AllowPublic, "https://npm.example/", VerdictRespond, VerdictDeny, "owner/a", "the rule " + reason + ", so that it may be about every host"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if !strings.Contains(c.url, " ") {
				c.url = "GET " + c.url
			}
			r := request(t, c.url)
			var rules []Rule
			if err := json.Unmarshal([]byte(c.rules), &rules); err != nil {
				t.Fatal(err)
			}
			before, err := Compile(Owner, rules, defined)
			if err != nil {
				t.Fatal(err)
			}
			at := func(l *Layer) Decision {
				table := Table{Default: c.def, Layers: [3]*Layer{nil, l, nil}}
				if d := table.Name(r.Host); d.Verdict == VerdictDeny {
					return d
				}
				if d := table.Connect(r); d.Verdict != VerdictInspect {
					return d
				}
				return table.Decide(r)
			}
			if d := at(before); d.Verdict != c.verdict {
				t.Errorf("while it is defined: %+v", d)
			}
			stored, err := CompileStored(Owner, rules, nil)
			if err != nil {
				t.Fatal(err)
			}
			for what, l := range map[string]*Layer{"reloaded": before.WithPresets(nil), "stored": stored} {
				if d := at(l); d.Verdict != c.then || d.Rule != c.rule || d.Reason != c.reason {
					t.Errorf("%s: %+v", what, d)
				}
				if w := l.PresetWarnings(); len(w) != 1 || w[0].Field != "hosts" || !strings.Contains(w[0].Problem, reason) {
					t.Errorf("%s: warnings %+v", what, w)
				}
				if got := l.UndefinedPresets(); !slices.Equal(got, []string{"npm"}) {
					t.Errorf("%s: undefined %v", what, got)
				}
				again := l.WithPresets(defined)
				if d := at(again); !cmp.Equal(d, at(before)) || again.PresetWarnings() != nil {
					t.Errorf("%s, and defined again: %+v", what, d)
				}
			}
			if _, err := Compile(Owner, rules, nil); err == nil || !strings.Contains(err.Error(), `"npm" is not a preset`) {
				t.Errorf("new rules that name it: %v", err)
			}
		})
	}
}
