package api

import (
	"bytes"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/egress/egresstest"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/preset"
	"github.com/doze-run/doze/problem"
)

const oneRule = `{"rules":[{"name":"no","hosts":["evil.example"],"ports":["443","8000-8100"],"action":"deny","reason":"r"}]}`

func TestRulesComeBackAsTheyWereSet(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	for _, path := range []string{"/egress/rules", "/sandbox/box/egress/rules"} {
		none := s.do("GET", path, nil)
		if none.header.Get("ETag") != `"0"` || strings.TrimSpace(string(none.body)) != `{"revision":0,"default":"inherit","rules":[]}` {
			t.Errorf("%s: at first %s, %s", path, none.header.Get("ETag"), none.body)
		}
		set := must[types.RuleSet](s, http.StatusOK, "PUT", path, oneRule)
		got := s.do("GET", path, nil)
		if set.Revision != 1 || got.header.Get("ETag") != `"1"` || !strings.Contains(string(got.body), oneRule[1:len(oneRule)-1]) {
			t.Errorf("%s: set %+v, then %s, %s", path, set, got.header.Get("ETag"), got.body)
		}
		must[types.RuleSet](s, http.StatusOK, "PUT", path, `{"rules":[]}`)
		if set := must[types.RuleSet](s, http.StatusOK, "GET", path, nil); set.Revision != 2 || len(set.Rules) != 0 {
			t.Errorf("%s: %+v", path, set)
		}
	}
	s.refused(problem.SandboxNotFound, "GET", "/sandbox/absent/egress/rules", nil)
	s.refused(problem.SandboxNotFound, "PUT", "/sandbox/absent/egress/rules", oneRule)
}

func TestRulesAreReplacedOnlyIfTheyAreThoseThatWereSeen(t *testing.T) {
	s := newServer(t, Limits{})
	put := func(ifMatch string) response { return s.do("PUT", "/egress/rules", oneRule, "If-Match", ifMatch) }
	for _, step := range []struct {
		ifMatch string
		etag    string // "" for a conflict
	}{{`"0"`, `"1"`}, {`"0"`, ""}, {`"1"`, `"2"`}, {"*", `"3"`}, {`"2"`, ""}, {` "3" `, `"4"`}, {`"99"`, ""}} {
		got := put(step.ifMatch)
		if step.etag == "" {
			if p := s.checkProblem(problem.RevisionConflict, step.ifMatch, got); !strings.Contains(p.Detail, "they are at revision") {
				t.Errorf("%s: %s", step.ifMatch, p.Detail)
			}
		} else if got.status != http.StatusOK || got.header.Get("ETag") != step.etag {
			t.Errorf("%s: %d, %s, want %s", step.ifMatch, got.status, got.header.Get("ETag"), step.etag)
		}
	}
	for _, bad := range []string{"4", `"four"`, `W/"4"`, `"4`, `"-1"`, `"4", "5"`, `""`} {
		s.checkProblem(problem.RequestInvalid, bad, put(bad))
	}
	if set := must[types.RuleSet](s, http.StatusOK, "GET", "/egress/rules", nil); set.Revision != 4 {
		t.Errorf("they are at %d", set.Revision)
	}
}

func TestRulesThatNeverApplyGetAWarning(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	const shadowed = `{"rules":[{"name":"npm","hosts":["npm.example"],"action":"allow"},{"name":"rest","hosts":["**"],"action":"deny"},
		{"name":"gh","hosts":["gh.example"],"policies":[{"name":"bearer","secrets":{"token":"gone"}}]}]}`
	for _, path := range []string{"/egress/rules", "/sandbox/box/egress/rules"} {
		set := must[types.RuleSet](s, http.StatusOK, "PUT", path, shadowed)
		if len(set.Warnings) < 2 {
			t.Fatalf("%s: %+v", path, set.Warnings)
		}
		if w := set.Warnings[0]; w.Location != "body.rules[1]" || !strings.Contains(w.Message, `"rest" denies what "npm" and "gh" allow`) || w.Hint != `remove "rest" and set "default": "deny"` {
			t.Errorf("%s: got %+v", path, w)
		}
		last := set.Warnings[len(set.Warnings)-1]
		if last.Location != "body.rules[2].policies[0].secrets[token]" || !strings.Contains(last.Message, `secret "gone", which does not exist`) {
			t.Errorf("%s: got %+v", path, last)
		}
		if got := must[types.RuleSet](s, http.StatusOK, "GET", path, nil); got.Warnings != nil || len(got.Rules) != 3 {
			t.Errorf("%s: read %+v", path, got)
		}
	}
	// The sandbox's rules are compared with the owner's and the node's, too.
	set := must[types.RuleSet](s, http.StatusOK, "PUT", "/sandbox/box/egress/rules", `{"rules":[{"name":"a","hosts":["metadata.internal"],"action":"allow"}]}`)
	if len(set.Warnings) != 2 || !strings.Contains(set.Warnings[0].Message, "node/no-metadata denies") || !strings.Contains(set.Warnings[1].Message, "owner/rest denies") {
		t.Errorf("got %+v", set.Warnings)
	}
	if set := must[types.RuleSet](s, http.StatusOK, "PUT", "/egress/rules", `{"default":"deny","rules":[{"name":"npm","hosts":["npm.example"],"action":"allow"}]}`); set.Warnings != nil {
		t.Errorf("got %+v", set.Warnings)
	}
}

func TestTheDefaultOfRules(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	for _, path := range []string{"/egress/rules", "/sandbox/box/egress/rules"} {
		for _, step := range []struct{ body, want string }{
			{`{"rules":[]}`, "inherit"}, {`{"default":"deny","rules":[]}`, "deny"}, {oneRule, "deny"}, {`{"default":"inherit","rules":[]}`, "inherit"},
		} {
			if set := must[types.RuleSet](s, http.StatusOK, "PUT", path, step.body); string(set.Default) != step.want {
				t.Errorf("%s: %s: got %q", path, step.body, set.Default)
			}
			if set := must[types.RuleSet](s, http.StatusOK, "GET", path, nil); string(set.Default) != step.want {
				t.Errorf("%s: %s: then %q", path, step.body, set.Default)
			}
		}
		for _, bad := range []string{`"allow_public"`, `""`, `1`} {
			s.refused(problem.RequestInvalid, "PUT", path, `{"default":`+bad+`,"rules":[]}`)
		}
	}
	must[types.RuleSet](s, http.StatusOK, "PUT", "/sandbox/box/egress/rules", `{"default":"deny","rules":[{"name":"a","hosts":["a.example"],"action":"allow"}]}`)
	for url, want := range map[string]string{"https://a.example/": "allow sandbox/a", "https://b.example/": "deny default"} {
		e := must[types.Explanation](s, http.StatusOK, "POST", "/sandbox/box/egress/explain", `{"url":"`+url+`"}`)
		if got := string(e.Verdict) + " " + e.Rule; got != want {
			t.Errorf("%s: got %s (%s), want %s", url, got, e.Reason, want)
		}
	}
}

func TestFaultsOfRulesAreListedWithTheirPlace(t *testing.T) {
	s := newServer(t, Limits{})
	must[types.RuleSet](s, http.StatusOK, "PUT", "/egress/rules", oneRule)
	p := s.refused(problem.RulesInvalid, "PUT", "/egress/rules", `{"rules":[
		{"name":"ok","action":"allow"},
		{"name":"ok","hosts":["a.example","https://b.example"],"action":"allow"},
		{"name":"corp","allow_private":true,"policies":[{"name":"../p"}]},
		{"name":"stub","respond":{"status":99}}]}`)
	var places []string
	for _, e := range p.Errors {
		places = append(places, e.Location)
	}
	want := []string{"body.rules[1].name", "body.rules[1].hosts[1]", "body.rules[2].allow_private", "body.rules[2].policies[0].name", "body.rules[3].respond.status"}
	slices.Sort(places)
	slices.Sort(want)
	if !slices.Equal(places, want) || !strings.Contains(p.Detail, "rule 2 (ok)") || !strings.Contains(p.Detail, "and 4 more") {
		t.Errorf("got %v, %s", places, p.Detail)
	}
	many := make([]string, 50)
	for i := range many {
		many[i] = `{"name":"A","action":"deny"}`
	}
	if p := s.refused(problem.RulesInvalid, "PUT", "/egress/rules", `{"rules":[`+strings.Join(many, ",")+`]}`); len(p.Errors) != maxFaults {
		t.Errorf("%d faults are listed", len(p.Errors))
	}
	if set := must[types.RuleSet](s, http.StatusOK, "GET", "/egress/rules", nil); set.Revision != 1 {
		t.Errorf("something was applied: %+v", set)
	}
}

func TestInvalidRulesAreRefused(t *testing.T) {
	s := newServer(t, Limits{})
	for body, where := range map[string]string{
		`{"rules":[{"action":"allow"}]}`:                                               "body.rules[0].name",
		`{"rules":[{"name":"a","action":"allow","host":["x"]}]}`:                       "body.rules[0].host",
		`{"rules":[{"name":"a","action":"deny","Action":"allow"}]}`:                    "body.rules[0].Action",
		`{"rules":[{"name":"a","action":"deny","action":"allow"}]}`:                    "body.rules[0].action",
		`{"rules":[{"name":"a","respond":{"status":200,"Body":"x"}}]}`:                 "body.rules[0].respond.Body",
		`{"rules":[{"name":"a","policies":[{"name":"p"},{"name":"q","Secrets":{}}]}]}`: "body.rules[0].policies[1].Secrets",
		`{"rules":[{"name":"a","action":"allow","ports":[443]}]}`:                      "body.rules[0].ports[0]",
		`{"rules":{}}`: "body.rules",
		`{}`:           "body.rules",
	} {
		if p := s.refused(problem.RequestInvalid, "PUT", "/egress/rules", body); len(p.Errors) == 0 || p.Errors[0].Location != where {
			t.Errorf("%s: %+v, want %s", body, p, where)
		}
	}
	if p := s.refused(problem.RulesInvalid, "PUT", "/egress/rules", `{"rules":[{"name":"a"}]}`); p.Errors[0].Location != "body.rules[0].action" {
		t.Errorf("got %+v", p)
	}
	p := s.refused(problem.RequestInvalid, "PUT", "/egress/rules", `{"rules":[{"name":"a","action":"allow","host":["x"]}]}`)
	if !strings.Contains(p.Errors[0].Hint, "hosts, methods, name") {
		t.Errorf("the fields are not named: %+v", p.Errors[0])
	}
	if p := s.refused(problem.RulesInvalid, "PUT", "/egress/rules", `{"rules":[{"name":"a","action":"allow","ports":["443","http"]}]}`); len(p.Errors) != 1 || p.Errors[0].Location != "body.rules[0].ports[1]" {
		t.Errorf("got %+v", p)
	}
	p = s.refused(problem.RequestInvalid, "PUT", "/egress/rules", `{"rules":[{"name":"b","action":"answer"},{"name":"c","action":"policies"}]}`)
	if len(p.Errors) != 2 || p.Errors[0].Location != "body.rules[0].action" || p.Errors[1].Location != "body.rules[1].action" || !strings.Contains(p.Errors[1].Message, "allow, deny") {
		t.Errorf("got %+v", p)
	}
	long := fmt.Sprintf(`{"rules":[%s{"name":"a","action":"allow"}]}`, strings.Repeat(`{"name":"a","action":"allow"},`, rule.MaxRules))
	s.refused(problem.RequestInvalid, "PUT", "/egress/rules", long)
	must[types.Policy](s, http.StatusOK, "PUT", "/policies/p", bytes.NewReader(egresstest.Module(1)))
	// The document does not describe the configuration of a policy.
	must[types.RuleSet](s, http.StatusOK, "PUT", "/egress/rules",
		`{"rules":[{"name":"a","headers":{"x-a":"1"},"policies":[{"name":"p","config":{"A":1,"a":[2]},"secrets":{"token":"t"}}]}]}`)
}

func TestPresetsAreListedAndUsedInRules(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	list := must[types.PresetList](s, http.StatusOK, "GET", "/egress/presets", nil).Presets
	if len(list) != len(preset.All())+1 || !slices.ContainsFunc(list, func(p types.Preset) bool { return cmp.Equal(p, presetOf(egresstest.Registry)) }) {
		t.Fatalf("got %+v", list)
	}
	for _, p := range list {
		must[types.RuleSet](s, http.StatusOK, "PUT", "/egress/rules", `{"default":"deny","rules":[{"name":"a","hosts":["preset:`+p.Name+`"],"action":"allow"}]}`)
		host := strings.Replace(p.Hosts[len(p.Hosts)-1], "*", "x", 1)
		e := must[types.Explanation](s, http.StatusOK, "POST", "/sandbox/box/egress/explain", `{"url":"https://`+host+`/"}`)
		if e.Verdict != types.VerdictAllow || e.Rule != "owner/a" || e.Preset != p.Name {
			t.Errorf("%s: %s is explained as %+v", p.Name, host, e)
		}
	}
	if p := s.refused(problem.RulesInvalid, "PUT", "/egress/rules", `{"rules":[{"name":"a","hosts":["preset:nmp"],"action":"allow"}]}`); p.Errors[0].Location != "body.rules[0].hosts[0]" {
		t.Errorf("got %+v", p)
	}
	p := s.refused(problem.RequestInvalid, "PUT", "/secrets/github", `{"value":"12345678","hosts":["preset:github"]}`)
	if p.Errors[0].Location != "body.hosts[0]" || !strings.Contains(p.Detail, "bound to hosts, not to a preset") {
		t.Errorf("got %+v", p)
	}
}

// Rules do not change when the operator removes a preset that they name, and have a
// warning.
func TestRulesWhosePresetWasRemovedHaveAWarning(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	const rules = `{"default":"deny","rules":[{"name":"a","hosts":["preset:registry"],"action":"allow"}]}`
	for _, path := range []string{"/egress/rules", "/sandbox/box/egress/rules"} {
		must[types.RuleSet](s, http.StatusOK, "PUT", path, rules)
		if got := must[types.RuleSet](s, http.StatusOK, "GET", path, nil); got.Warnings != nil {
			t.Errorf("%s: got %+v", path, got)
		}
	}
	s.egress.RemovePresets(t)
	for _, path := range []string{"/egress/rules", "/sandbox/box/egress/rules"} {
		got := must[types.RuleSet](s, http.StatusOK, "GET", path, nil)
		if len(got.Rules) != 1 || len(got.Warnings) != 1 || got.Warnings[0].Location != "body.rules[0].hosts" ||
			got.Warnings[0].Message != `"a" names preset:registry, which is not defined on this node: it allows none of its hosts` {
			t.Errorf("%s: got %+v", path, got)
		}
		if p := s.refused(problem.RulesInvalid, "PUT", path, rules); p.Errors[0].Location != "body.rules[0].hosts[0]" {
			t.Errorf("%s: got %+v", path, p)
		}
	}
	e := must[types.Explanation](s, http.StatusOK, "POST", "/sandbox/box/egress/explain", `{"url":"https://registry.example.com/"}`)
	if e.Verdict != types.VerdictDeny || !strings.HasSuffix(e.Reason, "; owner/a names preset:registry, which is not defined on this node") {
		t.Errorf("explained as %+v", e)
	}
}

func TestNodeRulesAreShownAndNotSet(t *testing.T) {
	s := newServer(t, Limits{})
	got := must[types.NodeRules](s, http.StatusOK, "GET", "/node/egress/rules", nil)
	if got.Default != types.RuleDefaultAllowPublic || len(got.Rules) != 1 || got.Rules[0].Name != "no-metadata" {
		t.Errorf("got %+v", got)
	}
	s.refused(problem.MethodNotAllowed, "PUT", "/node/egress/rules", oneRule)
}
