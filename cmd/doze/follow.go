package main

import (
	"context"
	"errors"
	"time"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/problem"
)

// errDestroyed ends a stream after the last event of a sandbox.
var errDestroyed = errors.New("the sandbox is destroyed")

// printStream prints the items of a list. With follow it goes on with each item that comes
// after them, also across restarts of the node: stream calls its function with every item after
// a cursor until the stream or the function fails.
func printStream[T, C any](ctx context.Context, a *app, name string, list []T, follow bool, cursor func(T) C, text func(T) string,
	stream func(after C, each func(T) error) error) error {
	if !follow {
		return printItems(a, name, list, text)
	}
	var after C
	var unprinted error // the failure to print an item
	print := func(item T) error {
		after = cursor(item)
		unprinted = printItem(a, item, text)
		return unprinted
	}
	for _, item := range list {
		if err := print(item); err != nil {
			return err
		}
	}
	for {
		err := stream(after, print)
		if unprinted != nil {
			return unprinted
		}
		if again, err := awaitNode(ctx, err); !again {
			return err
		}
	}
}

// reconnectAfter is how long a follower waits after the node went away.
const reconnectAfter = time.Second

// awaitNode reports whether to follow again after a stream has ended with err, or returns the
// error to end with. It waits a moment for the node to restart.
func awaitNode(ctx context.Context, err error) (again bool, _ error) {
	refused, isProblem := errors.AsType[*problem.Problem](err)
	unexpected, isUnexpected := errors.AsType[*client.UnexpectedResponseError](err)
	switch {
	case ctx.Err() != nil:
		return false, ctx.Err()
	case err == errDestroyed, problem.Has(err, problem.SandboxNotFound), problem.Has(err, problem.PolicyNotFound):
		return false, nil // deleted since this command began
	case isProblem && refused.Status < 500, isUnexpected && unexpected.Status < 500:
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
