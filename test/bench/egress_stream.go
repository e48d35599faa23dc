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
	// streamQuorum is how many of a peer's rounds have to end well for a figure.
	streamQuorum = 3
)

// measureStream: one TCP stream each way, passed through, against what gives
// rootless containers their network elsewhere. All take turns, so that the machine's
// drift meets all of them; each figure is the median of its rounds.
func measureStream(ctx context.Context, b *bench) ([]row, error) {
	sb, err := b.node.withClient(ctx, "stream")
	if err != nil {
		return nil, err
	}
	_, port, _ := strings.Cut(b.node.origin.Raw, ":")
	peers := []struct {
		name string
		run  streamBeside
	}{{"pasta", throughPasta}, {"slirp4netns", throughSlirp}}
	var rows []row
	for _, direction := range []string{"out", "in"} {
		arguments := func(to string) []string {
			return []string{"-do", "stream", "-direction", direction, "-to", to, "-duration", streamTime.String()}
		}
		rates := map[string][]float64{}
		failed := map[string][]error{}
		for round := range streamRounds + 1 {
			r, err := b.node.client(ctx, sb.ID, arguments(rawHost)...)
			if err != nil {
				return rows, err
			}
			if round > 0 { // the first is the warm-up
				rates["doze"] = append(rates["doze"], r.perSecond())
			}
			for _, p := range peers {
				r, err := p.run(ctx, b, arguments(peerGateway+":"+port))
				if err != nil {
					failed[p.name] = append(failed[p.name], err)
				} else if round > 0 {
					rates[p.name] = append(rates[p.name], r.perSecond())
				}
			}
		}
		rows = append(rows, streamRow(direction, rates, failed))
	}
	return rows, nil
}

// streamRow compares the rounds that ended well: pasta of 2023, as in Debian 12, breaks
// some of its streams.
func streamRow(direction string, rates map[string][]float64, failed map[string][]error) row {
	r := row{
		Figure: "one TCP stream " + direction + ", passed through, against the better of pasta and slirp4netns",
		Bar:    "≥ 1.0",
		Values: map[string]float64{},
		Note:   "MTU 65,520 for all, one server on the loopback, each in a session of its own",
	}
	ours := median(rates["doze"]) * 8 / 1e9
	r.Values["doze_gbit_s"] = ours
	best := 0.0
	var parts, missing []string
	for _, name := range []string{"pasta", "slirp4netns"} {
		if errs := failed[name]; len(errs) > 0 {
			r.Note += fmt.Sprintf("; %s failed %d of %d times: %v", name, len(errs), streamRounds+1, errs[0])
		}
		if len(rates[name]) < streamQuorum {
			missing = append(missing, name)
			continue
		}
		rate := median(rates[name]) * 8 / 1e9
		r.Values[name+"_gbit_s"] = rate
		best = max(best, rate)
		parts = append(parts, fmt.Sprintf("%s %.1f", name, rate))
	}
	if len(missing) > 0 {
		parts = append(parts, "no figure of "+strings.Join(missing, ", "))
	}
	if best == 0 {
		r.Measured = fmt.Sprintf("no peer (doze %.1f Gbit/s)", ours)
		return r
	}
	r.Values["ratio"] = ours / best
	r.Measured = fmt.Sprintf("%.2f (doze %.1f, %s Gbit/s)", ours/best, ours, strings.Join(parts, ", "))
	r.Met = ours >= best && len(missing) == 0
	return r
}
