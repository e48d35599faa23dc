package sdk

import "github.com/doze-run/doze/policies/sdk/internal/abi"

// Policy is what a module does with the exchanges that pass through it.
type Policy struct {
	// Request sees each request before it is sent; nil sees none. If it returns
	// an error the request is refused and the error's text is the reason, which
	// the sandbox reads. The error of [Request.Respond] responds instead.
	Request func(*Request) error
	// Response sees what came back, or that nothing did; nil sees none, and frees
	// the instance earlier. Without BufferResponse it has been passed on by then. If it returns an error the
	// response is withheld as far as it was not sent.
	Response func(*Response) error
	// Features that every exchange needs. They cost the node memory.
	Features Features
}

// Features of the host. Without them bodies are streamed past the policy.
type Features uint32

const (
	// BufferRequest lets Request read the body and leave it in place. Bodies
	// above the node's limit (1 MiB by default) are refused.
	BufferRequest = Features(abi.BufferRequest)
	// BufferResponse lets Response change status, header and body. The client
	// gets nothing before the response is whole.
	BufferResponse = Features(abi.BufferResponse)
	// Trailers gives access to trailers.
	Trailers = Features(abi.Trailers)
)

// Serve makes build's policy the one of this program. It belongs into func init:
// main does not run. C is the type of the configuration, a struct with json tags;
// what the rule gives is decoded strictly, and nothing given leaves C as it is.
//
// A configuration that does not fit or an error of build ends the instance with
// the reason, so that a rule with it is refused when it is set.
func Serve[C any](build func(C) (Policy, error)) {
	load(func() error {
		var c C
		if err := readConfig(&c); err != nil {
			return err
		}
		p, err := build(c)
		if err != nil {
			return &configError{err}
		}
		if p.Features != 0 {
			if err := Enable(p.Features); err != nil {
				return err
			}
		}
		if p.Response == nil {
			abi.EnableFeatures(abi.RequestOnly) // a host that does not know it does more work
		}
		policy = p
		return nil
	})
}

// Enable switches features on for this exchange. It is called in Request; for
// features of every exchange there is [Policy.Features].
func Enable(f Features) error {
	if abi.EnableFeatures(uint32(f))&uint32(f) != uint32(f) {
		return errFeatures
	}
	return nil
}

// policy is what this instance runs.
var policy Policy

// The exchange that the host serves, made once: an instance serves one exchange
// at a time.
var (
	request  Request
	response Response
)

func handleRequest() uint64 {
	if policy.Request == nil {
		return abi.Next
	}
	request = newRequest()
	switch err := policy.Request(&request); err {
	case nil:
		return uint64(request.Context)<<32 | abi.Next
	case errResponded:
		return 0
	default:
		abi.Deny(err.Error())
		return 0
	}
}

func handleResponse(reqCtx, isError uint32) {
	if policy.Response == nil {
		return
	}
	response = newResponse(reqCtx, isError != 0)
	if err := policy.Response(&response); err != nil {
		abi.Deny(err.Error())
	}
}
