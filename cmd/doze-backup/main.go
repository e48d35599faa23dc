// Command doze-backup is the backup helper of a doze node, which starts it in Podman's user namespace for each
// backup and restore; see package runtime/backup.
//
//	doze-backup run    serve the request on standard input
package main

import (
	"os"
	"runtime/debug"

	"github.com/doze-run/doze/runtime/backup/helper"
)

// buildVersion is set by the build: -ldflags "-X main.buildVersion=…".
var buildVersion = "unknown"

// memoryLimit is the size in bytes near which the garbage collector runs more often. The helper buffers up to
// four packs of 21 MB.
const memoryLimit = 512 << 20

func main() {
	debug.SetMemoryLimit(memoryLimit)
	switch {
	case len(os.Args) == 2 && os.Args[1] == "run":
		if !helper.Run(os.Stdin, os.Stdout) {
			os.Exit(1)
		}
	case len(os.Args) == 2 && os.Args[1] == "version":
		os.Stdout.WriteString(buildVersion + "\n")
	default:
		os.Stderr.WriteString("usage: doze-backup run|version\n")
		os.Exit(1)
	}
}
