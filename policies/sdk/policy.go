package sdk

import (
	"errors"

	"github.com/doze-run/doze/policies/sdk/internal/abi"
	"github.com/doze-run/doze/policies/sdk/internal/decode"
)

// Policy is the set of a module's handlers for the exchanges that pass through it.
type Policy struct {
	// Request is called for each request before it is sent; it may be nil. If it
	// returns an error, the request is refused, and the sandbox gets the error's text
	// as the reason. The error of [Request.Respond] sends the policy's response instead.
	Request func(*Request) error
	// Response is called for each response, and for each failure of the upstream. If it
	// is nil, the instance is released earlier. Without BufferResponse, the response has
	// already been forwarded when Response is called. If Response returns an error, the
	// part of the response that has not been sent is withheld.
	Response func(*Response) error
	// Features are the features that every exchange needs. They cost the node memory.
	Features Features
}

// Features are features of the host. Without them, bodies stream past the policy.
type Features uint32

const (
	// BufferRequest lets Request read the body and leave it in place. Bodies
	// above the node's limit (1 MiB by default) are refused.
	BufferRequest = Features(abi.BufferRequest)
	// BufferResponse lets Response change the status, header and body. The client
	// gets nothing before the response is complete.
	BufferResponse = Features(abi.BufferResponse)
	// Trailers gives access to trailers.
	Trailers = Features(abi.Trailers)
)

// Serve makes the policy that build returns the policy of this program. Call it in func
// init, because main does not run. C is the type of the configuration, a struct with json
// tags. The rule's configuration is decoded strictly. If the rule has none, build gets the
// zero value of C.
//
// If the configuration is invalid or build returns an error, the instance ends with the
// reason, so that a rule with this configuration is refused when it is set.
func Serve[C any](build func(C) (Policy, error)) {
	load(func() error {
		var c C
		var p Policy
		err := readConfig(&c)
		if err == nil {
			p, err = build(c)
		}
		if err != nil {
			return errors.New("config: " + err.Error())
		}
		if p.Features != 0 {
			if err := Enable(p.Features); err != nil {
				return err
			}
		}
		if p.Response == nil {
			abi.Node().EnableFeatures(abi.RequestOnly) // hosts without this feature do more work
		}
		policy = p
		return nil
	})
}

// readConfig decodes the rule's configuration into c, a pointer. An empty configuration
// leaves *c unchanged.
func readConfig(c any) error {
	text := fetch(abi.Node().GetConfig)
	if len(text) == 0 {
		return nil
	}
	return decode.Strict(text, c)
}

// Enable enables features for this exchange. Call it in Request. For features of
// every exchange, use [Policy.Features].
func Enable(f Features) error {
	if abi.Node().EnableFeatures(uint32(f))&uint32(f) != uint32(f) {
		return errFeatures
	}
	return nil
}

// policy is the policy that this instance runs.
var policy Policy

// The current exchange. The variables are reused, because an instance serves one exchange
// at a time.
var (
	request  Request
	response Response
)

func handleRequest() uint64 {
	if policy.Request == nil {
		return abi.Next
	}
	request = Request{Header: Header{abi.RequestHeader}, Body: Body{kind: abi.RequestBody}, Trailer: Header{abi.RequestTrailer}}
	switch err := policy.Request(&request); err {
	case nil:
		return uint64(request.Context)<<32 | abi.Next
	case errResponded:
		return 0
	default:
		abi.Node().Deny(err.Error())
		return 0
	}
}

func handleResponse(reqCtx, isError uint32) {
	if policy.Response == nil {
		return
	}
	response = Response{
		Header: Header{abi.ResponseHeader}, Body: Body{kind: abi.ResponseBody}, Trailer: Header{abi.ResponseTrailer},
		Context: reqCtx, Failed: isError != 0,
	}
	if err := policy.Response(&response); err != nil {
		abi.Node().Deny(err.Error())
	}
}
