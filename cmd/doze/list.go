package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
)

func (a *app) listCommand() *cobra.Command {
	var filter client.Filter
	var quiet bool
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List sandboxes",
		Long:    "List sandboxes. This never wakes a sandbox.",
		Example: "  doze ls --state asleep --label team=web\n  doze sleep $(doze ls -q --state running)",
		Args:    wants(0, 0),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, _ []string) error {
			sandboxes, err := node.List(ctx, filter)
			if err != nil {
				return err
			}
			if quiet {
				return printItems(a, "sandboxes", sandboxes, func(sb types.Sandbox) string { return clean(sb.Name) })
			}
			return a.printSandboxes(sandboxes)
		}),
	}
	choiceFlag(cmd, (*string)(&filter.State), "state", "list only sandboxes in this state: "+strings.Join(textsOf(states), ", "), states)
	cmd.Flags().StringArrayVar(&filter.Labels, "label", nil, "list only sandboxes with this label, as KEY=VALUE; may be repeated")
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "print names only")
	return cmd
}

// states that a sandbox in a list may have.
var states = []types.State{types.StateStarting, types.StateRunning, types.StateAsleep, types.StateStopped, types.StateArchived}

func (a *app) printSandboxes(sandboxes []types.Sandbox) error {
	heads := []any{"NAME", "STATE", "SINCE", "IMAGE", "SIZE", "PORTS", "ACTIVE", "CREATED"}
	return printTable(a, "sandboxes", sandboxes, heads, func(sb types.Sandbox) []any {
		ports := cmp.Or(strings.Join(portNumbers(sb.Ports), ","), "-")
		return []any{sb.Name, sb.State, ago(sb.StateSince), sb.Image, sb.Size, ports, ago(sb.LastActiveAt), ago(sb.CreatedAt)}
	})
}

func (a *app) showCommand() *cobra.Command {
	shown := false
	return &cobra.Command{
		Use:               "show SANDBOX...",
		Short:             "Show the details of sandboxes",
		Long:              "Show the details of sandboxes. This never wakes a sandbox.",
		Args:              wants(1, -1),
		ValidArgsFunction: a.complete(sandboxNames),
		RunE: a.forEach(func(ctx context.Context, node *client.Client, name string) error {
			sb, err := node.Get(ctx, name)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(sb)
			}
			if shown {
				fmt.Fprintln(a.out)
			}
			shown = true
			return a.printSandbox(sb)
		}),
	}
}

func (a *app) printSandbox(sb types.Sandbox) error {
	t := newTable(a.out)
	t.row("name", sb.Name)
	t.row("id", sb.ID)
	t.row("state", strings.TrimSuffix(fmt.Sprintf("%s for %s (%s)", sb.State, ago(sb.StateSince), sb.StateReason), " ()"))
	if c := sb.Condition; c != nil {
		t.row("condition", c.Message+" (for "+ago(c.Since)+")")
	}
	t.row("image", sb.Image+" ("+sb.ImageRef+")")
	t.row("size", sb.Size)
	t.row("created", moment(sb.CreatedAt))
	t.row("last active", moment(sb.LastActiveAt))
	t.row("sleeps after", span(time.Duration(sb.SleepAfter)))
	t.row("stops after", span(time.Duration(sb.StopAfter)))
	if sb.ArchiveAfter > 0 {
		t.row("archives after", span(time.Duration(sb.ArchiveAfter)))
	}
	if disk := sb.Archived; disk != nil {
		t.row("archive", fmt.Sprintf("backup %s, %s", disk.BackupID, size(disk.SizeBytes)))
	}
	if sb.Persist != types.PersistMemory {
		t.row("persists", string(sb.Persist))
	}
	if !sb.ExpiresAt.IsZero() {
		t.row("expires", sb.ExpiresAt.Local().Format(time.DateTime)+" (ttl "+span(time.Duration(sb.TTL))+")")
	}
	if u := sb.Usage; u != nil {
		t.row("cpu time", cpuTime(u.CPUSeconds))
		t.row("memory", size(u.MemoryBytes))
		if u.Files > 0 { // measured
			t.row("disk", fmt.Sprintf("%s in %d files", size(u.DiskBytes), u.Files))
		}
	}
	if !sb.HoldUntil.IsZero() {
		t.row("held until", sb.HoldUntil.Local().Format(time.DateTime))
	}
	for _, key := range slices.Sorted(maps.Keys(sb.Labels)) {
		t.row("label", key+"="+sb.Labels[key])
	}
	for _, key := range slices.Sorted(maps.Keys(sb.Env)) {
		t.row("env", key+"="+sb.Env[key])
	}
	for _, p := range sb.Ports {
		t.row("port", fmt.Sprintf("%d  %s  (access %s, wake %s, host header %s, protocol %s, websocket %s)", p.Port, p.URL, p.Access, p.Wake, p.HostHeader, p.Protocol, p.WebSocket))
	}
	for _, p := range sb.Processes {
		t.row("process", fmt.Sprintf("%s  %s  %s  %s", p.ID, p.Name, processState(p), commandLine(p)))
	}
	return t.flush()
}

func moment(at time.Time) string {
	if at.IsZero() {
		return "never"
	}
	return at.Local().Format(time.DateTime) + " (" + ago(at) + " ago)"
}
