//go:build integration

package podman

import (
	"slices"
	"testing"
	"time"
)

// stopwatch collects how long the steps of a benchmark take.
type stopwatch struct {
	names []string
	took  map[string][]time.Duration
}

func newStopwatch() *stopwatch { return &stopwatch{took: make(map[string][]time.Duration)} }

func (s *stopwatch) do(b *testing.B, name string, step func() error) {
	b.Helper()
	began := time.Now()
	if err := step(); err != nil {
		b.Fatalf("%s: %v", name, err)
	}
	if s.took[name] == nil {
		s.names = append(s.names, name)
	}
	s.took[name] = append(s.took[name], time.Since(began))
}

// report gives the median of each step in milliseconds.
func (s *stopwatch) report(b *testing.B) {
	for _, name := range s.names {
		took := s.took[name]
		slices.Sort(took)
		b.ReportMetric(float64(took[len(took)/2])/1e6, name+"-ms")
	}
}
