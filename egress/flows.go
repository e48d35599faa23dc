package egress

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/runtime/sandbox"
)

// Flows returns the audit entries of a sandbox's traffic, sent or refused, oldest first.
func (e *Egress) Flows(id sandbox.ID, f audit.Filter) []audit.Entry {
	return e.audit.Entries(string(id), f)
}

// FollowFlows returns the entries of Flows and then new ones, until the sandbox is
// forgotten, the node closes or stop is called.
func (e *Egress) FollowFlows(id sandbox.ID, f audit.Filter) (flows <-chan audit.Entry, stop func()) {
	return e.audit.Follow(string(id), f)
}

// Describe implements prometheus.Collector.
func (e *Egress) Describe(ch chan<- *prometheus.Desc) { e.audit.Describe(ch) }

// Collect implements prometheus.Collector.
func (e *Egress) Collect(ch chan<- prometheus.Metric) { e.audit.Collect(ch) }
