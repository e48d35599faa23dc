package api

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// Metrics count and time calls and commands. Several APIs may share them.
type Metrics struct {
	prometheus.Collector
	exec  *prometheus.HistogramVec
	calls *prometheus.CounterVec
	took  *prometheus.HistogramVec
}

// NewMetrics returns metrics that count from zero.
func NewMetrics() *Metrics {
	registry := prometheus.NewRegistry()
	metrics := promauto.With(registry)
	return &Metrics{
		Collector: registry,
		calls: metrics.NewCounterVec(prometheus.CounterOpts{
			Name: "doze_api_requests_total",
			Help: "API calls that have ended.",
		}, []string{"method", "route", "code"}),
		took: metrics.NewHistogramVec(prometheus.HistogramOpts{
			Name: "doze_api_request_duration_seconds",
			Help: "How long API calls took, streams included, until their end.",
			// From a read of memory to a stream of an hour.
			Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 60, 600, 3600},
		}, []string{"method", "route"}),
		exec: metrics.NewHistogramVec(prometheus.HistogramOpts{
			Name: "doze_exec_duration_seconds",
			Help: "How long commands ran, as the node saw it, without the wake.",
			// From a builtin of a warm shell to a long build.
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 1800},
		}, []string{"outcome"}),
	}
}

// How a command ended.
const (
	outcomeExited   = "exited"
	outcomeTimedOut = "timed_out"
	outcomeLost     = "lost"      // unknown
	outcomeClient   = "abandoned" // killed, because its client disconnected
)

func (m *Metrics) observeExec(outcome string, took time.Duration) {
	m.exec.WithLabelValues(outcome).Observe(took.Seconds())
}

// observeCall counts a call. One without a route may have any method, which is not
// counted by its name.
func (m *Metrics) observeCall(method, route string, code int, took time.Duration) {
	if route == "" {
		method = ""
	}
	m.calls.WithLabelValues(method, route, strconv.Itoa(code)).Inc()
	m.took.WithLabelValues(method, route).Observe(took.Seconds())
}
