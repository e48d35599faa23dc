package rule

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"
)

func TestDefaultsOfLayers(t *testing.T) {
	const (
		npm   = `[{"name":"npm","hosts":["npm.example"],"action":"allow"}]`
		pip   = `[{"name":"pip","hosts":["pip.example"],"action":"allow"}]`
		every = `[{"name":"every","hosts":["**"],"action":"policies","policies":[{"policy":"redact"}]}]`
		reads = `[{"name":"reads","hosts":["npm.example"],"methods":["GET"],"action":"allow"}]`
		no    = `[{"name":"no","hosts":["npm.example"],"action":"deny"}]`
		none  = ""
	)
	for name, c := range map[string]struct {
		node, owner, box       string
		nodeDef, ownerDef, def Default
		line                   string
		want                   string // verdict rule
		reason                 string
		connection             Verdict // where it differs from the request's
	}{
		"an owner's, without a rule":                  {none, none, none, AllowPublic, DenyAll, Inherit, "GET https://a.example/", "deny default", "the owner's default is deny", ""},
		"an owner's, and their rule":                  {none, npm, none, AllowPublic, DenyAll, Inherit, "GET https://npm.example/", "allow owner/npm", "", ""},
		"an owner's, and a rule of the sandbox":       {none, none, npm, AllowPublic, DenyAll, Inherit, "GET https://npm.example/", "allow sandbox/npm", "", ""},
		"an owner's is not undone by the node's rule": {every, npm, none, AllowPublic, DenyAll, Inherit, "GET https://a.example/", "deny default", "no rule of the owner or the sandbox", VerdictInspect},
		"the node's policies run nevertheless":        {every, npm, none, AllowPublic, DenyAll, Inherit, "GET https://npm.example/", "allow node/every", "", VerdictInspect},
		"a sandbox's":                                 {none, npm, pip, AllowPublic, Inherit, DenyAll, "GET https://npm.example/", "deny default", "the sandbox's default is deny", ""},
		"a sandbox's, and its rule":                   {none, npm, pip, AllowPublic, Inherit, DenyAll, "GET https://pip.example/", "allow sandbox/pip", "", ""},
		"both":                                        {none, npm, pip, AllowPublic, DenyAll, DenyAll, "GET https://npm.example/", "deny default", "the sandbox's default is deny", ""},
		"inherited from the node":                     {none, none, npm, DenyAll, Inherit, Inherit, "GET https://a.example/", "deny default", "no rule allows it", ""},
		"the node's is undone by each rule":           {none, none, npm, DenyAll, Inherit, Inherit, "GET https://npm.example/", "allow sandbox/npm", "", ""},
		"inherited, public":                           {none, npm, npm, AllowPublic, Inherit, Inherit, "GET https://a.example/", "allow default", "", ""},
		"a method that the rule has not":              {none, none, reads, AllowPublic, Inherit, DenyAll, "POST https://npm.example/", "deny default", "the sandbox's default is deny", VerdictInspect},
		"a method that it has":                        {none, none, reads, AllowPublic, Inherit, DenyAll, "GET https://npm.example/", "allow sandbox/reads", "", VerdictInspect},
		"deny wins":                                   {none, no, npm, AllowPublic, Inherit, DenyAll, "GET https://npm.example/", "deny owner/no", "", ""},
		"an address":                                  {none, npm, none, AllowPublic, DenyAll, Inherit, "GET https://1.1.1.1/", "deny default", "the owner's default is deny", ""},
	} {
		table := table(t, c.nodeDef, c.node, "[]", "[]")
		if c.owner != "" {
			table.Layers[1] = layerOf(t, Owner, c.owner)
		}
		if c.box != "" {
			table.Layers[2] = layerOf(t, Sandbox, c.box)
		}
		table.Layers[1], table.Layers[2] = table.Layers[1].WithDefault(c.ownerDef), table.Layers[2].WithDefault(c.def)
		r := request(t, c.line)
		d := table.Decide(r)
		if got := fmt.Sprintf("%s %s", d.Verdict, d.Rule); got != c.want || !strings.Contains(d.Reason, c.reason) {
			t.Errorf("%s: %s: got %s (%s), want %s", name, c.line, got, d.Reason, c.want)
		}
		connection := table.Connect(r)
		if c.connection == "" {
			c.connection = d.Verdict
		}
		if connection.Verdict != c.connection {
			t.Errorf("%s: the connection: %+v, want %s", name, connection, c.connection)
		}
		if r.Host == "" {
			continue
		}
		// A name is resolved where anything could be reached under it.
		want := d.Verdict
		if name == "a method that the rule has not" {
			want = VerdictAllow
		}
		if got := table.Name(r.Host); got.Verdict != want {
			t.Errorf("%s: the name: %+v, want %s", name, got, want)
		}
	}
}

func TestWarnings(t *testing.T) {
	const (
		npm  = `{"name":"npm","hosts":["npm.example","*.npm.example"],"action":"allow"}`
		rest = `{"name":"rest","hosts":["**"],"action":"deny"}`
	)
	for name, c := range map[string]struct {
		rules string
		node  string
		want  []string // each warning's location and words of it
	}{
		"a rest that is denied":      {npm + "," + rest, "", []string{`1: "rest" denies what "npm" allows: a rule that denies wins wherever it stands; remove "rest" and set "default": "deny"`}},
		"without hosts, and before":  {`{"name":"rest","action":"deny"},` + npm, "", []string{`0: "rest" denies what "npm" allows`}},
		"several":                    {npm + `,{"name":"git","hosts":["git.example"],"methods":["GET"],"action":"allow"},` + rest, "", []string{`2: "rest" denies what "npm" and "git" allow`}},
		"policies":                   {`{"name":"gh","hosts":["a.example"],"policies":[{"policy":"x"}]},` + rest, "", []string{`1: "rest" denies what "gh" allows`}},
		"one of the hosts":           {npm + `,{"name":"no","hosts":["npm.example"],"action":"deny"}`, "", []string{`1: "no" denies what "npm" (npm.example) allows: a rule that denies wins wherever it stands; narrow "no"`}},
		"by a pattern":               {npm + `,{"name":"no","hosts":["*.example"],"action":"deny"}`, "", []string{`1: "no" denies what "npm" allows`}},
		"the same paths":             {`{"name":"a","hosts":["a.example"],"paths":["/x"],"action":"allow"},{"name":"no","hosts":["a.example"],"paths":["/y","/x"],"action":"deny"}`, "", []string{`1: "no" denies what "a" allows`}},
		"the node's":                 {npm, rest, []string{`0: node/rest denies what "npm" allows: a rule that denies wins wherever it stands; remove it from these rules, or ask the node's operator`}},
		"an exception":               {`{"name":"all","hosts":["*.example"],"action":"allow"},{"name":"no","hosts":["evil.example"],"action":"deny"}`, "", nil},
		"only some methods":          {npm + `,{"name":"ro","hosts":["**"],"methods":["POST"],"action":"deny"}`, "", nil},
		"only some ports":            {npm + `,{"name":"ssh","hosts":["**"],"ports":["22"],"action":"deny"}`, "", nil},
		"only some paths":            {npm + `,{"name":"p","hosts":["**"],"paths":["/x"],"action":"deny"}`, "", nil},
		"only HTTP":                  {npm + `,{"name":"p","hosts":["**"],"scheme":"http","action":"deny"}`, "", nil},
		"only with a header":         {npm + `,{"name":"p","headers":{"X-A":"1"},"action":"deny"}`, "", nil},
		"another host":               {npm + `,{"name":"p","hosts":["a.example"],"action":"deny"}`, "", nil},
		"an address next to hosts":   {npm + `,{"name":"p","addresses":["192.0.2.0/24"],"action":"deny"}`, "", nil},
		"two that deny":              {`{"name":"a","hosts":["a.example"],"action":"deny"},` + rest, "", nil},
		"an existing secret":         {`{"name":"a","hosts":["*.bound.example"],"policies":[{"policy":"p","secrets":{"token":"have"}}]}`, "", nil},
		"a secret that is not":       {`{"name":"a","hosts":["a.bound.example"],"policies":[{"policy":"p","secrets":{"token":"have"}},{"policy":"p","secrets":{"token":"gone"}}]}`, "", []string{`0: policies[1].secrets[token]: "a" uses secret "gone", which does not exist`}},
		"a placeholder without one":  {`{"name":"a","hosts":["a.bound.example"],"action":"allow","placeholders":{"TOKEN":"gone"}}`, "", []string{`0: placeholders[TOKEN]: "a" uses secret "gone"`}},
		"a secret of another host":   {`{"name":"a","hosts":["b.example"],"policies":[{"policy":"p","secrets":{"token":"have"}}]}`, "", []string{`0: policies[0].secrets[token]: "a" uses secret "have", which is bound to none of its hosts (it is bound to a.bound.example)`}},
		"a secret of a rule for all": {`{"name":"a","policies":[{"policy":"p","secrets":{"token":"have"}}]}`, "", nil},
		"many rules that are shadowed": {npm + strings.Repeat(",", 1) + func() string {
			var more []string
			for i := range 9 {
				more = append(more, fmt.Sprintf(`{"name":"r%d","hosts":["r.example"],"action":"allow"}`, i))
			}
			return strings.Join(more, ",")
		}() + "," + rest, "", []string{`10: "rest" denies what "npm", "r0", "r1", "r2", "r3" and 5 more allow`}},
	} {
		var before []*Layer
		if c.node != "" {
			before = []*Layer{layerOf(t, Node, "["+c.node+"]"), nil}
		}
		got := Warnings(layerOf(t, Owner, "["+c.rules+"]"), before, func(name string) ([]string, bool) {
			return []string{"a.bound.example"}, name == "have"
		})
		if len(got) != len(c.want) {
			t.Errorf("%s: got %+v", name, got)
			continue
		}
		for i, w := range got {
			text := fmt.Sprintf("%d: %s: %s; %s", w.Index, w.Field, w.Problem, w.Remedy)
			if text = strings.ReplaceAll(text, ": : ", ": "); !strings.Contains(text, c.want[i]) {
				t.Errorf("%s: got %s, want %s", name, text, c.want[i])
			}
		}
	}
}

func TestWarningsAreBounded(t *testing.T) {
	var rules []Rule
	for i := range MaxRules {
		r := Rule{Name: fmt.Sprint("r", i), Action: Allow}
		if i%2 == 0 {
			r.Action = Deny
		}
		for j := range MaxEntries {
			r.Hosts = append(r.Hosts, fmt.Sprintf("h%d.example", j))
		}
		r.Methods = []string{"GET"}
		rules = append(rules, r)
	}
	l, err := Compile(Owner, rules, nil)
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	if got := Warnings(l, nil, nil); len(got) == 0 || len(got) > MaxWarnings {
		t.Errorf("%d warnings", len(got))
	}
	t.Logf("compared for %v", time.Since(start)) // without a bound 250 million hosts
}

func TestActionIsInferred(t *testing.T) {
	l := layerOf(t, Owner, `[{"name":"p","hosts":["p.example"],"policies":[{"policy":"x"}]},{"name":"a","hosts":["a.example"],"answer":{"status":204}}]`)
	table := &Table{Default: AllowPublic, Layers: [3]*Layer{nil, l}}
	if d := table.Decide(request(t, "GET https://p.example/")); chain(d) != "owner/p=x" {
		t.Errorf("got %+v", d)
	}
	if d := table.Decide(request(t, "GET https://a.example/")); d.Verdict != VerdictRespond {
		t.Errorf("got %+v", d)
	}
	for rule, want := range map[string]string{
		`{"name":"n","hosts":["a.example"]}`:                                                 "action: missing; use allow or deny, or give the rule policies or respond",
		`{"name":"n","policies":[{"policy":"x"}],"answer":{"status":204}}`:                   "respond: cannot be combined with policies; make two rules",
		`{"name":"n","action":"deny","policies":[{"policy":"x"}]}`:                           `policies: cannot be combined with the action "deny"; make two rules`,
		`{"name":"n","action":"allow","answer":{"status":204}}`:                              `respond: cannot be combined with the action "allow"; make two rules`,
		`{"name":"n","action":"policies"}`:                                                   "policies: 0 policies; use 1 to 16",
		`{"name":"n","action":"answer","policies":[{"policy":"x"}],"answer":{"status":204}}`: "policies: cannot be combined with respond; make two rules",
		`{"name":"n","answer":{"status":204},"placeholders":{"TOKEN":"x"}}`:                  "placeholders: cannot be combined with respond; make two rules",
	} {
		var list []Rule
		if err := json.Unmarshal([]byte("["+rule+"]"), &list); err != nil {
			t.Fatal(err)
		}
		if _, err := Compile(Owner, list, nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %s", rule, err, want)
		}
	}
}
