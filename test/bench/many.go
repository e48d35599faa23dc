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
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/store"
	"github.com/prometheus/procfs"
	"golang.org/x/sync/errgroup"
)

const (
	sleepers   = 100
	sleepAfter = 5 * time.Second // they fall asleep by themselves
	sleepWait  = 5 * time.Minute // bounds the wait for that: only a broken node needs it
	idleRounds = 5
	idleWatch  = 10 * time.Second // of each round
	idleBar    = 0.5              // percent of a core
	records    = 10_000
)

// measureAsleep: memory and CPU with many sleeping sandboxes.
func measureAsleep(ctx context.Context, b *bench) ([]row, error) {
	count := b.count(sleepers)
	ids, err := b.populate(ctx, count, sleepAfter)
	if err != nil {
		return nil, err
	}
	wait, cancel := context.WithTimeout(ctx, sleepWait)
	defer cancel()
	asleep := 0
	if err := poll(wait, time.Second, func() (bool, error) {
		list, err := b.node.API.List(ctx, client.Filter{State: types.StateAsleep})
		asleep = len(list)
		return asleep >= count, err
	}); err != nil {
		return nil, fmt.Errorf("%d of %d are asleep: %w", asleep, count, err)
	}
	before, err := processes(b.node.Home, ids)
	if err != nil {
		return nil, err
	}
	each := spread{before.each(count)}
	share := map[string]spread{} // percent of a core, by program and "all"
	var switches spread          // a second
	watch := b.lasting(idleWatch)
	for range idleRounds {
		if err := pause(ctx, watch); err != nil {
			return nil, err
		}
		after, err := processes(b.node.Home, ids)
		if err != nil {
			return nil, err
		}
		all := 0.0
		for _, name := range nodePrograms {
			used := 100 * (after.cpu[name] - before.cpu[name]).Seconds() / after.at.Sub(before.at).Seconds()
			share[name] = append(share[name], used)
			all += used
		}
		share["all"] = append(share["all"], all)
		switches = append(switches, float64(after.switches-before.switches)/after.at.Sub(before.at).Seconds())
		each = append(each, after.each(count))
		before = after
	}
	memory := values{"processes": float64(before.processes)}.add("per_sandbox_mib", each)
	var parts, shares []string
	for _, name := range programs {
		mib := float64(before.byName[name]) / (1 << 20)
		memory[name+"_mib"] = mib
		parts = append(parts, fmt.Sprintf("%s %.0f", name, mib))
	}
	used := values{"watched_s": watch.Seconds()}.add("percent", share["all"]).add("context_switches_per_s", switches)
	for _, name := range nodePrograms {
		used.add(name+"_percent", share[name])
		shares = append(shares, name+" "+share[name].text("%.2f"))
	}
	guests := before.guests
	return []row{{
		Figure:   fmt.Sprintf("memory per sleeping sandbox, all processes (PSS), at %d", count),
		Bar:      "≤ 8 MB",
		Measured: each.text("%.1f") + " MiB",
		Met:      each.median()*(1<<20) <= 8_000_000,
		Values:   memory,
		Note:     "in MiB: " + strings.Join(parts, ", "),
	}, {
		Figure:   fmt.Sprintf("resident memory of a guest (RSS), the largest of %d that fell asleep", count),
		Bar:      "≤ 8 MB",
		Measured: fmt.Sprintf("%.1f MB (median %.1f)", guests.max(), guests.median()),
		Met:      guests.max() <= 8,
		Values:   values{}.add("rss_mb", guests),
	}, {
		Figure:   fmt.Sprintf("CPU of the node with %d sleeping sandboxes", count),
		Bar:      fmt.Sprintf("≤ %g %% of a core", idleBar),
		Measured: share["all"].text("%.2f") + " %",
		Met:      share["all"].median() <= idleBar,
		Values:   used,
		Note:     fmt.Sprintf("in %%: %s; context switches a second: %s", strings.Join(shares, ", "), switches.text("%.0f")),
	}}, nil
}

// makers is how many sandboxes are created or removed concurrently.
const makers = 4

// populate makes sandboxes, each of which has run a command.
func (b *bench) populate(ctx context.Context, count int, sleepAfter time.Duration) (ids []string, err error) {
	ids = make([]string, count)
	var made atomic.Int64
	err = concurrently(ctx, count, func(ctx context.Context, i int) error {
		var err error
		if ids[i], err = b.node.create(ctx, fmt.Sprint("many-", i), sleepAfter); err != nil {
			return err
		}
		if n := made.Add(1); n%50 == 0 {
			b.progress("  %d of %d are made", n, count)
		}
		return b.node.exec(ctx, ids[i], "true")
	})
	return ids, err
}

// concurrently calls f for 0 to n-1, makers at a time, until one fails.
func concurrently(ctx context.Context, n int, f func(ctx context.Context, i int) error) error {
	all, ctx := errgroup.WithContext(ctx)
	all.SetLimit(makers)
	for i := range n {
		all.Go(func() error { return f(ctx, i) })
	}
	return all.Wait()
}

// programs of a node with sandboxes.
var programs = []string{"doze-node", "doze-guest", "doze-netns", "doze-disk", "conmon", "podman"}

// nodePrograms are the node and its helpers, whose CPU time counts as the node's.
var nodePrograms = []string{"doze-node", "doze-netns", "doze-disk", "podman"}

// census of the processes of a node and its sandboxes.
type census struct {
	at        time.Time
	processes int
	pss       int64
	byName    map[string]int64
	guests    spread // RSS of each, in MB
	cpu       map[string]time.Duration
	switches  int64 // of the context, voluntary, of nodePrograms
}

// each is the memory of one of count sandboxes in MiB.
func (c census) each(count int) float64 { return float64(c.pss) / float64(count) / (1 << 20) }

// processes counts all that a node with sandboxes started, and all in and around them.
func processes(home string, ids []string) (census, error) {
	c, err := readCensus(home, ids)
	if err != nil {
		return c, err
	}
	for _, name := range programs {
		if c.byName[name] == 0 {
			return c, fmt.Errorf("no %s is among the processes", name)
		}
	}
	return c, nil
}

func readCensus(home string, ids []string) (census, error) {
	c := census{byName: map[string]int64{}, cpu: map[string]time.Duration{}}
	all, err := procfs.AllProcs()
	if err != nil {
		return c, err
	}
	for _, p := range all {
		if p.PID == os.Getpid() || !belongs(p, home, ids) {
			continue
		}
		err := c.count(p)
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ESRCH) { // it ended meanwhile
			return c, err
		}
	}
	c.at = time.Now()
	return c, nil
}

// count adds a process.
func (c *census) count(p procfs.Proc) error {
	name, err := p.Comm()
	if err != nil {
		return err
	}
	memory, err := p.ProcSMapsRollup()
	if err != nil {
		return err
	}
	if slices.Contains(nodePrograms, name) {
		stat, err := p.Stat()
		if err != nil {
			return err
		}
		threads, err := procfs.AllThreads(p.PID)
		if err != nil {
			return err
		}
		for _, t := range threads {
			if status, err := t.NewStatus(); err == nil { // else it ended meanwhile
				c.switches += int64(status.VoluntaryCtxtSwitches)
			}
		}
		c.cpu[name] += time.Duration(stat.CPUTime() * float64(time.Second))
	}
	if name == "doze-guest" {
		c.guests = append(c.guests, float64(memory.Rss)/1e6)
	}
	c.processes++
	c.pss += int64(memory.Pss)
	c.byName[name] += int64(memory.Pss)
	return nil
}

// belongs reports whether a process is of the node with this home, or of one of
// these sandboxes: its program, its working directory, its arguments or its
// cgroup name them.
func belongs(p procfs.Proc, home string, ids []string) bool {
	program, _ := p.Executable()
	folder, _ := p.Cwd()
	arguments, _ := p.CmdLine()
	cgroups, _ := p.Cgroups()
	text := fmt.Sprint(program, "\x00", folder, "\x00", arguments, "\x00", cgroups)
	return folder == home || strings.Contains(text, home+"/") ||
		slices.ContainsFunc(ids, func(id string) bool { return strings.Contains(text, id) })
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
	var starts spread
	for range latencyRounds {
		took, err := timed(n.Start)
		if err != nil {
			return nil, err
		}
		starts = append(starts, took/1000)
		info, err := n.API.Node(ctx)
		if err != nil {
			return nil, err
		}
		if have := info.Sandboxes[types.StateStopped]; have != records {
			return nil, fmt.Errorf("the node has %d stopped sandboxes of %d records", have, records)
		}
		if err := n.Stop(); err != nil {
			return nil, err
		}
	}
	return []row{atMost(fmt.Sprintf("node start with %d sandbox records until it serves", records), "%.2f", " s", 2, "start_s", starts)}, nil
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
