// Hostile is a policy whose configuration makes it misbehave, for tests of egress.
package main

import (
	"errors"
	"strings"

	"github.com/doze-run/doze/policies/sdk"
)

type config struct {
	// Do is the misbehavior: loop, memory, output, trap or error; empty for none.
	Do string `json:"do"`
	// At is the call that misbehaves: start, request or response.
	At string `json:"at"`
}

func init() { sdk.Serve(build) }

func main() {}

func build(c config) (sdk.Policy, error) {
	if c.At == "start" {
		return sdk.Policy{}, c.harm()
	}
	p := sdk.Policy{Request: func(r *sdk.Request) error {
		if c.At == "request" {
			return c.harm()
		}
		return nil
	}}
	if c.At == "response" {
		p.Features = sdk.BufferResponse
		p.Response = func(*sdk.Response) error { return c.harm() }
	}
	return p, nil
}

// retained holds what is allocated.
var retained [][]byte

func (c config) harm() error {
	switch c.Do {
	case "loop":
		for len(retained) == 0 {
		}
	case "memory":
		for {
			retained = append(retained, make([]byte, 1<<20))
		}
	case "output":
		for line := strings.Repeat("x", 1<<20); ; {
			println(line)
		}
	case "trap":
		panic("on purpose")
	case "error":
		return errors.New("no")
	}
	return nil
}
