package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"
)

// spread has a value for each round of a figure, or the time of each call in ms.
type spread []float64

// quantile returns the smallest value that is not less than q of them.
func (s spread) quantile(q float64) float64 {
	sorted := slices.Sorted(slices.Values(s))
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

func (s spread) median() float64 { return s.quantile(.5) }
func (s spread) p99() float64    { return s.quantile(.99) }
func (s spread) min() float64    { return slices.Min(s) }
func (s spread) max() float64    { return slices.Max(s) }

// ms in milliseconds.
func ms(d time.Duration) float64 { return 1000 * d.Seconds() }

// timed returns how long a call of f took, in ms.
func timed(f func() error) (float64, error) {
	start := time.Now()
	err := f()
	return ms(time.Since(start)), err
}

// repeat times n calls of f, each after a call of before, unless it is nil.
func repeat(ctx context.Context, n int, before, f func() error) (spread, error) {
	var s spread
	for i := range n {
		err := ctx.Err()
		if err == nil && before != nil {
			err = before()
		}
		if err != nil {
			return nil, err
		}
		took, err := timed(f)
		if err != nil {
			return nil, fmt.Errorf("call %d: %w", i+1, err)
		}
		s = append(s, took)
	}
	return s, nil
}

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
	name    string
	round   func(context.Context) (float64, error)
	values  map[int]float64 // by round
	samples spread          // further values, which round appends
	failed  []error
}

// newMedians returns a contender whose values are the medians of the rounds, and whose samples are all times.
func newMedians(name string, round func(context.Context) (spread, error)) *contender {
	c := &contender{name: name}
	c.round = func(ctx context.Context) (float64, error) {
		s, err := round(ctx)
		if err != nil {
			return 0, err
		}
		c.samples = append(c.samples, s...)
		return s.median(), nil
	}
	return c
}

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
			if round < 0 {
				c.samples = nil
			}
		}
	}
	return nil
}

// versus is alternate for a figure that needs its peer.
func versus(ctx context.Context, rounds int, ours, peer *contender) error {
	if err := alternate(ctx, rounds, ours, peer); err != nil {
		return err
	}
	return peer.missing(rounds)
}

// spread of the rounds that ended well.
func (c *contender) spread() spread { return slices.Collect(maps.Values(c.values)) }

// missing returns why the contender has no figure; nil if most of its rounds ended well.
func (c *contender) missing(rounds int) error {
	if len(c.values) > rounds/2 {
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

// latencyRounds is how many rounds a figure of times has.
const latencyRounds = 5

// inRounds collects the times of a figure that has no peer: the median of each round, and
// all times.
func inRounds(round func() (spread, error)) (p50s, all spread, err error) {
	for range latencyRounds {
		s, err := round()
		if err != nil {
			return nil, nil, err
		}
		p50s, all = append(p50s, s.median()), append(all, s...)
	}
	return p50s, all, nil
}
