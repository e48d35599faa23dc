package sandbox_test

import (
	"errors"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
)

// samples returns the value of each sandbox's sample of a metric.
func samples(t *testing.T, m *sandbox.Manager, metric string) map[string]float64 {
	t.Helper()
	registry := prometheus.NewRegistry()
	registry.MustRegister(m)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]float64{}
	for _, family := range families {
		if family.GetName() != metric {
			continue
		}
		for _, sample := range family.GetMetric() {
			for _, label := range sample.GetLabel() {
				if label.GetName() == "sandbox_name" {
					values[label.GetValue()] = sample.GetCounter().GetValue() + sample.GetGauge().GetValue()
				}
			}
		}
	}
	return values
}

// A counter that is 0 for once looks like a reset, and all that was counted
// before like the increase of a moment.
func TestUsageThatCannotBeReadHasNoSample(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	a := create(t, n.Manager, "a")
	create(t, n.Manager, "b")
	const cpu, memory = "doze_sandbox_cpu_seconds_total", "doze_sandbox_memory_bytes"
	if got := len(samples(t, n.Manager, cpu)); got != 2 {
		t.Fatalf("%d samples, want 2", got)
	}
	n.Freezer.FailUsage(a.ID, errors.New("out of descriptors"))
	for _, metric := range []string{cpu, memory} {
		got := samples(t, n.Manager, metric)
		if _, ok := got["a"]; ok || len(got) != 1 {
			t.Errorf("%s: %v, want b alone", metric, got)
		}
	}
}
