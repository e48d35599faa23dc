package audit

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

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

func newMetrics(f promauto.Factory) *metrics {
	return &metrics{
		requests:    newTraffic(f, "request", "requests of sandboxes that were intercepted and have ended"),
		connections: newTraffic(f, "connection", "connections of sandboxes that passed through and have ended"),
		dnsRefusals: f.NewCounter(prometheus.CounterOpts{
			Name: "doze_egress_dns_refusals_total", Help: "DNS queries of sandboxes that were refused.",
		}),
		suppressed: f.NewCounter(prometheus.CounterOpts{
			Name: "doze_egress_log_lines_suppressed_total", Help: "Entries omitted from the log because their sandbox exceeded its rate.",
		}),
	}
}

func newTraffic(f promauto.Factory, subject, what string) traffic {
	return traffic{
		total: f.NewCounterVec(prometheus.CounterOpts{
			Name: "doze_egress_" + subject + "s_total", Help: "Number of " + what + ", by verdict.",
		}, []string{"verdict"}),
		bytes: f.NewCounterVec(prometheus.CounterOpts{
			Name: "doze_egress_" + subject + "_bytes_total", Help: "Bytes of " + what + ", by direction.",
		}, []string{"direction"}),
		seconds: f.NewHistogram(prometheus.HistogramOpts{
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
