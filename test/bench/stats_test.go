package main

import (
	"context"
	"errors"
	"slices"
	"testing"
)

func TestContendersTakeTurns(t *testing.T) {
	var order []string
	contend := func(name string, fails func(call int) bool) *contender {
		calls := 0
		return &contender{name: name, round: func(context.Context) (float64, error) {
			order = append(order, name)
			calls++
			if fails(calls) {
				return 0, errors.New("no")
			}
			return float64(calls), nil
		}}
	}
	never := func(int) bool { return false }
	ours, peer := contend("ours", never), contend("peer", func(call int) bool { return call == 2 })
	absent := contend("absent", func(int) bool { return true })
	const rounds = 3
	if err := alternate(t.Context(), rounds, ours, peer, absent); err != nil {
		t.Fatal(err)
	}
	want := []string{"absent", "peer", "ours", "ours", "peer", "absent", "absent", "peer", "ours", "ours", "peer", "absent"}
	if !slices.Equal(order, want) {
		t.Errorf("the order is %v, want %v", order, want)
	}
	// The first call is not counted, and ratios are of rounds in which both ended well.
	if s := ours.spread(); s.min() != 2 || s.median() != 3 || s.max() != 4 {
		t.Errorf("ours is %v", s)
	}
	if ratio := ours.over(peer); len(ratio) != 2 || ratio.median() != 1 {
		t.Errorf("the ratio is %v", ratio)
	}
	if err := peer.missing(rounds); err != nil {
		t.Errorf("the peer is missing: %v", err)
	}
	if absent.missing(rounds) == nil {
		t.Error("the absent peer is not missing")
	}
	failing := contend("ours", func(int) bool { return true })
	if alternate(t.Context(), rounds, failing, peer) == nil {
		t.Error("an error of doze does not count as one")
	}
}

func TestUncountedRoundHasNoSamples(t *testing.T) {
	calls := 0.
	c := newMedians("ours", func(context.Context) (spread, error) {
		calls++
		return spread{calls, calls + .5}, nil
	})
	if err := alternate(t.Context(), 2, c); err != nil {
		t.Fatal(err)
	}
	if want := (spread{2, 2.5, 3, 3.5}); !slices.Equal(c.samples, want) {
		t.Errorf("the samples are %v, want %v", c.samples, want)
	}
}

func TestSpreadHasTheMedianAndBothEnds(t *testing.T) {
	s := spread{0.9, 0.5, 0.7}
	if got, want := s.text("%.1f"), "0.7 (0.5–0.9)"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	v := values{}.add("ratio", s)
	if v["ratio"] != 0.7 || v["ratio_min"] != 0.5 || v["ratio_max"] != 0.9 {
		t.Errorf("got %v", v)
	}
}

func TestSoakReportsLeaks(t *testing.T) {
	before := held{goroutines: 100, descriptors: 50, cgroups: 0, processes: 3, rss: 100 << 20}
	for name, change := range map[string]func(*held){
		"goroutines":  func(h *held) { h.goroutines += soakSlack + 1 },
		"descriptors": func(h *held) { h.descriptors += soakSlack + 1 },
		"cgroups":     func(h *held) { h.cgroups++ },
		"processes":   func(h *held) { h.processes++ },
		"memory":      func(h *held) { h.rss += soakGrowth + 1 },
	} {
		after := before
		if over := after.over(before); over != "" {
			t.Errorf("nothing has changed, but %s", over)
		}
		change(&after)
		if after.over(before) == "" {
			t.Errorf("more %s are not noticed", name)
		}
	}
}
