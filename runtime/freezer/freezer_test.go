package freezer

import (
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
)

func TestOpenRefusesFoldersOutsideOfCgroupV2(t *testing.T) {
	for _, dir := range []string{"", "/", "/tmp", MountPoint, MountPoint + "/../../tmp", t.TempDir()} {
		if _, err := Open(dir); err == nil {
			t.Errorf("Open(%q) succeeded", dir)
		}
	}
}

func TestValuesForTheKernel(t *testing.T) {
	for _, c := range []struct {
		got, want string
	}{
		{cpuMax(0), "max 100000"},
		{cpuMax(0.25), "25000 100000"},
		{cpuMax(2), "200000 100000"},
		{cpuMax(0.001), "1000 100000"},
		{orMax(0), "max"},
		{orMax(1 << 30), "1073741824"},
	} {
		if c.got != c.want {
			t.Errorf("got %q, want %q", c.got, c.want)
		}
	}
}

func TestInvalidIDsAreRefused(t *testing.T) {
	f := &Freezer{dir: t.TempDir(), cgroups: map[sandbox.ID]*cgroup{}}
	for id, want := range map[sandbox.ID]bool{
		"k3f9x2m7q1az":                      true,
		"":                                  false,
		".":                                 false,
		"..":                                false,
		"a/b":                               false,
		"a.b":                               false,
		"A":                                 false,
		"é":                                 false,
		sandbox.ID(strings.Repeat("a", 65)): false,
	} {
		if _, err := f.Prepare(id, sandbox.Limits{}); (err == nil) != want {
			t.Errorf("Prepare(%q): %v", id, err)
		}
	}
}
