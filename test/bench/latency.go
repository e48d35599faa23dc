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

// measureWake: a preview request that finds the sandbox asleep, each paired
// with the same request right after it, awake.
func measureWake(ctx context.Context, b *bench) ([]row, error) {
	sb, url, err := b.node.withServer(ctx, "wake")
	if err != nil {
		return nil, err
	}
	var asleep, awake, added samples
	for range 300 {
		if _, err := b.node.API.Sleep(ctx, sb.ID); err != nil {
			return nil, err
		}
		wakes := []string{"warm", ""} // what each of the two must have cost
		pair, err := repeat(ctx, 0, 2, func() error {
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
	return []row{{
		Figure:   "wake of a preview, added to the same request awake",
		Bar:      "p50 ≤ 1 ms, p99 ≤ 5 ms",
		Measured: fmt.Sprintf("p50 %.2f ms, p99 %.2f ms", ms(added.p50()), ms(added.p99())),
		Met:      added.p50() <= time.Millisecond && added.p99() <= 5*time.Millisecond,
		Values: map[string]float64{
			"added_p50_ms": ms(added.p50()), "added_p99_ms": ms(added.p99()),
			"asleep_p50_ms": ms(asleep.p50()), "awake_p50_ms": ms(awake.p50()),
		},
		Note: fmt.Sprintf("asleep p50 %.2f ms, awake p50 %.2f ms; Sablier publishes 1.5 ms p50 and 4.9 ms p99 for an app that runs", ms(asleep.p50()), ms(awake.p50())),
	}}, nil
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
	ours, err := pairs(300, func() error { return f.Freeze(ctx, id) }, func() error { return f.Thaw(ctx, id) })
	if err != nil {
		return nil, err
	}
	conn, err := connectPodman(ctx, b.node.Home)
	if err != nil {
		return nil, err
	}
	container := "doze-" + sb.ID
	podman, err := pairs(30, func() error { return containers.Pause(conn, container, nil) }, func() error { return containers.Unpause(conn, container, nil) })
	if err != nil {
		return nil, err
	}
	ratio := float64(podman.p50()) / float64(ours.p50())
	thaw := float64(ours.p50().Nanoseconds())
	return []row{{
		Figure:   "Podman's unpause (API) against our thaw",
		Bar:      "≥ 20 times slower",
		Measured: fmt.Sprintf("%.0f times (%.2f ms, %.3f ms)", ratio, ms(podman.p50()), thaw/1e6),
		Met:      ratio >= 20,
		Values:   map[string]float64{"ratio": ratio, "podman_p50_ms": ms(podman.p50()), "thaw_p50_us": thaw / 1e3},
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
	i := 0
	times, err := repeat(ctx, 2, 30, func() error {
		i++
		sb, err := b.node.create(ctx, fmt.Sprint("create-", i), 0)
		if err != nil {
			return err
		}
		return b.node.exec(ctx, sb.ID, "true")
	})
	if err != nil {
		return nil, err
	}
	return []row{{
		Figure:   "create to first exec result, image present",
		Bar:      "p50 ≤ 150 ms",
		Measured: fmt.Sprintf("p50 %.0f ms, p99 %.0f ms", ms(times.p50()), ms(times.p99())),
		Met:      times.p50() <= 150*time.Millisecond,
		Values:   map[string]float64{"p50_ms": ms(times.p50()), "p99_ms": ms(times.p99())},
	}}, nil
}

// measureColdWake: from stopped to the first answer of a declared server.
func measureColdWake(ctx context.Context, b *bench) ([]row, error) {
	sb, url, err := b.node.withServer(ctx, "cold")
	if err != nil {
		return nil, err
	}
	var times samples
	for range 30 {
		if _, err := b.node.API.Stop(ctx, sb.ID); err != nil {
			return nil, err
		}
		one, err := repeat(ctx, 0, 1, func() error { return b.node.getWaking(ctx, url, "cold") })
		if err != nil {
			return nil, err
		}
		times = append(times, one...)
	}
	return []row{{
		Figure:   "stopped to first byte of a small server declared on-wake",
		Bar:      "p50 ≤ 200 ms",
		Measured: fmt.Sprintf("p50 %.0f ms, p99 %.0f ms", ms(times.p50()), ms(times.p99())),
		Met:      times.p50() <= 200*time.Millisecond,
		Values:   map[string]float64{"p50_ms": ms(times.p50()), "p99_ms": ms(times.p99())},
	}}, nil
}

// measureExec: `true` through the API, and by podman exec beside it.
func measureExec(ctx context.Context, b *bench) ([]row, error) {
	sb, err := b.node.create(ctx, "exec", 0)
	if err != nil {
		return nil, err
	}
	ours, err := repeat(ctx, 20, 500, func() error { return b.node.exec(ctx, sb.ID, "true") })
	if err != nil {
		return nil, err
	}
	// One shell runs all of them, so that starting this much larger program's children does not count.
	const n = 20
	script := fmt.Sprintf("podman exec doze-%s true; date +%%s%%N; for i in $(seq %d); do podman exec doze-%s true || exit 1; done; date +%%s%%N", sb.ID, n, sb.ID)
	cmd := exec.CommandContext(ctx, "sh", "-c", script)
	cmd.Dir = b.node.Home
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			err = fmt.Errorf("%w: %s", err, exit.Stderr)
		}
		return nil, err
	}
	var start, end int64
	if _, err := fmt.Sscan(string(out), &start, &end); err != nil {
		return nil, fmt.Errorf("timing podman exec: %w in %q", err, out)
	}
	podman := time.Duration((end - start) / n)
	ratio := float64(podman) / float64(ours.p50())
	return []row{{
		Figure:   "exec `true` through the HTTPS API; podman exec beside it",
		Bar:      "p50 ≤ 5 ms; ≥ 15 times faster",
		Measured: fmt.Sprintf("p50 %.2f ms; %.0f times faster (%.0f ms)", ms(ours.p50()), ratio, ms(podman)),
		Met:      ours.p50() <= 5*time.Millisecond && ratio >= 15,
		Values:   map[string]float64{"p50_ms": ms(ours.p50()), "p99_ms": ms(ours.p99()), "podman_mean_ms": ms(podman), "ratio": ratio},
	}}, nil
}
