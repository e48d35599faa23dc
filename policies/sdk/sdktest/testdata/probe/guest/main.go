// Command guest builds the probes as a module, for the node's host.
package main

import (
	"github.com/doze-run/doze/policies/sdk"
	"github.com/doze-run/doze/policies/sdk/sdktest/testdata/probe"
)

func init() { sdk.Serve(probe.Build) }

func main() {}
