package cgroup

import "testing"

func TestContains(t *testing.T) {
	for _, c := range []struct {
		file, want string
		in         bool
	}{
		{"0::/doze/sandboxes/abc\n", "/doze/sandboxes/abc", true},
		{"0::/doze/sandboxes/abc/libpod-1/container\n", "/doze/sandboxes/abc", true},
		{"9:name=systemd:/\n0::/doze/sandboxes/abc/x\n", "/doze/sandboxes/abc", true},
		{"0::/doze/sandboxes/abcd\n", "/doze/sandboxes/abc", false},
		{"0::/doze/node\n", "/doze/sandboxes/abc", false},
		{"9:name=systemd:/doze/sandboxes/abc\n0::/\n", "/doze/sandboxes/abc", false},
		{"0::/../doze/sandboxes/abc\n", "/doze/sandboxes/abc", false},
		{"", "/doze/sandboxes/abc", false},
	} {
		if got := Contains(c.want, []byte(c.file)); got != c.in {
			t.Errorf("%q in %s: %v", c.file, c.want, got)
		}
	}
}
