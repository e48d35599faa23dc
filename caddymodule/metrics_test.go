package caddymodule

import (
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// metric is what docs/reference/metrics.md says of one.
type metric struct {
	Type   string
	Labels []string
}

// documentedMetrics reads the table of docs/reference/metrics.md.
func documentedMetrics(t *testing.T) map[string]metric {
	t.Helper()
	content, err := os.ReadFile("../docs/reference/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	table := map[string]metric{}
	row := regexp.MustCompile("(?m)^\\| `(doze_[a-z_]+)` \\| ([a-z]+) \\|([^|]*)\\|")
	for _, cells := range row.FindAllStringSubmatch(string(content), -1) {
		m := metric{Type: cells[2]}
		values := regexp.MustCompile(`\([^)]*\)`)
		for _, label := range regexp.MustCompile("`([a-z_]+)`").FindAllStringSubmatch(values.ReplaceAllString(cells[3], ""), -1) {
			m.Labels = append(m.Labels, label[1])
		}
		slices.Sort(m.Labels)
		table[cells[1]] = m
	}
	if len(table) < 15 {
		t.Fatalf("docs/reference/metrics.md has %d metrics; its table is not read", len(table))
	}
	return table
}

// describedMetrics are the names and labels that a collector announces.
func describedMetrics(t *testing.T, collector prometheus.Collector) map[string][]string {
	t.Helper()
	descs := make(chan *prometheus.Desc)
	go func() { collector.Describe(descs); close(descs) }()
	form := regexp.MustCompile(`^Desc\{fqName: ("[^"]*"), .*, variableLabels: \{(.*)\}\}$`)
	described := map[string][]string{}
	for desc := range descs {
		parts := form.FindStringSubmatch(desc.String())
		if parts == nil {
			t.Fatalf("unexpected form of a description: %s", desc)
		}
		name, err := strconv.Unquote(parts[1])
		if err != nil {
			t.Fatal(err)
		}
		labels := strings.FieldsFunc(parts[2], func(r rune) bool { return r == ',' })
		slices.Sort(labels)
		described[name] = labels
	}
	return described
}

// The table of docs/reference/metrics.md is the node's metrics with their types and labels,
// and these follow Prometheus' conventions.
func TestMetricsAreDocumented(t *testing.T) {
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

	documented := documentedMetrics(t)
	registry := prometheus.NewPedanticRegistry()
	described := map[string][]string{}
	for _, collector := range s.node.Collectors() {
		if err := registry.Register(collector); err != nil {
			t.Fatal(err)
		}
		for name, labels := range describedMetrics(t, collector) {
			described[name] = labels
		}
	}
	labels := map[string][]string{}
	for name, m := range documented {
		labels[name] = append([]string{}, m.Labels...)
	}
	if diff := cmp.Diff(described, labels); diff != "" {
		t.Errorf("docs/reference/metrics.md differs from the node's metrics and labels:\n%s", diff)
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
	for name, m := range documented {
		// Counters with labels and without samples are not gathered; they end in _total.
		got := types[name]
		if got == "" && strings.HasSuffix(name, "_total") {
			got = "counter"
		}
		if got != m.Type {
			t.Errorf("%s is a %q, docs/reference/metrics.md says %s", name, got, m.Type)
		}
	}
	findings, err := promlint.NewWithMetricFamilies(families).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, finding := range findings {
		t.Errorf("%s: %s", finding.Metric, finding.Text)
	}
}
