package sdk

import (
	"github.com/doze-run/doze/policies/sdk/internal/abi"
	"github.com/doze-run/doze/policies/sdk/internal/decode"
)

// configError is a configuration that cannot work.
type configError struct{ err error }

func (e *configError) Error() string { return "config: " + e.err.Error() }
func (e *configError) Unwrap() error { return e.err }

// readConfig decodes the rule's configuration into *c.
func readConfig(c any) error {
	text := fetch(abi.GetConfig)
	if len(text) == 0 {
		return nil
	}
	if err := decode.Strict(text, c); err != nil {
		return &configError{err}
	}
	return nil
}
