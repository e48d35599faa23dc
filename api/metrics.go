package api

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics are the API's own; those of sandboxes are the Manager's. One Metrics
// may serve several APIs, one after the other or at once.
type Metrics struct {
	exec *prometheus.HistogramVec
}

// NewMetrics returns metrics that count from zero.
func NewMetrics() *Metrics {
	return &Metrics{exec: prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "doze_exec_duration_seconds",
		Help: "How long commands ran, as the node saw it, without the wake.",
		// From a builtin of a warm shell to a long build.
		Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 1800},
	}, []string{"outcome"})}
}

// How a command ended.
const (
	outcomeExited   = "exited"
	outcomeTimedOut = "timed_out"
	outcomeLost     = "lost"      // nobody knows how
	outcomeClient   = "abandoned" // its client went away, so it was killed
)

func (m *Metrics) observeExec(outcome string, took time.Duration) {
	m.exec.WithLabelValues(outcome).Observe(took.Seconds())
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) { m.exec.Describe(ch) }

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) { m.exec.Collect(ch) }

var _ prometheus.Collector = (*Metrics)(nil)
