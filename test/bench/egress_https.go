package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

const (
	proxyRounds = 4
	proxyTime   = 3 * time.Second // of one round of one side
)

// proxies are the peers of intercepted HTTPS, with what ours has to reach of them.
var proxies = []struct {
	name  string
	start func(ctx context.Context, folder, originCA string) (*proxy, error)
	bar   float64
}{{"mitmproxy", startMitmproxy, 10}, {"squid with bump", startSquid, 0.8}}

// measureIntercept: small GETs over 32 connections, each with a header that holds a
// secret. The client is this program on all sides: in a sandbox for ours, on the
// loopback beside a peer, which so is spared the network stack of a sandbox.
func measureIntercept(ctx context.Context, b *bench) ([]row, error) {
	sb, err := b.node.withClient(ctx, "intercept")
	if err != nil {
		return nil, err
	}
	_, port, _ := strings.Cut(b.node.origin.HTTPS, ":")
	arguments := []string{"-do", "load", "-connections", fmt.Sprint(loadConnections), "-duration", proxyTime.String()}
	running := make([]*proxy, len(proxies))
	failed := make([]error, len(proxies))
	for i, p := range proxies {
		folder := filepath.Join(b.node.folder, fmt.Sprint("peer-", i))
		if err := os.Mkdir(folder, 0o700); err != nil {
			return nil, err
		}
		if running[i], failed[i] = p.start(ctx, folder, b.node.originCA()); failed[i] == nil {
			defer running[i].end()
		}
	}
	var ours []float64
	theirs := make([][]float64, len(proxies))
	for round := range proxyRounds + 1 {
		r, err := b.node.client(ctx, sb.ID, append(arguments, "-to", lookURL)...)
		if err != nil {
			return nil, err
		}
		if r.Failed > 0 {
			return nil, fmt.Errorf("%d requests failed: %s", r.Failed, r.Failure)
		}
		if round > 0 { // the first is the warm-up
			ours = append(ours, float64(r.Requests)/r.Seconds)
		}
		for i, p := range running {
			if failed[i] != nil {
				continue
			}
			r, err := runBeside(ctx, b, append(arguments, "-to", "https://localhost:"+port+"/", "-proxy", p.URL, "-ca", p.CA)...)
			switch {
			case err != nil:
				failed[i] = err
			case r.Failed > 0:
				failed[i] = fmt.Errorf("%d requests failed: %s", r.Failed, r.Failure)
			case round > 0:
				theirs[i] = append(theirs[i], float64(r.Requests)/r.Seconds)
			}
		}
	}
	rows := make([]row, len(proxies))
	for i, p := range proxies {
		rows[i] = proxyRow(p.name, p.bar, median(ours), theirs[i], failed[i])
	}
	return rows, nil
}

func proxyRow(name string, bar, ours float64, theirs []float64, failed error) row {
	r := row{
		Figure: "intercepted HTTPS with bearer, small GETs, 32 connections, requests per second against " + name,
		Bar:    fmt.Sprintf("≥ %g", bar),
		Values: map[string]float64{"doze_per_s": ours},
		Note:   "HTTP/1.1 on both sides; all add the header and verify the origin; ours through a sandbox's network, with audit and scrubbing, the peer an explicit proxy without a log",
	}
	if failed != nil {
		r.Measured = fmt.Sprintf("no peer (doze %.0f/s)", ours)
		r.Note = failed.Error()
		return r
	}
	peer := median(theirs)
	r.Values["peer_per_s"], r.Values["ratio"] = peer, ours/peer
	r.Measured = fmt.Sprintf("%.2f (%.0f/s, %.0f/s)", ours/peer, ours, peer)
	r.Met = ours >= bar*peer
	return r
}

const (
	pairCount = 4000
	addedBar  = 300 * time.Microsecond
)

// measureAdded: what interception and a policy add to a request, beside the same
// request passed through, each over one connection.
func measureAdded(ctx context.Context, b *bench) ([]row, error) {
	sb, err := b.node.withClient(ctx, "added")
	if err != nil {
		return nil, err
	}
	r, err := b.node.client(ctx, sb.ID, "-do", "pairs", "-to", lookURL, "-than", passURL, "-count", fmt.Sprint(pairCount))
	if err != nil {
		return nil, err
	}
	added := r.Times.p50() - r.Than.p50()
	return []row{{
		Figure:   "added p50 by interception and one policy, against pass-through",
		Bar:      "≤ 0.3 ms",
		Measured: fmt.Sprintf("%.3f ms (%.3f, %.3f)", ms(added), ms(r.Times.p50()), ms(r.Than.p50())),
		Met:      added <= addedBar,
		Values:   map[string]float64{"added_p50_ms": ms(added), "intercepted_p50_ms": ms(r.Times.p50()), "passed_p50_ms": ms(r.Than.p50()), "intercepted_p99_ms": ms(r.Times.p99()), "passed_p99_ms": ms(r.Than.p99())},
	}}, nil
}

const (
	newHosts = 200
	firstBar = 10 * time.Millisecond
)

// measureFirst: from looking a name up to the answer, when nobody has asked for it.
func measureFirst(ctx context.Context, b *bench) ([]row, error) {
	sb, err := b.node.withClient(ctx, "first")
	if err != nil {
		return nil, err
	}
	r, err := b.node.client(ctx, sb.ID, "-do", "first", "-to", "https://*.look.test/", "-count", fmt.Sprint(newHosts))
	if err != nil {
		return nil, err
	}
	return []row{{
		Figure:   "first request to a new host, intercepted",
		Bar:      "p50 ≤ 10 ms",
		Measured: fmt.Sprintf("p50 %.2f ms, p99 %.2f ms", ms(r.Times.p50()), ms(r.Times.p99())),
		Met:      r.Times.p50() <= firstBar,
		Values:   map[string]float64{"p50_ms": ms(r.Times.p50()), "p99_ms": ms(r.Times.p99())},
		Note:     "name, connection, leaf, both handshakes, policy, answer",
	}}, nil
}

const (
	blobBytes  = 1 << 30
	blobRounds = 3
	blobBar    = 300e6 // bytes a second
	blobGrowth = 64 << 20
)

// measureBlob: a large body through interception and scrubbing, and what the node's
// memory does meanwhile.
func measureBlob(ctx context.Context, b *bench) ([]row, error) {
	sb, err := b.node.withClient(ctx, "blob")
	if err != nil {
		return nil, err
	}
	fetch := func(host string, bytes int64) (clientResult, error) {
		r, err := b.node.client(ctx, sb.ID, "-do", "blob", "-to", fmt.Sprintf("https://%s/blob?bytes=%d", host, bytes))
		if err == nil && r.Bytes != bytes {
			err = fmt.Errorf("got %d bytes of %d", r.Bytes, bytes)
		}
		return r, err
	}
	const look, pass = "api.look.test", "api.pass.test"
	for _, host := range []string{look, pass} {
		if _, err := fetch(host, blobBytes/16); err != nil {
			return nil, err
		}
	}
	before, err := b.node.rss()
	if err != nil {
		return nil, err
	}
	watch := watchRSS(ctx, b.node)
	var rates, passed []float64
	for range blobRounds {
		r, err := fetch(look, blobBytes)
		if err != nil {
			return nil, err
		}
		rates = append(rates, r.perSecond())
		if r, err = fetch(pass, blobBytes); err != nil {
			return nil, err
		}
		passed = append(passed, r.perSecond())
	}
	seen, err := watch()
	if err != nil {
		return nil, err
	}
	growth := maximum(seen) - float64(before)
	rate := median(rates)
	return []row{{
		Figure:   "1 GiB body through interception and scrubbing; growth of the node's memory (RSS)",
		Bar:      "≥ 300 MB/s; ≤ 64 MiB",
		Measured: fmt.Sprintf("%.0f MB/s; %.0f MiB", rate/1e6, growth/(1<<20)),
		Met:      rate >= blobBar && growth <= blobGrowth,
		Values:   map[string]float64{"mb_s": rate / 1e6, "passed_mb_s": median(passed) / 1e6, "rss_growth_mib": growth / (1 << 20), "rss_before_mib": float64(before) / (1 << 20)},
		Note:     fmt.Sprintf("random bytes, HTTP/1.1; the same passed through: %.0f MB/s", median(passed)/1e6),
	}}, nil
}

// watchRSS samples the node's memory until the returned function is called.
func watchRSS(ctx context.Context, n *node) (stop func() ([]float64, error)) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	var seen []float64
	var failed error
	go func() { // ends in stop
		defer close(done)
		for {
			select {
			case <-time.After(50 * time.Millisecond):
			case <-ctx.Done():
				return
			}
			rss, err := n.rss()
			if err != nil {
				failed = err
				return
			}
			seen = append(seen, float64(rss))
		}
	}()
	return func() ([]float64, error) {
		cancel()
		<-done
		return seen, failed
	}
}
