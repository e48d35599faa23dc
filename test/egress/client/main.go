// Client runs in sandboxes of the tests and uses the network as programs in Go do. It
// fails with a message unless it gets the responses of the servers of the tests.
package main

import (
	"context"
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
	"get":       get,
	"events":    eachVersion(events),
	"trailers":  eachVersion(trailers),
	"reuse":     eachVersion(reuse),
	"many":      eachVersion(many),
	"websocket": webSocket,
	"grpc":      calls,
	"fronting":  fronting,
}

func main() {
	if len(os.Args) < 3 || commands[os.Args[1]] == nil {
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
