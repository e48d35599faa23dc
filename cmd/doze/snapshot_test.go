package main

import (
	"strings"
	"testing"

	"github.com/doze-run/doze/api/types"
)

func TestForksAreNamedOrCounted(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	r.misused("--count 3 is not the number of names", "fork", "a", "b", "--count", "3")
	forks := func(args ...string) (names []string) {
		t.Helper()
		list := decodeJSON[types.ForkList](t, r.ok(append([]string{"fork", "--json"}, args...)...))
		for _, sb := range list.Sandboxes {
			names = append(names, sb.Name)
		}
		return names
	}
	if names := forks("a", "b", "c"); strings.Join(names, " ") != "b c" {
		t.Errorf("the forks are %q", names)
	}
	for count, args := range map[int][]string{1: {"a"}, 2: {"a", "-n", "2"}} {
		if names := forks(args...); len(names) != count {
			t.Errorf("%q made %q", args, names)
		}
	}
}
