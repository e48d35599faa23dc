package caddymodule

import (
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// description is what a collector announces of a metric.
type description struct{ help, labels string }

func descriptions(t *testing.T, collector prometheus.Collector) map[string]description {
	t.Helper()
	descs := make(chan *prometheus.Desc)
	go func() { collector.Describe(descs); close(descs) }()
	form := regexp.MustCompile(`^Desc\{fqName: ("[^"]*"), help: ("(?:[^"\\]|\\.)*"), .*, variableLabels: \{(.*)\}\}$`)
	described := map[string]description{}
	for desc := range descs {
		parts := form.FindStringSubmatch(desc.String())
		if parts == nil {
			t.Fatalf("unexpected form of a description: %s", desc)
		}
		name, err := strconv.Unquote(parts[1])
		if err != nil {
			t.Fatal(err)
		}
		help, err := strconv.Unquote(parts[2])
		if err != nil {
			t.Fatal(err)
		}
		labels := ""
		if parts[3] != "" {
			labels = "`" + strings.ReplaceAll(parts[3], ",", "`, `") + "`"
		}
		described[name] = description{help, labels}
	}
	return described
}

// TestReferenceOfMetrics generates the table of docs/reference/metrics.md. The metrics
// follow Prometheus' conventions.
func TestReferenceOfMetrics(t *testing.T) {
	s := newSite(t)
	sb, _ := s.sandbox(hello, sandbox.Port{})
	if _, err := s.Manager.Sleep(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	lease, err := s.Manager.Acquire(t.Context(), sb.ID, sandbox.CausePreview)
	if err != nil {
		t.Fatal(err)
	}
	lease.Release()
	if res := s.api("POST", "/api/v1/sandbox/"+string(sb.ID)+"/exec", `{"command":"true"}`); res.StatusCode != http.StatusOK {
		t.Fatalf("exec: %s: %s", res.Status, testkit.Body(t, res))
	}

	registry := prometheus.NewPedanticRegistry()
	described := map[string]description{}
	for _, collector := range s.node.Collectors() {
		if err := registry.Register(collector); err != nil {
			t.Fatal(err)
		}
		maps.Copy(described, descriptions(t, collector))
	}

	// A call is counted when it has ended, which its client does not wait for.
	types := map[string]string{}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the calls are counted", func() bool {
		if families, err = registry.Gather(); err != nil {
			t.Fatal(err)
		}
		for _, family := range families {
			types[family.GetName()] = strings.ToLower(family.GetType().String())
		}
		return types["doze_exec_duration_seconds"] != "" && types["doze_api_request_duration_seconds"] != ""
	})
	var table strings.Builder
	table.WriteString("| name | type | labels | |\n|---|---|---|---|\n")
	for _, name := range slices.Sorted(maps.Keys(described)) {
		// Counters with labels and without samples are not gathered; they end in _total.
		kind := types[name]
		if kind == "" && strings.HasSuffix(name, "_total") {
			kind = "counter"
		}
		if kind == "" {
			t.Errorf("%s has no sample, so that its type is unknown", name)
		}
		fmt.Fprintf(&table, "| `%s` | %s | %s | %s |\n", name, kind, described[name].labels, described[name].help)
	}
	testkit.Generated(t, "../docs/reference/metrics.md", "metrics", table.String())

	findings, err := promlint.NewWithMetricFamilies(families).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, finding := range findings {
		t.Errorf("%s: %s", finding.Metric, finding.Text)
	}
}
