// Package builtin embeds the modules of the policies that doze ships.
//
// They are compiled by `make policies`, which `make build` does first, into the
// folder modules, and are not in the repository. A program that was built by
// `go build` or xcaddy alone has none: it reports that when a rule names one, and accepts
// policies that are pushed.
package builtin

import (
	"bytes"
	"compress/gzip"
	"embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"

	"github.com/doze-run/doze/policies"
)

// all: so that the folder may hold nothing but its own file.
//
//go:embed all:modules
var modules embed.FS

// Errors of Module.
var (
	// ErrUnknown: doze ships no policy of that name.
	ErrUnknown = errors.New("not a policy that doze ships")
	// ErrNotBuilt: it does, but not in this program.
	ErrNotBuilt = errors.New("this program was built without the policies that doze ships: " +
		"build it by `make build`, or push the policy (`doze policy new NAME --template NAME`, `doze policy build NAME`, `doze policy push NAME.wasm`)")
)

// Names of the policies that doze ships, sorted, in this program or not.
func Names() []string { return policies.Names() }

// Module returns the WebAssembly of a policy. Each call decompresses it.
func Module(name string) ([]byte, error) { return module(modules, name) }

func module(from fs.FS, name string) ([]byte, error) {
	if !slices.Contains(Names(), name) {
		return nil, fmt.Errorf("policy %.80q: %w; there are %s", name, ErrUnknown, strings.Join(Names(), ", "))
	}
	packed, err := fs.ReadFile(from, "modules/"+name+".wasm.gz")
	if err != nil {
		return nil, fmt.Errorf("policy %s: %w", name, ErrNotBuilt)
	}
	var wasm []byte
	r, err := gzip.NewReader(bytes.NewReader(packed))
	if err == nil {
		wasm, err = io.ReadAll(r)
	}
	if err != nil {
		return nil, fmt.Errorf("policy %s: %w", name, err)
	}
	return wasm, nil
}
