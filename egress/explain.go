package egress

import (
	"context"
	"net/http"

	"github.com/doze-run/doze/egress/flow"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/explain"
	"github.com/doze-run/doze/egress/rule/ruleset"
	"github.com/doze-run/doze/runtime/sandbox"
)

// Explain returns the decision that egress would make on a request of the sandbox.
// Nothing is sent. Errors: *problem.InvalidError, or sandbox.ErrNotFound.
func (e *Egress) Explain(ctx context.Context, id sandbox.ID, method, url string, header http.Header) (explain.Explanation, error) {
	r, err := explain.Parse(method, url, header)
	if err != nil {
		return explain.Explanation{}, err
	}
	sb, ok := e.cfg.Sandboxes.ByID(id)
	if !ok {
		return explain.Explanation{}, sandbox.ErrNotFound
	}
	t, err := e.tableOf(ctx, sb)
	if err != nil {
		return explain.Explanation{}, err
	}
	return explain.Of(&t.Table, r, known{e, t}), nil
}

// ExplainProxy is Explain for a request that one of the owner's programs outside of
// sandboxes sends through the proxy. Errors: *problem.InvalidError, or
// sandbox.ErrClosed.
func (e *Egress) ExplainProxy(ctx context.Context, owner, method, url string, header http.Header) (explain.Explanation, error) {
	r, err := explain.Parse(method, url, header)
	if err != nil {
		return explain.Explanation{}, err
	}
	p, err := e.proxyClient(ctx, owner)
	if err != nil {
		return explain.Explanation{}, err
	}
	t := p.Table()
	explained := explain.Of(&t.Table, r, known{e, t})
	explained.Placeholders = nil // proxy clients have none
	return explained, nil
}

// tableOf returns the table that applies to a sandbox, or would if it were attached.
func (e *Egress) tableOf(ctx context.Context, sb sandbox.Sandbox) (*flow.Table, error) {
	if a := e.find(sb.ID); a != nil {
		return a.Table(), nil
	}
	done, err := e.changeWith(ctx, sb.Owner, e.sets.Get(ruleset.Scope{Sandbox: sb.ID}).Rules)
	if err != nil {
		return nil, err
	}
	defer done()
	if !e.exists(sb.ID) { // no later call would release its rules
		return nil, sandbox.ErrNotFound
	}
	if err := e.loadLayer(ctx, ruleset.Scope{Sandbox: sb.ID}, sb.Owner); err != nil {
		return nil, err
	}
	c := e.carrier.NewClient(sb.ID, sb.Owner)
	e.build(c)
	return c.Table(), nil
}

// known is the state besides the rules that decides a client's requests. It implements
// explain.Known.
type known struct {
	e     *Egress
	table *flow.Table
}

func (k known) Policy(source rule.Source, u rule.Use) (digest string, err error) {
	l := k.table.LayerOf(source)
	m, err := k.e.moduleOf(l.Owner, u.Policy)
	if err != nil {
		return "", err
	}
	return m.digest, l.Unready[flow.UseOf(u)]
}

func (k known) Secret(source rule.Source, name, host string) error {
	_, err := k.e.Secrets.Use(k.table.LayerOf(source).Owner, name, host)
	return err
}

func (k known) ECH() bool { return k.e.settings.Load().AllowECH }
