// Client runs in sandboxes of the tests and uses the network as programs in Go do. It
// fails with a message unless the responses are those of the test's servers.
package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"
)

// patience bounds a run. It decides only how long a test waits for a broken node.
const patience = time.Minute

// commands by name. Each takes the URL, or host and port, of a server, and possibly more.
var commands = map[string]func(ctx context.Context, args []string) error{
	"get":       one(get),
	"events":    one(eachVersion(events)),
	"trailers":  one(eachVersion(trailers)),
	"reuse":     one(eachVersion(reuse)),
	"many":      one(eachVersion(many)),
	"websocket": one(webSocket),
	"grpc":      one(calls),
	"fronting":  fronting,
}

// one is a command with one argument.
func one(f func(ctx context.Context, server string) error) func(context.Context, []string) error {
	return func(ctx context.Context, args []string) error {
		if len(args) != 1 {
			return errors.New("expected one argument")
		}
		return f(ctx, args[0])
	}
}

func main() {
	if len(os.Args) < 2 || commands[os.Args[1]] == nil {
		fmt.Fprintf(os.Stderr, "usage: client %s SERVER...\n", strings.Join(slices.Sorted(maps.Keys(commands)), "|"))
		os.Exit(2)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := commands[os.Args[1]](ctx, os.Args[2:]); err != nil {
		fmt.Fprintf(os.Stderr, "client: %s: %v\n", os.Args[1], err)
		os.Exit(1)
	}
}
