package audit

import "github.com/prometheus/client_golang/prometheus"

// metrics are the metrics of a Log. Names and labels are public:
// docs/reference/metrics.md. No label has a value that a sandbox chose.
type metrics struct {
	requests    traffic
	connections traffic
	dnsRefusals prometheus.Counter
	suppressed  prometheus.Counter
}

// traffic counts entries of one kind.
type traffic struct {
	total   *prometheus.CounterVec
	bytes   *prometheus.CounterVec
	seconds prometheus.Histogram
}

// From a refusal, which takes microseconds, to a model's response of minutes.
var durationBuckets = []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300}

func newMetrics() *metrics {
	return &metrics{
		requests:    newTraffic("request", "requests of sandboxes that were intercepted and have ended"),
		connections: newTraffic("connection", "connections of sandboxes that passed through and have ended"),
		dnsRefusals: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "doze_egress_dns_refusals_total", Help: "DNS queries of sandboxes that were refused.",
		}),
		suppressed: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "doze_egress_log_lines_suppressed_total", Help: "Entries omitted from the log because their sandbox exceeded its rate.",
		}),
	}
}

func newTraffic(subject, what string) traffic {
	return traffic{
		total: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "doze_egress_" + subject + "s_total", Help: "Number of " + what + ", by verdict.",
		}, []string{"verdict"}),
		bytes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "doze_egress_" + subject + "_bytes_total", Help: "Bytes of " + what + ", by direction.",
		}, []string{"direction"}),
		seconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "doze_egress_" + subject + "_duration_seconds", Help: "Duration of " + what + ".", Buckets: durationBuckets,
		}),
	}
}

func (t traffic) count(e *Entry) {
	t.total.WithLabelValues(string(e.Verdict)).Inc()
	if e.BytesOut > 0 {
		t.bytes.WithLabelValues("out").Add(float64(e.BytesOut))
	}
	if e.BytesIn > 0 {
		t.bytes.WithLabelValues("in").Add(float64(e.BytesIn))
	}
	t.seconds.Observe(e.Duration.seconds())
}

func (m *metrics) count(e *Entry) {
	switch e.Kind {
	case DNS:
		m.dnsRefusals.Inc()
	case Connection:
		m.connections.count(e)
	case Request:
		m.requests.count(e)
	}
}

func (m *metrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{
		m.requests.total, m.requests.bytes, m.requests.seconds,
		m.connections.total, m.connections.bytes, m.connections.seconds,
		m.dnsRefusals, m.suppressed,
	}
}

// Describe implements prometheus.Collector.
func (l *Log) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range l.metrics.collectors() {
		c.Describe(ch)
	}
}

// Collect implements prometheus.Collector.
func (l *Log) Collect(ch chan<- prometheus.Metric) {
	for _, c := range l.metrics.collectors() {
		c.Collect(ch)
	}
}

var _ prometheus.Collector = (*Log)(nil)
