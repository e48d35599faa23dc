package api

import (
	"net/http"
	"testing"
	"time"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
)

func TestFeedHasEventsOfAllSandboxes(t *testing.T) {
	s := newServer(t, Limits{})
	one := s.create("one")
	s.create("two")
	s.sleep(one)
	page := must[types.FeedPage](s, http.StatusOK, "GET", "/events", nil)
	var got []string
	for _, ev := range page.Events {
		got = append(got, string(ev.Type)+" "+ev.SandboxName)
	}
	if len(got) != 3 || got[0] != "created one" || got[1] != "created two" || got[2] != "slept one" {
		t.Fatalf("got %q", got)
	}
	first := must[types.FeedPage](s, http.StatusOK, "GET", "/events?limit=1", nil)
	if len(first.Events) != 1 || first.NextCursor != first.Events[0].Cursor {
		t.Fatalf("the first page is %+v", first)
	}
	rest := must[types.FeedPage](s, http.StatusOK, "GET", "/events?cursor="+first.NextCursor, nil)
	if len(rest.Events) != 2 || rest.Gap || rest.NextCursor != "" {
		t.Errorf("the second page is %+v", rest)
	}

	stream := s.open("GET", "/events", nil, "Accept", eventStreamType, "Last-Event-ID", page.Events[1].Cursor)
	if ev := stream.expect("slept"); ev.id != page.Events[2].Cursor {
		t.Errorf("the event has the id %q, want its cursor %q", ev.id, page.Events[2].Cursor)
	}
	must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/two/hold", `{"duration":"1h"}`)
	stream.expect("held")
	if sb := must[types.Sandbox](s, http.StatusOK, "GET", "/sandbox/one", nil); sb.State != types.StateAsleep {
		t.Errorf("reading events woke it: %s", sb.State)
	}
}

func TestFeedReportsMissedEvents(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("one")
	if page := must[types.FeedPage](s, http.StatusOK, "GET", "/events?cursor=otherrun-7", nil); !page.Gap || len(page.Events) != 1 {
		t.Errorf("a cursor of an earlier run of the node: %+v, want a gap and all that is kept", page)
	}
	stream := s.open("GET", "/events?cursor=otherrun-7", nil, "Accept", eventStreamType)
	stream.expect("gap")
	stream.expect("created")
	for location, p := range map[string]problem.Problem{
		"query.cursor":         s.refused(problem.RequestInvalid, "GET", "/events?cursor=x", nil),
		"header.Last-Event-ID": s.refused(problem.RequestInvalid, "GET", "/events", nil, "Last-Event-ID", "x"),
	} {
		if len(p.Errors) != 1 || p.Errors[0].Location != location {
			t.Errorf("the fault of %s is %+v", location, p)
		}
	}
	for _, query := range []string{"cursor=x", "cursor=-1", "limit=0", "limit=1001", "since=1"} {
		s.refused(problem.RequestInvalid, "GET", "/events?"+query, nil)
	}
}

func TestUsageIsShownWithoutWaking(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("one")
	s.sleep(id)
	sb := must[types.Sandbox](s, http.StatusOK, "GET", "/sandbox/one", nil)
	if sb.Usage == nil || sb.Usage.MemoryBytes <= 0 || sb.State != types.StateAsleep {
		t.Errorf("asleep: usage %+v, state %s", sb.Usage, sb.State)
	}
	if list := must[types.SandboxList](s, http.StatusOK, "GET", "/sandbox", nil); list.Sandboxes[0].Usage != nil {
		t.Errorf("a list has usage %+v although it was not asked for", list.Sandboxes[0].Usage)
	}
	if list := must[types.SandboxList](s, http.StatusOK, "GET", "/sandbox?usage=true", nil); list.Sandboxes[0].Usage == nil {
		t.Error("a list has no usage although it was asked for")
	}
}

func TestTTLIsSetChangedAndRemoved(t *testing.T) {
	s := newServer(t, Limits{})
	made := must[types.Sandbox](s, http.StatusCreated, "POST", "/sandbox", `{"name":"one","ttl":"2h"}`)
	if got := made.ExpiresAt.Sub(made.CreatedAt); made.TTL != types.Duration(2*time.Hour) || got != 2*time.Hour {
		t.Errorf("ttl %s, expires %s after its creation", time.Duration(made.TTL), got)
	}
	if sb := must[types.Sandbox](s, http.StatusOK, "PATCH", "/sandbox/one", `{"ttl":"0s"}`); sb.TTL != 0 || !sb.ExpiresAt.IsZero() {
		t.Errorf("without a limit: ttl %s, expires at %s", time.Duration(sb.TTL), sb.ExpiresAt)
	}
	s.refused(problem.RequestInvalid, "PATCH", "/sandbox/one", `{"ttl":"1ms"}`)
}
