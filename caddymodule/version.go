package caddymodule

import "runtime/debug"

const modulePath = "github.com/doze-run/doze"

// Version is what the API says of itself. A program that knows its own sets it
// before it runs Caddy; otherwise it is this module's, as the program was built.
var Version string

func version() string {
	if Version != "" {
		return Version
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	if info.Main.Path == modulePath {
		return info.Main.Version
	}
	for _, dep := range info.Deps {
		if dep.Path == modulePath {
			return dep.Version
		}
	}
	return "unknown"
}
