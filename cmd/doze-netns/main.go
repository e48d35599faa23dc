// Command doze-netns is the namespace helper of a doze node, which starts it.
//
//	doze-netns serve   serve requests on standard input, a packet socket, until it is closed
//	doze-netns check   make the network of a sandbox in a namespace of its own, and end
//	doze-netns probe   send this process's user namespace over standard input, and end
//
// Run it by Podman's own `podman unshare` to find Podman's user namespace, and
// by nsenter to serve in it without a podman process that stays.
//
// Under the name doze-crun it is the OCI runtime of sandboxes, which Podman starts: see
// package ociruntime.
package main

import (
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"

	"github.com/doze-run/doze/runtime/netns/helper"
	"github.com/doze-run/doze/runtime/podman/ociruntime"
)

// buildVersion is set by the build: -ldflags "-X main.buildVersion=…".
var buildVersion = "unknown"

func main() {
	if strings.HasPrefix(filepath.Base(os.Args[0]), ociruntime.Name) {
		os.Exit(ociruntime.Main(os.Args))
	}
	// The helper lives as long as the node and must cost next to nothing.
	debug.SetGCPercent(20)
	if len(os.Args) != 2 {
		fail("usage: doze-netns serve|check|probe|version")
	}
	var err error
	switch os.Args[1] {
	case "serve":
		err = helper.Serve(0)
	case "check":
		err = helper.Check()
	case "probe":
		err = helper.Probe(0)
	case "version":
		os.Stdout.WriteString(buildVersion + "\n")
	default:
		fail("unknown command " + os.Args[1])
	}
	if err != nil {
		fail(err.Error())
	}
}

func fail(why string) {
	os.Stderr.WriteString("doze-netns: " + why + "\n")
	os.Exit(1)
}
