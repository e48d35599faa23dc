// Bearer authenticates requests by a token in the Authorization header.
package main

import (
	"errors"
	"strings"

	"github.com/doze-run/doze/policies/sdk"
)

type config struct {
	// Scheme before the token: Bearer unless given.
	Scheme string `json:"scheme"`
}

func init() { sdk.Serve(build) }

func main() {}

func build(c config) (sdk.Policy, error) {
	if c.Scheme == "" {
		c.Scheme = "Bearer"
	}
	if strings.ContainsFunc(c.Scheme, func(r rune) bool { return r <= ' ' || r >= 0x7f }) {
		return sdk.Policy{}, errors.New(`"scheme" is one word, such as Bearer`)
	}
	return sdk.Policy{Request: func(r *sdk.Request) error {
		token, err := sdk.Secret("token")
		if err != nil {
			return err
		}
		r.Header.Set("Authorization", c.Scheme+" "+token)
		return nil
	}}, nil
}
