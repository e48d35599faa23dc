package egress

import (
	"sync/atomic"

	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/policy"
	"github.com/doze-run/doze/runtime/sandbox"
)

// sender is whose connections and requests are decided on: a sandbox, or all that
// an owner has outside of sandboxes.
type sender struct {
	e     *Egress
	id    sandbox.ID // empty outside of sandboxes
	owner string
	table atomic.Pointer[table]
	load  load
}

// name is what the sender is called where sandboxes are by their ids: in the audit
// log, before policies, among kept connections.
func (m *sender) name() string {
	if m.id == "" {
		return outsideName(m.owner)
	}
	return string(m.id)
}

// outsideName has a slash, which ids of sandboxes have not.
func outsideName(owner string) string { return "proxy/" + owner }

// identity is what policies are told of the sender.
func (m *sender) identity() policy.Sandbox {
	if m.id == "" {
		return policy.Sandbox{ID: m.name(), Owner: m.owner}
	}
	sb, _ := m.e.cfg.Sandboxes.ByID(m.id) // of one that is being destroyed name and labels may be gone
	return policy.Sandbox{ID: string(m.id), Name: sb.Name, Owner: m.owner, Labels: sb.Labels}
}

// record completes an entry and writes it.
func (m *sender) record(entry audit.Entry) {
	entry.Sandbox = m.name()
	m.e.audit.Record(entry)
}
