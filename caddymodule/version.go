package caddymodule

import "runtime/debug"

const modulePath = "github.com/doze-run/doze"

// Version is the version that the API reports. A program that has a version of its own sets
// it before it runs Caddy. Default: the version of this module in the program.
var Version string

func version() string {
	if Version != "" {
		return Version
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, module := range append(info.Deps, &info.Main) {
			if module.Path == modulePath {
				return module.Version
			}
		}
	}
	return "unknown"
}
