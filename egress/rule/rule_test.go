package rule

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"path"
	"regexp"
	"strings"
	"testing"
)

// layerOf compiles rules as they come over the API.
func layerOf(t testing.TB, source Source, rules string) *Layer {
	t.Helper()
	var list []Rule
	if err := json.Unmarshal([]byte(rules), &list); err != nil {
		t.Fatal(err)
	}
	l, err := Compile(source, list, nil)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func table(t testing.TB, def Default, node, owner, box string) *Table {
	t.Helper()
	result := &Table{Default: def}
	for i, l := range []struct {
		source Source
		rules  string
	}{{Node, node}, {Owner, owner}, {Sandbox, box}} {
		if l.rules != "" {
			result.Layers[i] = layerOf(t, l.source, l.rules)
		}
	}
	return result
}

// request is "METHOD URL", the URL with a host name or an address.
func request(t testing.TB, line string) Request {
	t.Helper()
	method, url, _ := strings.Cut(line, " ")
	scheme, rest, _ := strings.Cut(url, "://")
	host, path, found := strings.Cut(rest, "/")
	if found {
		path = "/" + path
	}
	r := Request{Method: method, Path: path, HTTPS: scheme == "https", Port: 80}
	if r.HTTPS {
		r.Port = 443
	}
	if name, ok := strings.CutPrefix(host, "["); ok {
		r.Host = strings.TrimSuffix(name, "]")
	} else if host, port, ok := strings.Cut(host, ":"); ok {
		p, err := ParsePorts(port)
		if err != nil {
			t.Fatal(err)
		}
		r.Host, r.Port = host, p.First
	} else {
		r.Host = host
	}
	if a, err := netip.ParseAddr(r.Host); err == nil {
		r.Host, r.Address = "", a
	}
	return r
}

func chain(d Decision) string {
	var names []string
	for _, s := range d.Chain {
		names = append(names, s.Rule+"="+s.Policy)
	}
	return strings.Join(names, " ")
}

func TestDecisions(t *testing.T) {
	const (
		github  = `{"name":"github","hosts":["api.github.com"],"action":"policies","policies":[{"policy":"bearer","secrets":{"token":"gh"}}]}`
		allow   = `{"name":"all","hosts":["api.github.com"],"action":"allow"}`
		noWrite = `{"name":"read","hosts":["**"],"methods":["POST","DELETE"],"action":"deny","reason":"read only"}`
		noHost  = `{"name":"no","hosts":["*.evil.example"],"action":"deny"}`
		repos   = `{"name":"repos","hosts":["api.github.com"],"paths":["/repos/acme/**"],"action":"allow"}`
		noAdmin = `{"name":"admin","hosts":["**"],"paths":["/admin/**"],"action":"deny"}`
		guard   = `{"name":"guard","hosts":["**"],"methods":["POST","GET"],"paths":["/admin/**"],"action":"policies","policies":[{"policy":"guard"}]}`
		hello   = `{"name":"hello","hosts":["hello.example"],"action":"answer","answer":{"status":204}}`
	)
	for name, c := range map[string]struct {
		def              Default
		node, owner, box string
		line             string
		verdict          Verdict
		rule             string
		chain            string
	}{
		"nothing said, public": {AllowPublic, "", "", "", "GET https://a.example/", VerdictAllow, "default", ""},
		"nothing said, deny":   {DenyAll, "", "", "", "GET https://a.example/", VerdictDeny, "default", ""},
		"no default is deny":   {"", "", "", "", "GET https://a.example/", VerdictDeny, "default", ""},
		"no name":              {AllowPublic, "", "", "", "GET https://1.1.1.1/", VerdictDeny, "default", ""},
		"allowed":              {DenyAll, "[" + allow + "]", "", "", "GET https://api.github.com/", VerdictAllow, "node/all", ""},
		"another host":         {DenyAll, "[" + allow + "]", "", "", "GET https://github.com/", VerdictDeny, "default", ""},
		"policies of all layers": {DenyAll, "[" + github + "]", "[" + github + "]", "[" + github + "]", "GET https://api.github.com/", VerdictAllow, "node/github",
			"node/github=bearer owner/github=bearer sandbox/github=bearer"},
		"an earlier layer's leave does not hide policies": {DenyAll, "[" + allow + "]", "[" + github + "]", "", "GET https://api.github.com/", VerdictAllow, "owner/github", "owner/github=bearer"},
		"first of a layer":                {DenyAll, "[" + allow + "," + github + "]", "", "", "GET https://api.github.com/", VerdictAllow, "node/all", ""},
		"deny wins over what is before":   {AllowPublic, "[" + allow + "," + noWrite + "]", "", "", "POST https://api.github.com/", VerdictDeny, "node/read", ""},
		"deny wins from a later layer":    {AllowPublic, "[" + github + "]", "", "[" + noWrite + "]", "POST https://api.github.com/", VerdictDeny, "sandbox/read", ""},
		"deny does not touch others":      {AllowPublic, "[" + github + "]", "", "[" + noWrite + "]", "GET https://api.github.com/", VerdictAllow, "node/github", "node/github=bearer"},
		"below":                           {AllowPublic, "[" + noHost + "]", "", "", "GET https://a.b.evil.example/", VerdictDeny, "node/no", ""},
		"not the apex":                    {AllowPublic, "[" + noHost + "]", "", "", "GET https://evil.example/", VerdictAllow, "default", ""},
		"not what only ends so":           {AllowPublic, "[" + noHost + "]", "", "", "GET https://notevil.example/", VerdictAllow, "default", ""},
		"request rules are about the web": {DenyAll, "[" + github + "]", "", "", "GET https://api.github.com:8443/", VerdictDeny, "default", ""},
		"path":                            {DenyAll, "[" + repos + "]", "", "", "GET https://api.github.com/repos/acme/x/y", VerdictAllow, "node/repos", ""},
		"another path":                    {DenyAll, "[" + repos + "]", "", "", "GET https://api.github.com/repos/other/x", VerdictDeny, "default", ""},
		"path that leads out":             {DenyAll, "[" + repos + "]", "", "", "GET https://api.github.com/repos/acme/../other/x", VerdictDeny, "default", ""},
		"the same, escaped":               {DenyAll, "[" + repos + "]", "", "", "GET https://api.github.com/repos/acme/%2e%2e/other", VerdictDeny, "default", ""},
		"the same, escaped slash":         {DenyAll, "[" + repos + "]", "", "", "GET https://api.github.com/repos/acme/..%2fother", VerdictDeny, "default", ""},
		"the same, escaped twice":         {DenyAll, "[" + repos + "]", "", "", "GET https://api.github.com/repos/acme/%252e%252e/other", VerdictDeny, "default", ""},
		"the same, backslash":             {DenyAll, "[" + repos + "]", "", "", `GET https://api.github.com/repos/acme/..\other`, VerdictDeny, "default", ""},
		"the same, parameter":             {DenyAll, "[" + repos + "]", "", "", `GET https://api.github.com/repos/acme/..;x/other`, VerdictDeny, "default", ""},
		"broken escape":                   {DenyAll, "[" + repos + "]", "", "", "GET https://api.github.com/repos/acme/%zz", VerdictDeny, "default", ""},
		"escaped slash in a name":         {DenyAll, "[" + repos + "]", "", "", "GET https://api.github.com/repos/acme/a%2fb", VerdictAllow, "node/repos", ""},
		"dots behind an escaped slash":    {DenyAll, "[" + repos + "]", "", "", "GET https://api.github.com/repos/acme/a%2fb/../../other/x", VerdictDeny, "default", ""},
		"escaped letters":                 {DenyAll, `[{"name":"w","paths":["/wiki/München/**"],"action":"allow"}]`, "", "", "GET https://a.example/wiki/M%C3%BCnchen/x", VerdictAllow, "node/w", ""},
		"name with a slash":               {DenyAll, `[{"name":"p","paths":["/p/g%2Fp/**","/p/g/p/**"],"action":"allow"}]`, "", "", "GET https://a.example/p/g%2fp/x", VerdictAllow, "node/p", ""},
		"name with a slash, denied":       {AllowPublic, `[{"name":"p","paths":["/p/g%2Fp/**"],"action":"deny"}]`, "", "", "GET https://a.example/p/g%2fp/x", VerdictDeny, "node/p", ""},
		"policies, doubled slash":         {AllowPublic, "[" + guard + "]", "", "", "GET https://a.example//admin/x", VerdictDeny, "node/guard", ""},
		"policies, broken escape":         {AllowPublic, "[" + guard + "]", "", "", "GET https://a.example/admin/%zz", VerdictDeny, "node/guard", ""},
		"policies, dots":                  {AllowPublic, "[" + guard + "]", "", "", "GET https://a.example/x/../admin/y", VerdictDeny, "node/guard", ""},
		"policies, small letters":         {AllowPublic, "[" + guard + "]", "", "", "post https://a.example/admin/x", VerdictAllow, "node/guard", "node/guard=guard"},
		"policies, another path":          {AllowPublic, "[" + guard + "]", "", "", "POST https://a.example/public//x", VerdictAllow, "default", ""},
		"denied method in small letters":  {AllowPublic, "[" + noWrite + "]", "", "", "post https://a.example/", VerdictDeny, "node/read", ""},
		"denied path":                     {AllowPublic, "[" + noAdmin + "]", "", "", "GET https://a.example/admin/x", VerdictDeny, "node/admin", ""},
		"denied path in disguise":         {AllowPublic, "[" + noAdmin + "]", "", "", "GET https://a.example/public/..//%61dmin/x", VerdictDeny, "node/admin", ""},
		"denied path, doubled slash":      {AllowPublic, "[" + noAdmin + "]", "", "", "GET https://a.example//admin/x", VerdictDeny, "node/admin", ""},
		"denied path, dots":               {AllowPublic, "[" + noAdmin + "]", "", "", "GET https://a.example/x%2fy/../admin/z", VerdictDeny, "node/admin", ""},
		"denied path, empty parameter":    {AllowPublic, "[" + noAdmin + "]", "", "", "GET https://a.example/a/;/../../admin/z", VerdictDeny, "node/admin", ""},
		"denied path, parameter":          {AllowPublic, "[" + noAdmin + "]", "", "", "GET https://a.example/admin;x%2fy/z", VerdictDeny, "node/admin", ""},
		"denied path, broken":             {AllowPublic, "[" + noAdmin + "]", "", "", "GET https://a.example/%zz", VerdictDeny, "node/admin", ""},
		"answer":                          {DenyAll, "[" + hello + "]", "", "", "GET https://hello.example/", VerdictRespond, "node/hello", ""},
		"address":                         {DenyAll, `[{"name":"net","addresses":["203.0.113.0/24"],"action":"allow"}]`, "", "", "GET http://203.0.113.9/", VerdictAllow, "node/net", ""},
		"address outside":                 {AllowPublic, `[{"name":"net","addresses":["203.0.113.0/24"],"action":"allow"}]`, "", "", "GET http://203.0.114.9/", VerdictDeny, "default", ""},
		"mapped address":                  {AllowPublic, `[{"name":"all","addresses":["0.0.0.0/0","::/0"],"action":"allow"},{"name":"no","addresses":["169.254.0.0/16"],"action":"deny"}]`, "", "", "GET http://[::ffff:169.254.169.254]/", VerdictDeny, "node/no", ""},
		"every host, but not an address":  {DenyAll, `[{"name":"all","hosts":["**"],"action":"allow"}]`, "", "", "GET http://203.0.113.9/", VerdictDeny, "default", ""},
		"neither a host nor an address":   {DenyAll, `[{"name":"net","addresses":["203.0.113.9"],"action":"allow"}]`, `[{"name":"stop","action":"deny"}]`, "", "GET http://203.0.113.9/", VerdictDeny, "owner/stop", ""},
		"scheme":                          {DenyAll, `[{"name":"s","hosts":["**"],"scheme":"https","action":"allow"}]`, "", "", "GET http://a.example/", VerdictDeny, "default", ""},
		"method in small letters":         {DenyAll, `[{"name":"g","methods":["GET"],"action":"allow"}]`, "", "", "get https://a.example/", VerdictDeny, "default", ""},
		"port":                            {DenyAll, `[{"name":"p","ports":["5432","8000-8100"],"action":"allow"}]`, "", "", "GET http://a.example:8100/", VerdictAllow, "node/p", ""},
		"port outside":                    {DenyAll, `[{"name":"p","ports":["5432","8000-8100"],"action":"allow"}]`, "", "", "GET http://a.example:8101/", VerdictDeny, "default", ""},
	} {
		t.Run(name, func(t *testing.T) {
			d := table(t, c.def, c.node, c.owner, c.box).Decide(request(t, c.line))
			if d.Verdict != c.verdict || d.Rule != c.rule || chain(d) != c.chain {
				t.Errorf("got %s by %s with %q; want %s by %s with %q", d.Verdict, d.Rule, chain(d), c.verdict, c.rule, c.chain)
			}
			if (d.Verdict == VerdictDeny) != (d.Reason != "") {
				t.Errorf("the reason is %q", d.Reason)
			}
		})
	}
}

func TestHeadersMatchByValue(t *testing.T) {
	allow := table(t, DenyAll, `[{"name":"h","headers":{"x-team":"web-*"},"action":"allow"}]`, "", "")
	deny := table(t, AllowPublic, `[{"name":"h","headers":{"x-team":"web-*"},"action":"deny"}]`, "", "")
	for _, c := range []struct {
		values        []string
		allow, denied bool
	}{
		{nil, false, false}, {[]string{"web-1"}, true, true}, {[]string{"api"}, false, false},
		{[]string{"web-1", "api"}, false, true}, {[]string{""}, false, false}, {[]string{"x web-1"}, false, false},
	} {
		r := request(t, "GET https://a.example/")
		r.Header = map[string][]string{"X-Team": c.values}
		if got := allow.Decide(r).Verdict == VerdictAllow; got != c.allow {
			t.Errorf("%q: allowed is %v", c.values, got)
		}
		if got := deny.Decide(r).Verdict == VerdictDeny; got != c.denied {
			t.Errorf("%q: denied is %v", c.values, got)
		}
	}
}

// Of two values of a header, a server reads one.
func TestHeaderWithTwoValuesDoesNotGetPastPolicies(t *testing.T) {
	tab := table(t, AllowPublic, `[{"name":"h","headers":{"x-team":"web-*"},"action":"policies","policies":[{"policy":"p"}]}]`, "", "")
	for _, c := range []struct {
		values []string
		want   Verdict
		chain  string
	}{
		{[]string{"web-1"}, VerdictAllow, "node/h=p"}, {[]string{"api"}, VerdictAllow, ""}, {nil, VerdictAllow, ""}, {[]string{"web-1", "api"}, VerdictDeny, ""},
	} {
		r := request(t, "GET https://a.example/")
		r.Header = map[string][]string{"X-Team": c.values}
		if d := tab.Decide(r); d.Verdict != c.want || chain(d) != c.chain {
			t.Errorf("%q: got %+v", c.values, d)
		}
	}
}

func TestConnectionsAreInspectedOnlyWhereARuleNeedsIt(t *testing.T) {
	for name, c := range map[string]struct {
		def     Default
		rules   string
		line    string
		verdict Verdict
		private bool
	}{
		"no rule":                {AllowPublic, `[]`, "C https://a.example", VerdictAllow, false},
		"host":                   {DenyAll, `[{"name":"a","hosts":["a.example"],"action":"allow"}]`, "C https://a.example", VerdictAllow, false},
		"method":                 {DenyAll, `[{"name":"a","hosts":["a.example"],"methods":["GET"],"action":"allow"}]`, "C https://a.example", VerdictInspect, false},
		"policy":                 {AllowPublic, `[{"name":"a","hosts":["a.example"],"action":"policies","policies":[{"policy":"p"}]}]`, "C https://a.example", VerdictInspect, false},
		"policy of another host": {AllowPublic, `[{"name":"a","hosts":["a.example"],"action":"policies","policies":[{"policy":"p"}]}]`, "C https://b.example", VerdictAllow, false},
		"policy, SSH":            {AllowPublic, `[{"name":"a","hosts":["a.example"],"action":"policies","policies":[{"policy":"p"}]}]`, "C http://a.example:22", VerdictAllow, false},
		"hidden by an earlier":   {DenyAll, `[{"name":"a","action":"allow"},{"name":"b","methods":["GET"],"action":"allow"}]`, "C https://a.example", VerdictAllow, false},
		"denies are not hidden":  {DenyAll, `[{"name":"a","action":"allow"},{"name":"b","methods":["PUT"],"action":"deny"}]`, "C https://a.example", VerdictInspect, false},
		"denied by its host":     {AllowPublic, `[{"name":"a","methods":["GET"],"action":"allow"},{"name":"b","hosts":["a.example"],"action":"deny"}]`, "C https://a.example", VerdictDeny, false},
		"private":                {DenyAll, `[{"name":"a","hosts":["git.corp"],"private":true,"action":"allow"}]`, "C https://git.corp", VerdictAllow, true},
		"private, inspected":     {DenyAll, `[{"name":"a","hosts":["git.corp"],"private":true,"methods":["GET"],"action":"allow"}]`, "C https://git.corp", VerdictInspect, true},
		"address":                {DenyAll, `[{"name":"a","addresses":["192.0.2.1"],"action":"allow"}]`, "C https://192.0.2.1", VerdictAllow, false},
	} {
		t.Run(name, func(t *testing.T) {
			d := table(t, c.def, c.rules, "", "").Connect(request(t, c.line))
			if d.Verdict != c.verdict || d.Private != c.private {
				t.Errorf("got %+v", d)
			}
		})
	}
}

func TestPlaceholdersAreOfTheRulesThatPermit(t *testing.T) {
	tb := table(t, DenyAll,
		`[{"name":"gh","hosts":["api.github.com"],"paths":["/repos/**"],"action":"allow","placeholders":{"GITHUB_TOKEN":"gh-node"}}]`,
		`[{"name":"gh","hosts":["api.github.com"],"action":"policies","policies":[{"policy":"readonly"}],"placeholders":{"GITHUB_TOKEN":"gh","NPM_TOKEN":"npm"}}]`, "")
	if got := tb.Connect(request(t, "GET https://api.github.com/")); got.Verdict != VerdictInspect {
		t.Errorf("a host with placeholders is not inspected: %+v", got)
	}
	d := tb.Decide(request(t, "GET https://api.github.com/repos/a"))
	secrets := map[string]bool{}
	for _, o := range d.Offers {
		secrets[o.Rule+" "+o.Secret] = true
	}
	if len(d.Offers) != 3 || !secrets["node/gh gh-node"] || !secrets["owner/gh gh"] || !secrets["owner/gh npm"] {
		t.Errorf("got %+v", d.Offers)
	}
	if d := tb.Decide(request(t, "GET https://api.github.com/user")); len(d.Offers) != 2 {
		t.Errorf("a rule that does not match offers its secret: %+v", d.Offers)
	}
	all := tb.Placeholders()
	if len(all) != 2 || all["GITHUB_TOKEN"] != (Offer{"node/gh", Node, "gh-node"}) || all["NPM_TOKEN"] != (Offer{"owner/gh", Owner, "npm"}) {
		t.Errorf("got %+v", all)
	}
}

func TestNamesThatNoRuleAllowsAreNotResolved(t *testing.T) {
	tab := table(t, DenyAll, `[
		{"name":"a","hosts":["a.example"],"ports":["22"],"action":"allow"},
		{"name":"b","hosts":["b.example"],"action":"allow"},
		{"name":"no-b","hosts":["b.example"],"action":"deny"},
		{"name":"c","hosts":["c.example"],"action":"allow"},
		{"name":"no-c","hosts":["c.example"],"ports":["80"],"action":"deny"},
		{"name":"no-d","hosts":["c.example"],"methods":["GET"],"action":"deny"}]`, "", "")
	for host, want := range map[string]Verdict{"a.example": VerdictAllow, "b.example": VerdictDeny, "c.example": VerdictAllow, "d.example": VerdictDeny} {
		if d := tab.Name(host); d.Verdict != want {
			t.Errorf("%s: %+v", host, d)
		}
	}
	if d := table(t, AllowPublic, "", "", "").Name("a.example"); d.Verdict != VerdictAllow {
		t.Errorf("by default %+v", d)
	}
}

func TestMistakesAreNamedWithPositionAndRemedy(t *testing.T) {
	for name, c := range map[string]struct{ source, rule, want string }{
		"no name":               {"node", `{"action":"allow"}`, `rule 2: name: "": a name is 1 to 64`},
		"bad name":              {"node", `{"name":"A b","action":"allow"}`, `name: "A b"`},
		"name twice":            {"node", `{"name":"first","action":"allow"}`, `rule 2 (first): name: "first" is the name of an earlier rule`},
		"star inside":           {"node", `{"name":"x","hosts":["a.example","a.*.example"],"action":"allow"}`, "rule 2 (x): hosts[1]: \"a.*.example\": a pattern is a name"},
		"address as host":       {"node", `{"name":"x","hosts":["10.0.0.1"],"action":"allow"}`, "rules name addresses under `addresses`"},
		"number as host":        {"node", `{"name":"x","hosts":["0x7f000001"],"action":"allow"}`, "is an address"},
		"URL as host":           {"node", `{"name":"x","hosts":["https://a.example"],"action":"allow"}`, "invalid host name"},
		"host and address":      {"node", `{"name":"x","hosts":["a.example"],"addresses":["10.0.0.1"],"action":"allow"}`, "make two rules"},
		"bad network":           {"node", `{"name":"x","addresses":["10.0.0.1/8"],"action":"allow"}`, "write 10.0.0.0/8"},
		"no network":            {"node", `{"name":"x","addresses":["10.0"],"action":"allow"}`, "write 203.0.113.7"},
		"mapped network":        {"node", `{"name":"x","addresses":["::ffff:10.0.0.1"],"action":"allow"}`, "write the IPv4 address itself"},
		"address, inspected":    {"node", `{"name":"x","addresses":["10.0.0.1"],"methods":["GET"],"action":"allow"}`, "cannot be inspected"},
		"address of an owner":   {"owner", `{"name":"x","addresses":["10.0.0.1"],"action":"allow"}`, "only the node's rules may allow addresses"},
		"private of an owner":   {"sandbox", `{"name":"x","hosts":["a.example"],"private":true,"action":"allow"}`, "allow_private: only the node's rules may allow private"},
		"scheme":                {"node", `{"name":"x","scheme":"ftp","action":"allow"}`, "write http or https"},
		"method":                {"node", `{"name":"x","methods":["get"],"action":"allow"}`, "write GET, in capitals"},
		"path":                  {"node", `{"name":"x","paths":["repos/**"],"action":"allow"}`, "write /repos/**"},
		"query":                 {"node", `{"name":"x","paths":["/a?b"],"action":"allow"}`, "a path ends before ?"},
		"dots in a path":        {"node", `{"name":"x","paths":["/a/../b"],"action":"allow"}`, "without . and .."},
		"escape in a path":      {"node", `{"name":"x","paths":["/a%20b"],"action":"allow"}`, "write characters as they are"},
		"header twice":          {"node", `{"name":"x","headers":{"x-a":"1","X-A":"2"},"action":"allow"}`, "in another spelling"},
		"response header twice": {"node", `{"name":"x","action":"answer","answer":{"status":200,"headers":{"x-a":"1","X-A":"2"}}}`, "in another spelling"},
		"header":                {"node", `{"name":"x","headers":{"a b":"c"},"action":"allow"}`, "invalid header name"},
		"header unseen":         {"node", `{"name":"x","headers":{"host":"c"},"action":"allow"}`, "before rules inspect a request"},
		"action":                {"node", `{"name":"x"}`, "use allow or deny, or give the rule policies or respond"},
		"reason":                {"node", `{"name":"x","action":"allow","reason":"r"}`, "only a rule that denies has one"},
		"no response":           {"node", `{"name":"x","action":"answer"}`, `respond: missing; write {"status": 200`},
		"response too many":     {"node", `{"name":"x","action":"allow","answer":{"status":200}}`, `respond: cannot be combined with the action "allow"`},
		"status":                {"node", `{"name":"x","action":"answer","answer":{"status":100}}`, "respond.status: 100 is out of range; use 200 to 599"},
		"response header":       {"node", `{"name":"x","action":"answer","answer":{"status":200,"headers":{"x":"a\nb"}}}`, "respond.headers[x]: invalid header"},
		"framing":               {"node", `{"name":"x","action":"answer","answer":{"status":200,"headers":{"content-length":"1"}}}`, "set by the connection"},
		"no policies":           {"node", `{"name":"x","action":"policies"}`, "policies: 0 policies; use 1 to 16"},
		"policy name":           {"node", `{"name":"x","action":"policies","policies":[{"policy":"../x"}]}`, "policies[0].name: "},
		"secret name":           {"node", `{"name":"x","action":"policies","policies":[{"policy":"p","secrets":{"t":"A B"}}]}`, "policies[0].secrets"},
		"policies too many":     {"node", `{"name":"x","action":"deny","policies":[{"policy":"p"}]}`, `policies: cannot be combined with the action "deny"`},
		"placeholder name":      {"node", `{"name":"x","action":"allow","placeholders":{"1A":"t"}}`, "invalid name of an environment variable"},
		"placeholder secret":    {"node", `{"name":"x","action":"allow","placeholders":{"A":"T T"}}`, `placeholders[A]: "T T"`},
		"placeholder, denied":   {"node", `{"name":"x","action":"deny","placeholders":{"A":"t"}}`, `placeholders: cannot be combined with the action "deny"`},
		"long path":             {"node", `{"name":"x","paths":["/` + strings.Repeat("a", MaxText) + `"],"action":"allow"}`, "use at most 1000"},
	} {
		t.Run(name, func(t *testing.T) {
			var list []Rule
			if err := json.Unmarshal([]byte(`[{"name":"first","action":"deny"},`+c.rule+`]`), &list); err != nil {
				t.Fatal(err)
			}
			l, err := Compile(Source(c.source), list, nil)
			var problem *Error
			if l != nil || !errors.As(err, &problem) || problem.Index != 1 || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, %v; want %q", l, err, c.want)
			}
		})
	}
	for _, ports := range []string{`"0"`, `"70000"`, `"90-80"`, `"http"`, `"-"`, `443`} {
		var r Rule
		if err := json.Unmarshal([]byte(`{"ports":[`+ports+`]}`), &r); err == nil {
			t.Errorf("ports %s were taken as %v", ports, r.Ports)
		}
	}
	if _, err := Compile(Node, make([]Rule, MaxRules+1), nil); err == nil {
		t.Error("any number of rules was taken")
	}
	for what, fill := range map[string]func(r *Rule, i int){
		"paths":   func(r *Rule, i int) { r.Paths = []string{"/a/*", "/b", "/c", fmt.Sprintf("/%d", i)} },
		"headers": func(r *Rule, i int) { r.Headers = map[string]string{"X-A": "*", "X-B": "*", "X-C": "*", "X-D": "*"} },
		"policies": func(r *Rule, i int) {
			r.Action, r.Policies = Policies, []Use{{Policy: "a", Config: fmt.Appendf(nil, `{"n":%d}`, i)}, {Policy: "same"}}
		},
	} {
		most := map[string]int{"paths": MaxGlobs / 4, "headers": MaxGlobs / 4, "policies": MaxUses - 1}[what]
		rules := make([]Rule, 0, most)
		for i := range most {
			r := Rule{Name: fmt.Sprint(i), Action: Allow}
			fill(&r, i)
			rules = append(rules, r)
		}
		if _, err := Compile(Node, rules, nil); err != nil {
			t.Errorf("%d rules with %s: %v", most, what, err)
		}
		more := Rule{Name: "more", Action: Allow}
		fill(&more, most)
		if _, err := Compile(Node, append(rules, more), nil); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("any number of %s was taken: %v", what, err)
		}
	}
}

func TestRulesComeBackAsGiven(t *testing.T) {
	const rules = `[{"name":"a","hosts":["*.example.com"],"private":true,"ports":["443","8000-8100"],"methods":["GET"],"action":"deny","reason":"r"}]`
	back, err := json.Marshal(layerOf(t, Node, rules).Rules())
	if err != nil || string(back) != rules {
		t.Errorf("got %s, %v", back, err)
	}
	if (*Layer)(nil).Rules() != nil {
		t.Error("no layer has rules")
	}
}

func TestHostsAreCleaned(t *testing.T) {
	for host, want := range map[string]string{
		"API.GitHub.com": "api.github.com", "a.example.": "a.example", "münchen.example": "xn--mnchen-3ya.example",
		"xn--mnchen-3ya.example": "xn--mnchen-3ya.example", "ａ.example": "a.example", "_dmarc.a.example": "_dmarc.a.example", "localhost": "localhost",
		"R3---sn-a.example.com": "r3---sn-a.example.com", "-A-.example": "-a-.example",
		"": "", ".": "", "a..example": "", "a b.example": "", "a.example:443": "", "a/b": "", "10.0.0.1": "", "[::1]": "", "::1": "", "2130706433": "", "0x7f.1": "",
		"a.0x7f": "", "１２７.0.0.1": "", strings.Repeat("a", 64) + ".example": "", strings.Repeat("a.", 127) + "example": "", "a.example\x00": "", "xn--a": "",
	} {
		got, err := CleanHost(host)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q is %q, %v; want %q", host, got, err, want)
		}
	}
}

var numeric = regexp.MustCompile(`(^|\.)([0-9]+|0x[0-9a-f]*)$`)

func FuzzCleanHost(f *testing.F) {
	f.Add("API.GitHub.com.")
	f.Add("münchen.example")
	f.Add("0x7f.1")
	f.Add("192.168.100.200")
	f.Add("a.longer.example.0xA9fea9fe")
	f.Fuzz(func(t *testing.T, host string) {
		name, err := CleanHost(host)
		if err != nil {
			return
		}
		if again, err := CleanHost(name); again != name || err != nil {
			t.Errorf("%q becomes %q, and that %q, %v", host, name, again, err)
		}
		// As numbers clients read the last label, whatever stands before it.
		if _, err := netip.ParseAddr(name); err == nil || numeric.MatchString(name) || strings.ContainsAny(name, "/:@ *\x00") {
			t.Errorf("%q becomes %q", host, name)
		}
	})
}

// readers are servers, each of which resolves a path in its own order. None of
// them knows of readings.
var readers = map[string]func(*url.URL) string{
	"URL standard: dots first, then escapes": func(u *url.URL) string {
		return unescape(u.ResolveReference(&url.URL{Path: u.Path, RawPath: u.RawPath}).EscapedPath())
	},
	"escapes first, then dots and slashes": func(u *url.URL) string { return path.Clean(u.Path) },
	"escapes, backslashes, dots":           func(u *url.URL) string { return path.Clean(strings.ReplaceAll(u.Path, `\`, "/")) },
	"slashes first, then dots": func(u *url.URL) string {
		return unescape(path.Clean(u.EscapedPath()))
	},
	"parameters, dots, escapes": func(u *url.URL) string {
		return unescape(path.Clean(regexp.MustCompile(`;[^/]*`).ReplaceAllString(u.EscapedPath(), "")))
	},
	"escapes, parameters, dots": func(u *url.URL) string {
		return path.Clean(regexp.MustCompile(`;[^/]*`).ReplaceAllString(u.Path, ""))
	},
	"escapes twice": func(u *url.URL) string { return path.Clean(unescape(u.Path)) },
}

// A rule permits a request only if its path is below the rule's for every server. A rule
// that denies, or has policies, matches if it is for any server.
func FuzzPathsCannotBeDisguised(f *testing.F) {
	for _, p := range []string{"/a/b", "/a/../c", "/a/%2e%2e/c", "/x/..//a/b", "/a%2fb", `/a\..\c`, "/a/..;/c", "/%zz", "/a/%252e%252e/c",
		"/a/x%2fy/../../c", "/x%2fy/../a/z", "/x/;/../../a/z", "/x//../a/z", "/a;x%2fy/z", "//a/b", "/;/a/b", "/%5ca/b", "/a%252fb"} {
		f.Add(p)
	}
	permit := table(f, DenyAll, `[{"name":"a","paths":["/a/**"],"action":"allow"}]`, "", "")
	forbid := table(f, AllowPublic, `[{"name":"a","paths":["/a/**"],"action":"deny"}]`, "", "")
	guard := table(f, AllowPublic, `[{"name":"a","paths":["/a/**"],"action":"policies","policies":[{"policy":"p"}]}]`, "", "")
	f.Fuzz(func(t *testing.T, sent string) {
		r := Request{Host: "a.example", Port: 443, HTTPS: true, Method: "GET", Path: sent}
		permitted, forbidden, guarded := permit.Decide(r).Verdict == VerdictAllow, forbid.Decide(r).Verdict == VerdictDeny, guard.Decide(r)
		unguarded := guarded.Verdict == VerdictAllow && len(guarded.Chain) == 0
		if permitted && !forbidden || unguarded == forbidden {
			t.Errorf("%q: permitted %v, forbidden %v, guarded %+v", sent, permitted, forbidden, guarded)
		}
		u, err := url.ParseRequestURI("https://a.example" + sent)
		if err != nil || !strings.HasPrefix(sent, "/") || strings.ContainsAny(sent, "?#") {
			return
		}
		for name, read := range readers {
			switch below := strings.HasPrefix(read(u), "/a/"); {
			case below && !forbidden:
				t.Errorf("%q was not forbidden and is %q to a server with %s", sent, read(u), name)
			case !below && permitted && strings.TrimRight(read(u), "/") != "/a":
				t.Errorf("%q was permitted and is %q to a server with %s", sent, read(u), name)
			}
		}
	})
}

func BenchmarkDecide(b *testing.B) {
	tab := table(b, AllowPublic, `[{"name":"x","hosts":["*.evil.example"],"action":"deny"},
		{"name":"gh","hosts":["api.github.com"],"paths":["/repos/acme/**"],"action":"policies","policies":[{"policy":"bearer"}]}]`,
		`[{"name":"ro","methods":["POST"],"action":"deny"}]`, "")
	r := request(b, "GET https://api.github.com/repos/acme/doze/issues")
	b.ReportAllocs()
	for b.Loop() {
		tab.Decide(r)
	}
}
