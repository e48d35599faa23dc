package egress

import (
	"slices"
	"strings"
	"testing"

	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/preset"
	"github.com/doze-run/doze/egress/rule/ruleset"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// withPreset returns a change of settings that sets the hosts of the operator's preset npm,
// or removes the preset if there are none.
func withPreset(t *testing.T, hosts ...string) func(*Settings) {
	t.Helper()
	var list []preset.Preset
	if len(hosts) > 0 {
		list = []preset.Preset{{Name: "npm", Hosts: hosts}}
	}
	presets, err := rule.NewPresets(list)
	if err != nil {
		t.Fatal(err)
	}
	return func(s *Settings) { s.Rules = compileNodeRules(t, presets, s.Rules.Rules()...) }
}

// A reload that changes a preset changes the hosts of the stored rules of owners and
// sandboxes, whether or not the sandboxes are attached.
func TestReloadsChangeThePresetsOfStoredRules(t *testing.T) {
	r := newRig(t, func(c *Config) { withPreset(t, "a.plain.test")(&c.Settings) })
	b := r.box("k3f9x2m7q1az")
	b.push("note", noting("a note"))
	allow := []rule.Rule{{Name: "packages", Hosts: []string{"preset:npm"}, Action: rule.Allow}}
	if _, _, err := r.SetRules(testkit.Context(t), owner, "", ruleset.Update{Default: rule.DenyAll, Rules: allow}); err != nil {
		t.Fatal(err)
	}
	noted := []rule.Rule{{Name: "noted", Hosts: []string{"preset:npm"}, Policies: []rule.Use{{Policy: "note"}}}}
	b.rules(noted...)
	check := func(when, allowed, denied, reason string) {
		t.Helper()
		b.want(b.get("http://"+allowed+"/"), 200, "this is")
		if e := b.entry(allowed, func(e audit.Entry) bool { return e.Kind == audit.Request && e.Verdict == audit.Allow }); len(e.Notes) != 1 {
			t.Errorf("%s: the policy of the sandbox's rule did not run: %+v", when, e)
		}
		if a, err := b.try(newRequest(t, "GET", "http://"+denied+"/", nil)); err == nil && a.status != 403 { // the name has an address since it was allowed
			t.Errorf("%s: %s answered %+v", when, denied, a)
		}
		e, err := r.Explain(testkit.Context(t), b.sb.ID, "GET", "http://"+denied+"/", nil)
		if err != nil || e.Verdict != rule.VerdictDeny || !strings.Contains(e.Reason, reason) {
			t.Errorf("%s: %s is explained as %+v, %v", when, denied, e, err)
		}
	}
	check("at first", "a.plain.test", "b.plain.test", "no rule of the owner")
	if err := r.reload(withPreset(t, "b.plain.test")); err != nil {
		t.Fatal(err)
	}
	check("after a reload", "b.plain.test", "a.plain.test", "no rule of the owner")
	r.uses(t, 1) // no second instance of its policy
	if list := r.Presets(); !slices.ContainsFunc(list, func(p preset.Preset) bool {
		return p.Name == "npm" && p.Source == preset.Node && slices.Equal(p.Hosts, []string{"b.plain.test"})
	}) {
		t.Errorf("the presets are %+v", list)
	}

	removed := func(when string) {
		t.Helper()
		for _, host := range []string{"a.plain.test", "b.plain.test"} {
			e, err := r.Explain(testkit.Context(t), b.sb.ID, "GET", "http://"+host+"/", nil)
			if err != nil || e.Verdict != rule.VerdictDeny || !strings.Contains(e.Reason, "names preset:npm, which is not defined on this node") {
				t.Errorf("%s: %s is explained as %+v, %v", when, host, e, err)
			}
		}
		for _, id := range []sandbox.ID{"", b.sb.ID} {
			_, warnings, err := r.Rules(testkit.Context(t), owner, id)
			if err != nil || len(warnings) != 1 || !strings.Contains(warnings[0].Problem, "preset:npm") {
				t.Errorf("%s: the rules of %q have the warnings %+v, %v", when, id, warnings, err)
			}
		}
		if log := r.log.String(); strings.Count(log, "preset=npm") != 1 || !strings.Contains(log, "count=2") {
			t.Errorf("%s: the log is\n%s", when, log)
		}
	}
	if err := r.reload(withPreset(t)); err != nil {
		t.Fatal(err)
	}
	removed("after a reload without it")
	b.want(b.get("http://b.plain.test/"), 403, "preset:npm")
	if _, _, err := r.SetRules(testkit.Context(t), owner, b.sb.ID, ruleset.Update{Rules: noted}); err == nil || !strings.Contains(err.Error(), `"npm" is not a preset`) {
		t.Errorf("new rules that name it: %v", err)
	}

	r.config.Settings = *r.settings.Load()
	r.log = testkit.NewLog(t)
	r.config.Log = r.log.Logger()
	r.reopen()
	removed("after a restart without it")
	b.attach()
	if err := r.reload(withPreset(t, "a.plain.test")); err != nil {
		t.Fatal(err)
	}
	check("defined again", "a.plain.test", "b.plain.test", "no rule of the owner")
}

func TestReloadsChangeThePresetsOfTheNodesRules(t *testing.T) {
	r := newRig(t, func(c *Config) {
		withPreset(t, "a.plain.test")(&c.Settings)
		packages := rule.Rule{Name: "packages", Hosts: []string{"preset:npm"}, Action: rule.Allow}
		c.Settings.Default, c.Settings.Rules = rule.DenyAll, compileNodeRules(t, c.Settings.Rules.Presets(), packages)
	})
	b := r.box("k3f9x2m7q1az")
	b.want(b.get("http://a.plain.test/"), 200, "this is")
	if err := r.reload(withPreset(t, "b.plain.test")); err != nil {
		t.Fatal(err)
	}
	b.want(b.get("http://b.plain.test/"), 200, "this is")
}
