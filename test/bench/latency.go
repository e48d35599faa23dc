package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"time"

	"github.com/containers/podman/v5/pkg/bindings"
	"github.com/containers/podman/v5/pkg/bindings/containers"

	"github.com/doze-run/doze/runtime/freezer"
	"github.com/doze-run/doze/runtime/sandbox"
)

// latencyRounds is how many rounds a figure of times has.
const latencyRounds = 5

// timesBars are the bars of the median and, unless it is 0, of the 99th percentile.
type timesBars struct{ p50, p99 time.Duration }

// timesRow is the row of a figure of times without a peer.
func timesRow(figure, bar string, bars timesBars, p50s spread, all samples) row {
	return row{
		Figure:   figure,
		Bar:      bar,
		Measured: fmt.Sprintf("p50 %s ms, p99 %.2f ms", p50s.text("%.2f"), ms(all.p99())),
		Met:      p50s.median() <= ms(bars.p50) && (bars.p99 == 0 || all.p99() <= bars.p99),
		Values:   values{"p99_ms": ms(all.p99())}.add("p50_ms", p50s),
	}
}

// measureWake: a preview request that finds the sandbox asleep, each paired
// with the same request right after it, awake.
func measureWake(ctx context.Context, b *bench) ([]row, error) {
	sb, url, err := b.node.withServer(ctx, "wake")
	if err != nil {
		return nil, err
	}
	var asleep, awake samples
	p50s, added, err := inRounds(latencyRounds, func() (samples, error) {
		var added samples
		for range b.count(60) {
			if _, err := b.node.API.Sleep(ctx, sb.ID); err != nil {
				return nil, err
			}
			wakes := []string{"warm", ""} // the wake that each of the two must report
			pair, err := repeat(ctx, 2, func() error {
				want := wakes[0]
				wakes = wakes[1:]
				return b.node.getWaking(ctx, url, want)
			})
			if err != nil {
				return nil, err
			}
			asleep, awake = append(asleep, pair[0]), append(awake, pair[1])
			added = append(added, pair[0]-pair[1])
		}
		return added, nil
	})
	if err != nil {
		return nil, err
	}
	r := timesRow("wake of a preview, added to the same request awake", "p50 ≤ 1 ms, p99 ≤ 5 ms",
		timesBars{time.Millisecond, 5 * time.Millisecond}, p50s, added)
	r.Values["asleep_p50_ms"], r.Values["awake_p50_ms"] = ms(asleep.p50()), ms(awake.p50())
	r.Note = fmt.Sprintf("asleep p50 %.2f ms, awake p50 %.2f ms; Sablier publishes 1.5 ms p50 and 4.9 ms p99 for an app that runs", ms(asleep.p50()), ms(awake.p50()))
	return []row{r}, nil
}

// measureThaw: our thaw against Podman's unpause of the same container.
func measureThaw(ctx context.Context, b *bench) ([]row, error) {
	sb, err := b.node.create(ctx, "thaw", 0)
	if err != nil {
		return nil, err
	}
	f, err := freezer.Open(cgroup())
	if err != nil {
		return nil, err
	}
	id := sandbox.ID(sb.ID)
	if _, err := f.Prepare(id, sandbox.Limits{}); err != nil {
		return nil, err
	}
	conn, err := connectPodman(ctx, b.node.Home)
	if err != nil {
		return nil, err
	}
	name := "doze-" + sb.ID
	// p50 in ms of calls of second, each after one of first.
	p50 := func(n int, first, second func() error) (float64, error) {
		s, err := pairs(n, first, second)
		if err != nil {
			return 0, err
		}
		return float64(s.p50().Nanoseconds()) / 1e6, nil
	}
	ours := &contender{name: "doze", round: func(ctx context.Context) (float64, error) {
		return p50(b.count(60), func() error { return f.Freeze(ctx, id) }, func() error { return f.Thaw(ctx, id) })
	}}
	podman := &contender{name: "podman", round: func(context.Context) (float64, error) {
		return p50(b.count(10), func() error { return containers.Pause(conn, name, nil) }, func() error { return containers.Unpause(conn, name, nil) })
	}}
	if err := alternate(ctx, latencyRounds, ours, podman); err != nil {
		return nil, err
	}
	if err := podman.missing(latencyRounds); err != nil {
		return nil, err
	}
	ratio, theirs, thaw := podman.over(ours), podman.spread(), ours.spread()
	return []row{{
		Figure:   "Podman's unpause (API) against our thaw",
		Bar:      "≥ 20 times slower",
		Measured: fmt.Sprintf("%s times (%.2f ms, %.3f ms)", ratio.text("%.0f"), theirs.median(), thaw.median()),
		Met:      ratio.median() >= 20,
		Values:   values{}.add("ratio", ratio).add("podman_p50_ms", theirs).add("thaw_p50_us", thaw.times(1000)),
	}}, nil
}

// connectPodman finds the service that the node uses.
func connectPodman(ctx context.Context, home string) (context.Context, error) {
	var errs []error
	for _, socket := range podmanSockets(home) {
		conn, err := bindings.NewConnection(ctx, "unix://"+socket)
		if err == nil {
			return conn, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

// measureCreate: from nothing to the result of the first command.
func measureCreate(ctx context.Context, b *bench) ([]row, error) {
	made := 0
	round := func(n int) (samples, error) {
		return repeat(ctx, n, func() error {
			made++
			sb, err := b.node.create(ctx, fmt.Sprint("create-", made), 0)
			if err != nil {
				return err
			}
			return b.node.exec(ctx, sb.ID, "true")
		})
	}
	if _, err := round(2); err != nil { // not counted
		return nil, err
	}
	p50s, all, err := inRounds(latencyRounds, func() (samples, error) { return round(b.count(10)) })
	if err != nil {
		return nil, err
	}
	return []row{timesRow("create to first exec result, image present", "p50 ≤ 150 ms", timesBars{p50: 150 * time.Millisecond}, p50s, all)}, nil
}

// measureColdWake measures from stopped to the first response of a declared server.
func measureColdWake(ctx context.Context, b *bench) ([]row, error) {
	sb, url, err := b.node.withServer(ctx, "cold")
	if err != nil {
		return nil, err
	}
	p50s, all, err := inRounds(latencyRounds, func() (samples, error) {
		return pairs(b.count(10),
			func() error { _, err := b.node.API.Stop(ctx, sb.ID); return err },
			func() error { return b.node.getWaking(ctx, url, "cold") })
	})
	if err != nil {
		return nil, err
	}
	return []row{timesRow("stopped to first byte of a small server declared on_wake", "p50 ≤ 200 ms", timesBars{p50: 200 * time.Millisecond}, p50s, all)}, nil
}

// measureExec measures `true` through the API, and by podman exec.
func measureExec(ctx context.Context, b *bench) ([]row, error) {
	sb, err := b.node.create(ctx, "exec", 0)
	if err != nil {
		return nil, err
	}
	var all samples
	ours := &contender{name: "doze", round: func(ctx context.Context) (float64, error) {
		s, err := repeat(ctx, b.count(100), func() error { return b.node.exec(ctx, sb.ID, "true") })
		if err != nil {
			return 0, err
		}
		all = append(all, s...)
		return ms(s.p50()), nil
	}}
	podman := &contender{name: "podman exec", round: func(ctx context.Context) (float64, error) { return podmanExec(ctx, b, sb.ID) }}
	if err := alternate(ctx, latencyRounds, ours, podman); err != nil {
		return nil, err
	}
	if err := podman.missing(latencyRounds); err != nil {
		return nil, err
	}
	p50s, theirs, ratio := ours.spread(), podman.spread(), podman.over(ours)
	return []row{{
		Figure:   "exec `true` through the HTTPS API; podman exec for comparison",
		Bar:      "p50 ≤ 5 ms; ≥ 15 times faster",
		Measured: fmt.Sprintf("p50 %s ms; %s times faster (%.0f ms)", p50s.text("%.2f"), ratio.text("%.0f"), theirs.median()),
		Met:      p50s.median() <= 5 && ratio.median() >= 15,
		Values:   values{"p99_ms": ms(all.p99())}.add("p50_ms", p50s).add("podman_mean_ms", theirs).add("ratio", ratio),
	}}, nil
}

// podmanExec is the mean of a few calls in ms. One shell runs all of them, so that
// starting this much larger program's children does not count.
func podmanExec(ctx context.Context, b *bench, id string) (float64, error) {
	const n = 4
	script := fmt.Sprintf("podman exec doze-%[1]s true; date +%%s%%N; for i in $(seq %[2]d); do podman exec doze-%[1]s true || exit 1; done; date +%%s%%N", id, n)
	cmd := exec.CommandContext(ctx, "sh", "-c", script)
	cmd.Dir = b.node.Home
	out, err := output(cmd)
	if err != nil {
		return 0, err
	}
	var start, end int64
	if _, err := fmt.Sscan(string(out), &start, &end); err != nil {
		return 0, fmt.Errorf("parse the time of podman exec in %[2]q: %[1]w", err, out)
	}
	return float64(end-start) / n / 1e6, nil
}
