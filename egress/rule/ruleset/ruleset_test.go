package ruleset_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/ruleset"
	"github.com/doze-run/doze/runtime/store/document"
	"github.com/doze-run/doze/runtime/store/storetest"
)

func open(t testing.TB, docs document.Store) *ruleset.Sets {
	t.Helper()
	s, err := ruleset.Open(context.Background(), docs)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func rulesOf(t testing.TB, text string) []rule.Rule {
	t.Helper()
	var rules []rule.Rule
	if err := json.Unmarshal([]byte(text), &rules); err != nil {
		t.Fatal(err)
	}
	return rules
}

func deny(name string) []rule.Rule {
	return []rule.Rule{{Name: name, Hosts: []string{"evil.example"}, Action: rule.Deny}}
}

func update(s *ruleset.Sets, scope ruleset.Scope, u ruleset.Update) (ruleset.Set, error) {
	set, err := s.Compile(scope, u, nil)
	if err != nil {
		return ruleset.Set{}, err
	}
	return s.Replace(context.Background(), scope, set, u.IfRevision)
}

func replace(t testing.TB, s *ruleset.Sets, scope ruleset.Scope, rules []rule.Rule) ruleset.Set {
	t.Helper()
	set, err := update(s, scope, ruleset.Update{Rules: rules})
	if err != nil {
		t.Fatal(err)
	}
	return set
}

func verdict(s *ruleset.Sets, owner, sandbox ruleset.Scope, host string) rule.Verdict {
	table := rule.Table{Default: rule.AllowPublic}
	for i, scope := range []ruleset.Scope{owner, sandbox} {
		table.Layers[i+1] = s.Get(scope).Layer(nil)
	}
	return table.Name(host).Verdict
}

func TestReplacedRulesApply(t *testing.T) {
	s := open(t, storetest.New(t))
	owner, box := ruleset.Scope{Owner: "a"}, ruleset.Scope{Sandbox: "sb0000000001"}
	if got := s.Get(owner); got.Revision != 0 || got.Rules == nil || len(got.Rules) != 0 {
		t.Errorf("before, the rules are %+v", got)
	}
	replace(t, s, owner, deny("one"))
	replace(t, s, box, []rule.Rule{{Name: "two", Hosts: []string{"bad.example"}, Action: rule.Deny}})
	for host, want := range map[string]rule.Verdict{"evil.example": rule.VerdictDeny, "bad.example": rule.VerdictDeny, "good.example": rule.VerdictAllow} {
		if got := verdict(s, owner, box, host); got != want {
			t.Errorf("%s: %s, want %s", host, got, want)
		}
	}
	if got := verdict(s, ruleset.Scope{Owner: "b"}, ruleset.Scope{Sandbox: "a"}, "evil.example"); got != rule.VerdictAllow {
		t.Errorf("the rules apply to others too: %s", got)
	}
	replace(t, s, owner, nil)
	if got := verdict(s, owner, box, "evil.example"); got != rule.VerdictAllow {
		t.Errorf("rules that are no more decided: %s", got)
	}
}

func TestStaleRevisionsAreRefused(t *testing.T) {
	s := open(t, storetest.New(t))
	scope, revision := ruleset.Scope{Owner: "a"}, int64(0)
	set, err := update(s, scope, ruleset.Update{Rules: deny("one"), IfRevision: &revision})
	if err != nil || set.Revision != 1 || set.UpdatedAt.IsZero() {
		t.Fatalf("got %+v, %v", set, err)
	}
	_, err = update(s, scope, ruleset.Update{Rules: deny("two"), IfRevision: &revision})
	if !errors.Is(err, ruleset.ErrRevision) || !strings.HasSuffix(err.Error(), "they are at revision 1, not 0") {
		t.Errorf("got %v, want ErrRevision", err)
	}
	if got := s.Get(scope); got.Rules[0].Name != "one" || got.Revision != 1 {
		t.Errorf("got %+v", got)
	}
	if set := replace(t, s, scope, deny("three")); set.Revision != 2 {
		t.Errorf("without a condition got revision %d, want 2", set.Revision)
	}
}

func TestOneOfManyChangesOfTheSameRevisionWins(t *testing.T) {
	s := open(t, storetest.New(t))
	var wg sync.WaitGroup
	won := make(chan string, 16)
	for n := range cap(won) {
		wg.Go(func() {
			revision, name := int64(0), fmt.Sprint(n)
			switch _, err := update(s, ruleset.Scope{Owner: "a"}, ruleset.Update{Rules: deny(name), IfRevision: &revision}); {
			case err == nil:
				won <- name
			case !errors.Is(err, ruleset.ErrRevision):
				t.Error(err)
			}
		})
	}
	wg.Wait()
	close(won)
	if name := <-won; s.Get(ruleset.Scope{Owner: "a"}).Rules[0].Name != name {
		t.Errorf("%s won, and the rules are %+v", name, s.Get(ruleset.Scope{Owner: "a"}))
	}
	if _, more := <-won; more {
		t.Error("two won")
	}
}

func TestRulesSurviveARestart(t *testing.T) {
	docs := storetest.New(t)
	s := open(t, docs)
	const text = `[{"name":"gh","hosts":["api.github.com"],"ports":["443"],"paths":["/repos/**"],"action":"policies",
		"policies":[{"policy":"bearer","config":{"a":[1,"<&>"]},"secrets":{"token":"github"}}]},
		{"name":"no","headers":{"x-a":"*"},"action":"deny","reason":"r"}]`
	owner, box := ruleset.Scope{Owner: "a/b"}, ruleset.Scope{Sandbox: "sb0000000001"}
	replace(t, s, owner, rulesOf(t, text))
	replace(t, s, owner, rulesOf(t, text))
	replace(t, s, box, deny("one"))
	replace(t, s, ruleset.Scope{Owner: "gone"}, deny("one"))
	if err := s.Delete(t.Context(), ruleset.Scope{Owner: "gone"}); err != nil {
		t.Fatal(err)
	}
	again := open(t, docs)
	if again.Faults() != nil {
		t.Fatal(again.Faults())
	}
	for _, scope := range []ruleset.Scope{owner, box, ruleset.Scope{Owner: "gone"}} {
		was, _ := json.Marshal(s.Get(scope))
		is, _ := json.Marshal(again.Get(scope))
		if string(was) != string(is) {
			t.Errorf("%s: %s became %s", scope, was, is)
		}
	}
	if got := again.Get(owner); got.Revision != 2 || got.Rules[0].Policies[0].Secrets["token"] != "github" {
		t.Errorf("got %+v", got)
	}
	if got := verdict(again, ruleset.Scope{Owner: ""}, box, "evil.example"); got != rule.VerdictDeny {
		t.Errorf("the rules are not in force: %s", got)
	}
}

func TestRulesThatCannotWorkAreRefusedWhole(t *testing.T) {
	s := open(t, storetest.New(t))
	replace(t, s, ruleset.Scope{Owner: "a"}, deny("one"))
	_, err := update(s, ruleset.Scope{Owner: "a"}, ruleset.Update{Rules: rulesOf(t, `[{"name":"good","action":"deny"},{"name":"bad","action":"perhaps"}]`)})
	var problem *rule.Error
	if !errors.As(err, &problem) || problem.Index != 1 {
		t.Errorf("got %v, want the second rule's error", err)
	}
	if got := s.Get(ruleset.Scope{Owner: "a"}); got.Revision != 1 || got.Rules[0].Name != "one" {
		t.Errorf("got %+v", got)
	}
	if _, err := update(s, ruleset.Scope{Sandbox: "a"}, ruleset.Update{Rules: rulesOf(t, `[{"name":"a","private":true,"action":"allow"}]`)}); !errors.As(err, &problem) {
		t.Errorf("a sandbox's rule allows private addresses: %v", err)
	}
}

func TestNothingChangesWhenTheStoreRefuses(t *testing.T) {
	docs := storetest.New(t)
	s := open(t, docs)
	replace(t, s, ruleset.Scope{Owner: "a"}, deny("one"))
	large := make([]rule.Rule, rule.MaxRules)
	for i := range large {
		large[i] = rule.Rule{Name: fmt.Sprint(i), Action: rule.Deny, Reason: strings.Repeat("x", rule.MaxText)}
	}
	if _, err := update(s, ruleset.Scope{Owner: "a"}, ruleset.Update{Rules: large}); err == nil {
		t.Error("more was taken than the store holds")
	}
	docs.Close()
	if _, err := update(s, ruleset.Scope{Owner: "a"}, ruleset.Update{Rules: deny("two")}); err == nil {
		t.Error("Replace reported success")
	}
	if err := s.Delete(t.Context(), ruleset.Scope{Owner: "a"}); err == nil {
		t.Error("Delete reported success")
	}
	if got := s.Get(ruleset.Scope{Owner: "a"}); got.Revision != 1 || got.Rules[0].Name != "one" {
		t.Errorf("got %+v", got)
	}
	if _, err := ruleset.Open(t.Context(), docs); err == nil {
		t.Error("sets were opened without their rules")
	}
}

func TestStoredRulesThatCannotBeReadDenyEverything(t *testing.T) {
	for name, value := range map[string]string{
		"no JSON":             `{`,
		"a newer field":       `{"revision":7,"rules":[{"name":"a","action":"allow","only_on_mondays":true}]}`,
		"rules that fail now": `{"revision":7,"rules":[{"name":"a","action":"perhaps"}]}`,
		"a newer set":         `{"revision":7,"otherwise":"deny","rules":[]}`,
		"another default":     `{"revision":7,"default":"allow","rules":[]}`,
	} {
		t.Run(name, func(t *testing.T) {
			docs := storetest.New(t)
			for _, doc := range []string{"owner/a", "nonsense", "owner/"} {
				if err := docs.PutDocument(t.Context(), "rules", doc, []byte(value)); err != nil {
					t.Fatal(err)
				}
			}
			s := open(t, docs)
			if len(s.Faults()) != 3 || !strings.Contains(errors.Join(s.Faults()...).Error(), "owner a") {
				t.Errorf("faults are %v", s.Faults())
			}
			if got := verdict(s, ruleset.Scope{Owner: "a"}, ruleset.Scope{}, "good.example"); got != rule.VerdictDeny {
				t.Errorf("got %s, want deny", got)
			}
			replace(t, s, ruleset.Scope{Owner: "a"}, deny("one"))
			if got := verdict(s, ruleset.Scope{Owner: "a"}, ruleset.Scope{}, "good.example"); got != rule.VerdictAllow {
				t.Errorf("set again, got %s, want allow", got)
			}
		})
	}
}

func TestDefaultsStayUntilReplaced(t *testing.T) {
	docs := storetest.New(t)
	s, scope := open(t, docs), ruleset.Scope{Owner: "a"}
	if got := s.Get(scope).Default; got != rule.Inherit {
		t.Errorf("at first %q", got)
	}
	for i, step := range []struct{ set, want rule.Default }{{"", rule.Inherit}, {rule.DenyAll, rule.DenyAll}, {"", rule.DenyAll}, {rule.Inherit, rule.Inherit}, {rule.DenyAll, rule.DenyAll}} {
		set, err := update(s, scope, ruleset.Update{Default: step.set})
		if err != nil || set.Default != step.want || s.Get(scope).Default != step.want {
			t.Errorf("step %d: got %+v, %v, want %s", i, set, err, step.want)
		}
	}
	s = open(t, docs)
	if got := verdict(s, scope, ruleset.Scope{}, "good.example"); got != rule.VerdictDeny || len(s.Faults()) > 0 {
		t.Errorf("read again, got %s, %v", got, s.Faults())
	}
	if _, err := update(s, scope, ruleset.Update{Default: rule.AllowPublic}); err == nil || !strings.Contains(err.Error(), "write inherit or deny") {
		t.Errorf("got %v", err)
	}
}

func TestAllYieldsEachScope(t *testing.T) {
	s := open(t, storetest.New(t))
	replace(t, s, ruleset.Scope{Owner: "a"}, deny("one"))
	replace(t, s, ruleset.Scope{Sandbox: "b"}, deny("two"))
	var got []string
	for scope, set := range s.All() {
		got = append(got, scope.String()+" "+set.Rules[0].Name+" "+scope.Owner+string(scope.Sandbox))
	}
	slices.Sort(got)
	if want := []string{"owner a one a", "sandbox b two b"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestRulesOfTheCallerAreCopied(t *testing.T) {
	s := open(t, storetest.New(t))
	given := deny("one")
	replace(t, s, ruleset.Scope{Owner: "a"}, given)
	given[0].Name, given[0].Hosts[0] = "changed", "changed.example"
	if got := s.Get(ruleset.Scope{Owner: "a"}).Rules[0]; got.Name != "one" || got.Hosts[0] != "evil.example" {
		t.Errorf("got %+v", got)
	}
}
