package api

import (
	"encoding/json"
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/ruleset"
)

// fullRule has a value in every field. Compile does not accept it.
func fullRule() types.Rule {
	return types.Rule{
		Name: "full", Hosts: []string{"*.example.com"}, Addresses: []string{"203.0.113.0/24"}, AllowPrivate: true,
		Ports: []string{"443", "8000-8100"}, Scheme: "https", Methods: []string{"GET"}, Paths: []string{"/a/**"},
		Headers: map[string]string{"X-A": "b*"}, Action: types.RuleActionDeny, Reason: "no uploads",
		Respond:      &types.RuleResponse{Status: 404, Headers: map[string]string{"X-B": "c"}, Body: "none"},
		Policies:     []types.RulePolicy{{Name: "bearer", Config: json.RawMessage(`{"a":1}`), Secrets: map[string]string{"token": "github"}}},
		Placeholders: map[string]string{"GITHUB_TOKEN": "github"},
	}
}

func TestConversionOfRulesLosesNothing(t *testing.T) {
	full := fullRule()
	checkFieldsSet(t, reflect.ValueOf(full), "types.Rule")
	converted, err := RulesOf([]types.Rule{full, {}})
	if err != nil {
		t.Fatal(err)
	}
	checkFieldsSet(t, reflect.ValueOf(converted[0]), "rule.Rule")
	if diff := cmp.Diff(full, ruleTo(converted[0])); diff != "" {
		t.Errorf("a rule changes when it is converted there and back (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(rule.Rule{}, converted[1]); diff != "" {
		t.Errorf("an empty rule gains values (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(types.Rule{}, ruleTo(rule.Rule{})); diff != "" {
		t.Errorf("an empty rule gains values (-want +got):\n%s", diff)
	}
	if list := ruleSetOf(ruleset.Set{}, nil).Rules; list == nil || len(list) != 0 {
		t.Errorf("no rules are %#v, not an empty list", list)
	}
}

// checkFieldsSet fails for every field below v that is zero.
func checkFieldsSet(t *testing.T, v reflect.Value, path string) {
	t.Helper()
	switch v.Kind() {
	case reflect.Pointer:
		checkFieldsSet(t, v.Elem(), path)
	case reflect.Struct:
		for i := range v.NumField() {
			field := path + "." + v.Type().Field(i).Name
			if v.Field(i).IsZero() {
				t.Errorf("%s is not set", field)
				continue
			}
			checkFieldsSet(t, v.Field(i), field)
		}
	case reflect.Slice:
		for i := range v.Len() {
			checkFieldsSet(t, v.Index(i), path+"[]")
		}
	}
}

// On the wire, a rule with policies or a response has no action.
func TestImpliedActionsAreNotInTheAPI(t *testing.T) {
	for action, want := range map[rule.Action]types.RuleAction{
		rule.Allow: "allow", rule.Deny: "deny", rule.Respond: "", rule.Policies: "", "": "",
	} {
		if got := ruleTo(rule.Rule{Action: action}).Action; got != want {
			t.Errorf("action %q becomes %q, want %q", action, got, want)
		}
	}
}

func TestRulesWithoutCounterpartAreRefused(t *testing.T) {
	_, err := RulesOf([]types.Rule{
		{Name: "fine", Action: types.RuleActionAllow},
		{Name: "bad", Action: "policies", Ports: []string{"443", "0", "9-8"}},
		{Ports: []string{"https"}},
	})
	var got []rule.Error
	for _, fault := range ruleErrors(err) {
		got = append(got, *fault)
	}
	want := []rule.Error{
		{Index: 1, Rule: "bad", Field: "action", Problem: `unknown action "policies"; use allow or deny, or no action in a rule with policies or respond`},
		{Index: 1, Rule: "bad", Field: "ports[1]"}, {Index: 1, Rule: "bad", Field: "ports[2]"},
		{Index: 2, Field: "ports[0]"},
	}
	for i := range got {
		if i > 0 && got[i].Problem != "" {
			got[i].Problem = "" // package rule's
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the errors differ (-want +got):\n%s", diff)
	}
	if _, err := RulesOf([]types.Rule{{Action: "answer"}}); err == nil {
		t.Error("RulesOf accepts an unknown action")
	}
}
