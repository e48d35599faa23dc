package api

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/egress/egresstest"
	"github.com/doze-run/doze/egress/policy/policylog"
	"github.com/doze-run/doze/problem"
)

// writes records lines of an owner's policy.
func writes(s *server, owner string, texts ...string) {
	for _, text := range texts {
		level := policylog.Info
		if strings.HasPrefix(text, "bad") {
			level = policylog.Warn
		}
		s.egress.PolicyLogs.Add(policylog.Policy{Owner: owner, Name: egresstest.BuiltIn}, policylog.Line{Level: level, Text: text, Flow: "f1", Sandbox: "k3f9x2m7q1az"})
	}
}

func texts(list types.PolicyLog) string {
	var all []string
	for _, l := range list.Lines {
		all = append(all, l.Text)
	}
	return strings.Join(all, ",")
}

func TestLinesOfAPolicyArePagedAndFiltered(t *testing.T) {
	s := newServer(t, Limits{})
	writes(s, testOwner, "one", "bad two", "three")
	writes(s, "another", "four")
	for query, want := range map[string]string{"": "one,bad two,three", "?level=warn": "bad two", "?level=error": "", "?limit=2": "one,bad two"} {
		if got := must[types.PolicyLog](s, http.StatusOK, "GET", "/policies/bearer/logs"+query, nil); texts(got) != want {
			t.Errorf("%s: got %s, want %s", query, texts(got), want)
		}
	}
	first := must[types.PolicyLog](s, http.StatusOK, "GET", "/policies/bearer/logs?limit=2", nil)
	if second := must[types.PolicyLog](s, http.StatusOK, "GET", "/policies/bearer/logs?limit=2&cursor="+first.NextCursor, nil); texts(second) != "three" || second.NextCursor != "" {
		t.Errorf("the second page is %+v", second)
	}
	if got := s.do("GET", "/policies/bearer/logs?level=error", nil); strings.TrimSpace(string(got.body)) != `{"lines":[]}` {
		t.Errorf("got %s", got.body)
	}
	for _, query := range []string{"level=loud", "limit=0", "limit=1001", "cursor=-1"} {
		s.refused(problem.RequestInvalid, "GET", "/policies/bearer/logs?"+query, nil)
	}
	s.refused(problem.RequestInvalid, "GET", "/policies/bearer/logs", nil, "Accept", eventStreamType, "Last-Event-ID", "x")
	s.refused(problem.PolicyNotFound, "GET", "/policies/nothing/logs", nil)
}

func TestLinesOfAPolicyAreFollowedAndGoOnAfterABreak(t *testing.T) {
	s := newServer(t, Limits{})
	writes(s, testOwner, "one", "bad two")
	stream := s.open("GET", "/policies/bearer/logs", nil, "Accept", eventStreamType)
	first := stream.expect("line")
	if l := parse[types.PolicyLine](t, first); l.Text != "one" || l.Flow != "f1" || first.id != fmt.Sprint(l.Seq) {
		t.Errorf("got %+v", first)
	}
	stream.expect("line")
	writes(s, testOwner, "three")
	if l := parse[types.PolicyLine](t, stream.expect("line")); l.Text != "three" {
		t.Errorf("got %+v", l)
	}
	stream.close()
	again := s.open("GET", "/policies/bearer/logs?level=warn", nil, "Accept", eventStreamType, "Last-Event-ID", first.id)
	if l := parse[types.PolicyLine](t, again.expect("line")); l.Text != "bad two" {
		t.Errorf("got %+v", l)
	}
	s.egress.PolicyLogs.Forget(policylog.Policy{Owner: testOwner, Name: egresstest.BuiltIn}) // as when it is deleted
	again.expectEnd()
}

func TestFollowersOfPoliciesAreBounded(t *testing.T) {
	s := newServer(t, Limits{MaxStreams: 1})
	stream := s.open("GET", "/policies/bearer/logs", nil, "Accept", eventStreamType)
	s.refused(problem.StreamLimitExceeded, "GET", "/policies/bearer/logs", nil, "Accept", eventStreamType)
	stream.close()
}
