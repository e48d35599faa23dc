package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
)

func (a *app) eventsCommand() *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use:   "events [SANDBOX]",
		Short: "Print what happened to a sandbox, or to all",
		Long: `Print what happened to a sandbox, oldest first, or without a name to all sandboxes:
the newest 4,096 events since the node started. This wakes none of them.`,
		Example:           "  doze events -f\n  doze events shop",
		Args:              wants(0, 1),
		ValidArgsFunction: a.completeFirst,
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			if len(args) == 0 {
				return a.feed(ctx, node, follow)
			}
			if follow {
				return a.followEvents(ctx, node, args[0])
			}
			events, err := node.Events(ctx, args[0], 0)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(map[string]any{"events": events})
			}
			for _, e := range events {
				if err := a.printEvent(e); err != nil {
					return err
				}
			}
			return nil
		}),
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on until the sandbox is destroyed")
	return cmd
}

// reconnectAfter is how long a follower waits after the node went away.
const reconnectAfter = time.Second

// errDestroyed ends followEvents after the last event.
var errDestroyed = errors.New("the sandbox is destroyed")

// followEvents prints every event once, also across restarts of the node.
func (a *app) followEvents(ctx context.Context, node *client.Client, sandbox string) error {
	// By id from here on: another sandbox may get the name.
	sb, err := node.Get(ctx, sandbox)
	if err != nil {
		return err
	}
	var last uint64
	var unprinted error // the failure to print an event
	for {
		err := node.Follow(ctx, sb.ID, last, func(e types.Event) error {
			last = e.Seq
			print := a.printEvent
			if a.json {
				print = func(e types.Event) error { return a.printLine(e) }
			}
			if unprinted = print(e); unprinted != nil {
				return unprinted
			}
			if e.Type == "destroyed" {
				return errDestroyed
			}
			return nil
		})
		switch {
		case err == errDestroyed:
			return nil
		case unprinted != nil:
			return unprinted
		}
		if again, err := goOn(ctx, err); !again {
			return err
		}
	}
}

// goOn reports whether to follow again after a stream has ended with err, or returns the
// error to end with. It waits a moment for the node to restart.
func goOn(ctx context.Context, err error) (again bool, _ error) {
	var refused *problem.Problem
	var unexpected *client.UnexpectedResponseError
	switch {
	case ctx.Err() != nil:
		return false, ctx.Err()
	case problem.Has(err, problem.SandboxNotFound), problem.Has(err, problem.PolicyNotFound):
		return false, nil // deleted since this command began
	case errors.As(err, &refused) && refused.Status < 500, errors.As(err, &unexpected) && unexpected.Status < 500:
		return false, err
	}
	timer := time.NewTimer(reconnectAfter)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false, ctx.Err()
	case <-timer.C:
		return true, nil
	}
}

// followFrom passes on what comes after a seq, and goes on when the node comes back. follow
// calls its function with each item until the stream or the function fails.
func followFrom[T any](ctx context.Context, after uint64, seq func(T) uint64, print func(T) error,
	follow func(after uint64, each func(T) error) error) error {
	for {
		var unprinted error // the failure to print an event
		err := follow(after, func(item T) error {
			after = seq(item)
			unprinted = print(item)
			return unprinted
		})
		if unprinted != nil {
			return unprinted
		}
		if again, err := goOn(ctx, err); !again {
			return err
		}
	}
}

func (a *app) printEvent(e types.Event) error {
	_, err := fmt.Fprintln(a.out, strings.TrimRight(fmt.Sprintf("%s  %-19s  %s", e.Time.Local().Format("2006-01-02 15:04:05.000"), clean(e.Type), clean(eventDetails(e))), " "))
	return err
}

// eventDetails says in a few words what an event has beyond its type.
func eventDetails(e types.Event) string {
	var parts []string
	add := func(format string, value any, say bool) {
		if say {
			parts = append(parts, fmt.Sprintf(format, value))
		}
	}
	add("%s", e.Kind, e.Kind != "")
	add("in %s", milliseconds(e.DurationMS), e.DurationMS > 0)
	add("for %s", e.Cause, e.Cause != "")
	add("%s", e.Reason, e.Reason != "")
	add("%s", e.Error, e.Error != "")
	add("port %d", e.Port, e.Port != 0)
	add("until %s", e.Until.Local().Format(time.DateTime), !e.Until.IsZero())
	add("%s", e.Progress, e.Progress != "")
	if p := e.Process; p != nil {
		add("%s", p.Name, true)
		add("%s", p.ID, true)
		add("%s", processState(*p), true)
	}
	return strings.Join(parts, ", ")
}
