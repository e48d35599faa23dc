package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"time"
)

const (
	loadConnections = 32
	loadRounds      = 5
	loadTime        = 3 * time.Second // of one round of one side
)

// cgroup is the subtree of the node's user, as packaging/host/enter sets it.
func cgroup() string { return os.Getenv("DOZE_CGROUP") }

// measureThroughput: requests per second through a preview, against Caddy's
// reverse_proxy in the same process to the same server outside of a sandbox.
func measureThroughput(ctx context.Context, b *bench) ([]row, error) {
	// A session of its own, as the server in the sandbox has: the scheduler
	// shares the cores between sessions (autogroup, sched(7)).
	peer := inSession(exec.CommandContext(ctx, b.node.Program("bench"), "serve", fmt.Sprint("127.0.0.1:", b.node.peerPort)))
	if err := peer.Start(); err != nil {
		return nil, err
	}
	defer peer.Wait()
	defer peer.Process.Kill()
	peerURL := fmt.Sprintf("https://peer.doze.localhost:%d/", b.node.Port)
	if err := b.node.awaitResponse(ctx, peerURL); err != nil {
		return nil, err
	}
	contend := func(name, url string) *contender {
		return &contender{name: name, round: func(ctx context.Context) (float64, error) {
			return perSecond(load(loadConnections, func() error { return b.node.get(ctx, url) }, func(past time.Duration) bool { return past >= b.lasting(loadTime) }), nil)
		}}
	}
	ours, theirs := contend("doze", b.url), contend("reverse_proxy", peerURL)
	if err := versus(ctx, loadRounds, ours, theirs); err != nil {
		return nil, err
	}
	ratio, mine, peers := ours.over(theirs), ours.spread(), theirs.spread()
	return []row{{
		Figure:   "requests per second through a preview, against reverse_proxy outside of a sandbox",
		Bar:      "≥ 0.8",
		Measured: fmt.Sprintf("%s (%.0f/s, %.0f/s)", ratio.text("%.2f"), mine.median(), peers.median()),
		Met:      ratio.median() >= 0.8,
		Values:   values{}.add("ratio", ratio).add("preview_per_s", mine).add("reverse_proxy_per_s", peers),
	}}, nil
}
