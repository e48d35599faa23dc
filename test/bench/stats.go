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

// repeat times n calls of f.
func repeat(ctx context.Context, n int, f func() error) (samples, error) {
	var s samples
	for i := range n {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		start := time.Now()
		if err := f(); err != nil {
			return nil, fmt.Errorf("call %d: %w", i+1, err)
		}
		s = append(s, time.Since(start))
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

// spread is one value for each round of a figure.
type spread []float64

func (s spread) median() float64 {
	sorted := slices.Sorted(slices.Values(s))
	return sorted[len(sorted)/2]
}

func (s spread) min() float64 { return slices.Min(s) }
func (s spread) max() float64 { return slices.Max(s) }

// times returns the spread in another unit.
func (s spread) times(factor float64) spread {
	scaled := make(spread, len(s))
	for i, v := range s {
		scaled[i] = factor * v
	}
	return scaled
}

// text is the median with the least and the greatest value, each as the verb formats it.
func (s spread) text(verb string) string {
	return fmt.Sprintf(verb+" ("+verb+"–"+verb+")", s.median(), s.min(), s.max())
}

// contender is one of those that take turns in a figure.
type contender struct {
	name   string
	round  func(context.Context) (float64, error)
	values map[int]float64 // by round
	failed []error
}

// quorum is how many rounds of a peer have to end well for a figure.
func quorum(rounds int) int { return rounds/2 + 1 }

// alternate measures every contender once a round, so that the machine's drift meets
// all of them, and in the opposite order every other round, so that none always finds
// the caches of the same other. A round before the first is not counted. The first
// contender is ours, whose error ends the figure; a peer's is noted.
func alternate(ctx context.Context, rounds int, all ...*contender) error {
	for _, c := range all {
		c.values = map[int]float64{}
	}
	for round := -1; round < rounds; round++ {
		order := slices.Clone(all)
		if round%2 != 0 {
			slices.Reverse(order)
		}
		for _, c := range order {
			v, err := c.round(ctx)
			switch {
			case err != nil && (c == all[0] || ctx.Err() != nil):
				return err
			case err != nil:
				c.failed = append(c.failed, err)
			case round >= 0:
				c.values[round] = v
			}
		}
	}
	return nil
}

// spread of the rounds that ended well.
func (c *contender) spread() spread {
	var s spread
	for _, v := range c.values {
		s = append(s, v)
	}
	return s
}

// missing returns why the contender has no figure; nil if it has one.
func (c *contender) missing(rounds int) error {
	if len(c.values) >= quorum(rounds) {
		return nil
	}
	return fmt.Errorf("%s: %w", c.name, c.failed[0])
}

// over is the ratio to a peer in each round that ended well for both.
func (c *contender) over(peer *contender) spread {
	var s spread
	for round, v := range c.values {
		if p, ok := peer.values[round]; ok {
			s = append(s, v/p)
		}
	}
	return s
}

// inRounds collects the samples of a figure that has no peer: the median of each
// round in ms, and all samples.
func inRounds(rounds int, round func() (samples, error)) (p50s spread, all samples, err error) {
	for range rounds {
		s, err := round()
		if err != nil {
			return nil, nil, err
		}
		p50s, all = append(p50s, ms(s.p50())), append(all, s...)
	}
	return p50s, all, nil
}
