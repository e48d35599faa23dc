package egress

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/flow"
	"github.com/doze-run/doze/egress/policy/catalog"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/ruleset"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

func TestRulesWithMistakesChangeNothing(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	b.push("note", noting("a note"))
	good := through("a.web.test", "note", "")
	b.rules(good)
	for name, c := range map[string]struct {
		rules []rule.Rule
		want  []string
	}{
		"a pattern":         {[]rule.Rule{good, {Name: "bad", Hosts: []string{"*a.test"}, Action: rule.Allow}}, []string{"rule 2 (bad)", "hosts[0]"}},
		"a policy":          {[]rule.Rule{good, {Name: "bad", Hosts: []string{"b.test"}, Action: rule.Policies, Policies: []rule.Use{{Policy: "note"}, {Policy: "nobodys"}}}}, []string{"rule 2 (bad)", "policies[1]", "no policy has this name"}},
		"several":           {[]rule.Rule{through("b.test", "nobodys", ""), {Name: "bad", Hosts: []string{"c.test"}, Action: rule.Policies, Policies: []rule.Use{{Policy: "nothing"}}}}, []string{"rule 1 (through)", "rule 2 (bad)"}},
		"private":           {[]rule.Rule{{Name: "bad", Hosts: []string{"b.test"}, Private: true, Action: rule.Allow}}, []string{"private"}},
		"the same name":     {[]rule.Rule{good, good}, []string{"rule 2 (through)"}},
		"no action at all ": {[]rule.Rule{{Name: "bad", Hosts: []string{"b.test"}}}, []string{"action"}},
	} {
		_, _, err := r.SetRules(testkit.Context(t), owner, b.sb.ID, ruleset.Update{Rules: c.rules})
		for _, want := range c.want {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: got %v, want %q", name, err, want)
			}
		}
	}
	stale := int64(0)
	if _, _, err := r.SetRules(testkit.Context(t), owner, b.sb.ID, ruleset.Update{IfRevision: &stale}); !errors.Is(err, ruleset.ErrRevision) {
		t.Errorf("rules of another revision: %v", err)
	}
	full := errors.New("the disk is full")
	r.documents.failWith(full)
	if _, _, err := r.SetRules(testkit.Context(t), owner, b.sb.ID, ruleset.Update{}); !errors.Is(err, full) {
		t.Errorf("got %v", err)
	}
	r.documents.failWith(nil)
	if set, _, _ := r.Rules(testkit.Context(t), owner, b.sb.ID); set.Revision != 1 || len(set.Rules) != 1 {
		t.Errorf("the rules are %+v", set)
	}
	b.want(b.get("https://a.web.test/"), 200, "this is")
	if e := b.entry("a.web.test", nil); len(e.Notes) != 1 {
		t.Errorf("the policy did not run: %+v", e)
	}
	r.uses(t, 1)
}

func TestCanceledChangesStartNoMorePolicies(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	b.push("note", noting("a note"))
	b.push("other", noting("another note"))
	ctx, cancel := context.WithCancel(testkit.Context(t))
	e := r.Egress
	started := 0
	rules, err := rule.Compile(rule.Sandbox, []rule.Rule{through("a.web.test", "note", ""), {Name: "second", Hosts: []string{"b.web.test"}, Action: rule.Policies, Policies: []rule.Use{{Policy: "other"}}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	e.changeMu.Lock()
	l, err := e.newValidLayer(ctx, func(owner, name string) (module, error) {
		started++
		cancel()
		return e.moduleOf(owner, name)
	}, owner, rules)
	e.changeMu.Unlock()
	if l != nil || !errors.Is(err, context.Canceled) || started != 1 {
		t.Errorf("got %v, %v after %d", l, err, started)
	}
	r.uses(t, 0)
}

// uses fails the test unless want policies are ready.
func (r *rig) uses(t *testing.T, want int) {
	t.Helper()
	r.pool.mu.Lock()
	defer r.pool.mu.Unlock()
	ready := 0
	for _, p := range r.pool.ready {
		if !p.Ended() {
			ready++
		}
	}
	if ready != want || r.pool.host.Modules() > want {
		t.Errorf("%d policies are ready, of %d modules; want %d", ready, r.pool.host.Modules(), want)
	}
}

func TestPushesWithMistakesChangeNothing(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	b.push("note", noting("first"))
	b.rules(through("a.web.test", "note", ""))
	if _, _, err := r.SetRules(testkit.Context(t), owner, "", ruleset.Update{Rules: []rule.Rule{through("b.web.test", "note", "")}}); err != nil {
		t.Fatal(err)
	}
	var invalid *problem.InvalidError
	for name, wasm := range map[string][]byte{"text": []byte("no module"), "nothing": nil, "a part": noting("x")[:40], "much": bytes.Repeat([]byte{0}, catalog.MaxModule+1)} {
		if _, err := r.PutPolicy(testkit.Context(t), owner, "note", wasm); !errors.As(err, &invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	full := errors.New("the disk is full")
	r.documents.failWith(full)
	if _, err := r.PutPolicy(testkit.Context(t), owner, "note", noting("second")); !errors.Is(err, full) {
		t.Errorf("got %v", err)
	}
	r.documents.failWith(nil)
	if _, err := r.PutPolicy(testkit.Context(t), owner, "no name", noting("second")); !errors.As(err, &invalid) {
		t.Errorf("got %v", err)
	}
	if err := r.DeletePolicy(testkit.Context(t), owner, "note"); !errors.Is(err, catalog.ErrInUse) || !strings.Contains(err.Error(), "owner/through, sandbox/k3f9x2m7q1az/through") {
		t.Errorf("got %v", err)
	}
	b.want(b.get("https://a.web.test/"), 200, "this is")
	if e := b.entry("a.web.test", nil); len(e.Notes) != 1 || e.Notes[0] != "first" {
		t.Errorf("the audit log says %+v", e)
	}
	r.uses(t, 1)
	for _, scope := range []string{"", string(b.sb.ID)} {
		if _, _, err := r.SetRules(testkit.Context(t), owner, b.sb.ID[:len(scope)], ruleset.Update{}); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.DeletePolicy(testkit.Context(t), owner, "note"); err != nil {
		t.Error(err)
	}
	if err := r.DeletePolicy(testkit.Context(t), owner, "note"); !errors.Is(err, catalog.ErrUnknown) {
		t.Errorf("got %v", err)
	}
	r.uses(t, 0)
}

func TestDeletedPoliciesLoseTheirStoredValues(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	count := func(host, want string) {
		t.Helper()
		b.rules(through(host, "count", ""))
		b.want(b.get("https://"+host+"/"), 200, "this is")
		if e := b.entry(host, nil); len(e.Notes) != 1 || e.Notes[0] != want {
			t.Errorf("%s: it notes %q, want %q", host, e.Notes, want)
		}
	}
	b.push("count", counting())
	count("a.web.test", "1")
	b.push("count", append(counting(), "\x00\x02\x01x"...)) // the new module continues the count
	count("b.web.test", "b")
	b.rules()
	if err := r.DeletePolicy(testkit.Context(t), owner, "count"); err != nil {
		t.Fatal(err)
	}
	b.push("count", counting())
	count("c.web.test", "1")
}

// Otherwise a policy that counts requests would not count any more.
func TestPoliciesThatArePushedAgainStoreValuesDuringEarlierRequests(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	began, end := make(chan struct{}), make(chan struct{})
	b.servers.handle(func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/earlier" {
			close(began)
			<-end
		}
	})
	push := func() {
		b.push("count", counting())
		b.rules(through("a.web.test", "count", ""))
	}
	push()
	request := newRequest(t, "GET", "https://a.web.test/earlier", nil)
	var earlier sync.WaitGroup
	earlier.Go(func() { _, _ = b.try(request) }) // ends with end
	testkit.Closed(t, "the request begins", began)
	b.rules()
	if err := r.DeletePolicy(testkit.Context(t), owner, "count"); err != nil {
		t.Fatal(err)
	}
	push()
	for _, want := range []string{"1", "b"} {
		path := "/later/" + want
		b.want(b.get("https://a.web.test"+path), 200, "")
		if e := b.entry("a.web.test", func(e audit.Entry) bool { return e.Path == path }); !slices.Equal(e.Notes, []string{want}) {
			t.Errorf("it notes %q, want %q", e.Notes, want)
		}
	}
	close(end)
	earlier.Wait()
}

// Two policies made from one template have equal bytes.
func TestPoliciesOfEqualBytesShareOnlyTheirCode(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	to := func(host, policy string) rule.Rule {
		use := through(host, policy, "")
		use.Name = policy
		return use
	}
	count := func(host, want string) {
		t.Helper()
		b.want(b.get("https://"+host+"/"), 200, "this is")
		if e := b.entry(host, func(e audit.Entry) bool { return slices.Equal(e.Notes, []string{want}) }); e.Policies[0].Name+".web.test" != host {
			t.Errorf("%s: the audit log names %+v", host, e.Policies)
		}
	}
	b.push("one", counting())
	b.push("two", counting())
	b.push("three", trapping())
	b.push("four", trapping())
	b.rules(to("one.web.test", "one"), to("two.web.test", "two"), to("three.web.test", "three"), to("four.web.test", "four"))
	count("one.web.test", "1")
	count("one.web.test", "b")
	count("two.web.test", "1")
	b.want(b.get("https://three.web.test/"), 403, "denied by policy three")
	b.want(b.get("https://four.web.test/"), 403, "denied by policy four")

	b.rules(to("two.web.test", "two"))
	if err := r.DeletePolicy(testkit.Context(t), owner, "one"); err != nil {
		t.Fatal(err)
	}
	count("two.web.test", "b")
}

func TestStoredValuesOfPoliciesSurviveARestart(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	count := func(want string) {
		t.Helper()
		b.rules(through("a.web.test", "count", ""))
		b.want(b.get("https://a.web.test/"), 200, "this is")
		b.entry("a.web.test", func(e audit.Entry) bool { return slices.Equal(e.Notes, []string{want}) })
	}
	b.push("count", counting())
	count("1")
	r.reopen()
	b.attach()
	count("b")
	b.rules()
	full := errors.New("the disk is full")
	r.documents.failWith(full)
	if err := r.DeletePolicy(testkit.Context(t), owner, "count"); !errors.Is(err, full) {
		t.Errorf("got %v", err)
	}
	r.documents.failWith(nil)
	if err := r.DeletePolicy(testkit.Context(t), owner, "count"); err != nil {
		t.Fatal(err)
	}
	r.reopen()
	b.attach()
	b.push("count", counting())
	count("1")
}

func TestExplanationsNameTheConfigurationThatIsNotReady(t *testing.T) {
	r := newRig(t)
	r.push("note", noting("a note"))
	broken := errors.New("broken")
	k := known{r.Egress, &flow.Table{Policies: [3]*flow.Layer{1: {Owner: owner, Unready: map[flow.Use]error{{Policy: "note", Config: "1"}: broken}}}}}
	for config, want := range map[string]error{"1": broken, "2": nil} {
		if digest, err := k.Policy(rule.Owner, rule.Use{Policy: "note", Config: []byte(config)}); digest == "" || err != want {
			t.Errorf("configuration %s: %q, %v", config, digest, err)
		}
	}
}

func TestSettingsThatAreDiscardedChangeNothing(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	never := rule.Rule{Name: "never", Hosts: []string{"a.web.test"}, Ports: []rule.Ports{{First: 443, Last: 443}}, Action: rule.Deny, Reason: "the node says no"}
	for name, change := range map[string]func(*Settings){
		"a policy": func(s *Settings) { s.Rules = compileNodeRules(t, nil, through("a.web.test", "unknown", "")) },
		"a CA":     func(s *Settings) { s.UpstreamCAs = []byte("no PEM") },
		"a proxy":  func(s *Settings) { s.UpstreamProxy = &url.URL{Scheme: "ftp", Host: "proxy.test"} },
		"a limit":  func(s *Settings) { s.MaxConnections = 0 },
		"default":  func(s *Settings) { s.Default = "perhaps" },
	} {
		if err := r.reload(change); err == nil {
			t.Errorf("%s: it was taken", name)
		}
	}
	s := *r.settings.Load()
	s.Rules = compileNodeRules(t, nil, never)
	c, err := r.Prepare(testkit.Context(t), s)
	if err != nil {
		t.Fatal(err)
	}
	c.Discard()
	b.want(b.get("https://a.web.test/"), 200, "this is")
	r.nodeRules(never)
	b.Client.CloseIdleConnections()
	b.want(b.get("https://a.web.test/"), 403, "the node says no")
	if err := r.reload(func(s *Settings) { s.Rules, s.Default = nil, rule.DenyAll }); err != nil {
		t.Fatal(err)
	}
	if d := r.find(b.sb.ID).Table().Name("a.web.test"); d.Verdict != rule.VerdictDeny {
		t.Errorf("got %+v", d)
	}
}

// load requests a URL over several connections until stop is called. stop returns the
// number of requests and the results that ok rejected.
func (b *box) load(url string, ok func(response, error) bool) (stop func() (asked int64, wrong []string)) {
	var asked atomic.Int64
	var mu sync.Mutex
	var wrong []string
	r := newRequest(b.t, "GET", url, nil) // shared: each newRequest retains a context until the test ends
	end := make(chan struct{})
	var running sync.WaitGroup
	for range 2 { // other tests share the few cores
		running.Go(func() {
			for {
				select {
				case <-end:
					return
				default:
				}
				a, err := b.try(r.Clone(context.Background()))
				asked.Add(1)
				if !ok(a, err) {
					mu.Lock()
					wrong = append(wrong, fmt.Sprint(a.status, a.body, err))
					mu.Unlock()
				}
			}
		})
	}
	return func() (int64, []string) {
		close(end)
		running.Wait()
		return asked.Load(), wrong
	}
}

func TestPushedPoliciesReportThatTheyReplaceABuiltInOne(t *testing.T) {
	r := newRig(t)
	for name, want := range map[string]bool{"bearer": true, "note": false} {
		info, err := r.PutPolicy(testkit.Context(t), owner, name, noting("a note"))
		if err != nil || info.ReplacesBuiltIn != want {
			t.Errorf("%s: got %+v, %v", name, info, err)
		}
	}
	for _, p := range r.Policies(owner) {
		if want := p.Name == "bearer"; p.ReplacesBuiltIn != want || p.BuiltIn == (p.Name == "bearer" || p.Name == "note") {
			t.Errorf("listed as %+v", p)
		}
	}
}

func TestRulesAreReplacedUnderLoad(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	b.push("note", noting("first"))
	b.push("other", noting("second"))
	b.rules(through("a.web.test", "note", ""))
	stop := b.load("https://a.web.test/", func(a response, err error) bool {
		return err == nil && (a.status == 200 || a.status == 403 && strings.Contains(a.body, "for a while"))
	})
	deny := rule.Rule{Name: "deny", Hosts: []string{"a.web.test"}, Methods: []string{"GET"}, Action: rule.Deny, Reason: "for a while"}
	for n := range 100 {
		switch n % 4 {
		case 0:
			b.rules(through("a.web.test", "other", ""))
		case 1:
			b.rules(deny)
		case 2:
			b.rules(through("a.web.test", "note", ""))
		case 3:
			if err := r.reload(func(s *Settings) { s.MaxConnections++ }); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := b.Explain(testkit.Context(t), b.sb.ID, "GET", "https://a.web.test/", nil); err != nil {
			t.Fatal(err)
		}
	}
	asked, wrong := stop()
	if len(wrong) > 0 || asked == 0 {
		t.Errorf("of %d requests %d failed: %.1000v", asked, len(wrong), wrong)
	}
	r.uses(t, 1)
}

// make bench replaces a policy a thousand times.
func TestPoliciesAreReplacedUnderLoad(t *testing.T) {
	const replacements = 50
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	b.push("bearer", bearer(0))
	b.secret("api", token, "a.web.test")
	b.rules(through("a.web.test", "bearer", "api"))
	stop := b.load("https://a.web.test/", func(a response, err error) bool { return err == nil && a.status == 200 })
	for n := range replacements {
		b.push("bearer", bearer(n+1))
	}
	asked, wrong := stop()
	if len(wrong) > 0 || asked == 0 {
		t.Errorf("of %d requests %d failed: %.1000v", asked, len(wrong), wrong)
	}
	if got := b.servers.last(t).Header.Get("Authorization"); got != "Bearer "+token {
		t.Errorf("the server got %q", got)
	}
	r.uses(t, 1)
}
