package main

import (
	"context"
	"fmt"
	"time"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/test/testnode"
)

const (
	fleetRounds = 3
	lists       = 10 // in each round
)

// measureFleet: what the life of a node costs with many sandboxes that run.
// docs/RATIONALE.md derives the bars.
func measureFleet(ctx context.Context, b *bench) ([]row, error) {
	none, err := goroutines(ctx, b.node.Node)
	if err != nil {
		return nil, err
	}
	count := b.count(b.fleet)
	if _, err := b.populate(ctx, count, 0); err != nil {
		return nil, err
	}
	var starts, adopted, stops, list spread
	var each spread // goroutines
	for range fleetRounds {
		// A client connected by HTTP/2 would get GOAWAY, and a second to finish.
		b.node.API.Close()
		took, err := timed(b.node.Stop)
		if err != nil {
			return nil, err
		}
		stops = append(stops, took/1000)
		began := time.Now()
		if err := b.node.Start(); err != nil {
			return nil, err
		}
		starts = append(starts, time.Since(began).Seconds())
		if err := b.awaitRunning(ctx, count); err != nil {
			return nil, err
		}
		adopted = append(adopted, time.Since(began).Seconds())
		times, err := repeat(ctx, b.count(lists), nil, func() error { return b.node.Command("ls").Run() })
		if err != nil {
			return nil, fmt.Errorf("doze ls: %w", err)
		}
		list = append(list, times.median())
		have, err := goroutines(ctx, b.node.Node)
		if err != nil {
			return nil, err
		}
		each = append(each, float64(have-none)/float64(count))
	}
	return []row{{
		Figure:   fmt.Sprintf("node start with %d running sandboxes until it serves and all are adopted", count),
		Bar:      "≤ 4 s",
		Measured: fmt.Sprintf("%s s (serves after %s)", adopted.text("%.2f"), starts.text("%.2f")),
		Met:      adopted.median() <= 4,
		Values:   values{}.add("serves_s", starts).add("adopted_s", adopted),
	}, atMost(fmt.Sprintf("SIGTERM until the node has ended, %d running sandboxes put to sleep", count), "%.2f", " s", 1.5, "stop_s", stops), {
		Figure:   fmt.Sprintf("`doze ls` with %d sandboxes", count),
		Bar:      "p50 ≤ 100 ms",
		Measured: "p50 " + list.text("%.0f") + " ms",
		Met:      list.median() <= 100,
		Values:   values{}.add("p50_ms", list),
	}, atMost("goroutines of the node for each running sandbox", "%.1f", "", 3, "goroutines", each)}, nil
}

// awaitRunning returns when every sandbox has been adopted.
func (b *bench) awaitRunning(ctx context.Context, count int) error {
	ctx, cancel := context.WithTimeout(ctx, sleepWait)
	defer cancel()
	var have map[types.State]int
	err := poll(ctx, 50*time.Millisecond, func() (bool, error) {
		info, err := b.node.API.Node(ctx)
		have = info.Sandboxes
		return have["running"] == count, err
	})
	if err != nil {
		err = fmt.Errorf("of %d sandboxes: %v: %w", count, have, err)
	}
	return err
}

// goroutines of the node, by its admin socket.
func goroutines(ctx context.Context, node *testnode.Node) (n int, err error) {
	profile, err := node.Admin(ctx, "/debug/pprof/goroutine?debug=1")
	if err != nil {
		return 0, err
	}
	if _, err := fmt.Sscanf(profile, "goroutine profile: total %d", &n); err != nil {
		return 0, fmt.Errorf("count goroutines: %w", err)
	}
	return n, nil
}
