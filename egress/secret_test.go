package egress

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/secret"
	"github.com/doze-run/doze/egress/secret/session"
	"github.com/doze-run/doze/testkit"
)

func TestReferencesInBodiesOfPoliciesAreRendered(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	b.push("body", inBody())
	b.secret("api", token, "a.web.test")
	b.rules(through("a.web.test", "body", "api"))
	b.servers.handle(echo)
	for _, sent := range []string{"", "the body of the client"} {
		a := b.do(newRequest(t, "POST", "https://a.web.test/", strings.NewReader(sent)))
		if got := b.servers.last(t); got.body != "Bearer "+token || got.ContentLength != int64(len(got.body)) {
			t.Errorf("the server got %q", got.body)
		}
		b.want(a, 200, "Bearer "+strings.Repeat("*", len(token)))
	}
	if e := b.entry("a.web.test", nil); len(e.Secrets) != 1 || e.Secrets[0] != "api" {
		t.Errorf("the audit log says %+v", e)
	}
	b.none(token)
}

// The request has the values when it is sent, and a policy may read the request again when
// the response arrives.
func TestPoliciesSeeNoSecretInTheRequestAfterTheResponse(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	b.push("peeking", peeking())
	b.secret("api", token, "a.web.test")
	b.rules(through("a.web.test", "peeking", "api"))
	b.want(b.get("https://a.web.test/"), 200, "this is")
	if got := b.servers.last(t); got.Header.Get("Authorization") != "Bearer "+token || got.URL.RawQuery != token {
		t.Fatalf("the server got %q, %q", got.Header.Get("Authorization"), got.URL.RawQuery)
	}
	e := b.entry("a.web.test", nil)
	if len(e.Notes) != 2 || !strings.HasPrefix(e.Notes[0], "Bearer doze-ref-") || !strings.HasPrefix(e.Notes[1], "/?doze-ref-") {
		t.Errorf("the policy saw %q", e.Notes)
	}
	b.none(token)
}

func TestMissingSecretsRefuseTheRequest(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	b.push("bearer", bearer(1))
	b.push("signing", signing())
	b.secret("api", token, "a.web.test")
	for _, c := range []struct{ name, url, policy, secret, reason string }{
		{"not bound", "https://b.web.test/", "bearer", "api", `policy bearer cannot use a secret: secret \"api\" is not bound to b.web.test`},
		{"plain", "http://c.plain.test/", "bearer", "api", `secret \"api\" is sent over TLS only: use https`},
		{"unknown", "https://d.web.test/", "bearer", "other", `secret \"other\" does not exist`},
		{"HMAC", "https://e.web.test/", "signing", "api", `secret \"api\" is not bound to e.web.test`},
		{"HMAC without TLS", "http://f.plain.test/", "signing", "api", `use https`},
	} {
		host := strings.Trim(strings.SplitN(c.url, ":", 2)[1], "/")
		b.rules(through(host, c.policy, c.secret))
		a := b.get(c.url)
		b.want(a, 403, c.reason)
		b.want(a, 403, `"code":"secret_not_allowed"`)
		if e := b.entry(host, nil); e.Verdict != audit.Deny || len(e.Secrets) != 0 || e.Status != 403 {
			t.Errorf("%s: the audit log says %+v", c.name, e)
		}
	}
	if b.servers.count() != 0 {
		t.Error("a server got something")
	}
	b.none(token)
}

func TestSecretsOfTheNodesRulesAreTheOperators(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	const nodes = "the-operators-own-token"
	b.secret("api", token, "a.web.test")
	r.bearerOfTheNode("a.web.test", nodes)
	b.servers.handle(echo)
	b.want(b.get("https://a.web.test/"), 200, "Bearer "+strings.Repeat("*", len(nodes)))
	if got := b.servers.last(t).Header.Get("Authorization"); got != "Bearer "+nodes {
		t.Errorf("the server got %q", got)
	}
	if e := b.entry("a.web.test", nil); len(e.Secrets) != 1 || e.Secrets[0] != "api" {
		t.Errorf("the audit log says %+v", e)
	}
}

// A host may publish the contents of a body. The owner's policies run after the node's, and
// see their references.
func TestPoliciesOfOwnersCannotMoveTheOperatorsSecrets(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	const nodes = "the-operators-own-token"
	b.secret("api", token, "a.web.test")
	r.bearerOfTheNode("a.web.test", nodes)
	b.push("publishing", publishing())
	b.rules(through("a.web.test", "publishing", ""))
	b.want(b.do(newRequest(t, "POST", "https://a.web.test/", strings.NewReader("x"))), 403, "moved a secret of another owner")
	if b.servers.count() != 0 {
		t.Errorf("the server got %q", b.servers.last(t).body)
	}
	b.push("own", inBody())
	b.rules(through("a.web.test", "own", "api"))
	b.want(b.do(newRequest(t, "POST", "https://a.web.test/", strings.NewReader("x"))), 200, "this is")
	if got := b.servers.last(t); got.body != "Bearer "+token || got.Header.Get("Authorization") != "Bearer "+nodes {
		t.Errorf("the server got %q, %q", got.body, got.Header.Get("Authorization"))
	}
	b.push("both", bearer(2)) // replaces the operator's secret with the owner's
	b.rules(through("a.web.test", "both", "api"))
	b.want(b.get("https://a.web.test/"), 200, "this is")
	if got := b.servers.last(t).Header.Get("Authorization"); got != "Bearer "+token {
		t.Errorf("the server got %q", got)
	}
	b.none(nodes)
}

func TestReplacedSecretsAreRemovedFromResponses(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	b.push("bearer", bearer(1))
	b.secret("api", token, "a.web.test")
	b.rules(through("a.web.test", "bearer", "api"))
	b.servers.handle(func(w http.ResponseWriter, r *http.Request) {
		b.secret("api", "another-token-instead", "a.web.test") // before the response begins
		echo(w, r)
	})
	b.want(b.get("https://a.web.test/"), 200, strings.Repeat("*", len(token)))
	b.servers.handle(echo)
	b.want(b.get("https://a.web.test/"), 200, strings.Repeat("*", len("another-token-instead")))
	if got := b.servers.last(t).Header.Get("Authorization"); got != "Bearer another-token-instead" {
		t.Errorf("the server got %q", got)
	}
	if err := b.Secrets.Delete(testkit.Context(t), owner, "api"); err != nil {
		t.Fatal(err)
	}
	b.want(b.get("https://a.web.test/"), 403, "does not exist")
}

// The secret is replaced after its value is read, and before the filter is made.
func TestFiltersRemoveTheSecretsOfTheRequest(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	b.secret("api", token, "a.web.test")
	s, id := session.New(r.Secrets, "a.web.test", true), secret.ID{Owner: owner, Name: "api"}
	value, err := s.Value(id)
	if err != nil || string(value) != token {
		t.Fatalf("got %q, %v", value, err)
	}
	b.secret("api", "another-token-instead", "a.web.test")
	f := r.find(b.sb.ID).Scrubber("a.web.test", s)
	if got := f.Text(token + " another-token-instead"); strings.Trim(got, "* ") != "" {
		t.Errorf("it leaves %q", got)
	}
	if _, err := s.Value(id); err != nil {
		t.Errorf("a value of the filter: %v", err)
	}
	b.secret("api", "a-third-token-that-is-late", "a.web.test")
	if _, err := s.Value(id); err == nil {
		t.Error("Value returned a secret that the filter does not remove")
	}
}

func TestHostsWithTheSameSecretsShareAFilter(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	b.secret("api", token, "*.web.test")
	of := func(host string) any {
		return r.find(b.sb.ID).Scrubber(host, session.New(r.Secrets, host, true))
	}
	if of("a.web.test") != of("b.web.test") {
		t.Error("they have one each")
	}
	if of("a.plain.test") != nil {
		t.Error("a host without secrets has a filter")
	}
	before := of("a.web.test")
	b.secret("api", "another-token-instead", "*.web.test")
	if of("a.web.test") == before {
		t.Error("the filter was not replaced")
	}
}

// Secrets of different owners may have the same name.
func TestSecretsOfTheSameNameAreDistinct(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	const nodes = "the-operators-own-token"
	b.secret("api", token, "a.web.test")
	r.operatorsSecret("api", nodes, "b.web.test")
	for host, value := range map[string]string{"a.web.test": token, "b.web.test": nodes} {
		f := r.find(b.sb.ID).Scrubber(host, session.New(r.Secrets, host, true))
		if got := f.Text(token + " " + nodes); strings.Contains(got, value) || strings.Count(got, "*") != len(value) {
			t.Errorf("of what %s says the filter leaves %q", host, got)
		}
	}
}

// The Trailer header names the trailers before the body.
func TestTrailersWithASecretInTheirNameAreNotAnnounced(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	b.push("bearer", bearer(1))
	b.secret("api", token, "a.web.test")
	b.rules(through("a.web.test", "bearer", "api"))
	b.servers.handle(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Trailer", token+", X-Sum")
		_, _ = io.WriteString(w, "body")
		w.Header().Set(token, "1")
		w.Header().Set("X-Sum", "2")
	})
	res, err := b.Client.Do(newRequest(t, "GET", "https://a.web.test/", nil))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	announced := fmt.Sprint(res.Trailer)
	_, _ = io.Copy(io.Discard, res.Body)
	if all := announced + fmt.Sprint(res.Trailer); strings.Contains(strings.ToLower(all), strings.ToLower(token)) || res.Trailer.Get("X-Sum") != "2" {
		t.Errorf("announced %s, came %v", announced, res.Trailer)
	}
}

func TestSecretsAreSentToVerifiedHostsOnly(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	if err := r.reload(func(s *Settings) {
		s.Resolve = maps.Clone(s.Resolve)
		s.Resolve["a.other.test"] = s.Resolve["*.web.test"] // the server's certificate is for *.web.test
	}); err != nil {
		t.Fatal(err)
	}
	b.push("bearer", bearer(1))
	b.secret("api", token, "a.other.test")
	for name, rules := range map[string]rule.Rule{"a policy": through("a.other.test", "bearer", "api"), "a placeholder": offering("a.other.test")} {
		b.rules(rules)
		req := newRequest(t, "POST", "https://a.other.test/", strings.NewReader(b.Environment(b.sb.ID)["API_TOKEN"]))
		b.want(b.do(req), 502, `"code":"upstream_certificate_invalid"`)
		if b.servers.count() != 0 {
			t.Fatalf("%s: the server got %+v", name, b.servers.last(t))
		}
	}
	b.entry("a.other.test", func(e audit.Entry) bool {
		return e.Verdict == audit.Error && strings.Contains(e.Reason, "for other names")
	})
	b.none(token)
}

// offering returns a rule that offers the sandbox a placeholder of a secret.
func offering(host string) rule.Rule {
	return rule.Rule{Name: "offer", Hosts: []string{host}, Action: rule.Allow, Placeholders: map[string]string{"API_TOKEN": "api"}}
}

func TestPlaceholdersAreExchangedForTheirHostsOnly(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	b.secret("api", token, "a.web.test")
	b.rules(offering("a.web.test"), rule.Rule{Name: "look", Hosts: []string{"b.web.test"}, Action: rule.Allow, Methods: []string{"GET", "POST"}})
	text := b.Environment(b.sb.ID)["API_TOKEN"]
	if text == "" || strings.Contains(text, token) {
		t.Fatalf("the environment has %q", text)
	}
	b.servers.handle(echo)
	with := func(url string, body io.Reader, header string) *http.Request {
		r := newRequest(t, "POST", url, body)
		if header != "" {
			r.Header.Set("Authorization", header)
		}
		return r
	}
	b.want(b.do(with("https://a.web.test/", nil, "Bearer "+text)), 200, strings.Repeat("*", len(token)))
	if got := b.servers.last(t).Header.Get("Authorization"); got != "Bearer "+token {
		t.Errorf("the server got %q", got)
	}
	b.want(b.do(with("https://a.web.test/", strings.NewReader(`key=`+text), "")), 200, "*")
	if got := b.servers.last(t).body; got != "key="+token {
		t.Errorf("the server got %q", got)
	}
	b.do(with("https://a.web.test/", io.MultiReader(strings.NewReader("key="+text)), "")) // of unknown length
	if got := b.servers.last(t).body; got != "key="+token {
		t.Errorf("the server got %q", got)
	}
	before := b.servers.count()
	for name, r := range map[string]*http.Request{
		"a header":                  with("https://b.web.test/", nil, "Bearer "+text),
		"a body":                    with("https://b.web.test/", strings.NewReader(text), ""),
		"a body of unknown length":  with("https://b.web.test/", io.MultiReader(strings.NewReader(text)), ""),
		"a plain request":           with("http://a.plain.test/", nil, text),
		"a body of unknown length ": with("http://a.plain.test/", io.MultiReader(strings.NewReader(text)), ""),
	} {
		a := b.do(r)
		b.want(a, 403, `"code":"placeholder_not_allowed"`)
		e := b.entry(r.URL.Host, func(e audit.Entry) bool { return e.Verdict == audit.Deny })
		if !strings.Contains(e.Reason, "placeholder") || len(e.Secrets) != 0 {
			t.Errorf("%s: the audit log says %+v", name, e)
		}
	}
	if b.servers.count() != before {
		t.Error("a server got one of them")
	}
	if e := b.entry("a.web.test", nil); len(e.Secrets) != 1 || e.Secrets[0] != "api" {
		t.Errorf("the audit log says %+v", e)
	}
	b.none(token)
}

// A policy may turn a request into one for which no rule offers the secret.
func TestPlaceholdersAreExchangedInRequestsOfPolicies(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	r.operatorsSecret("api", token, "a.web.test")
	offer := offering("a.web.test")
	offer.Paths = []string{"/open/**"}
	r.nodeRules(offer)
	b.push("elsewhere", rewriting("/closed/x"))
	b.push("there", rewriting("/open/y"))
	for policy, status := range map[string]int{"elsewhere": 403, "there": 200} {
		b.rules(through("a.web.test", policy, ""))
		req := newRequest(t, "GET", "https://a.web.test/open/x", nil)
		req.Header.Set("Authorization", b.Environment(b.sb.ID)["API_TOKEN"])
		b.want(b.do(req), status, "")
		if got := b.servers.count(); got > 0 && b.servers.last(t).URL.Path != "/open/y" {
			t.Errorf("%s: the secret went to %s", policy, b.servers.last(t).URL)
		}
	}
}

func TestRequestsEndedWithinTheBodyAreErrors(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	b.secret("api", token, "a.web.test")
	b.rules(offering("a.web.test"))
	r := newRequest(t, "POST", "https://a.web.test/", io.MultiReader(strings.NewReader("half"), iotest.ErrReader(errors.New("gone"))))
	r.ContentLength = 100
	if a, err := b.try(r); err == nil {
		t.Fatalf("got %d %q", a.status, a.body)
	}
	if e := b.entry("a.web.test", nil); e.Verdict != audit.Error || e.Reason != "the client ended the request" {
		t.Errorf("the audit log says %+v", e)
	}
	if b.servers.count() != 0 {
		t.Error("a server got something")
	}
}

func TestExplanationsListPlaceholdersAndMissingSecrets(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	b.push("bearer", bearer(1))
	b.secret("api", token, "a.web.test")
	b.rules(offering("a.web.test"), through("b.web.test", "bearer", "api"))
	for url, want := range map[string]string{
		"https://a.web.test/": `"placeholders":[{"name":"api"}]`, "https://b.web.test/": `"verdict":"deny"`,
	} {
		e, err := b.Explain(testkit.Context(t), b.sb.ID, "GET", url, nil)
		if err != nil {
			t.Fatal(err)
		}
		if text, _ := json.Marshal(e); !strings.Contains(string(text), want) {
			t.Errorf("%s: %s", url, text)
		}
	}
}

// A policy's own mistakes are returned to it; other errors end it.
func TestPoliciesReceiveErrorsOfTheirArguments(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	b.secret("api", token, "a.web.test")
	x := session.New(r.Secrets, "a.web.test", true)
	s := x.For(owner, map[string]string{"token": "api"})
	ref, err := s.Reference("token")
	if err != nil {
		t.Fatal(err)
	}
	encode := func(encoding int32, text string) error { _, err := s.Encode(encoding, text); return err }
	sum := func(name string, parts [][]byte) error { _, err := s.HMAC(name, "", parts); return err }
	sign := func(algorithm int32) error { _, err := s.Sign("token", algorithm, nil); return err }
	for name, c := range map[string]struct{ got, want error }{
		"an encoding":      {encode(9, "x"), secret.ErrBadArgument},
		"half a reference": {encode(0, ref[:len(ref)-1]), secret.ErrBadArgument},
		"too much":         {encode(0, strings.Repeat("x", 1<<20)), secret.ErrLimit},
		"no parts":         {sum("token", nil), secret.ErrBadArgument},
		"an algorithm":     {sign(9), secret.ErrBadArgument},
		"a name":           {sum("other", [][]byte{nil}), secret.ErrUnknown},
		"valid arguments":  {sum("token", [][]byte{nil}), nil},
	} {
		if !errors.Is(c.got, c.want) {
			t.Errorf("%s: %v", name, c.got)
		}
	}
	if err := sign(1); err == nil || errors.Is(err, secret.ErrBadArgument) || strings.Contains(err.Error(), token) {
		t.Errorf("a secret that is not a key: %v", err)
	}
	if used := x.Used(); len(used) != 1 || used[0] != (secret.ID{Owner: owner, Name: "api"}) {
		t.Errorf("used are %v", used)
	}
}
