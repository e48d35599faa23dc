// Client runs in sandboxes of the tests: what programs in Go do with the network.
// It fails with a message unless everything is as a server of the tests does it.
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

// patience bounds a run. It decides only how long a broken node keeps a test.
const patience = time.Minute

// commands by name. Each takes the URL, or host and port, of a server.
var commands = map[string]func(ctx context.Context, server string) error{
	"get":       get,
	"events":    events,
	"trailers":  trailers,
	"reuse":     reuse,
	"many":      many,
	"websocket": webSocket,
	"grpc":      calls,
}

func main() {
	if len(os.Args) != 3 || commands[os.Args[1]] == nil {
		fmt.Fprintf(os.Stderr, "usage: client %s SERVER\n", strings.Join(slices.Sorted(maps.Keys(commands)), "|"))
		os.Exit(2)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := commands[os.Args[1]](ctx, os.Args[2]); err != nil {
		fmt.Fprintf(os.Stderr, "client: %s: %v\n", os.Args[1], err)
		os.Exit(1)
	}
}
