package main

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// samples of one figure.
type samples []time.Duration

// quantile returns the smallest sample that is not less than q of them.
func (s samples) quantile(q float64) time.Duration {
	sorted := slices.Sorted(slices.Values(s))
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

func (s samples) p50() time.Duration { return s.quantile(.5) }
func (s samples) p99() time.Duration { return s.quantile(.99) }

// ms in milliseconds.
func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// repeat times n calls of f after warm calls that are not counted.
func repeat(ctx context.Context, warm, n int, f func() error) (samples, error) {
	var s samples
	for i := range warm + n {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		start := time.Now()
		if err := f(); err != nil {
			return nil, fmt.Errorf("call %d: %w", i+1, err)
		}
		if i >= warm {
			s = append(s, time.Since(start))
		}
	}
	return s, nil
}

// pairs times the second of each of n pairs of calls.
func pairs(n int, first, second func() error) (samples, error) {
	var s samples
	for range n {
		if err := first(); err != nil {
			return nil, err
		}
		start := time.Now()
		if err := second(); err != nil {
			return nil, err
		}
		s = append(s, time.Since(start))
	}
	return s, nil
}

// median of at least one number.
func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}

// maximum of at least one number.
func maximum(values []float64) float64 { return slices.Max(values) }
