// Command doze-bucket is the bucket helper of a doze node, which starts it in Podman's user namespace for the first
// mount of a bucket; see package runtime/bucket.
//
//	doze-bucket serve    serve requests on standard input, a socket
package main

import (
	"fmt"
	"os"
	"runtime/debug"

	"github.com/doze-run/doze/runtime/bucket/helper"
)

// buildVersion is set by the build: -ldflags "-X main.buildVersion=…".
var buildVersion = "unknown"

// memoryLimit is the size in bytes near which the garbage collector runs more often.
const memoryLimit = 512 << 20

func main() {
	debug.SetMemoryLimit(memoryLimit)
	switch {
	case len(os.Args) == 2 && os.Args[1] == "serve":
		if err := helper.Serve(os.Stdin.Fd()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	case len(os.Args) == 2 && os.Args[1] == "version":
		os.Stdout.WriteString(buildVersion + "\n")
	default:
		os.Stderr.WriteString("usage: doze-bucket serve|version\n")
		os.Exit(1)
	}
}
