// Package version returns the version of a program of doze.
package version

import (
	"cmp"
	"runtime/debug"
)

// release is set when doze is built:
// -ldflags "-X github.com/doze-run/doze/cmd/internal/version.release=v1.2.3".
var release string

// String is the version of this build: the release, or else the version of the
// module or the commit.
func String() string {
	info, ok := debug.ReadBuildInfo()
	if release != "" || !ok {
		return cmp.Or(release, "devel")
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			return s.Value[:min(12, len(s.Value))]
		}
	}
	return "devel"
}
