// Command doze-guest is PID 1 in every sandbox: it serves the node on a Unix
// socket and reaps processes. It needs no file but /proc, so that it works in any
// Linux image.
//
// Inside a sandbox, any program may ask that the sandbox be kept awake:
//
//	/.doze/bin/doze-guest hold 10m
//
// A hold of 0 ends the one before.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/doze-run/doze/runtime/guest"
)

// buildVersion is set by the build: -ldflags "-X main.buildVersion=…".
var buildVersion = "devel"

const usage = `usage: doze-guest                 serve; the first process of a sandbox
       doze-guest hold DURATION   keep this sandbox awake for a time such as 10m; 0 ends the hold
       doze-guest version
`

func main() {
	if err := run(os.Args[1:], guest.RunDir, guest.LogDir); err != nil {
		fmt.Fprintln(os.Stderr, "doze-guest:", err)
		os.Exit(1)
	}
}

func run(args []string, runDir, logDir string) error {
	switch {
	case len(args) == 0:
		return serve(context.Background(), runDir, logDir)
	case len(args) == 2 && args[0] == "hold":
		return hold(runDir, args[1])
	case len(args) == 1 && args[0] == "version":
		fmt.Println(buildVersion)
		return nil
	}
	return errors.New("unknown arguments\n" + usage)
}
