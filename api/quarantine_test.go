package api

import (
	"net/http"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
)

func TestAContainerThatCannotBeAdoptedIsNamedByThePath(t *testing.T) {
	p := problemOf(t.Context(), &sandbox.InvalidError{Field: "id", Reason: "it has no container", Want: "it can only be removed"})
	if len(p.Errors) != 1 || p.Errors[0].Location != "path.id" {
		t.Errorf("got %+v", p.Errors)
	}
}

func TestContainersInQuarantineAreListedAdoptedAndRemoved(t *testing.T) {
	node := sandboxtest.Open(t, nil)
	var ids []sandbox.ID
	for _, req := range []sandbox.CreateRequest{{Owner: testOwner, Name: "a"}, {Owner: testOwner, Name: "b"}, {Owner: "another", Name: "c"}} {
		sb, _, err := node.Manager.Create(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, sb.ID)
	}
	node.Crash(t, func() {
		for _, id := range ids {
			if err := node.Store.DeleteSandbox(t.Context(), id); err != nil {
				t.Fatal(err)
			}
		}
	})
	s := newServerOn(t, node, Limits{})
	s.http.Start()
	quarantined := func() map[sandbox.ID]string {
		found := map[sandbox.ID]string{}
		for _, q := range must[types.Node](s, http.StatusOK, "GET", "/node", nil).Quarantined {
			found[sandbox.ID(q.ID)] = q.Name
		}
		return found
	}
	if got := quarantined(); len(got) != 2 || got[ids[0]] != "a" || got[ids[1]] != "b" {
		t.Errorf("the owner sees %v", got)
	}
	at := func(id sandbox.ID) string { return "/node/quarantine/" + string(id) }
	s.refused(problem.QuarantineNotFound, "POST", at(ids[2])+"/adopt", map[string]any{})
	s.refused(problem.QuarantineNotFound, "DELETE", at(ids[2]), nil)
	s.refused(problem.NameInvalid, "POST", at(ids[0])+"/adopt", map[string]any{"name": "No Name"})
	if got := must[types.Sandbox](s, http.StatusOK, "POST", at(ids[0])+"/adopt", map[string]any{}); got.ID != string(ids[0]) || got.Name != "a" || got.State != types.StateStopped {
		t.Errorf("adopted %+v", got)
	}
	s.refused(problem.SandboxConflict, "POST", at(ids[1])+"/adopt", map[string]any{"name": "a"})
	if got := s.do("DELETE", at(ids[1]), nil); got.status != http.StatusNoContent {
		t.Errorf("remove: %d %s", got.status, got.body)
	}
	if got := quarantined(); len(got) != 0 {
		t.Errorf("left in quarantine: %v", got)
	}
}
