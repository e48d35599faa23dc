package sandbox

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics of a Manager. Names and labels are public: docs/reference/metrics.md.
type metrics struct {
	wakes        *prometheus.CounterVec
	wakeSeconds  *prometheus.HistogramVec
	wakeFailures prometheus.Counter
	engineErrors *prometheus.CounterVec
	events       *prometheus.CounterVec

	reclaimBytes  *prometheus.CounterVec
	pressureStops *prometheus.CounterVec
	underPressure prometheus.Gauge
	diskStops     *prometheus.CounterVec
}

// A warm wake takes about 0.1 ms, a cold one 50 ms and more.
var wakeBuckets = []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60}

var (
	sandboxesDesc   = prometheus.NewDesc("doze_sandboxes", "Sandboxes by state.", []string{"state"}, nil)
	leasesDesc      = prometheus.NewDesc("doze_sandbox_leases", "Leases held.", nil, nil)
	quarantinedDesc = prometheus.NewDesc("doze_quarantined_sandboxes", "Containers and run folders without a record.", nil, nil)
	waitersDesc     = prometheus.NewDesc("doze_wake_waiters", "Callers that wait for a wake.", nil, nil)
	cpuDesc         = prometheus.NewDesc("doze_sandbox_cpu_seconds_total", "CPU time of a sandbox since its cgroup was made.", []string{"sandbox", "sandbox_name"}, nil)
	availableDesc   = prometheus.NewDesc("doze_memory_available_bytes", "Memory that is left to the node and its sandboxes.", nil, nil)
	freeDiskDesc    = prometheus.NewDesc("doze_disk_free_bytes", "Free space of each file system that sandboxes write to, labeled with the path of a folder on it.", []string{"path"}, nil)
	freeFilesDesc   = prometheus.NewDesc("doze_disk_free_inodes", "Free inodes of each file system that sandboxes write to.", []string{"path"}, nil)
	shortDiskDesc   = prometheus.NewDesc("doze_disk_short", "Whether a file system has less free space than the reserve: 0 or 1.", nil, nil)
	diskDesc        = prometheus.NewDesc("doze_sandbox_disk_bytes", "Disk usage of a sandbox as last measured, excluding its image or snapshot.", []string{"sandbox", "sandbox_name"}, nil)
	memoryDesc      = prometheus.NewDesc("doze_sandbox_memory_bytes", "Memory of a sandbox that runs or is asleep.", []string{"sandbox", "sandbox_name"}, nil)
)

func newMetrics() *metrics {
	return &metrics{
		wakes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "doze_wakes_total", Help: "Wakes by kind and cause.",
		}, []string{"kind", "cause"}),
		wakeSeconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "doze_wake_duration_seconds", Help: "How long wakes took.", Buckets: wakeBuckets,
		}, []string{"kind"}),
		wakeFailures: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "doze_wake_failures_total", Help: "Wakes that failed.",
		}),
		engineErrors: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "doze_engine_errors_total", Help: "Errors of the container engine by operation.",
		}, []string{"operation"}),
		events: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "doze_sandbox_events_total", Help: "Changes in the life of sandboxes by type.",
		}, []string{"type"}),
		reclaimBytes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "doze_reclaim_memory_bytes_total", Help: "Memory of sleeping sandboxes before and after it was reclaimed.",
		}, []string{"moment"}),
		pressureStops: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "doze_memory_pressure_stops_total", Help: "Sleeping sandboxes that were stopped, or were to be, because memory was short.",
		}, []string{"outcome"}),
		underPressure: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "doze_memory_pressure", Help: "Whether memory is short: 0 or 1.",
		}),
		diskStops: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "doze_disk_stops_total", Help: "Sandboxes that were stopped because of their disk usage.",
		}, []string{"reason"}),
	}
}

func (s *metrics) reclaimed(r Reclaimed) {
	s.reclaimBytes.WithLabelValues("before").Add(float64(r.Before))
	s.reclaimBytes.WithLabelValues("after").Add(float64(r.After))
}

func (s *metrics) pressure(lasts bool) {
	value := 0.0
	if lasts {
		value = 1
	}
	s.underPressure.Set(value)
}

func (s *metrics) woke(kind WakeKind, cause Cause, took time.Duration) {
	s.wakes.WithLabelValues(string(kind), string(cause)).Inc()
	s.wakeSeconds.WithLabelValues(string(kind)).Observe(took.Seconds())
}

// collectors are the metrics that are counted as they happen.
func (s *metrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{s.wakes, s.wakeSeconds, s.wakeFailures, s.engineErrors, s.events, s.reclaimBytes, s.pressureStops, s.underPressure, s.diskStops}
}

// Describe implements prometheus.Collector.
func (m *Manager) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range m.metrics.collectors() {
		c.Describe(ch)
	}
	for _, desc := range []*prometheus.Desc{sandboxesDesc, cpuDesc, memoryDesc, leasesDesc, waitersDesc, quarantinedDesc, availableDesc, freeDiskDesc, freeFilesDesc, shortDiskDesc, diskDesc} {
		ch <- desc
	}
}

// Collect implements prometheus.Collector. It reads memory, and the kernel's counters of
// sandboxes that have a container; it wakes none.
func (m *Manager) Collect(ch chan<- prometheus.Metric) {
	for _, c := range m.metrics.collectors() {
		c.Collect(ch)
	}
	states := map[State]int{StateStarting: 0, StateRunning: 0, StateAsleep: 0, StateStopped: 0, StateArchived: 0}
	var leases int64
	var live []*liveSandbox
	m.mu.RLock()
	for _, b := range m.sandboxes {
		states[b.state()]++
		leases += b.leases()
		if b.pid.Load() != 0 {
			live = append(live, b)
		}
	}
	quarantined := len(m.quarantined)
	m.mu.RUnlock()
	ch <- prometheus.MustNewConstMetric(quarantinedDesc, prometheus.GaugeValue, float64(quarantined))
	m.collectUsage(ch, live)
	m.collectDisks(ch)
	for state, n := range states {
		ch <- prometheus.MustNewConstMetric(sandboxesDesc, prometheus.GaugeValue, float64(n), string(state))
	}
	if memory := m.memory.Load(); memory != nil {
		ch <- prometheus.MustNewConstMetric(availableDesc, prometheus.GaugeValue, float64(memory.Available))
	}
	ch <- prometheus.MustNewConstMetric(leasesDesc, prometheus.GaugeValue, float64(leases))
	ch <- prometheus.MustNewConstMetric(waitersDesc, prometheus.GaugeValue, float64(m.waiting.Load()))
}

// collectLimit bounds the time for the usage of all sandboxes, 30 µs each. Without a
// cgroup of the node's own it comes from Podman, which may hang.
const collectLimit = 5 * time.Second

// collectUsage collects the CPU time and memory of sandboxes. After an error there is no
// sample: a counter of 0 would look like a reset.
func (m *Manager) collectUsage(ch chan<- prometheus.Metric, live []*liveSandbox) {
	ctx, cancel := context.WithTimeout(context.Background(), collectLimit)
	defer cancel()
	for _, b := range live {
		sb := b.view.Load()
		name := sb.Name
		ch <- prometheus.MustNewConstMetric(diskDesc, prometheus.GaugeValue, float64(sb.Disk.Bytes), string(b.id), name)
		if cpu, err := m.deps.Freezer.CPUTime(ctx, b.id); err == nil {
			ch <- prometheus.MustNewConstMetric(cpuDesc, prometheus.CounterValue, cpu.Seconds(), string(b.id), name)
		}
		if memory, err := m.deps.Freezer.Memory(ctx, b.id); err == nil {
			ch <- prometheus.MustNewConstMetric(memoryDesc, prometheus.GaugeValue, float64(memory), string(b.id), name)
		}
	}
}

// collectDisks collects the free space as last read.
func (m *Manager) collectDisks(ch chan<- prometheus.Metric) {
	short := 0.0
	if m.disks.short.Load() != nil {
		short = 1
	}
	ch <- prometheus.MustNewConstMetric(shortDiskDesc, prometheus.GaugeValue, short)
	m.disks.polling.Lock()
	spaces := m.disks.last
	m.disks.polling.Unlock()
	for _, s := range spaces {
		ch <- prometheus.MustNewConstMetric(freeDiskDesc, prometheus.GaugeValue, float64(s.Free.Bytes), s.Path)
		ch <- prometheus.MustNewConstMetric(freeFilesDesc, prometheus.GaugeValue, float64(s.Free.Entries), s.Path)
	}
}
