//go:build !wasip1

package sdk

import "github.com/doze-run/doze/policies/sdk/internal/abi"

// load registers the policy for package sdktest.
func load(start func() error) {
	abi.Loaded = abi.Module{Start: start, HandleRequest: handleRequest, HandleResponse: handleResponse}
}
