package rule_test

import (
	"fmt"
	"log"

	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/preset"
)

func compile(source rule.Source, rules ...rule.Rule) *rule.Layer {
	layer, err := rule.Compile(source, rules, nil)
	if err != nil {
		log.Fatal(err)
	}
	return layer
}

// The error of Compile names every mistake.
func ExampleCompile() {
	_, err := rule.Compile(rule.Owner, []rule.Rule{
		{Name: "github", Hosts: []string{"api.github.com"}, Methods: []string{"GET"}, Action: rule.Allow},
		{Name: "private", Hosts: []string{"*.internal.example"}, Private: true, Action: rule.Allow},
	}, nil)
	fmt.Println(err)
	// Output:
	// rule 2 (private): allow_private: only the node's rules may allow private addresses
}

// A rule that denies wins in any layer. Otherwise the first matching rule of each layer
// counts.
func ExampleTable_Decide() {
	table := &rule.Table{Default: rule.DenyAll, Layers: [3]*rule.Layer{
		compile(rule.Node, rule.Rule{Name: "no-admin", Hosts: []string{"**"}, Paths: []string{"/admin/**"}, Action: rule.Deny, Reason: "not for agents"}),
		compile(rule.Owner, rule.Rule{Name: "api", Hosts: []string{"api.example.com"}, Action: rule.Allow}),
		nil,
	}}
	for _, r := range []rule.Request{
		{Host: "api.example.com", Port: 443, HTTPS: true, Method: "GET", Path: "/users"},
		{Host: "api.example.com", Port: 443, HTTPS: true, Method: "GET", Path: "/admin/users"},
		{Host: "other.example.com", Port: 443, HTTPS: true, Method: "GET", Path: "/"},
	} {
		d := table.Decide(r)
		fmt.Println(d.Verdict, "by", d.Rule)
	}
	// Output:
	// allow by owner/api
	// deny by node/no-admin
	// deny by default
}

// DNS resolves a name only if a connection to it might be permitted.
func ExampleTable_Name() {
	table := &rule.Table{Default: rule.DenyAll, Layers: [3]*rule.Layer{
		nil, compile(rule.Owner, rule.Rule{Name: "api", Hosts: []string{"*.example.com"}, Paths: []string{"/v1/**"}, Action: rule.Allow}), nil,
	}}
	fmt.Println(table.Name("api.example.com").Verdict)
	fmt.Println(table.Name("example.org").Verdict)
	// Output:
	// allow
	// deny
}

// Rules name presets, whose hosts may change without the rules.
func ExampleLayer_WithPresets() {
	define := func(hosts ...string) *rule.Presets {
		presets, err := rule.NewPresets([]preset.Preset{{Name: "mirror", Description: "Package mirror", Hosts: hosts}})
		if err != nil {
			log.Fatal(err)
		}
		return presets
	}
	layer, err := rule.Compile(rule.Owner, []rule.Rule{{Name: "packages", Hosts: []string{"preset:mirror"}, Action: rule.Allow}}, define("old.example.com"))
	if err != nil {
		log.Fatal(err)
	}
	layer = layer.WithPresets(define("new.example.com"))
	table := &rule.Table{Default: rule.DenyAll, Layers: [3]*rule.Layer{nil, layer, nil}}
	for _, host := range []string{"old.example.com", "new.example.com"} {
		fmt.Println(host, table.Connect(rule.Request{Host: host, Port: 443}).Verdict)
	}
	// Output:
	// old.example.com deny
	// new.example.com allow
}
