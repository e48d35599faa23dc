package api

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/secret/vault"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

// record keeps flows of a sandbox, one to each host, refused where it is evil.
func record(s *server, id string, hosts ...string) {
	for _, host := range hosts {
		e := audit.Entry{Sandbox: id, Kind: audit.Request, Host: host, Port: 443, Method: "GET", Path: "/", Verdict: audit.Allow}
		if strings.HasPrefix(host, "evil") {
			e.Verdict, e.Kind = audit.Deny, audit.DNS
		}
		s.egress.Flows.Record(e)
	}
}

func flowHosts(list types.FlowList) string {
	var hosts []string
	for _, e := range list.Flows {
		hosts = append(hosts, e.Host)
	}
	return strings.Join(hosts, " ")
}

func TestFlowsArePagedAndFiltered(t *testing.T) {
	s := newServer(t, Limits{})
	id, other := s.create("box"), s.create("other")
	record(s, id, "a.example.com", "evil.example", "b.example.com", "example.com")
	record(s, other, "other.example")
	for query, want := range map[string]string{
		"": "a.example.com evil.example b.example.com example.com", "?verdict=deny": "evil.example", "?kind=request": "a.example.com b.example.com example.com",
		"?host=*.example.com": "a.example.com b.example.com", "?host=example.com": "example.com", "?verdict=error": "", "?limit=2": "a.example.com evil.example",
	} {
		if got := must[types.FlowList](s, http.StatusOK, "GET", "/sandbox/box/egress/flows"+query, nil); flowHosts(got) != want {
			t.Errorf("%s: got %s, want %s", query, flowHosts(got), want)
		}
	}
	var paged []string
	for cursor := ""; ; {
		page := must[types.FlowList](s, http.StatusOK, "GET", fmt.Sprintf("/sandbox/box/egress/flows?limit=3&cursor=%s", cursor), nil)
		paged = append(paged, flowHosts(page))
		if cursor = page.NextCursor; cursor == "" {
			break
		}
	}
	if got := strings.Join(paged, "|"); got != "a.example.com evil.example b.example.com|example.com" {
		t.Errorf("pages are %s", got)
	}
	if got := s.do("GET", "/sandbox/other/egress/flows?verdict=deny", nil); strings.TrimSpace(string(got.body)) != `{"flows":[]}` {
		t.Errorf("got %s", got.body)
	}
	for _, query := range []string{"verdict=maybe", "kind=tcp", "limit=0", "limit=1001", "cursor=-1", "since=1", "host="} {
		s.refused(problem.RequestInvalid, "GET", "/sandbox/box/egress/flows?"+query, nil)
	}
	s.refused(problem.RequestInvalid, "GET", "/sandbox/box/egress/flows", nil, "Accept", eventStreamType, "Last-Event-ID", "x")
	s.refused(problem.SandboxNotFound, "GET", "/sandbox/absent/egress/flows", nil)
}

func TestFlowsAreFollowedAndGoOnAfterABreak(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	s.sleep(id)
	record(s, id, "a.example", "evil.example", "b.example")
	stream := s.open("GET", "/sandbox/box/egress/flows?kind=request", nil, "Accept", eventStreamType)
	first := stream.expect("request")
	if e := parse[types.Flow](t, first); e.Host != "a.example" || first.id != fmt.Sprint(e.Seq) {
		t.Errorf("got %+v", first)
	}
	if e := parse[types.Flow](t, stream.expect("request")); e.Host != "b.example" {
		t.Errorf("got %+v", e)
	}
	record(s, id, "evil.example", "c.example")
	if e := parse[types.Flow](t, stream.expect("request")); e.Host != "c.example" {
		t.Errorf("got %+v", e)
	}
	stream.close()

	again := s.open("GET", "/sandbox/box/egress/flows?cursor=0", nil, "Accept", eventStreamType, "Last-Event-ID", first.id)
	if e := parse[types.Flow](t, again.expect("dns")); e.Host != "evil.example" {
		t.Errorf("got %+v", e)
	}
	again.expect("request")
	again.expect("dns")
	again.expect("request")
	s.egress.Flows.Forget(id) // as when it is destroyed
	again.expectEnd()
	if s.state(id) != sandbox.StateAsleep {
		t.Error("reading woke it")
	}
}

func TestFollowersOfFlowsAreBoundedAndGetAProblemAtShutdown(t *testing.T) {
	s := newUnstartedServer(t, Limits{MaxStreams: 1})
	ctx, closing := context.WithCancelCause(context.Background())
	inner := s.http.Config.Handler
	s.http.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rctx, cancel := context.WithCancelCause(r.Context())
		defer cancel(nil)
		defer context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })()
		inner.ServeHTTP(w, r.WithContext(rctx))
	})
	s.http.Start()
	id := s.create("box")
	record(s, id, "a.example")
	stream := s.open("GET", "/sandbox/box/egress/flows", nil, "Accept", eventStreamType)
	stream.expect("request")
	s.refused(problem.StreamLimitExceeded, "GET", "/sandbox/box/egress/flows", nil, "Accept", eventStreamType)
	closing(sandbox.ErrClosed)
	if p := parse[problem.Problem](t, stream.expect("problem")); p.Code != problem.NodeUnavailable {
		t.Errorf("got %+v", p)
	}
	stream.expectEnd()
}

func TestExplanationsNameTheRule(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	s.sleep(id)
	must[types.RuleSet](s, http.StatusOK, "PUT", "/egress/rules",
		`{"rules":[{"name":"gh","hosts":["api.github.com"],"headers":{"x-a":"1"},"policies":[{"name":"bearer","secrets":{"token":"github"}}]}]}`)
	must[types.RuleSet](s, http.StatusOK, "PUT", "/sandbox/box/egress/rules", `{"rules":[{"name":"ro","hosts":["api.github.com"],"methods":["PUT"],"action":"deny","reason":"read only"}]}`)
	ask := func(body string) types.Explanation {
		return must[types.Explanation](s, http.StatusOK, "POST", "/sandbox/box/egress/explain", body)
	}
	if e := ask(`{"url":"https://metadata.internal/"}`); e.Verdict != types.VerdictDeny || e.Rule != "node/no-metadata" || e.Stage != types.StageDNS {
		t.Errorf("got %+v", e)
	}
	if e := ask(`{"method":"PUT","url":"https://api.github.com/user"}`); e.Rule != "sandbox/ro" || e.Reason != "read only" {
		t.Errorf("got %+v", e)
	}
	withHeader := `{"url":"https://api.github.com/user","headers":{"X-A":"1"}}`
	if e := ask(withHeader); e.Verdict != types.VerdictDeny || len(e.Secrets) != 1 || !strings.Contains(e.Secrets[0].Error, vault.ErrUnknown.Error()) {
		t.Errorf("without the secret: %+v", e)
	}
	if _, err := s.egress.Secrets.Put(t.Context(), testOwner, "github", []byte(canary), []string{"api.github.com"}); err != nil {
		t.Fatal(err)
	}
	if e := ask(withHeader); e.Verdict != types.VerdictAllow || e.Rule != "owner/gh" || e.Policies[0].Name != "bearer" || e.Secrets[0].Error != "" {
		t.Errorf("with it: %+v", e)
	}
	if e := ask(`{"url":"https://api.github.com/user"}`); e.Rule != "default" {
		t.Errorf("without the header: %+v", e)
	}
	for body, where := range map[string]string{
		`{"url":"example.com"}`: "body.url", `{"url":"ftp://example.com/"}`: "body.url", `{"method":"G T","url":"https://example.com/"}`: "body.method", `{}`: "body.url",
	} {
		if p := s.refused(problem.RequestInvalid, "POST", "/sandbox/box/egress/explain", body); p.Errors[0].Location != where {
			t.Errorf("%s: %+v", body, p)
		}
	}
	s.refused(problem.SandboxNotFound, "POST", "/sandbox/absent/egress/explain", withHeader)
	if s.state(id) != sandbox.StateAsleep {
		t.Error("explaining woke it")
	}
}

func TestFlowsFromOutsideOfSandboxesAreTheOwners(t *testing.T) {
	s := newServer(t, Limits{})
	record(s, s.create("box"), "sandbox.example")
	record(s, "proxy/"+testOwner, "a.example.com", "evil.example")
	record(s, "proxy/another", "another.example")
	if got := must[types.FlowList](s, http.StatusOK, "GET", "/egress/proxy/flows", nil); flowHosts(got) != "a.example.com evil.example" {
		t.Errorf("got %s", flowHosts(got))
	}
	if got := must[types.FlowList](s, http.StatusOK, "GET", "/egress/proxy/flows?verdict=deny&limit=1", nil); flowHosts(got) != "evil.example" {
		t.Errorf("got %s", flowHosts(got))
	}
}

func TestARequestFromOutsideOfSandboxesIsExplainedByTheOwnersRules(t *testing.T) {
	s := newServer(t, Limits{})
	must[types.RuleSet](s, http.StatusOK, "PUT", "/egress/rules", `{"rules":[{"name":"no","hosts":["a.example"],"action":"deny"}]}`)
	e := must[types.Explanation](s, http.StatusOK, "POST", "/egress/proxy/explain", `{"url":"https://a.example/x"}`)
	if e.Rule != "owner/no" || e.Verdict != types.VerdictDeny {
		t.Errorf("got %+v", e)
	}
	s.refused(problem.RequestInvalid, "POST", "/egress/proxy/explain", `{"url":"a.example"}`)
}
