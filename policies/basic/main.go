// Basic authenticates requests by a user's name and password: git over HTTPS,
// package registries, and much else.
package main

import (
	"errors"
	"strings"

	"github.com/doze-run/doze/policies/sdk"
)

type config struct {
	User string `json:"user"`
}

func init() { sdk.Serve(build) }

func main() {}

func build(c config) (sdk.Policy, error) {
	switch {
	case c.User == "":
		return sdk.Policy{}, errors.New(`"user" is missing; where a token is the password, servers mostly take any name`)
	case strings.Contains(c.User, ":"):
		return sdk.Policy{}, errors.New(`"user" cannot have a colon, which ends it (RFC 7617)`)
	}
	return sdk.Policy{Request: func(r *sdk.Request) error {
		credentials, err := sdk.Basic(c.User, "password")
		if err != nil {
			return err
		}
		// Without waiting for a 401, after which git would send its own credentials.
		r.Header.Set("Authorization", credentials)
		return nil
	}}, nil
}
