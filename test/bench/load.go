package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	loadConnections = 32
	loadRounds      = 5
	loadTime        = 3 * time.Second // of one round of one side
)

// cgroup is the subtree of the node's user, as packaging/host/enter sets it.
func cgroup() string { return os.Getenv("DOZE_CGROUP") }

// podmanSockets are where a node finds or puts its service.
func podmanSockets(home string) []string {
	return []string{
		filepath.Join(os.Getenv("XDG_RUNTIME_DIR"), "podman", "podman.sock"),
		filepath.Join(home, "run", "podman.sock"),
	}
}

// measureThroughput: requests per second through a preview, against Caddy's
// reverse_proxy in the same process to the same server outside of a sandbox.
// The two take turns, so that the machine's drift meets both.
func measureThroughput(ctx context.Context, b *bench) ([]row, error) {
	_, url, err := b.node.withServer(ctx, "throughput")
	if err != nil {
		return nil, err
	}
	peer := exec.CommandContext(ctx, b.node.Program("bench"), "serve", fmt.Sprint("127.0.0.1:", b.node.peerPort))
	// A session of its own, as the server in the sandbox has: the scheduler
	// shares the cores between sessions (autogroup, sched(7)).
	peer.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := peer.Start(); err != nil {
		return nil, err
	}
	defer peer.Wait()
	defer peer.Process.Kill()
	peerURL := fmt.Sprintf("https://peer.doze.localhost:%d/", b.node.Port)
	if err := b.node.awaitAnswer(ctx, peerURL); err != nil {
		return nil, err
	}
	var ours, theirs int64
	for round := range loadRounds + 1 {
		a, err := load(ctx, b.node, url)
		if err != nil {
			return nil, err
		}
		c, err := load(ctx, b.node, peerURL)
		if err != nil {
			return nil, err
		}
		if round > 0 { // the first is the warm-up
			ours, theirs = ours+a, theirs+c
		}
	}
	seconds := loadRounds * loadTime.Seconds()
	ratio := float64(ours) / float64(theirs)
	return []row{{
		Figure:   "requests per second through a preview, against reverse_proxy outside of a sandbox",
		Bar:      "≥ 0.8",
		Measured: fmt.Sprintf("%.2f (%.0f/s, %.0f/s)", ratio, float64(ours)/seconds, float64(theirs)/seconds),
		Met:      ratio >= 0.8,
		Values:   map[string]float64{"ratio": ratio, "preview_per_s": float64(ours) / seconds, "reverse_proxy_per_s": float64(theirs) / seconds},
	}}, nil
}

// load counts the requests that loadConnections clients make in loadTime.
func load(ctx context.Context, n *node, url string) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, loadTime+time.Minute)
	defer cancel()
	var count atomic.Int64
	var failed atomic.Pointer[error]
	end := time.Now().Add(loadTime)
	var wg sync.WaitGroup
	for range loadConnections {
		wg.Go(func() {
			for time.Now().Before(end) {
				if err := n.get(ctx, url); err != nil {
					failed.Store(&err)
					return
				}
				count.Add(1)
			}
		})
	}
	wg.Wait()
	if err := failed.Load(); err != nil {
		return 0, *err
	}
	return count.Load(), nil
}
