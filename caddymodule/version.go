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
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, module := range append(info.Deps, &info.Main) {
			if module.Path == modulePath {
				return module.Version
			}
		}
	}
	return "unknown"
}
