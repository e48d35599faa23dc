package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
)

// feed prints the events of all sandboxes.
func (a *app) feed(ctx context.Context, node *client.Client, follow bool) error {
	if follow {
		return a.followFeed(ctx, node)
	}
	events, _, err := node.Feed(ctx, "")
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(map[string]any{"events": events})
	}
	for _, e := range events {
		if err := a.printFeedEvent(e); err != nil {
			return err
		}
	}
	return nil
}

// followFeed prints each event once, also across restarts of the node, and reports
// on stderr when events were missed.
func (a *app) followFeed(ctx context.Context, node *client.Client) error {
	var cursor string
	var unprinted error // the failure to print an event
	for {
		err := node.FollowFeed(ctx, cursor, func(e types.FeedEvent) error {
			cursor = e.Cursor
			if a.json {
				unprinted = a.printLine(e)
			} else {
				unprinted = a.printFeedEvent(e)
			}
			return unprinted
		}, func() error {
			fmt.Fprintln(a.err, "doze: some events were missed; doze events SANDBOX has them")
			return nil
		})
		if unprinted != nil {
			return unprinted
		}
		if again, err := goOn(ctx, err); !again {
			return err
		}
	}
}

func (a *app) printFeedEvent(e types.FeedEvent) error {
	_, err := fmt.Fprintln(a.out, strings.TrimRight(fmt.Sprintf("%s  %-20s  %-19s  %s",
		e.Time.Local().Format("2006-01-02 15:04:05.000"), clean(e.SandboxName), clean(e.Type), clean(eventDetails(e.Event))), " "))
	return err
}
