package main

import (
	"context"
	"fmt"
	"strings"
	"time"
)

const (
	streamRounds = 5
	streamTime   = 2 * time.Second // of one stream
)

// measureStream: one TCP stream each way, passed through, against what gives
// rootless containers their network elsewhere.
func measureStream(ctx context.Context, b *bench) ([]row, error) {
	_, port, _ := strings.Cut(b.node.origin.Raw, ":")
	var rows []row
	for _, direction := range []string{"out", "in"} {
		stream := func(to string) task {
			return task{Do: "stream", Direction: direction, To: to, Duration: b.lasting(streamTime)}
		}
		gbits := func(r clientResult, err error) (float64, error) { return r.perSecond() * 8 / 1e9, err }
		beside := func(name string, run streamBeside) *contender {
			return &contender{name: name, round: func(ctx context.Context) (float64, error) {
				return gbits(run(ctx, b, stream(peerGateway+":"+port)))
			}}
		}
		ours := &contender{name: "doze", round: func(ctx context.Context) (float64, error) {
			return gbits(b.node.client(ctx, b.id, stream(rawHost)))
		}}
		peers := []*contender{beside("pasta", throughPasta), beside("slirp4netns", throughSlirp)}
		if err := alternate(ctx, streamRounds, ours, peers[0], peers[1]); err != nil {
			return rows, err
		}
		rows = append(rows, streamRow(direction, ours, peers))
	}
	return rows, nil
}

// streamRow compares the rounds that ended well: pasta of 2023, as in Debian 12, breaks
// some of its streams.
func streamRow(direction string, ours *contender, peers []*contender) row {
	r := row{
		Figure: "one TCP stream " + direction + ", passed through, against the better of pasta and slirp4netns",
		Bar:    "≥ 1.0",
		Values: values{}.add("doze_gbit_s", ours.spread()),
		Note:   "MTU 65,520 for all, one server on the loopback, each in a session of its own",
	}
	parts := []string{"doze " + ours.spread().text("%.1f")}
	var best *contender
	missing := false
	for _, p := range peers {
		if len(p.failed) > 0 {
			r.Note += fmt.Sprintf("; %s failed %d of %d times: %v", p.name, len(p.failed), streamRounds+1, p.failed[0])
		}
		if p.missing(streamRounds) != nil {
			missing = true
			parts = append(parts, "no figure of "+p.name)
			continue
		}
		r.Values.add(p.name+"_gbit_s", p.spread())
		parts = append(parts, p.name+" "+p.spread().text("%.1f"))
		if best == nil || p.spread().median() > best.spread().median() {
			best = p
		}
	}
	measured := "(" + strings.Join(parts, ", ") + " Gbit/s)"
	if best == nil {
		r.Measured = "no peer " + measured
		return r
	}
	ratio := ours.over(best)
	r.Values.add("ratio", ratio)
	r.Measured = ratio.text("%.2f") + " " + measured
	r.Met = ratio.median() >= 1 && !missing
	return r
}
