//go:build wasip1

package sdk

import (
	"syscall"

	"github.com/doze-run/doze/policies/sdk/internal/abi"
)

func load(start func() error) {
	if err := start(); err != nil {
		// A line rather than a panic: the node shows it to whoever set the rule.
		abi.Log(abi.Error, err.Error())
		println(err.Error()) // to standard error
		syscall.Exit(1)
	}
}

//go:wasmexport handle_request
func exportedHandleRequest() uint64 { return handleRequest() }

//go:wasmexport handle_response
func exportedHandleResponse(reqCtx, isError uint32) { handleResponse(reqCtx, isError) }
