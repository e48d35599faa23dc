//go:build wasip1

package sdk

import (
	"runtime/debug"
	"syscall"

	"github.com/doze-run/doze/policies/sdk/internal/abi"
)

// gcPercent is a quarter of Go's default. At 100 %, Go's collector waits until the heap has
// 4 MB, and an instance never returns memory; a policy needs a small part of that.
const gcPercent = 25

func load(start func() error) {
	debug.SetGCPercent(gcPercent)
	if err := start(); err != nil {
		// A log line instead of a panic: the node shows it to the author of the rule.
		abi.Node().Log(abi.Error, err.Error())
		println(err.Error()) // to standard error
		syscall.Exit(1)
	}
}

//go:wasmexport handle_request
func exportedHandleRequest() uint64 { return handleRequest() }

//go:wasmexport handle_response
func exportedHandleResponse(reqCtx, isError uint32) { handleResponse(reqCtx, isError) }
