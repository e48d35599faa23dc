//go:build !linux

package policy

import "context"

// runCompiler compiles a module into a folder, in this process and without limits. Nodes
// run on Linux; on other systems only authors run policies, to test their own.
func runCompiler(ctx context.Context, _ string, binary []byte, dir string, l limits) error {
	return compileInto(ctx, binary, dir, l.pages)
}
