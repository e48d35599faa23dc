// Command guest is the policy of package script as a module.
package main

import "github.com/doze-run/doze/policies/sdk/sdktest/testdata/script"

func init() {
	if err := script.Start(); err != nil {
		panic(err)
	}
}

func main() {}

//go:wasmexport handle_request
func handleRequest() uint64 { return script.HandleRequest() }

//go:wasmexport handle_response
func handleResponse(context, failed uint32) { script.HandleResponse(context, failed) }
