package flow

import (
	"net/http/httptest"
	"path/filepath"
	"testing"

	. "github.com/doze-run/doze/egress/internal/wat"
	"github.com/doze-run/doze/egress/policy"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/secret/seal"
	"github.com/doze-run/doze/egress/secret/session"
	"github.com/doze-run/doze/egress/secret/vault"
	"github.com/doze-run/doze/runtime/store/storetest"
)

const (
	host     = "api.example.com"
	operator = "operator"
	owner    = "ann"
)

// newLayer returns a layer that sends requests to host through a policy.
func newLayer(t *testing.T, owner string, source rule.Source) *Layer {
	t.Helper()
	use := rule.Use{Policy: "bearer"}
	rules, err := rule.Compile(source, []rule.Rule{{Name: "through", Hosts: []string{host}, Action: rule.Policies, Policies: []rule.Use{use}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	h, err := policy.NewHost(policy.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Close() })
	goOn := Code(I64Const(1), End)
	m, err := h.Compile(t.Context(), use.Policy, Handler(nil, "", goOn, Code(End)).Binary())
	if err != nil {
		t.Fatal(err)
	}
	defer m.Release()
	p, err := m.Configure(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	return &Layer{Layer: rules, Owner: owner, Ready: map[Use]*policy.Policy{UseOf(use): p}}
}

func newSession(t *testing.T) *session.Session {
	t.Helper()
	key, err := seal.Open(filepath.Join(t.TempDir(), "seal.key"))
	if err != nil {
		t.Fatal(err)
	}
	v, err := vault.Open(t.Context(), storetest.New(t), key)
	if err != nil {
		t.Fatal(err)
	}
	return session.New(v, host, true)
}

// A client uses a share of the instances of the node's policies, and all of its owner's.
func TestPoliciesOfAnotherOwnerAreShared(t *testing.T) {
	table := &Table{Policies: [3]*Layer{newLayer(t, operator, rule.Node), newLayer(t, owner, rule.Owner)}}
	table.Default = rule.AllowPublic
	for i, l := range table.Policies {
		if l != nil {
			table.Layers[i] = l.Layer
		}
	}
	c := &Client{ID: "k3f9x2m7q1az", Owner: owner}
	c.SetTable(table)
	q := &request{Client: c, to: destination{host: host, port: httpsPort, tls: true}, secrets: newSession(t)}
	steps, err := q.decide(httptest.NewRequest("GET", "https://"+host+"/", nil))
	defer release(steps)
	if err != nil || len(steps) != 2 || steps[0].Sharer != owner || steps[1].Sharer != "" {
		t.Errorf("got %+v, %v", steps, err)
	}
}

// A request retains each policy of its chain once, and none if one of them has ended.
func TestDecideRetainsEachPolicyOnce(t *testing.T) {
	l := newLayer(t, owner, rule.Owner)
	table := &Table{Policies: [3]*Layer{1: l}}
	table.Default, table.Layers[1] = rule.AllowPublic, l.Layer
	c := &Client{ID: "k3f9x2m7q1az", Owner: owner}
	c.SetTable(table)
	q := &request{Client: c, to: destination{host: host, port: httpsPort, tls: true}, secrets: newSession(t)}
	steps, err := q.decide(httptest.NewRequest("GET", "https://"+host+"/", nil))
	if err != nil || len(steps) != 1 {
		t.Fatalf("got %+v, %v", steps, err)
	}
	p := steps[0].Policy
	p.Release() // of the layer
	if p.Ended() {
		t.Error("the policy ended while the request retains it")
	}
	release(steps)
	if !p.Ended() {
		t.Error("the request retained the policy more than once")
	}
	if steps, err := q.steps(); err != errReplaced || steps != nil {
		t.Errorf("of a policy that ended: %+v, %v", steps, err)
	}
}
