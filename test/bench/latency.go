package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/containers/podman/v5/pkg/bindings"
	"github.com/containers/podman/v5/pkg/bindings/containers"

	"github.com/doze-run/doze/runtime/freezer"
	"github.com/doze-run/doze/runtime/sandbox"
)

// timesBars are the bars of the median and, unless it is 0, of the 99th percentile, in ms.
type timesBars struct{ p50, p99 float64 }

// timesRow is the row of a figure of times without a peer.
func timesRow(figure, bar string, bars timesBars, p50s, all spread) row {
	return row{
		Figure:   figure,
		Bar:      bar,
		Measured: fmt.Sprintf("p50 %s ms, p99 %.2f ms", p50s.text("%.2f"), all.p99()),
		Met:      p50s.median() <= bars.p50 && (bars.p99 == 0 || all.p99() <= bars.p99),
		Values:   values{"p99_ms": all.p99()}.add("p50_ms", p50s),
	}
}

// measureWake: a preview request that finds the sandbox asleep, each paired
// with the same request right after it, awake.
func measureWake(ctx context.Context, b *bench) ([]row, error) {
	var asleep, awake spread
	p50s, added, err := inRounds(func() (spread, error) {
		var added spread
		for range b.count(60) {
			if _, err := b.node.API.Sleep(ctx, b.id); err != nil {
				return nil, err
			}
			waking, err := timed(func() error { return b.node.getWaking(ctx, b.url, "warm") })
			if err != nil {
				return nil, err
			}
			again, err := timed(func() error { return b.node.getWaking(ctx, b.url, "") })
			if err != nil {
				return nil, err
			}
			asleep, awake, added = append(asleep, waking), append(awake, again), append(added, waking-again)
		}
		return added, nil
	})
	if err != nil {
		return nil, err
	}
	r := timesRow("wake of a preview, added to the same request awake", "p50 ≤ 1 ms, p99 ≤ 5 ms",
		timesBars{1, 5}, p50s, added)
	r.Values["asleep_p50_ms"], r.Values["awake_p50_ms"] = asleep.median(), awake.median()
	r.Note = fmt.Sprintf("asleep p50 %.2f ms, awake p50 %.2f ms; Sablier publishes 1.5 ms p50 and 4.9 ms p99 for an app that runs", asleep.median(), awake.median())
	return []row{r}, nil
}

// measureThaw: our thaw against Podman's unpause of the same container.
func measureThaw(ctx context.Context, b *bench) ([]row, error) {
	f, err := freezer.Open(cgroup())
	if err != nil {
		return nil, err
	}
	id := sandbox.ID(b.id)
	if _, err := f.Prepare(id, sandbox.Limits{}); err != nil {
		return nil, err
	}
	conn, err := connectPodman(ctx, b.node.Home)
	if err != nil {
		return nil, err
	}
	name := "doze-" + b.id
	ours := newMedians("doze", func(ctx context.Context) (spread, error) {
		return repeat(ctx, b.count(60), func() error { return f.Freeze(ctx, id) }, func() error { return f.Thaw(ctx, id) })
	})
	podman := newMedians("podman", func(ctx context.Context) (spread, error) {
		return repeat(ctx, b.count(10), func() error { return containers.Pause(conn, name, nil) }, func() error { return containers.Unpause(conn, name, nil) })
	})
	if err := versus(ctx, latencyRounds, ours, podman); err != nil {
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
	for _, folder := range []string{filepath.Join(os.Getenv("XDG_RUNTIME_DIR"), "podman"), filepath.Join(home, "run")} {
		conn, err := bindings.NewConnection(ctx, "unix://"+filepath.Join(folder, "podman.sock"))
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
	round := func(n int) (spread, error) {
		return repeat(ctx, n, nil, func() error {
			made++
			id, err := b.node.create(ctx, fmt.Sprint("create-", made), 0)
			if err != nil {
				return err
			}
			return b.node.exec(ctx, id, "true")
		})
	}
	if _, err := round(2); err != nil { // not counted
		return nil, err
	}
	p50s, all, err := inRounds(func() (spread, error) { return round(b.count(10)) })
	if err != nil {
		return nil, err
	}
	return []row{timesRow("create to first exec result, image present", "p50 ≤ 150 ms", timesBars{p50: 150}, p50s, all)}, nil
}

// measureColdWake measures from stopped to the first response of a declared server.
func measureColdWake(ctx context.Context, b *bench) ([]row, error) {
	p50s, all, err := inRounds(func() (spread, error) {
		return repeat(ctx, b.count(10),
			func() error { _, err := b.node.API.Stop(ctx, b.id); return err },
			func() error { return b.node.getWaking(ctx, b.url, "cold") })
	})
	if err != nil {
		return nil, err
	}
	return []row{timesRow("stopped to first byte of a small server declared on_wake", "p50 ≤ 200 ms", timesBars{p50: 200}, p50s, all)}, nil
}

// measureExec measures `true` through the API, and by podman exec.
func measureExec(ctx context.Context, b *bench) ([]row, error) {
	ours := newMedians("doze", func(ctx context.Context) (spread, error) {
		return repeat(ctx, b.count(100), nil, func() error { return b.node.exec(ctx, b.id, "true") })
	})
	podman := &contender{name: "podman exec", round: func(ctx context.Context) (float64, error) { return podmanExec(ctx, b) }}
	if err := versus(ctx, latencyRounds, ours, podman); err != nil {
		return nil, err
	}
	p50s, theirs, ratio := ours.spread(), podman.spread(), podman.over(ours)
	return []row{{
		Figure:   "exec `true` through the HTTPS API; podman exec for comparison",
		Bar:      "p50 ≤ 5 ms; ≥ 15 times faster",
		Measured: fmt.Sprintf("p50 %s ms; %s times faster (%.0f ms)", p50s.text("%.2f"), ratio.text("%.0f"), theirs.median()),
		Met:      p50s.median() <= 5 && ratio.median() >= 15,
		Values:   values{"p99_ms": ours.samples.p99()}.add("p50_ms", p50s).add("podman_mean_ms", theirs).add("ratio", ratio),
	}}, nil
}

// podmanExec is the mean of a few calls in ms. One shell runs all of them, so that
// starting this much larger program's children does not count.
func podmanExec(ctx context.Context, b *bench) (float64, error) {
	const n = 4
	script := fmt.Sprintf("podman exec doze-%[1]s true; date +%%s%%N; for i in $(seq %[2]d); do podman exec doze-%[1]s true || exit 1; done; date +%%s%%N", b.id, n)
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
