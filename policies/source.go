// Package policies embeds the sources of the SDK and of the policies that doze ships,
// which are also templates for new ones. Package builtin has the modules.
package policies

import (
	"embed"
	"io/fs"
	"slices"
)

//go:embed aws-sigv4 basic bearer github-app header model-budget query readonly redact
var shipped embed.FS

//go:embed sdk
var sdk embed.FS

// Names of the policies, sorted.
func Names() []string {
	entries, err := shipped.ReadDir(".")
	if err != nil {
		panic(err) // it is in the program
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names
}

// Source is a policy's folder, or false if there is none of that name.
func Source(name string) (fs.FS, bool) {
	if !slices.Contains(Names(), name) {
		return nil, false
	}
	folder, err := fs.Sub(shipped, name)
	return folder, err == nil
}

// SDK is the folder of the guest SDK, whose packages import each other under
// ImportPath.
func SDK() fs.FS {
	folder, err := fs.Sub(sdk, "sdk")
	if err != nil {
		panic(err) // it is in the program
	}
	return folder
}

// ImportPath of the guest SDK.
const ImportPath = "github.com/doze-run/doze/policies/sdk"
