package main

import (
	"regexp"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/runtime/sandbox"
)

func TestDfCommand(t *testing.T) {
	r := newRig(t)
	if out := r.ok("df"); !regexp.MustCompile(`^FILE SYSTEM .*\n/disks +1\.0 TiB .*\n\nKIND .*\nsandboxes +0 +0 B +-\n(.*\n){4}$`).MatchString(out) {
		t.Errorf("without sandboxes it printed %s", out)
	}
	id := sandbox.ID(decodeJSON[types.Sandbox](t, r.ok("create", "shop", "--json")).ID)
	r.ok("create", "blog")
	r.node.Engine.Write(id, "f", "content")
	r.ok("snapshot", "create", "shop", "s")
	if out := r.ok("df", "-n", "1"); !regexp.MustCompile(`(?s)\nsandboxes +2 +0 B +-\nsnapshots +1 +4\.0 KiB +4\.0 KiB\n.*\nSANDBOX .*\nblog +running +0 B +\S+ GiB +0 B +\d+s\n$`).MatchString(out) {
		t.Errorf("it printed %s", out)
	}
	usage := decodeJSON[types.NodeDiskUsage](t, r.ok("df", "--json"))
	if usage.UnusedSnapshots != (types.DiskTotal{Count: 1, Bytes: 4096}) || len(usage.LargestSandboxes) != 2 {
		t.Errorf("JSON %+v", usage)
	}
	r.refused("request_invalid: ", "df", "--limit", "1001")
}
