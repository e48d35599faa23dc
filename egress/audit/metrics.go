package audit

import "github.com/prometheus/client_golang/prometheus"

// metrics of a Log. Names and labels are public: docs/metrics.md. No label holds
// what a sandbox chose.
type metrics struct {
	entries    *prometheus.CounterVec
	bytes      *prometheus.CounterVec
	seconds    *prometheus.HistogramVec
	suppressed prometheus.Counter
}

// From a refusal, which takes microseconds, to a model's answer of minutes.
var durationBuckets = []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300}

func newMetrics() *metrics {
	return &metrics{
		entries: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "doze_egress_total", Help: "Flows and requests of sandboxes that have ended, and names refused, by kind and verdict.",
		}, []string{"kind", "verdict"}),
		bytes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "doze_egress_bytes_total", Help: "Bytes of flows and requests that have ended, by kind and direction.",
		}, []string{"kind", "direction"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "doze_egress_duration_seconds", Help: "How long flows and requests took.", Buckets: durationBuckets,
		}, []string{"kind"}),
		suppressed: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "doze_egress_lines_suppressed_total", Help: "Entries without a line in the log, because their sandbox had too many.",
		}),
	}
}

func (m *metrics) count(e *Entry) {
	kind := string(e.Kind)
	m.entries.WithLabelValues(kind, string(e.Verdict)).Inc()
	if e.BytesOut > 0 {
		m.bytes.WithLabelValues(kind, "out").Add(float64(e.BytesOut))
	}
	if e.BytesIn > 0 {
		m.bytes.WithLabelValues(kind, "in").Add(float64(e.BytesIn))
	}
	if e.Kind != DNS {
		m.seconds.WithLabelValues(kind).Observe(e.Duration.seconds())
	}
}

// Describe implements prometheus.Collector.
func (l *Log) Describe(ch chan<- *prometheus.Desc) {
	l.metrics.entries.Describe(ch)
	l.metrics.bytes.Describe(ch)
	l.metrics.seconds.Describe(ch)
	l.metrics.suppressed.Describe(ch)
}

// Collect implements prometheus.Collector.
func (l *Log) Collect(ch chan<- prometheus.Metric) {
	l.metrics.entries.Collect(ch)
	l.metrics.bytes.Collect(ch)
	l.metrics.seconds.Collect(ch)
	l.metrics.suppressed.Collect(ch)
}

var _ prometheus.Collector = (*Log)(nil)
