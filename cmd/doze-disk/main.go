// Command doze-disk is the disk helper of a doze node, which starts it in Podman's user
// namespace. It makes snapshots of the disks of sandboxes; see package runtime/disk.
//
//	doze-disk serve    serve requests on standard input, a socket, until it is closed
//	doze-disk export   read a request on standard input, and write a snapshot to standard output
package main

import (
	"errors"
	"os"
	"runtime/debug"

	"go.podman.io/storage/pkg/reexec"

	"github.com/doze-run/doze/runtime/disk/helper"
	"github.com/doze-run/doze/runtime/disk/wire"
)

// buildVersion is set by the build: -ldflags "-X main.buildVersion=…".
var buildVersion = "unknown"

func main() {
	if reexec.Init() { // Podman's storage starts this program again to unpack archives
		return
	}
	debug.SetGCPercent(20) // it lives as long as the node, and works rarely
	if len(os.Args) != 2 {
		fail("usage: doze-disk serve|export|version")
	}
	switch os.Args[1] {
	case "serve":
		if err := helper.Serve(0); err != nil {
			fail(err.Error())
		}
	case "export":
		err := helper.Export(os.Stdin, os.Stdout)
		if errors.Is(err, helper.ErrUnexportable) {
			os.Stderr.WriteString(err.Error() + "\n")
			os.Exit(wire.Unexportable)
		}
		if err != nil {
			fail(err.Error())
		}
	case "version":
		os.Stdout.WriteString(buildVersion + "\n")
	default:
		fail("unknown command " + os.Args[1])
	}
}

func fail(why string) {
	os.Stderr.WriteString("doze-disk: " + why + "\n")
	os.Exit(1)
}
