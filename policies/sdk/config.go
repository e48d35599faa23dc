package sdk

import (
	"github.com/doze-run/doze/policies/sdk/internal/abi"
	"github.com/doze-run/doze/policies/sdk/internal/decode"
)

// configError is the error of an invalid configuration.
type configError struct{ err error }

func (e *configError) Error() string { return "config: " + e.err.Error() }
func (e *configError) Unwrap() error { return e.err }

// readConfig decodes the rule's configuration into c, a pointer. An empty configuration
// leaves *c unchanged.
func readConfig(c any) error {
	text := fetch(abi.Node().GetConfig)
	if len(text) == 0 {
		return nil
	}
	if err := decode.Strict(text, c); err != nil {
		return &configError{err}
	}
	return nil
}
