package main

import (
	"regexp"
	"testing"

	"github.com/doze-run/doze/api/types"
)

func TestMountCommands(t *testing.T) {
	r := newRig(t)
	r.ok("create", "shop")
	dir := t.TempDir()
	if out := r.ok("mount", "add", "shop", "data/images/2026", dir+"/a", "--read-only"); out != dir+"/a\n" {
		t.Errorf("got %q", out)
	}
	m := decodeJSON[types.Mount](t, r.ok("mount", "add", "shop", "models", dir+"/b", "--json"))
	if m.Bucket != "models" || m.Prefix != "" || m.Path != dir+"/b" || m.ReadOnly {
		t.Errorf("got %+v", m)
	}
	want := `^PATH +BUCKET +PREFIX +ACCESS +MOUNTED\n` + dir + `/a +data +images/2026 +read-only +\d+s\n` + dir + `/b +models +read-write +\d+s\n$`
	if out := r.ok("mount", "ls", "shop"); !regexp.MustCompile(want).MatchString(out) {
		t.Errorf("got %q", out)
	}
	r.refused("mount_exists: ", "mount", "add", "shop", "data", dir+"/a")
	r.refused("request_invalid: ", "mount", "add", "shop", "other", dir+"/c")
	if out := r.ok("mount", "rm", "shop", dir+"/a"); out != dir+"/a  unmounted\n" {
		t.Errorf("got %q", out)
	}
	r.refused("mount_not_found: ", "mount", "rm", "shop", dir+"/a")
	if out := r.ok("history", "shop"); !regexp.MustCompile(`mounted +[0-9]\S* +- +bucket data at ` + dir + `/a\n(.*\n)*.*unmounted +[0-9]\S* +- +bucket data at ` + dir + `/a\n`).MatchString(out) {
		t.Errorf("got %q", out)
	}
}
