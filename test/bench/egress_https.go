package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"time"
)

const (
	proxyRounds = 5
	proxyTime   = 3 * time.Second // of one round of one side
)

// proxies are the peers of intercepted HTTPS, with the ratio to reach; 0 means
// none.
var proxies = []struct {
	name    string
	prepare func(ctx context.Context, p *proxy) (*exec.Cmd, error)
	bar     float64
}{{"mitmproxy", mitmproxy, 10}, {"squid with bump", squid, 1}, {"Go's reverse proxy alone", floor, 0}}

// measureIntercept: small GETs over 32 connections, each with a header that holds a
// secret. The client is this program on all sides: in a sandbox for ours, on the
// loopback next to a peer, which avoids the network stack of a sandbox.
func measureIntercept(ctx context.Context, b *bench) ([]row, error) {
	load := task{Do: "load", Connections: loadConnections, Duration: b.lasting(proxyTime)}
	ours := &contender{name: "doze", round: func(ctx context.Context) (float64, error) {
		through := load
		through.To = interceptedURL
		return perSecond(b.node.client(ctx, b.id, through))
	}}
	all := []*contender{ours}
	for _, p := range proxies {
		peer, end := besideProxy(ctx, b, p.name, p.prepare, load, perSecond)
		defer end()
		all = append(all, peer)
	}
	if err := alternate(ctx, proxyRounds, all...); err != nil {
		return nil, err
	}
	var rows []row
	for i, p := range proxies {
		rows = append(rows, proxyRow(p.bar, ours, all[i+1]))
	}
	return rows, nil
}

// perSecond is the rate of a load in which no request failed.
func perSecond(r clientResult, err error) (float64, error) {
	if err == nil && r.Failed > 0 {
		err = fmt.Errorf("%d requests failed: %s", r.Failed, r.Failure)
	}
	return float64(r.Requests) / r.Seconds, err
}

// besideProxy starts a peer for a contender whose round is a task of a client on the
// loopback, next to the peer. The task is to a path of the origin. A peer that does not
// start fails each round with the reason. The caller ends it.
func besideProxy(ctx context.Context, b *bench, name string, prepare func(context.Context, *proxy) (*exec.Cmd, error),
	t task, rate func(clientResult, error) (float64, error),
) (c *contender, end func()) {
	p, err := startProxy(ctx, b.node, prepare)
	c = &contender{name: name, round: func(ctx context.Context) (float64, error) {
		if err != nil {
			return 0, err
		}
		local := t
		local.To, local.Proxy, local.CA = p.origin+t.To, p.URL, p.CA
		return rate(readClient(inSession(exec.CommandContext(ctx, b.node.Program("bench"), "client", local.argument()))))
	}}
	return c, func() {
		if err == nil {
			p.stop()
		}
	}
}

func proxyRow(bar float64, ours, peer *contender) row {
	r := row{
		Figure: "intercepted HTTPS with bearer, small GETs, 32 connections, requests per second against " + peer.name,
		Bar:    noBar,
		Met:    bar == 0,
		Values: values{}.add("doze_per_s", ours.spread()),
		Note:   "HTTP/1.1 on both sides; all add the header and verify the origin; ours through a sandbox's network, with audit and scrubbing, the peer on the loopback, without a log",
	}
	if bar > 0 {
		r.Bar = fmt.Sprintf("≥ %.1f", bar)
	}
	if err := peer.missing(proxyRounds); err != nil {
		r.Measured = fmt.Sprintf("no peer (doze %s/s)", ours.spread().text("%.0f"))
		r.Note = err.Error()
		return r
	}
	ratio := ours.over(peer)
	r.Values.add("peer_per_s", peer.spread()).add("ratio", ratio)
	r.Measured = fmt.Sprintf("%s (%.0f/s, %.0f/s)", ratio.text("%.2f"), ours.spread().median(), peer.spread().median())
	r.Met = ratio.median() >= bar // true without a bar
	return r
}

const (
	pairRounds = 5
	pairCount  = 800 // in each round
	addedBar   = 0.3 // ms
)

// measureAdded measures the cost of interception and a policy per request, and the same
// request passed through, each over one connection.
func measureAdded(ctx context.Context, b *bench) ([]row, error) {
	var intercepted, passed, added spread
	for range pairRounds {
		r, err := b.node.client(ctx, b.id, task{Do: "pairs", To: interceptedURL, Than: passURL, Count: b.count(pairCount)})
		if err != nil {
			return nil, err
		}
		added = append(added, r.Times.median()-r.Than.median())
		intercepted, passed = append(intercepted, r.Times...), append(passed, r.Than...)
	}
	return []row{{
		Figure:   "added p50 by interception and one policy, against pass-through",
		Bar:      "≤ 0.3 ms",
		Measured: fmt.Sprintf("%s ms (%.3f, %.3f)", added.text("%.3f"), intercepted.median(), passed.median()),
		Met:      added.median() <= addedBar,
		Values: values{
			"intercepted_p50_ms": intercepted.median(), "passed_p50_ms": passed.median(),
			"intercepted_p99_ms": intercepted.p99(), "passed_p99_ms": passed.p99(),
		}.add("added_p50_ms", added),
	}}, nil
}

const (
	newHosts = 40 // in each round
	firstBar = 10 // ms
)

// measureFirst: from looking a name up to the response, for a name that is new.
func measureFirst(ctx context.Context, b *bench) ([]row, error) {
	round := 0
	p50s, all, err := inRounds(func() (spread, error) {
		round++
		r, err := b.node.client(ctx, b.id, task{Do: "first", To: fmt.Sprintf("https://*-%d.look.test/", round), Count: b.count(newHosts)})
		return r.Times, err
	})
	if err != nil {
		return nil, err
	}
	r := timesRow("first request to a new host, intercepted", "p50 ≤ 10 ms", timesBars{p50: firstBar}, p50s, all)
	r.Note = "name, connection, leaf, both handshakes, policy, response"
	return []row{r}, nil
}

const (
	blobBytes  = 1 << 30
	blobRounds = 3
	blobBar    = 400 // MB a second
	blobGrowth = 64  // MiB
)

// measureBlob measures a large body through interception and scrubbing, and the same
// passed through and through a peer that scrubs nothing, and what the node's memory
// does meanwhile.
func measureBlob(ctx context.Context, b *bench) ([]row, error) {
	bytes := int64(b.count(blobBytes))
	path := fmt.Sprintf("blob?bytes=%d", bytes)
	rate := func(r clientResult, err error) (float64, error) {
		if err == nil && r.Bytes != bytes {
			err = fmt.Errorf("got %d bytes of %d", r.Bytes, bytes)
		}
		return r.perSecond() / 1e6, err
	}
	through := func(name, url string) *contender {
		return &contender{name: name, round: func(ctx context.Context) (float64, error) {
			return rate(b.node.client(ctx, b.id, task{Do: "blob", To: url + path}))
		}}
	}
	intercepted, passed := through("intercepted", interceptedURL), through("passed through", passURL)
	bump, end := besideProxy(ctx, b, "squid with bump", squid, task{Do: "blob", To: path}, rate)
	defer end()
	if _, err := intercepted.round(ctx); err != nil { // the memory that one takes is not growth
		return nil, err
	}
	before, err := b.node.rss()
	if err != nil {
		return nil, err
	}
	watch := watchRSS(ctx, b.node)
	err = alternate(ctx, blobRounds, intercepted, passed, bump)
	seen, failed := watch()
	if err = errors.Join(err, failed); err != nil {
		return nil, err
	}
	growth := (seen.max() - float64(before)) / (1 << 20)
	mine, pass := intercepted.spread(), passed.spread()
	rows := []row{{
		Figure:   "1 GiB body through interception and scrubbing; growth of the node's memory (RSS)",
		Bar:      fmt.Sprintf("≥ %d MB/s; ≤ %d MiB", blobBar, blobGrowth),
		Measured: fmt.Sprintf("%s MB/s; %.0f MiB", mine.text("%.0f"), growth),
		Met:      mine.median() >= blobBar && growth <= blobGrowth,
		Values:   values{"rss_growth_mib": growth, "rss_before_mib": float64(before) / (1 << 20)}.add("mb_s", mine),
		Note:     "random bytes, HTTP/1.1",
	}, {
		Figure:   "the same passed through",
		Bar:      noBar,
		Measured: fmt.Sprintf("%s MB/s", pass.text("%.0f")),
		Met:      true,
		Values:   values{}.add("mb_s", pass),
	}, {
		Figure: "the same through squid with bump, on the loopback, which scrubs nothing; ours against it",
		Bar:    noBar,
		Met:    true,
	}}
	peer := &rows[len(rows)-1]
	if err := bump.missing(blobRounds); err != nil {
		peer.Measured, peer.Note = "no peer", err.Error()
		return rows, nil
	}
	theirs, ratio := bump.spread(), intercepted.over(bump)
	peer.Measured = fmt.Sprintf("%s MB/s; %s", theirs.text("%.0f"), ratio.text("%.2f"))
	peer.Values = values{}.add("mb_s", theirs).add("ratio", ratio)
	return rows, nil
}

// watchRSS samples the node's memory until the returned function is called.
func watchRSS(ctx context.Context, n *node) (stop func() (spread, error)) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	var seen spread
	var failed error
	go func() { // ends in stop
		defer close(done)
		failed = poll(ctx, 50*time.Millisecond, func() (bool, error) {
			rss, err := n.rss()
			seen = append(seen, float64(rss))
			return false, err
		})
	}()
	return func() (spread, error) {
		cancel()
		<-done
		if errors.Is(failed, context.Canceled) {
			failed = nil
		}
		return seen, failed
	}
}
