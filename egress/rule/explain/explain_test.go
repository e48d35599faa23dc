package explain_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"testing"

	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/explain"
	"github.com/doze-run/doze/problem"
)

// known has the policy bearer, and the secret github for api.github.com. It reports
// whether ECH passes through.
type known bool

func (known) Policy(_ rule.Source, u rule.Use) (string, error) {
	if u.Policy != "bearer" {
		return "", errors.New("unknown policy")
	}
	return "sha256:1", nil
}

func (known) Secret(source rule.Source, name, host string) error {
	if source == rule.Node {
		return errors.New("the operator has none")
	}
	if name != "github" || host != "api.github.com" {
		return fmt.Errorf("%s is not bound to %s", name, host)
	}
	return nil
}

func (k known) ECH() bool { return bool(k) }

func layer(t *testing.T, source rule.Source, text string) *rule.Layer {
	t.Helper()
	var rules []rule.Rule
	if err := json.Unmarshal([]byte(text), &rules); err != nil {
		t.Fatal(err)
	}
	l, err := rule.Compile(source, rules, nil)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestExplanationsNameTheDecidingRuleAndItsReason(t *testing.T) {
	table := &rule.Table{Default: rule.AllowPublic, Layers: [3]*rule.Layer{
		layer(t, rule.Node, `[{"name":"no","hosts":["evil.example"],"action":"deny","reason":"known for evil"},
			{"name":"net","addresses":["192.0.2.0/24"],"action":"allow"},
			{"name":"ssh","ports":["22"],"action":"deny"},
			{"name":"corp","hosts":["git.corp"],"private":true,"action":"allow"},
			{"name":"theirs","hosts":["theirs.example"],"action":"policies","policies":[{"policy":"bearer","secrets":{"token":"github"}}]}]`),
		layer(t, rule.Owner, `[{"name":"gh","hosts":["*.github.com"],"action":"policies","policies":[{"policy":"bearer","secrets":{"token":"github","again":"github"}}],"placeholders":{"GITHUB_TOKEN":"github"}},
			{"name":"gone","hosts":["gone.example"],"action":"policies","policies":[{"policy":"missing"}]},
			{"name":"place","hosts":["place.example"],"action":"allow","placeholders":{"TOKEN":"github"}},
			{"name":"pkg","hosts":["preset:mistral"],"action":"allow"},
			{"name":"stub","hosts":["stub.example"],"action":"answer","answer":{"status":204}}]`),
		layer(t, rule.Sandbox, `[{"name":"ro","hosts":["api.github.com"],"methods":["DELETE"],"action":"deny"}]`),
	}}
	for line, want := range map[string][]string{
		"GET https://evil.example/":               {"deny dns node/no known for evil"},
		"GET https://api.mistral.ai/":             {"allow connection owner/pkg the rule allows it", "preset=mistral"},
		"GET https://example.com/a":               {"allow connection default no rule matches", "unmodified"},
		"GET https://git.corp/":                   {"allow connection node/corp the rule allows it; the connection passes through", "private"},
		"GET http://192.0.2.7/":                   {"allow connection node/net the rule allows it"},
		"GET https://203.0.113.7/":                {"deny connection default the address was not looked up by a name"},
		"GET tcp://example.com:22":                {"deny connection node/ssh denied by a rule"},
		"GET tcp://api.github.com:443":            {"inspect request owner/gh", "traffic other than HTTP is refused"},
		"GET https://api.github.com/user":         {"allow request owner/gh the rule allows it through its policies, which may", "[bearer sha256:1]", "[github]", "{github }"},
		"GET https://place.example/":              {"allow request owner/place", "{github github is not bound to place.example}"},
		"GET https://theirs.example/":             {"deny request node/theirs", "the operator has none"},
		"DELETE https://api.github.com/user":      {"deny request sandbox/ro denied by a rule"},
		"GET https://gist.github.com/":            {"deny request owner/gh the policy bearer cannot use a secret: github is not bound to gist.github.com"},
		"GET http://api.github.com/":              {"deny request owner/gh", "secrets are sent over HTTPS only"},
		"GET https://gone.example/":               {"deny request owner/gone the policy missing cannot run: unknown policy"},
		"GET https://stub.example/":               {"respond request owner/stub the rule responds instead of the host", "204"},
		"GET https://API.GitHub.com.:443/user?x=": {"allow request owner/gh", "[github]"},
	} {
		t.Run(line, func(t *testing.T) {
			method, address, _ := strings.Cut(line, " ")
			r, err := explain.Parse(method, address, nil)
			if err != nil {
				t.Fatal(err)
			}
			got := shown(explain.Of(table, r, known(false)))
			for _, part := range want {
				if !strings.Contains(got, part) {
					t.Errorf("got %q, want %q", got, part)
				}
			}
			if strings.Contains(got, "private") != (r.Host == "git.corp") || strings.Count(got, "[github]") > 1 {
				t.Errorf("got %q", got)
			}
		})
	}
}

func TestExplanationsCoverECH(t *testing.T) {
	table := &rule.Table{Default: rule.AllowPublic, Layers: [3]*rule.Layer{
		layer(t, rule.Node, `[{"name":"no","hosts":["evil.example"],"ports":["443"],"action":"deny"}]`),
	}}
	const intercepted = "or is intercepted if its ClientHello has ECH"
	for _, c := range []struct {
		url    string
		passes known
		want   bool
	}{
		{"https://example.com/", false, true},
		{"https://example.com/", true, false},
		{"http://example.com/", false, false},
		{"https://evil.example/", false, false},
	} {
		r, err := explain.Parse("GET", c.url, nil)
		if err != nil {
			t.Fatal(err)
		}
		if got := explain.Of(table, r, c.passes).Reason; strings.Contains(got, intercepted) != c.want {
			t.Errorf("%s: got %q", c.url, got)
		}
	}
}

// shown is all that an explanation says, in one line.
func shown(e explain.Explanation) string {
	text := fmt.Sprint(e.Verdict, " ", e.Stage, " ", e.Rule, " ", e.Reason)
	for _, p := range e.Policies {
		text += fmt.Sprintf(" [%s %s]", p.Name, p.Digest)
	}
	for _, s := range e.Secrets {
		text += fmt.Sprintf(" [%s]", s.Name)
	}
	for _, s := range e.Placeholders {
		text += fmt.Sprintf(" {%s %s}", s.Name, s.Problem)
	}
	if e.Status != 0 {
		text += fmt.Sprint(" ", e.Status)
	}
	if e.Preset != "" {
		text += " preset=" + e.Preset
	}
	if e.Private {
		text += " private"
	}
	return text
}

func TestRequestsAreParsed(t *testing.T) {
	r, err := explain.Parse("POST", "https://API.Example.com:8443/a%2Fb?token=x#f", http.Header{"x-a": {"1", "2"}})
	if err != nil || r.Host != "api.example.com" || r.Port != 8443 || !r.HTTPS || r.Method != "POST" || r.Path != "/a%2Fb" || len(r.Header["X-A"]) != 2 {
		t.Errorf("got %+v, %v", r, err)
	}
	r, err = explain.Parse("GET", "http://[2001:db8::1]", nil)
	if err != nil || r.Address != netip.MustParseAddr("2001:db8::1") || r.Host != "" || r.Port != 80 || r.Path != "/" || r.HTTPS {
		t.Errorf("got %+v, %v", r, err)
	}
	for _, c := range [][3]string{
		{"GET", "", "url"}, {"GET", "example.com/x", "url"}, {"GET", "ftp://example.com/", "url"}, {"GET", "https:///x", "url"}, {"GET", "https:x", "url"},
		{"GET", "https://u:p@example.com/", "url"}, {"GET", "https://example.com:99999/", "url"}, {"GET", "https://example.com:0/", "url"},
		{"GET", "tcp://example.com", "url"}, {"GET", "https://a_b!c/", "url"}, {"GET", "https://2130706433/", "url"}, {"GET", "https://[fe80::1%25eth0]/", "url"},
		{"", "https://example.com/", "method"}, {"G T", "https://example.com/", "method"},
	} {
		var invalid *problem.InvalidError
		if _, err := explain.Parse(c[0], c[1], nil); !errors.As(err, &invalid) || invalid.Field != c[2] {
			t.Errorf("%q %q: %v, want an InvalidError of %s", c[0], c[1], err, c[2])
		}
	}
}
