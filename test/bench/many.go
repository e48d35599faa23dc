package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/store"
)

const (
	sleepers   = 100
	sleepAfter = 5 * time.Second // they fall asleep by themselves
	sleepWait  = 5 * time.Minute // bounds the wait for that: only a broken node needs it
	idleWatch  = 30 * time.Second
	records    = 10_000
	clockTicks = 100 // per second in /proc/PID/stat (USER_HZ, proc_pid_stat(5))
)

// measureAsleep: memory and CPU with many sleeping sandboxes.
func measureAsleep(ctx context.Context, b *bench) ([]row, error) {
	ids := make([]string, 0, sleepers)
	for i := range sleepers {
		sb, err := b.node.create(ctx, fmt.Sprint("sleeper-", i), sleepAfter)
		if err != nil {
			return nil, err
		}
		ids = append(ids, sb.ID)
		if err := b.node.exec(ctx, sb.ID, "true"); err != nil {
			return nil, err
		}
		if (i+1)%20 == 0 {
			b.progress("  %d of %d are made", i+1, sleepers)
		}
	}
	deadline := time.After(sleepWait)
	for asleep := 0; asleep < sleepers; {
		select {
		case <-time.After(time.Second):
		case <-deadline:
			return nil, fmt.Errorf("after %s only %d of %d are asleep", sleepWait, asleep, sleepers)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		list, err := b.node.API.List(ctx, client.Filter{State: client.StateAsleep})
		if err != nil {
			return nil, err
		}
		asleep = len(list)
	}
	before, err := processes(b.node.Home, ids)
	if err != nil {
		return nil, err
	}
	select {
	case <-time.After(idleWatch):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	after, err := processes(b.node.Home, ids)
	if err != nil {
		return nil, err
	}
	used := after.nodeCPU - before.nodeCPU
	share := 100 * used.Seconds() / idleWatch.Seconds()
	each := float64(after.pss) / sleepers / (1 << 20)
	values := map[string]float64{"per_sandbox_mib": each, "processes": float64(after.count)}
	var parts []string
	for _, name := range programs {
		mib := float64(after.byName[name]) / (1 << 20)
		values[name+"_mib"] = mib
		parts = append(parts, fmt.Sprintf("%s %.0f", name, mib))
	}
	return []row{{
		Figure:   fmt.Sprintf("memory per sleeping sandbox, all processes (PSS), at %d", sleepers),
		Bar:      "≤ 8 MB",
		Measured: fmt.Sprintf("%.1f MiB", each),
		Met:      after.pss/sleepers <= 8_000_000,
		Values:   values,
		Note:     "in MiB: " + strings.Join(parts, ", "),
	}, {
		Figure:   fmt.Sprintf("resident memory of a guest (RSS), the largest of %d that fell asleep", sleepers),
		Bar:      "≤ 8 MB",
		Measured: fmt.Sprintf("%.1f MB", float64(after.guestRSS)/1e6),
		Met:      after.guestRSS <= 8_000_000,
		Values:   map[string]float64{"rss_max_mb": float64(after.guestRSS) / 1e6},
	}, {
		Figure:   fmt.Sprintf("CPU of the node with %d sleeping sandboxes", sleepers),
		Bar:      "≤ 1 % of a core",
		Measured: fmt.Sprintf("%.2f %%", share),
		Met:      share <= 1,
		Values:   map[string]float64{"percent": share, "watched_s": idleWatch.Seconds()},
	}}, nil
}

// programs of which a node with sandboxes is made.
var programs = []string{"doze-node", "doze-guest", "doze-netns", "conmon", "podman"}

// census of the processes of a node and its sandboxes.
type census struct {
	count    int
	pss      int64
	byName   map[string]int64
	guestRSS int64         // of the largest guest
	nodeCPU  time.Duration // of the node with its helpers
}

// processes counts all that a node started, and all in and around its sandboxes.
func processes(home string, ids []string) (census, error) {
	c := census{byName: map[string]int64{}}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return c, err
	}
	for _, e := range entries {
		dir := filepath.Join("/proc", e.Name())
		if pid, err := strconv.Atoi(e.Name()); err != nil || pid == os.Getpid() || !belongs(dir, home, ids) {
			continue
		}
		name, err := os.ReadFile(filepath.Join(dir, "comm"))
		if err != nil {
			continue
		}
		pss, rss, err := readMemory(filepath.Join(dir, "smaps_rollup"))
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
			continue // it ended meanwhile
		}
		if err != nil {
			return c, err
		}
		what := strings.TrimSpace(string(name))
		c.count++
		c.pss += pss
		c.byName[what] += pss
		if what == "doze-guest" {
			c.guestRSS = max(c.guestRSS, rss)
		}
		if what == "doze-node" || what == "doze-netns" || what == "podman" {
			used, err := readCPU(filepath.Join(dir, "stat"))
			if err != nil {
				return c, err
			}
			c.nodeCPU += used
		}
	}
	for _, name := range programs {
		if c.byName[name] == 0 {
			return c, fmt.Errorf("no %s is among the processes", name)
		}
	}
	return c, nil
}

// belongs says whether a process is of the node with this home, or of one of
// these sandboxes: its program, its working directory, its arguments or its
// cgroup name them.
func belongs(dir, home string, ids []string) bool {
	program, _ := os.Readlink(filepath.Join(dir, "exe"))
	folder, _ := os.Readlink(filepath.Join(dir, "cwd"))
	arguments, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
	cgroups, _ := os.ReadFile(filepath.Join(dir, "cgroup"))
	text := program + "\x00" + folder + "\x00" + string(arguments) + "\x00" + string(cgroups)
	return folder == home || strings.Contains(text, home+"/") ||
		slices.ContainsFunc(ids, func(id string) bool { return strings.Contains(text, id) })
}

// readMemory returns the proportional and the resident set in bytes.
func readMemory(path string) (pss, rss int64, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, 0, err
	}
	for line := range strings.Lines(string(text)) {
		var kib int64
		if n, _ := fmt.Sscanf(line, "Pss: %d kB", &kib); n == 1 {
			pss = kib << 10
		} else if n, _ := fmt.Sscanf(line, "Rss: %d kB", &kib); n == 1 {
			rss = kib << 10
		}
	}
	return pss, rss, nil
}

func readCPU(path string) (time.Duration, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	// The name in parentheses may have spaces; utime and stime are fields 14 and 15.
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(fields) < 13 {
		return 0, fmt.Errorf("%s is short", path)
	}
	user, err := strconv.ParseInt(fields[11], 10, 64)
	if err != nil {
		return 0, err
	}
	system, err := strconv.ParseInt(fields[12], 10, 64)
	return time.Duration(user+system) * time.Second / clockTicks, err
}

// measureStart: a node with many records, from its start until it serves.
func measureStart(ctx context.Context, b *bench) ([]row, error) {
	n := b.node
	if err := n.Stop(); err != nil {
		return nil, err
	}
	if err := fill(ctx, n.Home); err != nil {
		return nil, err
	}
	var times samples
	for range 5 {
		start := time.Now()
		if err := n.Start(); err != nil {
			return nil, err
		}
		times = append(times, time.Since(start))
		if err := n.Stop(); err != nil {
			return nil, err
		}
	}
	return []row{{
		Figure:   fmt.Sprintf("node start with %d sandbox records until it serves", records),
		Bar:      "≤ 2 s",
		Measured: fmt.Sprintf("p50 %.2f s", times.p50().Seconds()),
		Met:      times.p50() <= 2*time.Second,
		Values:   map[string]float64{"p50_s": times.p50().Seconds(), "max_s": times.quantile(1).Seconds()},
	}}, nil
}

// fill writes the records of sandboxes that are stopped.
func fill(ctx context.Context, home string) error {
	s, err := store.Open(filepath.Join(home, "store"), slog.Default())
	if err != nil {
		return err
	}
	defer s.Close()
	now := time.Now().UTC()
	for i := range records {
		sb := sandbox.Sandbox{
			ID: sandbox.ID(fmt.Sprintf("filled%06d", i)), Name: fmt.Sprint("filled-", i), Owner: "operator",
			Image: "base", ImageRef: "localhost/doze/base:latest", Size: "basic", State: sandbox.StateStopped,
			Env: map[string]string{"NODE_ENV": "development"}, Labels: map[string]string{"team": "a"},
			CreatedAt: now, LastActiveAt: now, StateSince: now,
			Ports: []sandbox.Port{{Port: 3000, Token: "aaaaaaaaaaaaaaaaaaaa", Access: sandbox.AccessToken}},
		}
		if err := s.PutSandbox(ctx, sb); err != nil {
			return err
		}
	}
	return nil
}
