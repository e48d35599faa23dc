// Readonly permits requests that only read, and refuses all others.
package main

import (
	"errors"
	"slices"
	"strings"

	"github.com/doze-run/doze/policies/sdk"
)

type config struct {
	// Methods are GET, HEAD and OPTIONS unless given.
	Methods []string `json:"methods"`
	// Paths are globs; none means every path.
	Paths []string `json:"paths"`
	// Also permits more requests, such as POST to a path that only searches.
	Also []also `json:"also"`
}

type also struct {
	Methods []string `json:"methods"`
	Paths   []string `json:"paths"`
}

func init() { sdk.Serve(build) }

func main() {}

func build(c config) (sdk.Policy, error) {
	if len(c.Methods) == 0 {
		c.Methods = []string{"GET", "HEAD", "OPTIONS"}
	}
	permits := []also{{c.Methods, c.Paths}}
	for _, a := range c.Also {
		if len(a.Methods) == 0 || len(a.Paths) == 0 {
			return sdk.Policy{}, errors.New(`entries of "also" need methods and paths`)
		}
		permits = append(permits, a)
	}
	for _, p := range permits {
		for _, m := range p.Methods {
			if m == "" || strings.ToUpper(m) != m {
				return sdk.Policy{}, errors.New(`methods are in upper case, unlike "` + m + `"`)
			}
		}
		for _, glob := range p.Paths {
			if !strings.HasPrefix(glob, "/") && !strings.HasPrefix(glob, "**") {
				return sdk.Policy{}, errors.New(`paths begin with / or **, unlike "` + glob + `"`)
			}
		}
	}
	return sdk.Policy{Request: func(r *sdk.Request) error {
		return check(permits, r)
	}}, nil
}

// overrides are headers by which some servers use another method than the request's.
var overrides = []string{"X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override"}

func check(permits []also, r *sdk.Request) error {
	method, sent := r.Method(), r.Path()
	for _, header := range overrides {
		for _, m := range r.Header.Values(header) {
			if m != method {
				return sdk.Deny("read-only: " + header + " asks for another method than " + method)
			}
		}
	}
	if r.Upgrades() {
		return sdk.Deny("read-only: what is sent after a change of protocol may write")
	}
	path, plain := readPath(sent)
	named := false // a permit for this method has paths
	for _, p := range permits {
		if !slices.Contains(p.Methods, method) {
			continue
		}
		if len(p.Paths) == 0 {
			return nil
		}
		named = true
		if plain && slices.ContainsFunc(p.Paths, func(glob string) bool { return matches(glob, path) }) {
			return nil
		}
	}
	switch {
	case !named:
		return sdk.Deny("read-only: " + method + " is not allowed here")
	case !plain:
		return sdk.Deny("read-only: servers read this path in several ways; send it without dots, empty parts and escaped slashes")
	}
	return sdk.Deny("read-only: " + method + " is not allowed for this path")
}
