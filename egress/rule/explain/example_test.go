package explain_test

import (
	"fmt"
	"log"

	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/explain"
)

// nothing is a node without policies and secrets.
type nothing struct{}

func (nothing) Policy(_ rule.Source, use rule.Use) (string, error) {
	return "", fmt.Errorf("policy %s is not installed", use.Policy)
}
func (nothing) Secret(_ rule.Source, name, _ string) error {
	return fmt.Errorf("secret %s is not set", name)
}
func (nothing) ECH() bool { return false }

func ExampleOf() {
	layer, err := rule.Compile(rule.Owner, []rule.Rule{
		{Name: "read-only", Hosts: []string{"api.example.com"}, Methods: []string{"GET"}, Action: rule.Allow},
	}, nil)
	if err != nil {
		log.Fatal(err)
	}
	table := &rule.Table{Default: rule.DenyAll, Layers: [3]*rule.Layer{nil, layer, nil}}
	for _, method := range []string{"GET", "DELETE"} {
		request, err := explain.Parse(method, "https://api.example.com/users", nil)
		if err != nil {
			log.Fatal(err)
		}
		e := explain.Of(table, request, nothing{})
		fmt.Printf("%s: %s by %s: %s\n", method, e.Verdict, e.Rule, e.Reason)
	}
	// Output:
	// GET: allow by owner/read-only: the rule allows it
	// DELETE: deny by default: no rule allows it
}
