package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
)

func (a *app) eventsCommand() *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use:   "events [SANDBOX]",
		Short: "Print the events of a sandbox, or of all sandboxes",
		Long: `Print the events of a sandbox, oldest first. Without a name, print the latest 4,096
events of all sandboxes since the node started. This never wakes a sandbox.`,
		Example:           "  doze events -f\n  doze events shop",
		Args:              wants(0, 1),
		ValidArgsFunction: a.complete(oneSandbox),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			if len(args) == 0 {
				return a.feed(ctx, node, follow)
			}
			sandbox, err := followed(ctx, node, args[0], follow)
			if err != nil {
				return err
			}
			var events []types.Event
			if !follow { // else the stream begins with them: the sandbox may be destroyed before it
				if events, err = node.Events(ctx, sandbox, 0); err != nil {
					return err
				}
			}
			return printStream(ctx, a, "events", events, follow, func(e types.Event) uint64 { return e.Seq }, eventText,
				func(after uint64, each func(types.Event) error) error {
					return followEvents(ctx, node, sandbox, after, each)
				})
		}),
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "print new events until the sandbox is destroyed")
	return cmd
}

// followEvents calls each with every event until the sandbox is destroyed.
func followEvents(ctx context.Context, node *client.Client, sandbox string, after uint64, each func(types.Event) error) error {
	return node.Follow(ctx, sandbox, after, func(e types.Event) error {
		if err := each(e); err != nil || e.Type != types.EventTypeDestroyed {
			return err
		}
		return errDestroyed
	})
}

// followed returns the name of a sandbox, or its id if it is followed: another sandbox may
// get the name.
func followed(ctx context.Context, node *client.Client, name string, follow bool) (string, error) {
	if !follow {
		return name, nil
	}
	sb, err := node.Get(ctx, name)
	return sb.ID, err
}

// feed prints the events of all sandboxes. It reports on stderr when it missed events.
func (a *app) feed(ctx context.Context, node *client.Client, follow bool) error {
	events, _, err := node.Feed(ctx, "")
	if err != nil {
		return err
	}
	missed := func() error {
		fmt.Fprintln(a.err, "doze: some events were missed; doze events SANDBOX has them")
		return nil
	}
	return printStream(ctx, a, "events", events, follow, func(e types.FeedEvent) string { return e.Cursor }, feedText,
		func(after string, each func(types.FeedEvent) error) error {
			return node.FollowFeed(ctx, after, each, missed)
		})
}

func eventText(e types.Event) string {
	return timeline(e.Time, 0, "%-19s  %s", e.Type, eventDetails(e))
}

func feedText(e types.FeedEvent) string {
	return timeline(e.Time, 0, "%-20s  %-19s  %s", e.SandboxName, e.Type, eventDetails(e.Event))
}

// eventDetails describes in a few words what an event has beyond its type.
func eventDetails(e types.Event) string {
	var d details
	d.add(e.Kind != "", "%s", e.Kind)
	d.add(e.DurationMS > 0, "in %s", milliseconds(e.DurationMS))
	d.add(e.Cause != "", "for %s", e.Cause)
	d.add(e.Reason != "", "%s", e.Reason)
	d.add(e.Error != "", "%s", e.Error)
	d.add(e.Detail != "", "%s", e.Detail)
	d.add(e.Snapshot != "", "snapshot %s", e.Snapshot)
	d.add(e.Backup != "", "backup %s", e.Backup)
	d.add(e.Forks > 0, "%d forks", e.Forks)
	d.add(e.Bytes > 0, "%s", size(e.Bytes))
	d.add(e.StoredBytes > 0, "%s sent", size(e.StoredBytes))
	d.add(e.MemoryBefore != 0, "from %s to %s", size(e.MemoryBefore), size(e.MemoryAfter))
	d.add(e.Bucket != "", "bucket %s at %s", e.Bucket, e.Path)
	d.add(e.Port != 0, "port %d", e.Port)
	if l := e.Listening; l != nil {
		d.add(l.Program != "", "%s, pid %d", l.Program, l.PID)
		d.add(l.Process != "", "%s", l.Process)
	}
	d.add(!e.Until.IsZero(), "until %s", e.Until.Local().Format(time.DateTime))
	d.add(e.Progress != "", "%s", e.Progress)
	if p := e.Process; p != nil {
		d.add(true, "%s, %s, %s", p.Name, p.ID, processState(*p))
	}
	return d.String()
}
