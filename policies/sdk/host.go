package sdk

import (
	"errors"

	"github.com/doze-run/doze/policies/sdk/internal/abi"
)

// scratch holds results of the host until they are copied. Almost all results fit.
var scratch [4096]byte

// fetch returns the result of get. It is valid until the next call to the host.
func fetch(get func([]byte) uint32) []byte {
	buf := scratch[:]
	for {
		n := int(get(buf))
		if n <= len(buf) {
			return buf[:n]
		}
		buf = make([]byte, n)
	}
}

// fetchOf is fetch for functions that can fail. Its errors name op and name.
func fetchOf(op, name string, get func([]byte) int32) ([]byte, error) {
	buf := scratch[:]
	for {
		n := get(buf)
		switch {
		case n < 0:
			return nil, failure(op, name, n)
		case int(n) <= len(buf):
			return buf[:n], nil
		}
		buf = make([]byte, n)
	}
}

// HostError is the error of a failed call to the node.
type HostError struct {
	Op   string // such as "secret"
	Name string // of the requested secret or key; may be empty
	Err  error  // one of the errors below
}

func (e *HostError) Error() string {
	if e.Name == "" {
		return e.Op + ": " + e.Err.Error()
	}
	return e.Op + ` "` + e.Name + `": ` + e.Err.Error()
}

func (e *HostError) Unwrap() error { return e.Err }

// Errors that the node returns instead of a result.
var (
	ErrNotFound    = errors.New("not found; the rule's secrets have to name it")
	ErrNotAllowed  = errors.New("not allowed now; secrets are for requests, before they are sent")
	ErrBadArgument = errors.New("the node does not take that")
	ErrLimit       = errors.New("a limit is reached")
	// ErrTooLarge is the error of Body.Bytes for a body that exceeds the limit.
	ErrTooLarge = errors.New("the body is too large")

	errFeatures  = errors.New("the node does not offer the features that this policy needs")
	errResponded = errors.New("the policy responded")
	errUnknown   = errors.New("failed for a reason that this SDK does not know")
)

func failure(op, name string, code int32) error {
	e := &HostError{Op: op, Name: name, Err: errUnknown}
	switch code {
	case abi.NotFound:
		e.Err = ErrNotFound
	case abi.NotAllowed:
		e.Err = ErrNotAllowed
	case abi.BadArgument:
		e.Err = ErrBadArgument
	case abi.LimitHit:
		e.Err = ErrLimit
	}
	return e
}

// Deny returns an error with a reason. Any other error refuses the exchange as well.
func Deny(reason string) error { return errors.New(reason) }
