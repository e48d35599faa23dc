package main

import (
	"regexp"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

func TestSnapshotOfPaths(t *testing.T) {
	r := newRig(t)
	id := sandbox.ID(decodeJSON[types.Sandbox](t, r.ok("create", "shop", "--json")).ID)
	r.node.Engine.Write(id, "f", "content")
	r.node.Engine.Write(id, "g", "content")
	s := decodeJSON[types.Snapshot](t, r.ok("snapshot", "create", "shop", "part", "--path", "/srv/f", "--path", "/srv/g", "--json"))
	testkit.Diff(t, "paths", s.Paths, []string{"/srv/f", "/srv/g"})
	r.ok("snapshot", "create", "shop", "whole")
	if out := r.ok("snapshot", "ls", "shop"); !regexp.MustCompile(`^ID +NAME +SANDBOX +TAKEN +SIZE +FROZEN +PATHS\n\S+ +whole .* /\n\S+ +part .* /srv/f and 1 more\n$`).MatchString(out) {
		t.Errorf("ls printed %q", out)
	}
	r.node.Engine.Write(id, "f", "changed")
	r.node.Engine.Write(id, "h", "new")
	r.ok("restore", "shop", "part")
	testkit.Diff(t, "the files", r.node.Engine.Files(id), map[string]string{"f": "content", "g": "content", "h": "new"})
	r.refused("request_invalid: ", "snapshot", "create", "shop", "--path", "/srv/none")
}

func TestForkTakesNamesOrANumber(t *testing.T) {
	r := newRig(t)
	r.ok("create", "shop")
	forks := func(args ...string) int {
		t.Helper()
		return strings.Count(r.ok(append([]string{"fork", "shop"}, args...)...), "\n") - 1 // without the heads
	}
	testkit.Diff(t, "forks without a number", forks(), 1)
	testkit.Diff(t, "forks by number", forks("--count", "2"), 2)
	testkit.Diff(t, "forks by name", forks("a", "b"), 2)
	testkit.Diff(t, "forks by name and number", forks("c", "d", "--count", "2"), 2)
	r.misused("is not the number of names", "fork", "shop", "e", "f", "--count", "1")
	r.misused("is not the number of names", "fork", "shop", "e", "--count", "0")
	r.refused("request_invalid: ", "fork", "shop", "--count", "0")
	r.refused("request_invalid: ", "fork", "shop", "--count", "101")
	testkit.Diff(t, "sandboxes", strings.Count(r.ok("ls", "-q"), "\n"), 8)
}
